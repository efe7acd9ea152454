"""Several views of one image: each as if it were alone, by either backend."""

import dataclasses

import numpy as np
import pytest
from conftest import DALI, TF_DATA, at_night, jpeg, refused, spec_of, valid_images, write_indexed

import dali_tf_input as dti
from dali_tf_input import CenterCrop, Letterbox, Preprocess, RandomCrop, RandomResizedCrop
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.spec.crops import NoCrop, ResizeRandomCrop

LARGE = Preprocess.for_training(48, recipe="simclr")
SMALL = Preprocess.for_training(
    24, crop=RandomResizedCrop(area_range=(0.05, 0.25)), augment=(dti.augment.Solarize(p=0.5),)
)
VIEWS = (LARGE, LARGE, SMALL)
AUGMENT = (dti.augment.RandAugment(), dti.augment.RandomErasing(p=1.0))
ALONE = [
    Preprocess(image_size=(40, 32), crop=crop, mirror_probability=0.5, **changes)
    for crop, changes in (
        (RandomResizedCrop(), {}),
        (ResizeRandomCrop(resize=(50, 50)), {"antialias": True, "interpolation": "bicubic"}),
        (RandomCrop(), {"dtype": "uint8"}),
        (CenterCrop(resize_shorter=45), {"layout": "CHW", "dtype": "float16", "augment": AUGMENT}),
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
@pytest.mark.parametrize("decode", at_night(["auto"], ["auto", "full"]))
def test_as_if_alone(records, decode):
    """The first view is what the image is without others; all are the same by every kernel."""
    kinds = {
        "native": dti.TfDataOptions(decode=decode),
        "tensorflow": dti.TfDataOptions(decode=decode, kernel="tensorflow"),
        "dali": dataclasses.replace(DALI, decode="full"),
    }
    made = {name: [*feed(records, kind, ALONE)] for name, kind in kinds.items()}
    names = {f"image_{number}": (3, *view.image_shape) for number, view in enumerate(ALONE)}
    assert {name: values.shape for name, values in made["dali"][0][0].items()} == names
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": (LARGE,)}, "`views` must be 2 to 64, got 1"),
        ({"views": (SMALL, LARGE)}, "`preprocess` must be the first of `views`"),
        (
            {"views": (LARGE, dataclasses.replace(SMALL, apply_orientation=False))},
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
