"""Pipelines for the GPU, defined without one: each node's devices against DALI's own registry."""

import itertools

import pytest
from conftest import at_night, numbered_examples, spec_of, write_indexed
from nvidia.dali import backend
from test_parity import CROPS, SIZE

from dali_tf_input import Checks, ClassLabel, DaliOptions, Mix, Preprocess
from dali_tf_input.backends.dali import build_pipeline
from dali_tf_input.backends.dali_operator import load_operator
from dali_tf_input.backends.dali_reader import can_use_dali_reader
from dali_tf_input.backends.stream import Stream
from dali_tf_input.cli.flags import AUGMENTATIONS

load_operator()
REGISTERED = {
    "cpu": set(backend.RegisteredCPUOps()),
    "gpu": set(backend.RegisteredGPUOps()),
    "mixed": set(backend.RegisteredMixedOps()),
}
ORDERS = ("global", "buffer", "pass", "sequential")
USUAL = ("random_resized_crop", "random_crop", "cover_crop", "letterbox")
EVERYTHING = tuple(AUGMENTATIONS.values())
OUTPUTS = [{"dtype": "uint8"}, {"dtype": "float16", "layout": "CHW"}, {"antialias": True}]
OUTPUTS += [{"augment": EVERYTHING}, {"interpolation": "bicubic", "apply_orientation": True}]


def find_mistakes(pipeline):
    """Yields what is wrong with a pipeline's nodes and outputs."""
    pipeline._build_graph()
    for node in pipeline._ops:
        spec, device = node.spec, getattr(node._op, "device", "cpu")
        name = getattr(node._op, "schema_name", "ExternalSource")
        inputs = [spec.InputDevice(number) for number in range(spec.NumInput())]
        regular, arguments = inputs[: spec.NumRegularInput()], inputs[spec.NumRegularInput() :]
        is_reader = name == "readers__TFRecord" and device == "cpu"  # by a class of Python's
        if name not in REGISTERED[device] and not is_reader:
            yield f"{name} is not registered for {device}"
        if device == "mixed" and "Decoder" not in name and "decoders" not in name:
            yield f"{name} is mixed"
        if set(regular) - {"gpu" if device == "gpu" else "cpu"}:
            yield f"{name} on {device} takes {regular}"
        if set(arguments) - {"cpu"}:
            yield f"{name} has arguments on {arguments}"
    for output in pipeline._graph_outputs:
        if output.device != "gpu":
            yield f"an output is on the {output.device}"


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Records whose labels are all in the index, as DALI's own reader needs."""
    file = tmp_path_factory.mktemp("labeled") / "train-0"
    return write_indexed(file, numbered_examples(24), Checks(verify="schema"))


def test_dalis_own_reader_needs_all_labels_in_the_index(dataset, labeled):
    """Where a record has none, it would serve -1."""
    options = DaliOptions(device="gpu")
    for records, is_used in ((dataset, False), (labeled, True)):
        spec = spec_of(records, "buffer", Preprocess.for_training(32))
        assert can_use_dali_reader(spec, options) == is_used


@pytest.mark.filterwarnings("ignore:decode='region'")
@pytest.mark.parametrize("order", at_night(ORDERS[:3], ORDERS))
def test_every_node_is_where_it_may_be(labeled, order):
    """For every crop and decode; of the outputs each comes with every order."""
    outputs = itertools.cycle(OUTPUTS)
    # DALI's own reader serves order "buffer", with integers only.
    label = ClassLabel() if order == "buffer" else ClassLabel(num_classes=24, one_hot=True)
    for name, decode in itertools.product(at_night(USUAL, CROPS), ("full", "region")):
        changes = {"crop": CROPS[name], "mirror_probability": 0.5, **next(outputs)}
        how = {"order": "sequential", "repeat": False} if order == "pass" else {"order": order}
        preprocess = Preprocess(image_size=SIZE, **changes)
        spec = spec_of(labeled, how.pop("order"), preprocess, label=label, **how)
        options = DaliOptions(device="gpu", decode=decode, hw_decoder_load=0.5)
        uses_dali_reader = can_use_dali_reader(spec, options)
        assert uses_dali_reader == (order == "buffer" and not preprocess.augment)
        stream = Stream(spec=spec, shard_batch_size=4)
        pipeline = build_pipeline(stream, options, 0, uses_dali_reader=uses_dali_reader)
        assert list(find_mistakes(pipeline)) == []


@pytest.mark.parametrize("changes", [{}, {"dtype": "uint8", "layout": "CHW"}])
def test_mixed_batches_too(dataset, changes):
    preprocess = Preprocess.for_training(32, augment=EVERYTHING, **changes)
    label, mix = ClassLabel(num_classes=24, one_hot=True), Mix(mixup=0.8, cutmix=1.0)
    spec = spec_of(dataset, "buffer", preprocess, label=label, mix=mix)
    options = DaliOptions(device="gpu")
    assert not can_use_dali_reader(spec, options)
    pipeline = build_pipeline(
        Stream(spec=spec, shard_batch_size=4), options, 0, uses_dali_reader=False
    )
    assert list(find_mistakes(pipeline)) == []
