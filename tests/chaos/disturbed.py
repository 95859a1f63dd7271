"""A training that is the same to the last bit however often it is disturbed, and what disturbs it.

Runs on the workers.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import random
import signal
import struct
import threading
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fsspec.implementations.local import LocalFileSystem
from helpers import first_time, folder_with, note, notes
from waiting import wait_until

from ray_lite import train
from ray_lite.train.collective import broadcast_from_rank_zero
from ray_lite.train.testing.faulty import FaultPlan, FaultyFileSystem

__all__ = ["CHECKPOINT_EVERY", "KINDS", "Fault", "StorageWithFaults", "fault_plan", "final_weights", "train_disturbed"]

CHECKPOINT_EVERY = 3
KINDS = ("kill", "raise", "term", "stop", "torn write", "flipped bit", "truncated", "storage down", "exit")
NUM_WEIGHTS = 16


# -- the storage -----------------------------------------------------------------------------------


class _Plan(FaultPlan):
    """Faults that a train function can call for in its own process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tears_next_file = False
        self.is_down = False

    def write(self, name: str, path: str, data: bytes, store: Any) -> Any:
        if self.tears_next_file and "/rank-" in path:
            store(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_down:
            # A full disk, say: what comes back from the storage at once and will not pass by itself.
            raise OSError(errno.ENOSPC, "injected fault: no space left", path)
        return super().write(name, path, data, store)


class StorageWithFaults(FaultyFileSystem):
    """A store of objects, in a folder, in which a part of all operations fails; each process has its own faults."""

    in_this_process: ClassVar[list[StorageWithFaults]] = []

    def __init__(self, seed: int, error_rate: float) -> None:
        super().__init__(LocalFileSystem(), _Plan(seed=seed, error_rate=error_rate))
        self._made_of = (seed, error_rate)
        self.in_this_process.append(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageWithFaults, self._made_of

    @classmethod
    def plans(cls) -> list[_Plan]:
        return [filesystem.plan for filesystem in cls.in_this_process]


# -- the training ----------------------------------------------------------------------------------


class State:
    """Weights and generator of one rank; the next state depends on rank 0's weights too."""

    def __init__(self, rank: int) -> None:
        self.step = 0
        self.random = random.Random(rank)
        self.weights = [self.random.uniform(-1, 1) for _ in range(NUM_WEIGHTS)]

    def advance(self, shared: list[float]) -> None:
        self.weights = [
            math.sin(1.3 * mine + 0.7 * other + 0.1 * self.random.random())
            for mine, other in zip(self.weights, shared, strict=True)
        ]
        self.step += 1

    def pack(self) -> bytes:
        return pickle.dumps((self.step, self.random.getstate(), self.weights))

    def unpack(self, data: bytes) -> None:
        self.step, random_state, self.weights = pickle.loads(data)
        self.random.setstate(random_state)


def train_disturbed(config: dict[str, Any]) -> None:
    """Train ``num_steps`` steps, and carry the planned faults out, each once.

    Notes down where each attempt starts (``starts-<rank>``), at each fault how much may be lost at most
    (``faults``), and which steps were saved (``saved``).
    """
    context = train.get_context()
    rank = context.get_world_rank()
    scratch = config["scratch"]
    state = State(rank)
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state.unpack(Path(folder, f"rank-{rank}").read_bytes())
    note(scratch, f"starts-{rank}", [context.get_attempt(), state.step])
    while state.step < config["num_steps"]:
        # All ranks have reported everything before this step once it is over.
        state.advance(broadcast_from_rank_zero(state.weights))
        done = state.step
        is_preempted = broadcast_from_rank_zero(context.should_checkpoint())
        if done % CHECKPOINT_EVERY == 0 or is_preempted or done == config["num_steps"]:
            with folder_with(**{f"rank-{rank}": state.pack()}) as new:
                train.report({"done": done}, checkpoint=new)
            if rank == 0:
                note(scratch, "saved", done)
        else:
            train.report({"done": done})
        if is_preempted:
            return
        fault = fault_of(config["faults"], context.get_attempt(), done)
        if fault is not None and fault.victim == rank and first_time(scratch, f"fault-{fault.number}"):
            strike(fault, done, context, scratch)


def final_weights(checkpoint: train.Checkpoint, world_size: int = 2) -> bytes:
    """The weights of all ranks, bit for bit."""
    found = b""
    with checkpoint.as_directory() as folder:
        for rank in range(world_size):
            weights = pickle.loads(Path(folder, f"rank-{rank}").read_bytes())[2]
            found += struct.pack(f"{NUM_WEIGHTS}d", *weights)
    return found


# -- the faults ------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """One fault: each attempt ends by the next one of them."""

    number: int
    step: int
    victim: int
    kind: str
    extra: float
    """A number in [0, 1): where, or when exactly."""

    @property
    def is_damage(self) -> bool:
        return self.kind in ("flipped bit", "truncated")


def fault_plan(rng: random.Random, num_faults: int) -> list[Fault]:
    """Every kind in turn, in random order, at random ranks and moments."""
    kinds = [KINDS[number % len(KINDS)] for number in range(num_faults)]
    rng.shuffle(kinds)
    plan, step = [], CHECKPOINT_EVERY * 2
    for number, kind in enumerate(kinds):
        step += rng.randint(2, 4)
        plan.append(Fault(number, step, rng.randrange(2), kind, rng.random()))
    return plan


def fault_of(faults: list[Fault], attempt: int, done: int) -> Fault | None:
    """What happens in this attempt, if its moment has come."""
    if attempt > len(faults):
        return None
    fault = faults[attempt - 1]
    # Damage between two saves, so that it is known which one is the newest.
    is_moment = done >= fault.step and (not fault.is_damage or done % CHECKPOINT_EVERY == 1)
    return fault if is_moment else None


def strike(fault: Fault, done: int, context: train.TrainContext, scratch: str) -> None:
    # Every rank has reported the steps before this one; of this one, only this rank is known to have.
    saved = sorted({step for step in notes(scratch, "saved") if step < done})
    least = saved[-2] if fault.is_damage else saved[-1]
    most = saved[-2] if fault.is_damage else done + 1
    if fault.kind in ("kill", "term"):
        # It goes on meanwhile.
        most = 1 << 30
    note(scratch, "faults", {"number": fault.number, "kind": fault.kind, "least": least, "most": most})
    if fault.kind == "kill":
        threading.Timer(fault.extra * 0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif fault.kind == "raise":
        raise RuntimeError(f"fault {fault.number}")
    elif fault.kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "exit":
        os._exit(7)
    elif fault.kind == "torn write":
        for plan in StorageWithFaults.plans():
            plan.tears_next_file = True
        save_once_more(done)
    elif fault.kind == "storage down":
        for plan in StorageWithFaults.plans():
            plan.is_down = True
        save_once_more(done)
    else:
        folder = newest_folder(context, saved[-1])
        damage(folder, fault.kind, fault.extra)
        note(scratch, "damaged", folder.name)
        raise RuntimeError(f"fault {fault.number}")


def save_once_more(done: int) -> None:
    with folder_with(**{f"rank-{train.get_context().get_world_rank()}": os.urandom(20_000)}) as new:
        train.report({"done": done}, checkpoint=new)
    raise AssertionError("this checkpoint cannot have been stored")


def newest_folder(context: train.TrainContext, step: int) -> Path:
    """The committed checkpoint of ``step``."""
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = [c for c in context.get_storage().list_checkpoints() if c.metrics["done"] == step]
        return bool(found)

    wait_until(is_there, f"the checkpoint of step {step} is committed")
    return Path(context.get_trial_dir(), found[-1].dir_name)


def damage(folder: Path, kind: str, extra: float) -> None:
    path = folder / f"rank-{int(extra * 2)}"
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[int(extra * len(data)) :]
    else:
        position = int(extra * len(data) * 8)
        data[position // 8] ^= 1 << (position % 8)
    path.write_bytes(data)
