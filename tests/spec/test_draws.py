"""What augmentations draw: strengths as they are published, and how often each."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from conftest import at_night, refused

import dali_tf_input as dti
from dali_tf_input.backends.tf_augment import draw_rows
from dali_tf_input.spec.augment import Program
from dali_tf_input.spec.colors import LUMA
from dali_tf_input.spec.primitives import Primitive

SIZE = (224, 160)
DRAWS = 10_000


def rows_of(augmentation, op=0, size=SIZE):
    """Returns the rows of an operation: of each primitive the numbers, one row each."""
    table = Program([augmentation], size).rows_of_op(op).tolist()
    rows = {}
    for primitive, *numbers in table:
        rows.setdefault(Primitive(int(primitive)).name, []).append(numbers)
    return rows


def draw(augmentation, count=DRAWS, size=SIZE):
    """Returns the rows that `count` images get, (count, ops, 13)."""
    program = Program([augmentation], size)

    @tf.autograph.experimental.do_not_convert
    def draw_for(number):
        return draw_rows(program, tf.stack([np.int64(7), number]))

    drawn = tf.data.Dataset.range(count).map(draw_for)
    return next(drawn.batch(count).as_numpy_iterator())


def scale_of(row):
    """Returns by how much a COLOR row multiplies gray values and the distance to gray."""
    matrix = np.reshape(row, (3, 4))
    gray = matrix[:, :3].sum(1)
    return round(float(gray[0]), 4), round(float(matrix[0, 0] - matrix[1, 0]), 4)


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_torchvision_strengths(magnitude):
    """The numbers of torchvision.transforms.RandAugment's `_augmentation_space`, 31 bins."""
    height, width = SIZE
    rows = rows_of(dti.augment.RandAugment(magnitude=magnitude, num_ops=1))
    warps = sorted({tuple(np.round(row[:6], 4)) for row in rows["WARP"]})
    shear = np.linspace(0, 0.3, 31)[magnitude]
    across = int(np.linspace(0, 150 / 331 * width, 31)[magnitude])
    down = int(np.linspace(0, 150 / 331 * height, 31)[magnitude])
    turn = math.radians(np.linspace(0, 30, 31)[magnitude])
    expected = set()
    for sign in (-1, 1):
        cos, sin = math.cos(turn), math.sin(sign * turn)
        x, y = width / 2, height / 2
        expected |= {
            tuple(np.round(np.float32(row), 4) + 0.0)
            for row in (
                (1, sign * shear, 0, 0, 1, 0),
                (1, 0, 0, sign * shear, 1, 0),
                (1, 0, sign * across, 0, 1, 0),
                (1, 0, 0, 0, 1, sign * down),
                (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y),
            )
        }
    np.testing.assert_allclose(warps, sorted(expected), atol=2e-3)
    enhance = np.linspace(0, 0.9, 31)[magnitude]
    factors = {round(float(1 - enhance), 4), round(float(1 + enhance), 4)}
    scales = {scale_of(row) for row in rows["COLOR"]}
    assert scales == {(f, f) for f in factors} | {(1.0, f) for f in factors}
    assert {round(row[0], 4) for row in rows["CONTRAST"]} == factors
    bits = 8 - round(magnitude / (30 / 4))
    assert {row[0] for row in rows["POSTERIZE"]} == {256 - 2 ** (8 - bits)}
    np.testing.assert_allclose(
        rows["SOLARIZE"][0][0], np.linspace(255, 0, 31)[magnitude], rtol=1e-6
    )
    assert {name: len(those) for name, those in rows.items()} == {
        "NOTHING": 2,
        "WARP": 10,
        "COLOR": 4,
        "CONTRAST": 2,
        "FILTER": 2,
        "POSTERIZE": 2,
        "SOLARIZE": 2,
        "AUTOCONTRAST": 2,
        "EQUALIZE": 2,
    }


