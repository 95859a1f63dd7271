"""The floor: what the same work takes with two plain actors, or with nothing but a file.

No placement group, no controller, no storage, no error handling; nothing that does more can be quicker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import ray
from _answers import new_folder, wait_until_free
from _train_functions import processes_of_the_run, read_notes, time_reports

__all__ = ["fit_floor", "memory_floor", "recovery_floor", "reports_floor"]


class Member:
    """One rank."""

    def join(self, rank: int, port: int) -> float:
        """Import torch, join a gloo group of two, and give the time."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        return time.time()

    def report(self, rank: int, config: dict[str, Any]) -> None:
        """JSON of the metrics, appended to a file."""
        path = Path(config["folder"], f"history-{rank}.jsonl")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def write(values: dict[str, float]) -> None:
            os.write(descriptor, json.dumps(values).encode() + b"\n")

        time_reports(write, config, f"reports-{rank}")

    def rest(self) -> None:
        """What a train function does."""
        time.sleep(600.0)

    def pid(self) -> int:
        return os.getpid()


def group() -> tuple[list[Any], float]:
    """Start two actors, and wait until they are a group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = [ray.remote(Member).options(num_cpus=1).remote() for _ in range(2)]
    ready = ray.get([member.join.remote(rank, port) for rank, member in enumerate(members)])
    return members, ready[0]


def end(members: list[Any]) -> None:
    for member in members:
        ray.kill(member)


def fit_floor() -> dict[str, float]:
    idle = wait_until_free()
    called = time.time()
    members, first_line = group()
    ready = time.time()
    end(members)
    return {"total": ready - called, "first_line": first_line - called, "idle_workers": idle}


def reports_floor(num_reports: int) -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    members, _ = group()
    config = {"folder": str(folder), "num_reports": num_reports}
    ray.get([member.report.remote(rank, config) for rank, member in enumerate(members)])
    end(members)
    notes = read_notes(folder, "reports-*")
    rate = num_reports / max(n["ended"] - n["began"] for n in notes)
    return {
        "p50": max(n["p50"] for n in notes),
        "p99": max(n["p99"] for n in notes),
        "most": max(n["most"] for n in notes),
        "calls_per_s": rate,
        "to_disk_per_s": rate,
    }


class Idler:
    """An actor that does nothing."""

    async def look(self) -> list[dict[str, Any]]:
        return [process for process in processes_of_the_run() if process["pid"] == os.getpid()]


def memory_floor() -> dict[str, float]:
    """One actor that does nothing, as the controller would be if it were nothing but an actor."""
    wait_until_free()
    actor = ray.remote(Idler).options(num_cpus=0).remote()
    (process,) = ray.get(actor.look.remote())
    ray.kill(actor)
    return {"num": 1, "rss": process["rss"], "pss": process["pss"]}


def recovery_floor() -> dict[str, float]:
    idle = wait_until_free()
    members, _ = group()
    pid = ray.get(members[1].pid.remote())
    pending = [member.rest.remote() for member in members]
    time.sleep(1.0)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    # The dead one's call comes back with its error.
    ray.wait(pending, num_returns=1)
    ray.kill(members[0])
    again, first_line = group()
    end(again)
    return {"restart": first_line - killed, "idle_workers": idle}
