"""Ranks that depend on each other, and ways in which one of them fails. Runs on the workers.

The link is a collective over plain sockets through rank 0: when a rank goes away, the others
say "Connection closed by peer", as gloo and NCCL do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from ray_lite import train
from ray_lite.train.collective import broadcast_from_rank_zero

__all__ = ["CAUSES", "Case", "cases", "train_gloo", "train_linked"]


class OurError(Exception):
    """What user code raises."""


CAUSES = {
    "raise": "OurError: boom",
    "key error": "KeyError: 'boom'",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "_exit": "died",
    "kill": "died",
    "segfault": "died",
    "abort": "died",
    "hang": "hangs",
    "stop": "hangs",
}
"""How a rank fails → what the error must say of it in its first lines."""


class Case(NamedTuple):
    victim: int
    how: str
    round: int


def cases(rng: random.Random, world_size: int, count: int) -> list[Case]:
    """Random ranks and moments; each way to fail in turn, hangs (which take seconds) half as often."""
    ways = [*CAUSES, *(way for way in CAUSES if CAUSES[way] != "hangs")]
    return [Case(rng.randrange(world_size), ways[number % len(ways)], rng.randrange(4)) for number in range(count)]


def fail(how: str) -> None:
    """End this rank."""
    if how == "raise":
        raise OurError("boom")
    if how == "key error":
        raise KeyError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "_exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "hang":
        threading.Event().wait()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


class Link:
    """All ranks of a group, connected through rank 0."""

    def __init__(self, peers: list[Connection]) -> None:
        self._peers = peers

    def sum(self, value: float) -> float:
        """The sum over all ranks."""
        try:
            if train.get_context().get_world_rank() == 0:
                value += sum(peer.recv() for peer in self._peers)
                for peer in self._peers:
                    peer.send(value)
                return value
            self._peers[0].send(value)
            return self._peers[0].recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("Connection closed by peer [127.0.0.1]") from error


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """Connect the ranks; what fails inside closes the connections first, as torch's clean-up does."""
    context = train.get_context()
    peers: list[Connection] = []
    with contextlib.ExitStack() as stack:
        if context.get_world_rank() == 0:
            listener = stack.enter_context(Listener(("127.0.0.1", 0)))
            broadcast_from_rank_zero(listener.address)
            peers += [stack.enter_context(listener.accept()) for _ in range(context.get_world_size() - 1)]
        else:
            peers.append(stack.enter_context(Client(broadcast_from_rank_zero(None))))
        yield Link(peers)


def train_linked(config: dict[str, Any]) -> None:
    """Sum and report until the victim of this attempt's case fails; an attempt more than there are cases returns."""
    attempt = train.get_context().get_attempt()
    if attempt > len(config["cases"]):
        return
    case = Case(*config["cases"][attempt - 1])
    rank = train.get_context().get_world_rank()
    with linked() as link:
        for i in range(6):
            total = link.sum(rank)
            if i == case.round and rank == case.victim:
                fail(case.how)
            train.report({"i": i, "total": total})
    raise AssertionError("nothing has failed")


def train_gloo(config: dict[str, Any]) -> None:
    """The same over torch's process group."""
    import torch
    import torch.distributed as dist

    attempt = train.get_context().get_attempt()
    if attempt > len(config["cases"]):
        return
    case = Case(*config["cases"][attempt - 1])
    rank = train.get_context().get_world_rank()
    for i in range(6):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        if i == case.round and rank == case.victim:
            fail(case.how)
        train.report({"i": i, "total": float(total)})
    raise AssertionError("nothing has failed")
