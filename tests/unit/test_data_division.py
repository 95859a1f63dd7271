"""Datasets that split themselves: for each attempt anew, with its world size, where its ranks are."""

from __future__ import annotations

import pickle
import threading

import pytest
import ray.cloudpickle as cloudpickle

from ray_lite import train
from ray_lite.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray_lite.train.data import check_datasets
from ray_lite.train.errors import ConfigError, ConfigTypeError
from ray_lite.train.execution import datasets as division
from ray_lite.train.execution.datasets import SealedSource, divide, pack_datasets, shard_makers

NODES = ["a", "a", "b", "c", "c"]


class Counting:
    """Counts how often it was split; its parts say so, and are empty once they have been read."""

    def __init__(self, num_rows=12):
        self.num_rows, self.num_splits = num_rows, 0

    def split(self, n):
        self.num_splits += 1
        return [iter([(self.num_splits, n, row) for row in range(rank, self.num_rows, n)]) for rank in range(n)]


class Streaming:
    """As Ray Data: takes the nodes of the ranks."""

    def streaming_split(self, n, *, equal, locality_hints):
        return [{"rank": rank, "of": n, "nodes": locality_hints} for rank in range(n)]


class Failing:
    def __init__(self, error):
        self.error = error

    def split(self, n):
        raise self.error


class Short:
    def __init__(self, parts):
        self.parts = parts

    def split(self, n):
        return self.parts


def as_it_is(value):
    return value


def shipped(datasets, config=None, *, travels=True):
    """What an attempt starts from; ``travels`` is the way of a cluster, where all goes through pickles."""
    put = cloudpickle.dumps if travels else as_it_is
    remainder = (config or DataConfig()).remainder
    return pack_datasets(check_datasets(datasets, config), remainder=remainder, put=put)


def divided(shipments, world_size, node_ids=(), *, travels=True):
    return divide(shipments, world_size=world_size, node_ids=node_ids, fetch=pickle.loads if travels else as_it_is)


def shard(shipments, rank, world_size, *, travels=True):
    makers = shard_makers(
        shipments, world_rank=rank, world_size=world_size, fetch=pickle.loads if travels else as_it_is
    )
    return makers["train"]()


@pytest.mark.parametrize("travels", [True, False], ids=["cluster", "local"])
@pytest.mark.parametrize("world_sizes", [(2, 2), (1, 4), (4, 1), (3, 5)])
def test_each_attempt_has_new_parts_as_many_as_it_has_ranks(world_sizes, travels):
    """One split for ``max_workers`` served all attempts: half read parts, and parts that nobody read."""
    shipments = shipped({"train": Counting()}, travels=travels)
    for world_size in world_sizes:
        attempt = divided(shipments, world_size, travels=travels)
        assert len(attempt["train"].parts) == world_size
        rows = [list(shard(attempt, rank, world_size, travels=travels)) for rank in range(world_size)]
        assert {n for part in rows for _, n, _ in part} == {world_size}
        assert sorted(row for part in rows for _, _, row in part) == list(range(12))


def test_nothing_is_split_before_the_ranks_are_known():
    dataset = Counting()
    shipments = shipped({"train": dataset}, travels=False)
    assert dataset.num_splits == 0
    assert shipments["train"].parts is None
    divided(shipments, 2, travels=False)
    divided(shipments, 3, travels=False)
    assert dataset.num_splits == 2


def test_on_a_cluster_no_attempt_sees_what_another_did_to_the_dataset():
    shipments = shipped({"train": Counting()})
    for _ in range(3):
        num_splits, _, _ = next(shard(divided(shipments, 2), 0, 2))
        assert num_splits == 1


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_streaming_split_is_told_where_each_rank_of_the_attempt_is(world_size):
    attempt = divided(shipped({"train": Streaming()}), world_size, NODES[:world_size])
    assert shard(attempt, 0, world_size) == {"rank": 0, "of": world_size, "nodes": NODES[:world_size]}


