"""Which shard reads which records, and which batches they can fill."""

import pytest
from conftest import refused

from dali_tf_input import Shard
from dali_tf_input.spec.plan import check_step, replica_batch_size


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8, 11])
def test_shards_are_a_partition(num_shards):
    for num_records in range(31):
        shards = [
            Shard(shard_id, num_shards).records(num_records) for shard_id in range(num_shards)
        ]
        assert [record for shard in shards for record in shard] == list(range(num_records))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_every_replica_can_fill_its_batch():
    """Whatever `replica_batch_size` lets through, the smallest shard can serve."""
    for num_records in range(1, 31):
        for num_replicas in range(1, 9):
            for global_size in range(num_replicas, num_records + 1, num_replicas):
                batch_size = replica_batch_size(
                    global_size, num_replicas=num_replicas, num_records=num_records
                )
                assert batch_size * num_replicas == global_size
                check_step(batch_size, num_shards=num_replicas, num_records=num_records)


def step(size, num_shards):
    return lambda: check_step(size, num_shards=num_shards, num_records=5)


def replica(size, num_replicas):
    return lambda: replica_batch_size(size, num_replicas=num_replicas, num_records=100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shard(2, 2), r"`shard_id` must be in \[0, 2\), got 2"),
        (step(6, 1), "`batch_size` must be at most 5, as there are 5 records, got 6"),
        (step(2, 4), "must be at most 1 in each of 4 shards, as there are 5 records, got 2"),
        (step(1, 6), "must be at most 0 in each of 6 shards, as there are 5 records, got 1"),
        (replica(0, 1), "`batch_size` must be at least 1, got 0"),
        (replica(2, 3), "multiple of the 3 replicas, got 2: use 3"),
        (replica(102, 2), "at most the number of records, 100, got 102"),
    ],
)
def test_refuses(call, message):
    with refused(message):
        call()
