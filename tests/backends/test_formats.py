"""One list of accepted images: every path takes the same ones, and refuses the others by name."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, exif, table, write_indexed
from conftest import encode as save
from index.test_decoders import png
from PIL import Image
from test_parity import by_batch, by_dali, by_tensorflow, draw, make_exactly

import dali_tf_input as dti
from dali_tf_input.backends.tf_formats import count_pixels, is_accepted
from dali_tf_input.index.decoders import read_header
from dali_tf_input.records.checks import InvalidRecord

BY_TF = dti.TfDataOptions(kernel="tensorflow")
COLORS = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
CLEAR = Image.fromarray(COLORS)
RGB = CLEAR.convert("RGB")
TURNED = exif(6)
ACCEPTED = {
    "JPEG": save(RGB, "JPEG"),
    "PNG": save(RGB, "PNG"),
    "PNG with a palette": save(RGB.quantize(8), "PNG"),
    "WebP": save(RGB, "WEBP"),
    "WebP without loss": save(RGB, "WEBP", lossless=True),
    "WebP with EXIF": save(RGB, "WEBP", exif=TURNED),
    "WebP with EXIF behind an even chunk": save(RGB, "WEBP", exif=TURNED, icc_profile=b"even"),
    "BMP": save(RGB, "BMP"),
    "gray BMP": save(RGB.convert("L"), "BMP"),
}
# Pillow before 11 wrote the shade into the byte of a color that means nothing, later ones write 0.
ACCEPTED["gray BMP of another writer"] = b"".join(
    [
        ACCEPTED["gray BMP"][:54],
        bytes(shade for shade in range(256) for _ in range(4)),
        ACCEPTED["gray BMP"][54 + 4 * 256 :],
    ]
)
REFUSED = {
    "BMP with a palette": save(RGB.quantize(8), "BMP"),
    "BMP of 1 bit": save(RGB.convert("1"), "BMP"),
    "clear WebP": save(CLEAR, "WEBP"),
    "clear WebP without loss": save(CLEAR, "WEBP", lossless=True),
    "moving WebP": save(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(90)]),
    "WebP with EXIF behind an odd chunk": save(RGB, "WEBP", exif=TURNED, icc_profile=b"odd"),
    "WebP with EXIF that is cut": save(RGB, "WEBP", exif=TURNED)[:-10],
    "TIFF": save(RGB, "TIFF"),
    "GIF": save(RGB, "GIF"),
    "text": b"no image",
    "short": b"RIFF",
}


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_one_list(name):
    """The index step and TensorFlow's operations have the same."""
    image = (ACCEPTED | REFUSED)[name]
    assert bool(is_accepted(tf.constant(image))) == (name in ACCEPTED)
    try:
        read_header(image)
        assert name in ACCEPTED
    except InvalidRecord:
        assert name in REFUSED


@pytest.mark.slow
def test_every_path_takes_accepted_images(serve, tmp_path):
    """Both backends, prediction and an exported model make the same of them, upright."""
    turned = [save(RGB, "JPEG", exif=exif(number)) for number in range(1, 9)]
    images = [*ACCEPTED.values(), *turned]
    records = write_indexed(tmp_path / "train-0", [{"image": one, "label": 0} for one in images])
    spec = dti.InputSpec.for_evaluation(records, 16)
    expected, by_tf, by_dali = (
        next(iter(dti.load(spec, options, batch_size=len(images)).dataset))[0]
        for options in (TF_DATA, BY_TF, DALI)
    )
    ((_, predicted),) = dti.serving.iterate_batches(images, spec, batch_size=len(images))
    ((_, dalis),) = dti.serving.iterate_batches(images, spec, DALI, batch_size=len(images))
    served = tf.reshape(serve(images)["output_0"], expected.shape)
    for other in (by_tf, predicted, served):  # over 0..255
        difference = 58 * np.abs(other - expected)
        assert difference.mean() < 0.01
        assert difference.max() < 0.1
    for other in (by_dali, dalis):
        difference = 58 * np.abs(other - expected).mean((1, 2, 3))
        assert difference.mean() < 1
        assert difference.max() < 8
    assert len({one.numpy().tobytes() for one in expected[-8:]}) == 8


