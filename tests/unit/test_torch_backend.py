"""The process group: real processes that meet, work together and part."""

from __future__ import annotations

import functools
import os
import pickle
import time
import warnings

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch_workers import ProcessWorkers, make_context

from ray_lite.train.context.current import current_context
from ray_lite.train.errors import NotInTrainFunctionError, WorkerStartError
from ray_lite.train.torch import TorchBackend, TorchConfig
from ray_lite.train.torch.process_group import (
    RankPlace,
    _gpus_of_node,
    _tell_gpus,
    join_group,
    open_rendezvous,
)


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


def sleep_in_init(config, address, num_nodes):
    """One rank hangs inside torch, after it has said that it is there."""
    dist.init_process_group = lambda *args, **kwargs: time.sleep(30)
    join_group(config, address, num_nodes)


def test_a_rank_that_hangs_in_torch_is_named():
    """Case 71: not "wait timeout", but which rank, and the option to change."""
    config = TorchConfig(backend="gloo", timeout_s=2)
    with ProcessWorkers(3) as workers:
        places = workers.execute(open_rendezvous, config)
        arguments = (config, places[0].address, 1)
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
            workers.send(rank, join_group, config, places[0].address, 1)
        for rank in (0, 1):
            _, error = workers.receive(rank)
            assert isinstance(error, WorkerStartError)
            assert "rank 2 did not arrive within 1 s" in str(error)
            assert "TorchConfig(timeout_s=...)" in str(error)


def test_an_unreachable_rank_0_is_an_error_that_says_where():
    with ProcessWorkers(2) as workers:
        config = TorchConfig(timeout_s=1)
        workers.execute(open_rendezvous, config)
        workers.send(1, join_group, config, ("127.0.0.1", 1), 1)
        _, error = workers.receive(1)
        assert "cannot reach rank 0 at 127.0.0.1:1 within 1 s" in str(error)


def leave_store(config, address, num_nodes):
    """Rank 0 goes away with the store while the others wait for all to arrive."""
    os._exit(1)


def test_a_rank_0_that_goes_away_is_not_taken_for_ranks_that_are_late():
    config = TorchConfig(backend="gloo", timeout_s=30)
    with ProcessWorkers(3) as workers:
        places = workers.execute(open_rendezvous, config)
        arguments = (config, places[0].address, 1)
        workers.send(1, join_group, *arguments)
        workers.send(0, leave_store, *arguments)
        _, error = workers.receive(1)
        assert isinstance(error, WorkerStartError)
        assert "rank 0" in str(error)
        assert "did not arrive" not in str(error)


def test_ranks_of_a_node_learn_of_each_others_gpus_and_of_no_others():
    store = dist.HashStore()
    node = [make_context(rank, 3, gpu_ids=gpus) for rank, gpus in enumerate([("4",), ("2", "3"), ("GPU-a",)])]
    other = make_context(0, 1, node_rank=1, gpu_ids=("7",))
    for context in (*node, other):
        _tell_gpus(context, store)
    assert [_gpus_of_node(context, store) for context in node] == [[["4"], ["2", "3"], ["GPU-a"]]] * 3
    assert _gpus_of_node(other, store) == [["7"]]


class CountingWorkers:
    """Takes note of what is sent to the workers."""

    def __init__(self, world_size):
        self.world_size, self.num_bytes = world_size, 0

    def execute(self, fn, *args):
        self.num_bytes += self.world_size * len(pickle.dumps(args))
        if fn is open_rendezvous:
            address = ("10.0.0.1", 29500)
            return [RankPlace(rank // 8, address if rank == 0 else None) for rank in range(self.world_size)]
        return [None] * self.world_size


def test_what_is_sent_to_one_rank_does_not_grow_with_their_number():
    """The places of all ranks were sent to each rank: 400 MB for 4,096 of them."""
    few, many = CountingWorkers(8), CountingWorkers(4_096)
    for workers in (few, many):
        TorchBackend().on_start(workers, TorchConfig())
    assert many.num_bytes <= (4_096 / 8) * few.num_bytes + 4_096 * 8


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