@pytest.mark.parametrize(
    ("config", "nodes"), [(DataConfig(enable_shard_locality=False), NODES), (None, [])], ids=["unwanted", "local mode"]
)
def test_streaming_split_gets_no_hints_where_there_are_none_to_give(config, nodes):
    attempt = divided(shipped({"train": Streaming()}, config), 5, nodes)
    assert shard(attempt, 4, 5)["nodes"] is None


def test_the_source_does_not_go_on_to_the_workers():
    """It may be large, or open only where it is split."""
    attempt = divided(shipped({"train": Counting()}), 2)
    assert attempt["train"].source is None


def test_the_others_stay_as_they_are():
    whole = DataConfig(datasets_to_split=["train"])
    shipments = shipped({"train": [1, 2, 3, 4], "val": Counting()}, whole)
    attempt = divided(shipments, 2)
    assert attempt == shipments
    assert all(shipment.source is None and shipment.parts is None for shipment in attempt.values())
    assert shard(attempt, 1, 2) == [2, 4]


def test_a_function_is_called_once_per_fit_and_what_it_made_is_split_per_attempt():
    calls = []

    def make():
        calls.append(1)
        return Counting()

    shipments = shipped({"train": make}, travels=False)
    for world_size in (1, 2):
        assert len(divided(shipments, world_size, travels=False)["train"].parts) == world_size
    assert calls == [1]


def test_a_function_that_makes_no_dataset_is_found_on_the_driver():
    with pytest.raises(ConfigTypeError, match=r"dataset 'train' \(what its function returned\) is None"):
        shipped({"train": lambda: None})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            Failing(OSError("no such bucket")),
            r"dataset 'train' could not be split among 2 workers: OSError: no such bucket",
        ),
        (Failing(KeyError("x")), r"dataset 'train' could not be split among 2 workers: KeyError: 'x'"),
        (Short([1]), r"dataset 'train': split\(2\) gave 1 parts"),
        (Short(None), r"dataset 'train' could not be split among 2 workers: TypeError: "),
    ],
    ids=["raises", "raises a KeyError", "too few", "no list"],
)
def test_a_split_that_fails_names_the_dataset(dataset, message):
    with pytest.raises(ConfigError, match=message):
        divided(shipped({"first": Counting(), "train": dataset}), 2)


def test_a_library_that_is_not_there_where_the_dataset_is_split_names_the_dataset():
    shipments = shipped({"train": Counting()}, travels=False)
    shipments["train"].source[0] = SealedSource(b"cno_such_library\nDataset\n.")
    with pytest.raises(ConfigError, match=r"dataset 'train' could not be split .* No module named 'no_such_library'"):
        divided(shipments, 2, travels=False)


def test_the_parts_that_were_made_before_a_failure_are_given_back(monkeypatch):
    released = []
    monkeypatch.setattr(division, "release", lambda shipments: released.extend(shipments))
    with pytest.raises(ConfigError):
        divided(shipped({"first": Counting(), "train": Failing(ValueError("no"))}), 2)
    assert released == ["first"]


def test_parts_without_anything_running_behind_them_are_released_without_ray():
    attempt = divided(shipped({"train": Counting(), "val": [1]}), 2)
    for _ in range(2):
        division.release(attempt)


def test_a_dataset_that_cannot_be_pickled_is_refused_by_name_before_anything_runs():
    dataset = Counting()
    dataset.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"dataset 'train' splits itself, and cannot be pickled .*lock"):
        shipped({"train": dataset})
    # In this process nothing has to travel.
    assert len(divided(shipped({"train": dataset}, travels=False), 1, travels=False)["train"].parts) == 1


def test_local_mode_splits_anew_for_each_attempt_too(tmp_path):
    """A part that the first attempt had read to its end was empty in the second."""

    def fn():
        rows = list(train.get_dataset_shard("train"))
        train.report({"rows": len(rows), "splits": rows[0][0], "of": rows[0][1]})
        if train.get_context().get_attempt() == 1:
            raise RuntimeError("the first attempt fails")

    result = train.DataParallelTrainer(
        fn,
        datasets={"train": Counting()},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.metrics == {"rows": 12, "splits": 2, "of": 1}