@pytest.mark.parametrize("kind", [None, DALI], ids=["tf_data", "dali"])
def test_prediction_leaves_out_other_images(kind):
    bad: list[int] = []
    report = functools.partial(lambda found, place, _: found.append(place), bad)
    spec = dti.Preprocess.for_evaluation(16)
    assert not [*dti.serving.iterate_batches([*REFUSED.values()], spec, kind, on_bad=report)]
    assert sorted(bad) == [*range(len(REFUSED))]


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
@table("name, options", [("GIF", TF_DATA), ("clear WebP", DALI)], REFUSED, [TF_DATA, BY_TF, DALI])
def test_every_path_names_other_images(tmp_path, name, options):
    records = write_indexed(tmp_path / "train-0", [{"image": REFUSED[name], "label": 0}])
    spec = dti.InputSpec.for_evaluation(records, 16)
    with pytest.raises(dti.BadRecordError, match="record 0"):
        next(iter(dti.load(spec, options, batch_size=1)))


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Returns the function of a model that was exported; the argument is for `export`."""
    model = keras.Sequential([keras.layers.Input((16, 16, 3)), keras.layers.Flatten()])

    @functools.cache
    def load(**limits):
        folder = tmp_path_factory.mktemp("exported") / "model"
        dti.serving.export_saved_model(model, dti.Preprocess.for_evaluation(16), folder, **limits)
        exported = tf.saved_model.load(str(folder))
        function = exported.signatures["serving_default"]
        return lambda images: function(encoded=tf.constant(images)), exported

    return lambda images, **limits: load(**limits)[0](images)


@pytest.mark.slow
def test_one_bad_image_of_a_request(serve):
    """The error of an exported model says which it is; long thin images cost what they weigh."""
    images = [ACCEPTED["JPEG"], REFUSED["GIF"], ACCEPTED["PNG"], b""]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"no JPEG.*\[1 3\]"):
        serve(images)
    thin = save(Image.new("RGB", (8000, 1), "red"), "JPEG")
    assert serve([thin])["output_0"].shape == (1, 768)


@pytest.mark.parametrize("name", ACCEPTED)
def test_pixels_are_counted_before_an_image_is_decoded(name):
    counted = 0 if "BMP" in name else 600
    assert int(count_pixels(tf.constant(ACCEPTED[name]))) == counted
    assert int(count_pixels(tf.constant(REFUSED["clear WebP"]))) == 600  # of another kind inside


def test_images_of_too_many_pixels(serve):
    """A small file that claims to be huge is not decoded, and the error says which it is."""
    claims = [ACCEPTED["JPEG"], ACCEPTED["PNG"]]
    start = claims[0].index(b"\xff\xc0")
    claims[0] = claims[0][: start + 5] + b"\xfd\xe8\xfd\xe8" + claims[0][start + 9 :]
    claims[1] = claims[1][:16] + b"\0\0\xff\xff" * 2 + claims[1][24:]
    for claim in claims:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"more than 89,478,485.*\[1\]"):
            serve([ACCEPTED["WebP"], claim])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"more than 599 pixels"):
        serve([ACCEPTED["JPEG"]], max_pixels=599)


def save_deep(pixels):
    """Returns a PNG of 16 bits, which Pillow writes of gray only, of uint16 (height, width, n)."""
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    return png(width, height, 16, {1: 0, 3: 2, 4: 6}[channels], lines)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bits_are_rounded_alike(channels):
    """Every value, to the nearest of 256, by each engine and where images are predicted."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    image = save_deep(np.repeat(ramp[..., None], channels, 2))
    expected = np.dstack([np.floor(ramp / 257 + 0.5)] * 3)
    plain = dti.Preprocess(image_size=(256, 256), dtype="uint8", crop=dti.RandomCrop())
    uniforms = draw(plain, 1)
    for made in (
        by_batch([image], uniforms, plain),
        by_tensorflow([image], uniforms, plain, eagerly=True),
        by_dali([image], uniforms, plain),
    ):
        np.testing.assert_array_equal(made[0], expected)
    whole = dti.Preprocess(image_size=(256, 256), dtype="uint8")
    ((_, predicted),) = dti.serving.iterate_batches([image], whole)
    np.testing.assert_array_equal(predicted[0], expected)


@pytest.mark.parametrize("size", [(8000, 1), (1, 8000)])
def test_thin_images_are_not_blown_up(size):
    """Without antialias too, TensorFlow resizes the part that is seen."""
    image = np.linspace(0, 255, 8000).astype(np.uint8)
    data = save(Image.fromarray(image.reshape(size[::-1])).convert("RGB"), "PNG")
    crop = dti.CenterCrop(resize_shorter=24)
    preprocess = dti.Preprocess.for_evaluation(16, crop=crop, antialias=False, normalization=None)
    uniforms = draw(preprocess, 1)
    (made,) = by_tensorflow([data], uniforms, preprocess)
    assert np.abs(made - make_exactly(data, uniforms[0], preprocess)).max() < 0.1
