"""Several views of one image: each as if it were alone, by either backend."""

import dataclasses

import keras
import numpy as np
import pytest
from conftest import DALI, TF_DATA, at_night, jpeg, refused, spec_of, valid_images, write_indexed

import dali_tf_input as dti
from dali_tf_input import CenterCrop, Letterbox, Preprocess, RandomCrop, RandomResizedCrop
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.spec.crops import NoCrop, ResizeRandomCrop

# Not turned: to trace that takes as long as all else.
STORED = {"apply_orientation": False}
LARGE = Preprocess.for_training(48, recipe="simclr", **STORED)
SMALL = Preprocess.for_training(
    24, crop=RandomResizedCrop(area_range=(0.05, 0.25)), augment=(dti.Solarize(p=0.5),), **STORED
)
VIEWS = (LARGE, LARGE, SMALL)
ALONE = [
    Preprocess(image_size=(40, 32), crop=crop, mirror_probability=0.5, **STORED, **changes)
    for crop, changes in (
        (RandomResizedCrop(), {}),
        (ResizeRandomCrop(resize=(50, 50)), {"antialias": True, "interpolation": "bicubic"}),
        (RandomCrop(), {"dtype": "uint8"}),
        (CenterCrop(resize_shorter=45), {"layout": "CHW", "dtype": "float16"}),
        (NoCrop(), {"interpolation": "nearest"}),
    )
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Photos of several sizes and kinds, among them what the compiled decoder refuses."""
    sizes = [(60, 90), (97, 40), (33, 47), (200, 300), (1, 50)]
    images = [jpeg(*size, seed=number) for number, size in enumerate(sizes)] + valid_images()
    examples = [{"image": image, "label": number} for number, image in enumerate(images)]
    return write_indexed(tmp_path_factory.mktemp("views") / "train", examples)


def feed(records, options, views, *, start_step=0, **changes):
    spec = spec_of(records, "global", views[0], views=views, **changes)
    return make_dataset(spec, options, batch_size=3, start_step=start_step)


@pytest.mark.slow
def test_what_comes_out(records):
    """Dictionaries by name, as Keras takes them; the views of an image differ."""
    (one, _), (other, _) = batches = [
        next(iter(feed(records, options, VIEWS))) for options in (DALI, TF_DATA)
    ]
    for images, labels in batches:
        assert {name: values.shape for name, values in images.items()} == {
            "image_0": (3, 48, 48, 3),
            "image_1": (3, 48, 48, 3),
            "image_2": (3, 24, 24, 3),
        }
        assert labels.shape == (3,)
        assert np.abs(images["image_0"] - images["image_1"]).mean() > 0.05
    for name, values in one.items():
        assert np.abs(values - other[name]).mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("decode", at_night(["auto"], ["auto", "full"]))
def test_as_if_alone(records, decode):
    """The first view is what the image is without others; all are the same by every kernel."""
    kinds = {
        "native": dti.TfDataOptions(decode=decode),
        "tensorflow": dti.TfDataOptions(decode=decode, kernel="tensorflow"),
        "dali": dataclasses.replace(DALI, decode="full"),
    }
    made = {name: [*feed(records, kind, ALONE)] for name, kind in kinds.items()}
    alone = [*make_dataset(spec_of(records, "global", ALONE[0]), TF_DATA, batch_size=3)]
    for step, (images, _) in enumerate(alone):
        np.testing.assert_allclose(made["native"][step][0]["image_0"], images, atol=1e-4)
    for name in ("tensorflow", "dali"):
        for (images, labels), (others, other_labels) in zip(
            made["native"], made[name], strict=True
        ):
            np.testing.assert_array_equal(labels, other_labels)
            for view, values in images.items():
                difference = np.abs(values.numpy().astype(float) - others[view].numpy())
                assert np.quantile(difference, 0.98) <= (1 if view == "image_2" else 0.1), view


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_resumes(records, options):
    """To the bit, from the middle; and `batch_at`."""
    views = (SMALL, SMALL, ALONE[0])
    whole = [images for images, _ in feed(records, options, views)]
    rest = [images for images, _ in feed(records, options, views, start_step=2)]
    for images, others in zip(whole[2:], rest, strict=True):
        for name, values in images.items():
            np.testing.assert_array_equal(values, others[name])
    train = dti.load(spec_of(records, "global", SMALL, views=views), options, batch_size=3)
    for name, values in train.batch_at(1)[0].items():
        np.testing.assert_array_equal(values, whole[1][name])


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))
def test_trains(records, options):
    """A model of two towers, by `fit`."""
    spec = dti.InputSpec.for_training(records, views=(SMALL, SMALL))
    tower = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(8)])
    names = ("image_0", "image_1")
    inputs = {name: keras.Input(SMALL.image_shape, name=name) for name in names}
    merged = keras.layers.Subtract()([tower(inputs["image_0"]), tower(inputs["image_1"])])
    model = keras.Model(inputs, keras.layers.Dense(30)(merged))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    train = dti.load(spec, options, batch_size=4)
    assert np.isfinite(train.fit(model, epochs=2, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": (LARGE,)}, "`views` must be at least two, got 1"),
        ({"views": (SMALL, LARGE)}, "`preprocess` must be the first of `views`"),
        (
            {"views": (LARGE, dataclasses.replace(SMALL, apply_orientation=True))},
            "`apply_orientation` must be equal",
        ),
        ({"mix": dti.Mix(mixup=1.0), "views": VIEWS}, "`views` works without `mask` and `mix`"),
    ],
)
def test_refuses(records, changes, message):
    if "mix" in changes:
        changes["label"] = dti.ClassLabel(one_hot=True, num_classes=30)
    with refused(message):
        spec_of(records, "global", LARGE, **changes)


def test_refuses_fields_of_one_image(records):
    make = dti.InputSpec.for_training
    with refused("`views` must be a tuple of Preprocess, which have all fields of the images"):
        make(records, views=VIEWS, crop=RandomCrop())
    made = make(records, views=[LARGE, dataclasses.replace(SMALL, crop=Letterbox())])
    assert made.preprocess == LARGE
    images, _ = next(iter(dti.load(made, TF_DATA, batch_size=4)))
    assert images["image_1"].shape == (4, 24, 24, 3)