def test_sharpness_blends_with_a_smoothed_image():
    """Pillow's SMOOTH has 5 in the middle of ones; a factor of 1 leaves the image as it is."""
    (low, high) = sorted(rows_of(dti.augment.RandAugment(magnitude=10))["FILTER"])
    np.testing.assert_allclose(sum(low[:9]), 1, rtol=1e-6)
    np.testing.assert_allclose([high[0], low[0]], [0.3 / 13, -0.3 / 13], rtol=1e-5)
    np.testing.assert_allclose([high[4], low[4]], [0.7 + 1.5 / 13, 1.3 - 1.5 / 13], rtol=1e-5)


def test_trivial_strengths():
    """The wide space: 31 strengths, up to 0.99, 32 pixels and 135 degrees, bits from 8 to 2."""
    rows = rows_of(dti.augment.TrivialAugment())
    assert sum(map(len, rows.values())) == 14 * 2 * 31
    assert max(abs(row[1]) for row in rows["WARP"] if row[0] == 1) == pytest.approx(0.99)
    assert max(abs(row[2]) for row in rows["WARP"] if row[0] == 1) == 32
    assert min(row[0] for row in rows["WARP"]) == pytest.approx(math.cos(math.radians(135)))
    assert {row[0] for row in rows["POSTERIZE"]} == {256 - 2 ** (8 - bits) for bits in range(2, 9)}
    assert {row[6] for row in rows["WARP"]} == {0.0}


@pytest.mark.parametrize(
    ("magnitude", "increasing", "factors", "mask", "threshold", "amount"),
    [
        (10, True, {0.1, 1.9}, 0, 0, 110),
        (9, True, {0.19, 1.81}, 128, 26, 99),  # timm: 4 - 3 bits, 256 - 230
        (9, False, {1.72}, 224, 230, 99),
        (15, False, {2.8}, 252, 384, 165),
        (0, False, {0.1}, 0, 0, 0),
        (0, True, {1.0}, 240, 256, 0),
    ],
)
def test_tf_strengths(magnitude, increasing, factors, mask, threshold, amount):
    made = dti.augment.RandAugment(magnitude=magnitude, dialect="tf", increasing=increasing)
    rows = rows_of(made, size=(224, 224))
    assert {round(row[0], 4) for row in rows["CONTRAST"]} == factors
    assert {row[0] for row in rows["POSTERIZE"]} == {mask}
    assert {row[0] for row in rows["SOLARIZE"]} == {0, threshold}  # 0 inverts
    assert {row[0] for row in rows["ADD"]} == {amount}
    assert max(row[2] for row in rows["WARP"] if row[0] == 1) == pytest.approx(10 * magnitude)
    assert {row[6] for row in rows["WARP"]} == {128}
    assert ("ERASE" in rows) == (not increasing)
    if not increasing:  # cutout: a square of twice the pixels, around any pixel
        side = 2 * int(magnitude * 4)
        assert rows["ERASE"][0][:9] == [side, side, 224, 224, -side / 2, -side / 2, *[128] * 3]


def test_magnitudes_of_a_normal_distribution():
    made = dti.augment.RandAugment(dialect="tf", magnitude=9, magnitude_std=0.5)
    shears = [row[1] for row in rows_of(made)["WARP"] if row[0] == 1 and row[1] > 0]
    magnitudes = np.array(shears) / 0.03
    assert magnitudes.max() == pytest.approx(10)  # clipped, as timm does
    assert np.mean(magnitudes) == pytest.approx(9, abs=0.02)
    assert np.std(magnitudes) == pytest.approx(0.49, abs=0.03)
    wide = rows_of(dti.augment.RandAugment(magnitude=29, magnitude_std=100))
    assert max(row[1] for row in wide["WARP"] if row[0] == 1) == pytest.approx(0.3)


