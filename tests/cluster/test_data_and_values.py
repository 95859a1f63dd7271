"""Datasets, return values, captures and configs travel as they are, once, and bad ones say so."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from clusters import living_actors
from helpers import folder_with, note, notes, rank
from waiting import wait_until

from ray_lite import train
from ray_lite.train import (
    ConfigError,
    DataConfig,
    DatasetNotFoundError,
    FailureConfig,
    ScalingConfig,
    TrainFunctionError,
    WorkerGroupError,
)
from ray_lite.train.torch import TorchTrainer


@pytest.mark.parametrize(("rows", "n"), [(0, 2), (1, 4), (3, 2), (7, 3)])
@pytest.mark.parametrize("kind", [list, np.asarray], ids=["list", "numpy"])
def test_all_ranks_get_equally_many_rows_and_every_row_is_read(fit, scratch, rows, n, kind):
    def fn(config):
        note(config["scratch"], "ids", [int(row) for row in train.get_dataset_shard("train")])

    fit(fn, n=n, cfg={"scratch": str(scratch)}, ds={"train": kind(list(range(rows)))})
    shards = notes(scratch, "ids")
    assert len(shards) == n
    assert len({len(shard) for shard in shards}) == 1
    assert {row for shard in shards for row in shard} == set(range(rows))


def test_a_ddp_loop_over_shards_that_do_not_divide_finishes(fit):
    def fn():
        import torch

        shard = train.get_dataset_shard("train")
        model = train.torch.prepare_model(torch.nn.Linear(1, 1))
        loader = torch.utils.data.DataLoader(shard, batch_size=2)
        for _ in range(2):
            for batch in loader:
                model(batch.float().reshape(-1, 1)).sum().backward()
        train.report({"rows": len(shard)})

    assert fit(fn, ds={"train": list(range(25))}, trainer=TorchTrainer).metrics == {"rows": 13}


def test_what_is_not_split_is_whole_on_each_rank(fit, scratch):
    def fn(config):
        lengths = [len(train.get_dataset_shard(name)) for name in ("train", "val")]
        note(config["scratch"], "lengths", lengths)

    fit(
        fn,
        cfg={"scratch": str(scratch)},
        ds={"train": range(10), "val": range(10)},
        trainer_options={"dataset_config": DataConfig(datasets_to_split=["train"])},
    )
    assert notes(scratch, "lengths") == [[5, 10], [5, 10]]


def test_unknown_names_list_the_known_ones_and_the_default_name_is_train(fit):
    def fn():
        assert len(train.get_dataset_shard()) == 2
        train.get_dataset_shard("trian")

    with pytest.raises(WorkerGroupError, match=r"'trian'.*'train'") as caught:
        fit(fn, ds={"train": range(4)})
    assert isinstance(caught.value.__cause__, DatasetNotFoundError)
    with pytest.raises(WorkerGroupError, match="was given none"):
        fit(lambda: train.get_dataset_shard("train"), n=1)


def test_shards_need_no_cpu_and_no_barrier(fit):
    def fn():
        if rank() == 0:
            assert len(train.get_dataset_shard("train")) == 1

    fit(fn, n=4, ds={"train": range(4)})


class Stream:
    """Splits itself as Ray Data does, and notes down for how many ranks, and where they are."""

    def __init__(self, scratch, num_rows=24) -> None:
        self.scratch, self.num_rows = str(scratch), num_rows

    def streaming_split(self, n, *, equal, locality_hints):
        note(self.scratch, "splits", [n, locality_hints])
        # Each row can be read once, as from a stream.
        return [iter(range(start, self.num_rows, n)) for start in range(n)]


def test_each_attempt_reads_new_parts_of_a_dataset_that_splits_itself(fit, scratch):
    """The rows that the first attempt had read were missing in the second."""
    import ray

    def fn(config):
        shard, attempt = train.get_dataset_shard("train"), train.get_context().get_attempt()
        rows = [next(shard) for _ in range(3)]
        if attempt == 1:
            raise ValueError("in the middle of the first epoch")
        note(config["scratch"], "rows", [attempt, *rows, *shard])

    fit(fn, cfg={"scratch": str(scratch)}, ds={"train": Stream(scratch)}, fc=FailureConfig(max_failures=1))
    here = ray.get_runtime_context().get_node_id()
    assert notes(scratch, "splits") == [[2, [here, here]]] * 2
    assert sorted(notes(scratch, "rows")) == [[2, *range(0, 24, 2)], [2, *range(1, 24, 2)]]


def test_an_elastic_attempt_has_as_many_parts_as_ranks(fit, scratch):
    """There were parts for ``max_workers``, and nobody read those of the workers that found no room."""
    import ray

    holder = ray.remote(num_cpus=2)(Holder).options(name="holder").remote()
    ray.get(holder.is_up.remote())

    def fn(config):
        world_size = train.get_context().get_world_size()
        note(config["scratch"], "rows", [world_size, *train.get_dataset_shard("train")])
        if world_size == 2:
            train.collective.barrier()
            if rank() == 0:
                ray.kill(ray.get_actor("holder"))
                wait_until(lambda: ray.available_resources().get("CPU", 0) >= 2, "the room of the holder is free")
            train.collective.barrier()
            raise ValueError("now there is room for more")

    fit(
        fn,
        cfg={"scratch": str(scratch)},
        ds={"train": Stream(scratch)},
        fc=FailureConfig(max_failures=1),
        scaling=ScalingConfig(num_workers=(1, 4)),
    )
    assert [n for n, _ in notes(scratch, "splits")] == [2, 4]
    rows = notes(scratch, "rows")
    assert sorted(part for part in rows if part[0] == 2) == [[2, *range(start, 24, 2)] for start in range(2)]
    assert sorted(part for part in rows if part[0] == 4) == [[4, *range(start, 24, 4)] for start in range(4)]


class Holder:
    """Takes room away."""

    def is_up(self) -> bool:
        return True


class Broken:
    def split(self, n):
        raise OSError("no such bucket")


def test_a_split_that_raises_ends_the_start_up_and_names_the_dataset(fit):
    with pytest.raises(WorkerGroupError, match="dataset 'train' could not be split among 2 workers: OSError") as caught:
        fit(lambda: None, ds={"val": [1, 2], "train": Broken()})
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "splitting the datasets" in str(caught.value)
    assert 'raise OSError("no such bucket")' in str(caught.value)


def test_a_dataset_that_cannot_be_sent_to_where_it_is_split_is_refused(fit, scratch):
    dataset = Stream(scratch)
    dataset.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"dataset 'train' .*lock"):
        fit(lambda: None, ds={"train": dataset})
    assert notes(scratch, "splits") == []


@pytest.fixture
def ray_data(no_leaks):
    """Ray Data; the actors that it keeps for the whole cluster end with the test."""
    import ray
    import ray.data

    yield ray.data
    wait_until(lambda: "SplitCoordinator" not in living_actors(), f"no dataset is being read: {living_actors()}")
    for actor in ray.util.list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(**actor))


# Ray Data (2.60) sets options of its own that it has deprecated.
@pytest.mark.ray_data
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_data_is_read_whole_after_a_failure_and_by_fewer_workers_than_there_may_be(ray_data, fit, scratch):
    """Its parts wait for each other, those of ranks that died or never were included: both hung for ever."""

    def fn(config):
        c = train.get_context()
        if c.get_attempt() == 1 and rank() == 0:
            wait_until(lambda: notes(config["scratch"], "begun"), "the other rank begins, and waits for this one")
            raise ValueError("before the first epoch has begun")
        note(config["scratch"], "begun", rank())
        for epoch in range(2):
            ids = [int(row["id"]) for row in train.get_dataset_shard("train").iter_rows()]
            note(config["scratch"], "ids", [c.get_attempt(), c.get_world_size(), epoch, ids])

    fit(
        fn,
        cfg={"scratch": str(scratch)},
        ds={"train": ray_data.range(40, override_num_blocks=4)},
        fc=FailureConfig(max_failures=1),
        # Two of at most four: one CPU is left to read with.
        scaling=ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1.5}),
    )
    parts = notes(scratch, "ids")
    assert sorted(part[:3] for part in parts) == [[2, 2, 0], [2, 2, 0], [2, 2, 1], [2, 2, 1]]
    for epoch in range(2):
        shards = [ids for *_, number, ids in parts if number == epoch]
        assert [len(ids) for ids in shards] == [20, 20]
        assert sorted(row for ids in shards for row in ids) == list(range(40))


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda: 5, lambda value: value == 5),
        (lambda: {"a": np.ones(3)}, lambda value: value["a"].tolist() == [1, 1, 1]),
        (lambda: b"x" * 30_000_000, lambda value: len(value) == 30_000_000),
        (lambda: lambda: 7, lambda value: value() == 7),
    ],
    ids=["int", "array", "30 MB", "function"],
)
def test_the_return_value_of_rank_0_comes_back(fit, make, check):
    assert check(fit(lambda: make(), n=2).return_value)


def test_a_tensor_and_a_module_come_back(fit):
    def fn():
        import torch

        return torch.ones(2), torch.nn.Linear(2, 2)

    tensor, module = fit(fn, n=1).return_value
    assert tensor.tolist() == [1, 1]
    assert module.in_features == 2


@pytest.mark.parametrize("make", [threading.Lock, lambda: (x for x in [])], ids=["lock", "generator"])
def test_a_return_value_that_cannot_travel_costs_a_warning_not_the_run(fit, caplog, make):
    def fn():
        with folder_with(w="1") as checkpoint:
            train.report({"a": 1}, checkpoint=checkpoint)
        return make()

    result = fit(fn, n=2)
    assert result.return_value is None
    assert result.metrics == {"a": 1}
    assert result.checkpoint is not None
    assert "return value" in caplog.text
    assert type(make()).__name__ in caplog.text


def test_a_large_closure_is_sent_once_and_warned_about(fit, caplog):
    big = np.zeros(120_000_000, np.uint8)
    assert fit(lambda: int(big.sum()), n=2).return_value == 0
    assert "MiB" in caplog.text
    assert "datasets=" in caplog.text


def test_each_worker_has_its_own_config_and_the_drivers_stays_as_it_was(fit, scratch):
    def fn(config):
        note(config["scratch"], "lr", config["lr"])
        config["lr"] = 5

    config = {"scratch": str(scratch), "lr": 1}
    fit(fn, cfg=config)
    fit(fn, cfg=config)
    assert config["lr"] == 1
    assert notes(scratch, "lr") == [1, 1, 1, 1]


class App:
    """Holds its own trainer, as a notebook class would."""

    def __init__(self, fit) -> None:
        self.data = list(range(1_000))
        self.fit = fit

    def train_fn(self, config):
        train.report({"n": config["n"]})

    def go(self):
        return self.fit(self.train_fn, cfg={"n": 3}, n=1)


def test_a_method_whose_object_cannot_be_pickled_names_the_attribute(fit):
    app = App(fit)
    app.lock = threading.Lock()
    with pytest.raises(TrainFunctionError, match="lock"):
        app.go()


def test_context_injection_by_annotation_on_a_worker(fit):
    def fn(config, whatever: train.TrainContext):
        assert whatever is train.get_context()
        whatever.report({"rank": whatever.get_world_rank(), "lr": config["lr"]})

    assert fit(fn, cfg={"lr": 1}).metrics == {"rank": 0, "lr": 1}


def test_the_context_knows_the_run(fit, tmp_path):
    def fn():
        c = train.get_context()
        train.report(
            {
                "name": c.get_experiment_name(),
                "trial": [c.get_trial_name(), c.get_trial_dir()],
                "id": c.get_trial_id(),
                "bundles": len(c.get_trial_resources().bundles),
                "metadata": c.get_metadata(),
                "cpus": c.get_num_cpus(),
            }
        )

    result = fit(fn, name="named", trainer_options={"metadata": {"team": "a"}})
    expected = str(tmp_path / "storage" / "named")
    assert result.metrics["name"] == "named"
    assert result.metrics["trial"] == ["named", expected]
    assert len(result.metrics["id"]) == 32
    assert result.metrics["bundles"] == 2
    assert result.metrics["metadata"] == {"team": "a"}
    assert result.metrics["cpus"] == 1.0
    assert result.path == expected
