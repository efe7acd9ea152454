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


def test_shard_refuses():
    with refused(r"`shard_id` must be in \[0, 2\), got 2"):
        Shard(2, 2)


@pytest.mark.parametrize(
    ("batch_size", "num_shards", "message"),
    [
        (6, 1, "`batch_size` must be at most 5, as there are 5 records, got 6"),
        (2, 4, "`batch_size` must be at most 1 in each of 4 shards, as there are 5 records, got 2"),
        (1, 6, "`batch_size` must be at most 0 in each of 6 shards, as there are 5 records, got 1"),
    ],
)
def test_check_step_refuses(batch_size, num_shards, message):
    with refused(message):
        check_step(batch_size, num_shards=num_shards, num_records=5)


@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "message"),
    [
        (0, 1, "`batch_size` must be at least 1, got 0"),
        (7, 2, "multiple of the 2 replicas, got 7: use 6 or 8"),
        (2, 3, "multiple of the 3 replicas, got 2: use 3"),
        (102, 2, "at most the number of records, 100, got 102"),
    ],
)
def test_replica_batch_size_refuses(batch_size, num_replicas, message):
    with refused(message):
        replica_batch_size(batch_size, num_replicas=num_replicas, num_records=100)
