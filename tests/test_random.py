"""The hash and the permutation: bijective, unrelated to each other, and the same in C++."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from conftest import at_night

from dali_tf_input.backends.stream import EPOCH_STRIDE, MAX_EPOCHS
from dali_tf_input.backends.tf_native import list_images
from dali_tf_input.random import Purpose, hash_words, permute, seed_of
from dali_tf_input.spec.plan import Groups, Plan

SIZES = sorted({1 << bits for bits in range(12, 21)})
AROUND_POWERS = [size + more for size in SIZES for more in (-1, 0, 1)]


def permutations(size, count, seed=1):
    """Returns the permutations of `count` epochs: (count, size)."""
    keys = hash_words(seed, Purpose.ORDER, np.arange(count))[:, None]
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


@pytest.mark.parametrize("size", at_night([10, 100, 1000], [10, 100, 1000, 4096, 5000]))
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
        seed_of(seed, purpose, more) for seed in seeds for purpose in Purpose for more in range(50)
    }
    assert len(made) == len(seeds) * len(Purpose) * 50
    assert seed_of(0, Purpose.CROP, 0) == SEED_OF_0


SEED_OF_0 = 1070957052962950154


def random_plan(random):
    """Returns a plan of any kind, and a shard of it."""
    num_slots = int(random.integers(1, 1 << random.integers(1, 14)))
    num_shards = int(random.integers(1, 1 + min(9, num_slots)))
    size = int(random.integers(1, 1 + min(40, num_slots // num_shards)))
    fields = {"seed": int(random.integers(0, 1 << 31))}
    kind = random.integers(5)
    if kind == 0:  # an evaluation
        fields = {"keep_remainder": True}
        num_shards, size = (int(number) for number in random.integers(1, 50, 2))
    elif kind == 1:
        fields["block_size"] = int(random.integers(1, 50))
    elif kind == 2:
        fields["repeats"] = int(random.choice([n for n in (1, 2, 3) if size * num_shards % n == 0]))
    else:
        count = int(random.integers(1, 12))
        sizes = random.integers(1, 1 << random.integers(1, 14), count)
        shares = random.dirichlet(np.full(count, random.choice([0.1, 1.0])))
        fields["groups"] = Groups(tuple(sizes.tolist()), tuple(shares), are_parts=kind == 3)
    plan = Plan(num_slots=num_slots, shard_batch_size=size, num_shards=num_shards, **fields)
    return plan, int(random.integers(num_shards))


@pytest.mark.parametrize("rounds", [at_night(400, 20_000)])
def test_cpp_has_the_same_plan(rounds):
    """Of all kinds of plans: the same keys and records, also of a part of an epoch."""
    random = np.random.default_rng(rounds)
    kinds = set()
    for _ in range(rounds):
        plan, shard = random_plan(random)
        epoch = int(random.choice([0, 1, 77, MAX_EPOCHS - 1]))
        slots = plan.slots(shard)
        first = int(random.integers(0, len(slots) + 1)) if random.random() < 0.5 else 0
        count = int(random.integers(0, 2 * len(slots) + 2))
        keys, records = list_images(plan.to_numbers(shard), epoch, first, count)
        slots = slots[first : first + count]
        np.testing.assert_array_equal(keys, epoch * EPOCH_STRIDE + slots)
        np.testing.assert_array_equal(records, plan.positions(epoch, slots))
        kinds.add((plan.groups and plan.groups.are_parts, plan.seed is None, plan.repeats > 1))
    assert len(kinds) == 5


def test_cpp_has_the_plan_of_many_records():
    """Of more than fit into 32 bits, with a seed and keys that use all of theirs."""
    plan = Plan(num_slots=(1 << 39) + 12345, shard_batch_size=256, num_shards=3, seed=(1 << 31) - 1)
    first = plan.num_images(2) - 1000
    keys, records = list_images(plan.to_numbers(2), MAX_EPOCHS - 1, first, 5000)
    slots = plan.slots(2, first)
    assert len(keys) == 1000
    np.testing.assert_array_equal(keys, (MAX_EPOCHS - 1) * EPOCH_STRIDE + slots)
    np.testing.assert_array_equal(records, plan.positions(MAX_EPOCHS - 1, slots))


def test_cpp_refuses_what_is_no_plan():
    """It would walk for ever, or read beyond the groups."""
    groups = Groups((5, 7, 9), (0.5, 0.25, 0.25), are_parts=True)
    plan = Plan(num_slots=20, shard_batch_size=2, num_shards=2, seed=3, groups=groups)
    numbers, sizes, nodes = plan.to_numbers(1)

    def refuses(numbers=numbers, sizes=sizes, nodes=nodes, epoch=0, first=0):
        with pytest.raises(tf.errors.InvalidArgumentError, match="plan"):
            list_images((numbers, sizes, nodes), epoch, first, 5)

    for place, wrong in ((0, 0), (1, 0), (2, 0), (3, 2), (4, 21), (7, 0), (8, 0), (9, 3), (10, 21)):
        changed = numbers.copy()
        changed[place] = wrong
        refuses(changed)
    refuses(numbers[:-1])
    for table, name in ((sizes, "sizes"), (nodes, "nodes")):
        for place in range(table.size):
            for wrong in (-1, 1 << 60):
                changed = table.copy()
                changed.ravel()[place] = wrong
                refuses(**{name: changed})
    refuses(sizes=sizes[:2])
    refuses(epoch=-1)
    refuses(epoch=MAX_EPOCHS)
    refuses(first=-1)
