"""A call that does not fit names the function, and the nearest argument that it has."""

import dataclasses
import re

import pytest
from conftest import refused

import dali_tf_input as dti
from dali_tf_input.errors import WrongCallError

PREPROCESS = dti.Preprocess()
# Of every public callable: a wrong keyword and the nearest right one, "" if none is near.
WRONG = {
    "BadRecordError": None,  # raised, not called
    "CenterCrop": ("resize", "resize_shorter"),
    "Checks": ("mask", "mask_key"),
    "ClassLabel": ("label_smoothing", "smoothing"),
    "ColorJitter": ("saturate", "saturation"),
    "DaliOptions": ("threads", "num_threads"),
    "GaussianBlur": ("sigmas", "sigma"),
    "Input": None,  # made by `load`
    "InputError": None,
    "InputSpec": ("record_id", "record_ids"),
    "InputSpec.for_evaluation": ("labels", "label"),
    "InputSpec.for_training": ("mirror", "mirror_probability"),
    "Letterbox": ("filling", "fill"),
    "Mix": ("mix_up", "mixup"),
    "MultiHot": ("classes", "num_classes"),
    "NoCrop": ("xyz", ""),
    "Preprocess": ("size", "image_size"),
    "Preprocess.for_evaluation": ("normalize", "normalization"),
    "Preprocess.for_training": ("auto_augment", "augment"),
    "RandAugment": ("magnitudes", "magnitude"),
    "RandomCrop": ("xyz", ""),
    "RandomErasing": ("area", "area_range"),
    "RandomGrayscale": ("probability", ""),
    "RandomResizedCrop": ("area", "area_range"),
    "Records": ("file", "files"),
    "Records.from_files": ("index_folder", "index_dir"),
    "ResizeRandomCrop": ("size", "resize"),
    "Resume": ("save_freq", "save_every"),
    "SegmentationMask": ("ignore_class", "ignore"),
    "Shard": ("shard", "shard_id"),
    "Solarize": ("thresh", "threshold"),
    "Stored": ("pad", "padding"),
    "TfDataOptions": ("parallel_calls", "num_parallel_calls"),
    "TrivialAugment": ("filling", "fill"),
    "Values": ("sizes", "size"),
    "VerticalMirror": ("probability", ""),
    "build_index": ("check", "checks"),
    "export_saved_model": ("dir", ""),
    "iterate_batches": ("batchsize", "batch_size"),
    "load": ("global_batch_size", "batch_size"),
    "make_dataset": ("device", "device_id"),
}


def find(name):
    owner, _, method = name.partition(".")
    return getattr(getattr(dti, owner), method) if method else getattr(dti, owner)


def test_the_table_has_every_public_callable():
    public = set(dti.__all__) - {"__version__"}
    for name in list(public):
        kind = getattr(dti, name)
        methods = {key for key, value in vars(kind).items() if isinstance(value, classmethod)}
        public |= {f"{name}.{key}" for key in methods if not key.startswith("_")}
    assert {*WRONG} == public - {"Checks.from_json"}  # for the manifest


@pytest.mark.parametrize("name", [name for name, pair in WRONG.items() if pair])
def test_a_wrong_keyword_names_the_nearest(name):
    wrong, nearest = WRONG[name]
    said = re.escape(f"{name}() has no argument `{wrong}`.")
    hint = rf"Did you mean `{nearest}`\?$" if nearest else "It has (`|none)"
    records = ("train-*",) if name.startswith("InputSpec.") else ()
    with refused(f"^{said} {hint}") as caught:
        find(name)(*records, **{wrong: 1})
    assert isinstance(caught.value, WrongCallError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dti.MultiHot(), "^MultiHot..: missing a required argument: 'num_classes'"),
        (lambda: dti.InputSpec(order="global"), "^InputSpec..: missing a required .*'records'"),
        (lambda: dti.InputSpec.for_training(), "^InputSpec.for_training..: missing .*'records'"),
        (lambda: dti.Shard(0, 1, 2), "^Shard..: too many positional arguments"),
        (lambda: dti.Values(3), "^Values..: too many positional arguments"),
        (lambda: dti.Shard(0, shard_id=0), "^Shard..: multiple values for argument 'shard_id'"),
        (lambda: dti.load(1, 2, 3), "^load..: too many positional arguments"),
        (lambda: dataclasses.replace(PREPROCESS, mirror=1), "^Preprocess.. has no argument `mirr"),
        (lambda: PREPROCESS.with_fields(crops=1), "^Preprocess.. has no argument `crops`. Did"),
    ],
)
def test_a_call_that_does_not_fit(call, message):
    with refused(message) as caught:
        call()
    assert isinstance(caught.value, TypeError)
