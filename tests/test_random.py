"""The hash and the permutation: bijective, unrelated to each other, and the same in C++."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from dali_tf_input.backends.tf_native import load
from dali_tf_input.random import Stream, hash_words, permute, seed_of

SIZES = sorted({1 << bits for bits in range(12, 21)})
AROUND_POWERS = [size + more for size in SIZES for more in (-1, 0, 1)]


def permutations(size, count, seed=1):
    """Returns the permutations of `count` epochs: (count, size)."""
    keys = hash_words(seed, Stream.ORDER, np.arange(count))[:, None]
    return permute(np.arange(size), size, keys)


@pytest.mark.parametrize("sizes", [range(1, 2001), AROUND_POWERS], ids=["small", "powers of 2"])
def test_it_is_a_bijection(sizes):
    for size in sizes:
        moved = permute(np.arange(size), size, hash_words(size))
        assert np.bincount(moved, minlength=size).tolist() == [1] * size


def test_sizes_and_keys_of_their_own():
    """As for the members of classes: each place has the size and the key of its class."""
    sizes, keys = np.arange(1, 200), hash_words(7, np.arange(1, 200))
    places = sizes // 2
    expected = [int(permute(*given)) for given in zip(places, sizes, keys, strict=True)]
    assert permute(places, sizes, keys).tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_orders_of_a_few_records_are_as_frequent_as_chance_has_it(size):
    """Pearson's statistic over all orders, within five standard deviations."""
    count = 100 * math.factorial(size)
    rows = permutations(size, count).tolist()
    orders = [*itertools.permutations(range(size))]
    times = dict.fromkeys(orders, 0)
    for row in rows:
        times[tuple(row)] += 1
    statistic = sum((number - 100) ** 2 / 100 for number in times.values())
    freedom = len(orders) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [10, 100, 1000, 4096, 5000])
def test_fixed_points_and_neighbors_are_as_frequent_as_chance_has_it(size):
    """A permutation has one fixed point, and one pair of neighbors that stay so, on average; their
    numbers over 1,000 epochs are within five standard deviations.
    """
    rows, spread = permutations(size, 1000), 5 / math.sqrt(1000)
    assert abs((rows == np.arange(size)).sum(1).mean() - 1) < spread
    assert abs((np.diff(rows) == 1).sum(1).mean() - (1 - 1 / size)) < spread


def test_epochs_and_seeds_are_unrelated():
    """Ranks of a record in two epochs, and with two seeds, have no correlation: of 100,000 records,
    within five standard deviations.
    """
    size = 100_000
    rows = np.concatenate([permutations(size, 3), permutations(size, 2, seed=2)])
    correlation = np.corrcoef(rows) - np.eye(5)
    assert abs(correlation).max() < 5 / math.sqrt(size)


def test_purposes_do_not_share_numbers():
    """Seeds that bit tricks would have mapped to each other, too."""
    seeds = [0, 1, 2, 2**31 - 1]
    made = {
        seed_of(seed, stream, more) for seed in seeds for stream in Stream for more in range(50)
    }
    assert len(made) == len(seeds) * len(Stream) * 50
    assert seed_of(0, Stream.CROP, 0) == SEED_OF_0


SEED_OF_0 = 1070957052962950154


def test_cpp_has_the_same_numbers():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 1 << random.integers(1, 40, 5000))
    places = random.integers(0, sizes)
    keys = hash_words(random.integers(0, 1 << 31, 5000), Stream.CLASS)
    moved = load().dali_tf_input_permute(places, sizes, keys.astype(np.int64))
    np.testing.assert_array_equal(moved, permute(places, sizes, keys))


@pytest.mark.parametrize("place", [-1, 5])
def test_cpp_refuses_places_outside(place):
    """It would walk for ever."""
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"places must be in \[0, size\)"):
        load().dali_tf_input_permute([place], [5], [1])