@pytest.mark.slow
def test_draws_of_rand_augment():
    """Each of 14 operations as often, in both places; and timm's one half of the time."""
    drawn = draw(dti.augment.RandAugment())
    for op in range(2):
        kinds = np.bincount(drawn[:, op, 0].astype(int), minlength=len(Primitive)) / DRAWS * 14
        expected = {"NOTHING": 1, "WARP": 5, "COLOR": 2, "CONTRAST": 1, "FILTER": 1}
        expected |= dict.fromkeys(["POSTERIZE", "SOLARIZE", "AUTOCONTRAST", "EQUALIZE"], 1)
        for primitive in Primitive:
            rate = expected.get(primitive.name, 0)
            assert kinds[primitive] == pytest.approx(rate, abs=0.14 * rate + 1e-9)
    pairs = np.histogram2d(*drawn[:, :, 0].T, bins=12)[0] / DRAWS
    np.testing.assert_allclose(pairs, np.outer(pairs.sum(1), pairs.sum(0)), atol=0.01)
    half = draw(dti.augment.RandAugment(p=0.5, num_ops=3, dialect="tf"))
    is_done = half[..., 0] > 0
    assert is_done.mean() == pytest.approx(0.5, abs=0.015)
    assert np.bincount(is_done.sum(1)) / DRAWS == pytest.approx(
        [1 / 8, 3 / 8, 3 / 8, 1 / 8], abs=0.02
    )


@pytest.mark.slow
def test_draws_of_color_jitter():
    """In each of 24 orders as often; factors are even over their ranges."""
    drawn = draw(
        dti.augment.ColorJitter(brightness=0.4, contrast=1.5, saturation=0.2, hue=0.1, p=0.8)
    )
    done = drawn[drawn[:, 0, 0] > 0]
    assert len(done) / DRAWS == pytest.approx(0.8, abs=0.015)
    kinds = np.empty(done.shape[:2], int)
    matrices = done[:, :, 1:].reshape(*done.shape[:2], 3, 4)[..., :3]
    values = np.zeros(done.shape[:2])
    is_contrast = done[..., 0] == Primitive.CONTRAST
    is_brightness = ~is_contrast & (np.abs(matrices[..., 0, 1]) == 0)
    keeps_gray = np.abs(matrices.sum(-1) - 1).max(-1) < 1e-5
    is_hue = (
        ~is_contrast
        & ~is_brightness
        & keeps_gray
        & (np.abs(matrices[..., 0, 1] - matrices[..., 2, 1]) > 1e-5)
    )
    kinds[:] = 3
    kinds[is_contrast], kinds[is_brightness], kinds[is_hue] = 0, 1, 2
    assert (np.sort(kinds, 1) == [0, 1, 2, 3]).all()
    orders = np.unique(kinds, axis=0, return_counts=True)[1] / len(done) * 24
    assert len(orders) == 24
    assert orders.min() > 0.75
    assert orders.max() < 1.25
    values = {
        (0.0, 2.5): done[..., 1][is_contrast],
        (0.6, 1.4): done[..., 1][is_brightness],
        (0.8, 1.2): (matrices[..., 0, 0] - matrices[..., 1, 0])[kinds == 3],
    }
    for (low, high), factors in values.items():
        counts = np.histogram(factors, 10, (low, high))[0] / len(done) * 10
        np.testing.assert_allclose(counts, 1, atol=0.12)
    gray = np.array([LUMA @ matrix for matrix in matrices[is_hue][:100]])
    np.testing.assert_allclose(gray, [LUMA] * 100, atol=1e-4)  # the brightness stays


@pytest.mark.slow
def test_draws_of_erasing():
    """Area and aspect ratio as they are documented, all positions alike; only inside."""
    height, width = SIZE
    drawn = draw(dti.augment.RandomErasing(p=0.25, area_range=(0.02, 0.2)))[:, 0]
    done = drawn[drawn[:, 0] == Primitive.ERASE]
    assert len(done) / DRAWS == pytest.approx(0.25, abs=0.015)
    top, left, bottom, right, seed = done[:, 1:6].T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= height).all()
    assert (right <= width).all()
    assert len(np.unique(seed)) > 0.99 * len(seed)
    tall, wide = bottom - top, right - left
    areas, ratios = tall * wide / (height * width), np.log(tall / wide)
    assert areas.mean() == pytest.approx(0.11, abs=0.004)
    assert np.quantile(areas, [0.1, 0.5, 0.9]) == pytest.approx([0.038, 0.11, 0.182], abs=0.008)
    assert np.quantile(ratios, [0.25, 0.75]) == pytest.approx([-0.6, 0.6], abs=0.1)
    places = np.stack([top / (height - tall), left / (width - wide)])
    np.testing.assert_allclose(
        np.quantile(places, [0.25, 0.5, 0.75], axis=1).T, [[0.25, 0.5, 0.75]] * 2, atol=0.03
    )


