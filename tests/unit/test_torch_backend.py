"""The process group: real processes that meet, work together and part."""

from __future__ import annotations

import functools
import os
import time
import warnings

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch_workers import ProcessWorkers

from ray_lite.train.context.current import current_context
from ray_lite.train.errors import NotInTrainFunctionError, WorkerStartError
from ray_lite.train.torch import TorchBackend, TorchConfig
from ray_lite.train.torch.process_group import join_group, open_rendezvous


def start(workers, **options):
    config = TorchConfig(**options)
    TorchBackend().on_start(workers, config)
    return config


def sum_of_ranks():
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def environment():
    return {**os.environ, "rank": current_context().get_world_rank()}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_ranks_meet_and_part(world_size, init_method):
    """A group for one worker too; destroyed on every rank, not on rank 0 alone."""
    with ProcessWorkers(world_size) as workers:
        config = start(workers, init_method=init_method, timeout_s=30)
        assert workers.execute(sum_of_ranks) == [sum(range(world_size))] * world_size
        TorchBackend().on_shutdown(workers, config)
        assert workers.execute(dist.is_initialized) == [False] * world_size


def test_every_rank_has_the_variables_that_torchrun_sets():
    """Case 68: also when the driver hands on stale ones."""
    stale = {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "MASTER_ADDR": "10.255.255.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with ProcessWorkers(2, env=stale) as workers:
        config = start(workers, timeout_s=30)
        for env in workers.execute(environment):
            rank = str(env["rank"])
            assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == (rank, rank, rank)
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["ROLE_WORLD_SIZE"]) == ("2", "2", "2")
            assert (env["NODE_RANK"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "0", "1")
            assert env["MASTER_ADDR"] == "127.0.0.1"
            assert 0 < int(env["MASTER_PORT"]) != 29500
            assert env["ACCELERATE_TORCH_DEVICE"] == "cpu"
            assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        TorchBackend().on_shutdown(workers, config)
        # What was found is put back: in local mode the process is the user's own.
        assert all(env.items() >= stale.items() for env in workers.execute(environment))


def test_tcp_leaves_the_master_variables_alone():
    with ProcessWorkers(2) as workers:
        start(workers, init_method="tcp", timeout_s=30)
        assert not any("MASTER_ADDR" in env or "MASTER_PORT" in env for env in workers.execute(environment))


def test_many_groups_at_the_same_time_and_one_after_another():
    """Case 67: no port is taken twice, and each group sees only its own ranks."""
    with ProcessWorkers(2) as first, ProcessWorkers(3) as second:
        for _ in range(5):
            configs = [start(first, timeout_s=30), start(second, timeout_s=30)]
            assert first.execute(sum_of_ranks) == [1, 1]
            assert second.execute(sum_of_ranks) == [3, 3, 3]
            for workers, config in zip((first, second), configs, strict=True):
                TorchBackend().on_shutdown(workers, config)


def test_a_group_can_be_made_again_without_a_shutdown_between():
    """An attempt that failed has no orderly end, and its workers may be used again."""
    with ProcessWorkers(2) as workers:
        start(workers, timeout_s=30)
        start(workers, timeout_s=30)
        assert workers.execute(sum_of_ranks) == [1, 1]


def test_the_train_function_may_destroy_the_group_or_make_more():
    with ProcessWorkers(2) as workers:
        config = start(workers, timeout_s=30)
        workers.execute(dist.destroy_process_group)
        TorchBackend().on_shutdown(workers, config)
        config = start(workers, timeout_s=30)
        workers.execute(make_subgroup)
        TorchBackend().on_shutdown(workers, config)
        assert workers.execute(dist.is_initialized) == [False, False]


def make_subgroup():
    dist.new_group([0, 1])


def sleep_in_init(config, address, places):
    """One rank hangs inside torch, after it has said that it is there."""
    dist.init_process_group = lambda *args, **kwargs: time.sleep(30)
    join_group(config, address, places)


def test_a_rank_that_hangs_in_torch_is_named():
    """Case 71: not "wait timeout", but which rank, and the option to change."""
    config = TorchConfig(backend="gloo", timeout_s=2)
    with ProcessWorkers(3) as workers:
        places = workers.execute(open_rendezvous, config)
        arguments = (config, places[0].address, tuple(places))
        workers.send(1, sleep_in_init, *arguments)
        for rank in (0, 2):
            workers.send(rank, join_group, *arguments)
        for rank in (0, 2):
            _, error = workers.receive(rank)
            assert isinstance(error, WorkerStartError)
            assert "rank 1 did not answer within TorchConfig(timeout_s=2)" in str(error)
        workers.kill()


def test_a_rank_that_never_arrives_is_named():
    config = TorchConfig(backend="gloo", timeout_s=1)
    with ProcessWorkers(3) as workers:
        places = workers.execute(open_rendezvous, config)
        for rank in (0, 1):
            workers.send(rank, join_group, config, places[0].address, tuple(places))
        for rank in (0, 1):
            _, error = workers.receive(rank)
            assert isinstance(error, WorkerStartError)
            assert "rank 2 did not arrive within 1 s" in str(error)
            assert "TorchConfig(timeout_s=...)" in str(error)


def test_an_unreachable_rank_0_is_an_error_that_says_where():
    with ProcessWorkers(2) as workers:
        config = TorchConfig(timeout_s=1)
        places = workers.execute(open_rendezvous, config)
        workers.send(1, join_group, config, ("127.0.0.1", 1), tuple(places))
        _, error = workers.receive(1)
        assert "cannot reach rank 0 at 127.0.0.1:1 within 1 s" in str(error)


def test_a_backend_that_this_torch_lacks_is_named():
    if dist.is_nccl_available():
        pytest.skip("this build of torch has nccl")
    with ProcessWorkers(1) as workers, pytest.raises(WorkerStartError, match="'nccl' is not in this build of torch"):
        start(workers, backend="nccl")


def test_nothing_is_warned_about_on_the_way():
    with ProcessWorkers(2) as workers:
        workers.execute(functools.partial(warnings.simplefilter, "error"))
        config = start(workers, timeout_s=30)
        TorchBackend().on_shutdown(workers, config)


def test_the_backend_keeps_no_state():
    assert vars(TorchBackend()) == {}
    assert TorchBackend() is not TorchBackend()


def test_only_workers_join_groups():
    with pytest.raises(NotInTrainFunctionError, match="TorchBackend"):
        open_rendezvous(TorchConfig())
