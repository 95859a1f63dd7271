"""The process group, ranks and variables as torchrun gives them, whatever stood in the environment before."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from helpers import first_time, folder_with, note, notes, rank, read
from waiting import wait_until

from ray_lite import train
from ray_lite.train import FailureConfig, ScalingConfig, WorkerGroupError
from ray_lite.train.torch import TorchConfig, TorchTrainer

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def sum_of_ranks() -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([train.get_context().get_world_rank()])
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_both_ways_to_meet_make_one_group(fit, init_method):
    def fn(config):
        train.report({"sum": sum_of_ranks(), "addr": os.environ.get("MASTER_ADDR")})

    result = fit(
        fn,
        trainer=TorchTrainer,
        trainer_options={"torch_config": TorchConfig(init_method=init_method)},
        cfg={},
    )
    assert result.metrics["sum"] == 1
    assert (result.metrics["addr"] is None) == (init_method == "tcp")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_context_environment_and_torch_agree(fit, monkeypatch, num_workers):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")

    def fn():
        import torch.distributed as dist

        c = train.get_context()
        expected = (
            c.get_world_rank(),
            c.get_world_size(),
            c.get_local_rank(),
            c.get_local_world_size(),
            c.get_node_rank(),
        )
        assert tuple(os.environ[name] for name in VARIABLES) == tuple(map(str, expected))
        assert os.environ["MASTER_ADDR"]
        assert os.environ["MASTER_PORT"]
        assert dist.get_rank() == c.get_world_rank()
        assert dist.get_world_size() == c.get_world_size()
        train.report({"ok": True})

    assert fit(fn, n=num_workers, trainer=TorchTrainer).metrics == {"ok": True}
    assert os.environ["RANK"] == "7"


def test_stale_variables_and_a_busy_port_on_the_driver_do_not_matter(fit, monkeypatch):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "10.255.255.1")
        assert fit(lambda: train.report({"sum": sum_of_ranks()}), trainer=TorchTrainer).metrics["sum"] == 1


def test_one_run_after_another_meets_no_busy_port(fit):
    for _ in range(3):
        assert fit(lambda: train.report({"sum": sum_of_ranks()}), trainer=TorchTrainer).metrics["sum"] == 1


def test_two_runs_at_the_same_time_see_only_their_own_ranks(fit):
    results: list = []

    def one(name: str) -> None:
        results.append(fit(lambda: train.report({"sum": sum_of_ranks()}), trainer=TorchTrainer, name=name))

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.metrics["sum"] for result in results] == [1, 1]


def test_after_a_restart_the_group_is_new_and_whole(fit, scratch):
    def fn(config):
        assert sum_of_ranks() == 1
        note(config["scratch"], "ports", os.environ["MASTER_PORT"])
        if rank() == 0 and first_time(config["scratch"], "kill"):
            wait_until(lambda: len(notes(config["scratch"], "ports")) == 2, "both ranks have noted the port")
            os.kill(os.getpid(), 9)
        train.report({"sum": sum_of_ranks()})

    result = fit(fn, cfg={"scratch": str(scratch)}, trainer=TorchTrainer, fc=FailureConfig(max_failures=1))
    assert result.metrics["sum"] == 1
    ports = notes(scratch, "ports")
    assert len(ports) == 4
    assert ports[0] == ports[1]
    assert ports[2] == ports[3]


def test_user_code_may_destroy_the_group_or_make_more(fit):
    def destroys():
        import torch.distributed as dist

        dist.destroy_process_group()

    def makes():
        import torch.distributed as dist

        dist.new_group([0, 1])

    fit(destroys, trainer=TorchTrainer)
    fit(makes, trainer=TorchTrainer)


def test_a_rank_that_returns_while_another_waits_at_a_barrier_does_not_hang_the_end(fit):
    def fn():
        import torch.distributed as dist

        if rank() == 1:
            dist.barrier()

    with pytest.raises(WorkerGroupError):
        fit(fn, trainer=TorchTrainer, trainer_options={"torch_config": TorchConfig(timeout_s=5)})


def test_threads_follow_the_reserved_cpus(fit):
    def fn():
        import torch

        c = train.get_context()
        train.report({"threads": torch.get_num_threads(), "cpus": c.get_num_cpus(), "resources": c.get_resources()})

    result = fit(fn, scaling=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2}), trainer=TorchTrainer)
    assert result.metrics == {"threads": 2, "cpus": 2.0, "resources": {"CPU": 2}}


def test_ddp_trains_the_same_weights_on_all_ranks_and_saves_plain_keys(fit):
    def fn():
        import torch

        from ray_lite.train.torch import prepare_data_loader, prepare_model, unwrap_model

        torch.manual_seed(0)
        model = prepare_model(torch.nn.Linear(3, 1))
        data = torch.utils.data.TensorDataset(torch.arange(30.0).reshape(10, 3), torch.ones(10, 1))
        loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        orders = []
        for _ in range(2):
            for x, y in loader:
                orders.append(x[:, 0].tolist())
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        state = unwrap_model(model).state_dict()
        path = f"rank-{rank()}.json"
        import json

        with folder_with(**{path: json.dumps({k: v.tolist() for k, v in state.items()})}) as checkpoint:
            train.report({"orders": orders}, checkpoint=checkpoint)

    result = fit(fn, trainer=TorchTrainer)
    with result.checkpoint.as_directory() as folder:
        texts = [Path(folder, f"rank-{r}.json").read_text() for r in range(2)]
    assert texts[0] == texts[1]
    assert '"weight"' in texts[0]
    half = len(result.metrics["orders"]) // 2
    assert result.metrics["orders"][:half] != result.metrics["orders"][half:]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_sigterm_to_the_whole_group_leaves_the_loaders_workers_at_work(fit, scratch, is_persistent):
    def fn(config):
        from torch.utils.data import DataLoader

        from ray_lite.train.torch import prepare_data_loader

        context = train.get_context()
        if context.get_attempt() == 2:
            train.report({"start": read(train.get_checkpoint(), "i")})
            return
        loader = DataLoader(range(400), batch_size=2, num_workers=2, persistent_workers=config["is_persistent"])
        batches = iter(prepare_data_loader(loader))
        next(batches)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) >= 2
        for pid in [*map(int, children), os.getpid()]:
            os.kill(pid, signal.SIGTERM)
        wait_until(context.should_checkpoint, "the notice has come")
        assert sum(1 for _ in batches) == 99
        with folder_with(i="7") as new:
            train.report({"i": 7}, checkpoint=new if rank() == 0 else None)

    result = fit(
        fn,
        trainer=TorchTrainer,
        cfg={"is_persistent": is_persistent},
        fc=FailureConfig(max_failures=0, preemption_grace_s=20),
    )
    assert result.metrics == {"start": "7"}