@pytest.mark.parametrize(
    ("augmentation", "rate"),
    [
        (dti.augment.RandomGrayscale(p=0.2), 0.2),
        (dti.augment.GaussianBlur(), 1.0),
        *at_night(
            [],
            [
                (dti.augment.Solarize(p=0.3), 0.3),
                (dti.augment.VerticalMirror(), 0.5),
                (dti.augment.GaussianBlur(p=0.0), 0.0),
            ],
        ),
    ],
)
def test_how_often(augmentation, rate):
    drawn = draw(augmentation)[:, 0]
    assert (drawn[:, 0] > 0).mean() == pytest.approx(rate, abs=0.015 if 0 < rate < 1 else 0)
    if isinstance(augmentation, dti.augment.GaussianBlur) and rate:
        assert np.quantile(drawn[:, 1], [0, 0.5, 1]) == pytest.approx([0.1, 1.05, 2.0], abs=0.03)


def test_a_program_of_many():
    """Steps of all augmentations in their turn; what draws nothing takes no part."""
    parts = [
        dti.augment.ColorJitter(),
        dti.augment.RandAugment(),
        dti.augment.ColorJitter(hue=0.1, contrast=1),
        dti.augment.Solarize(),
    ]
    program = Program(parts, SIZE)
    assert program.augmentation_of_op.tolist() == [0, 0, 1, 1, 2]
    assert program.num_uniforms == 3 + 3 * 5
    assert program.rows[0].tolist() == [0] * 13
    assert Program([], SIZE).num_ops == 0
    for op, part in enumerate([parts[1], parts[1], parts[2], parts[2], parts[3]]):
        own = {tuple(row) for table in part.plan(SIZE).tables for row in table.tolist()}
        assert {tuple(row) for row in program.rows_of_op(op).tolist()} == own


def test_refuses_with_an_image():
    make = dti.Preprocess.for_training
    with refused("give no rectangle that is smaller than the image, 4x224"):
        make(
            (4, 224),
            augment=(dti.augment.RandomErasing(area_range=(0.4, 0.5), aspect_ratio_range=(9, 9)),),
        )
    with refused("`augment` must be a sequence, got"):
        make(224, augment=dti.augment.RandAugment())
    with refused("`augment` must be one of RandAugment, TrivialAugment, .*, got"):
        make(224, augment=("rand",))
    with refused("`recipe` must be one of 'resnet-50', .*, got 'vit'"):
        make(224, recipe="vit")


def test_recipes():
    """A recipe's fields, which those of the call replace."""
    made = dti.Preprocess.for_training(192, recipe="deit", mirror_probability=0.0)
    assert made.crop == dti.RandomResizedCrop()
    assert [type(part).__name__ for part in made.augment] == ["RandAugment", "RandomErasing"]
    assert (made.interpolation, made.antialias, made.mirror_probability) == ("bicubic", True, 0)
    for recipe in ("resnet-50", "torchvision-v2", "convnext", "simclr"):
        assert dti.Preprocess.for_training(64, recipe=recipe).crop == dti.RandomResizedCrop()


def test_every_augmentation_has_its_own_numbers():
    """The same seed draws other numbers for the second of two equal augmentations."""
    drawn = draw(dti.augment.RandAugment(num_ops=2), 200)
    assert (drawn[:, 0] != drawn[:, 1]).any(1).mean() > 0.8
    twice = Program([dti.augment.Solarize(p=0.5)] * 2, SIZE)
    rows = np.stack([draw_rows(twice, np.array([1, n])).numpy()[:, 0] for n in range(100)])
    both = [*itertools.product([0.0, 3.0], repeat=2)]
    assert all((rows == pair).all(1).sum() > 10 for pair in both)
