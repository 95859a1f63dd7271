"""The workers' processes as their nodes see them: what can be learnt and done without the workers' help.

A worker that is busy, stopped or gone answers nobody. Its folder and its process are looked at
where they are: in a thread here, or in one short task on each other node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import ray

from ..context.identity import WorkerIdentity
from ..context.journal import read_tail, remove_journal
from .control import Process, kill_if_stopped, read_stacks, seconds_since_heartbeat, send_command
from .exits import Exits, death_detail, describe_exit, read_crash
from .failures import WorkerFailure, died
from .nodes import on_nodes

__all__ = ["Sites"]

_NODE_TIMEOUT_S = 10.0


class Sites:
    """The processes of one attempt, by world rank.

    Args:
        identities: Who holds which rank.
        processes: The process of each rank.
        folder: World rank → the worker's own folder on its node.
    """

    def __init__(
        self, identities: Sequence[WorkerIdentity], processes: Sequence[Process], folder: Callable[[int], str]
    ) -> None:
        # Taken once: while this attempt is being closed, the group already makes the next one.
        self._nodes = [identity.node_id for identity in identities]
        self._processes, self._folder = list(processes), folder
        self._here = ray.get_runtime_context().get_node_id()
        self._exits = Exits(
            process.pid for process, node in zip(self._processes, self._nodes, strict=True) if node == self._here
        )

    def close(self) -> None:
        """Let go of the processes; the nodes can still be asked."""
        self._exits.close()

    async def tell_all(self, command: dict[str, Any]) -> None:
        """Give all workers a command (``control.CommandReader``); who does not hear is left out."""
        await self._on_each(send_command, lambda rank: (self._folder(rank), command))

    async def silences(self, world_ranks: Iterable[int]) -> dict[int, float]:
        """Seconds since each rank has moved, for those whose node answers."""
        found = await self._on_each(seconds_since_heartbeat, lambda rank: (self._folder(rank),), world_ranks)
        return {rank: age for rank, age in found.items() if isinstance(age, float)}

    async def stacks(self, world_ranks: Iterable[int], *, may_signal: bool) -> dict[int, str]:
        """Where the threads of each rank stand (``control.read_stacks``), or why that cannot be told."""
        found = await self._on_each(
            read_stacks, lambda rank: (self._folder(rank), self._processes[rank], may_signal), world_ranks
        )
        return {
            rank: f"its node does not answer ({type(stack).__name__})" if isinstance(stack, Exception) else stack
            for rank, stack in sorted(found.items())
        }

    async def explain(self, failure: WorkerFailure) -> WorkerFailure:
        """Say of a process that has died, on a node that lives, how it has ended."""
        rank = failure.world_rank
        status, was_out_of_memory = None, False
        crash = (await self._on_each(read_crash, lambda r: (self._folder(r),), [rank]))[rank]
        if isinstance(crash, Exception):
            crash = ""
        if self._nodes[rank] == self._here:
            status = await asyncio.to_thread(self._exits.status, self._processes[rank].pid)
            was_out_of_memory = self._exits.was_out_of_memory()
        detail = death_detail(failure.message, describe_exit(status, crash, was_out_of_memory=was_out_of_memory))
        explained = died(rank, failure.node_ip, detail, step=failure.step, stack=crash)
        return attrs.evolve(explained, failed_at=failure.failed_at)

    async def tail(self, world_rank: int, after: int) -> list[bytes] | Exception:
        """The records in a rank's journal after its first ``after``; a ``RayError`` or a time-out of a lost node."""
        found: list[bytes] | Exception
        found = (await self._on_each(_read_after, lambda rank: (self._folder(rank), after), [world_rank]))[world_rank]
        return found

    async def last_tails(self, after: Sequence[int]) -> dict[int, list[bytes] | Exception]:
        """As ``tail``, of all ranks at once; ends those on the way that are stopped and do not hear that it is over."""
        return await self._on_each(_end_and_read, lambda rank: (self._folder(rank), self._processes[rank], after[rank]))

    async def clean_up(self) -> None:
        """Remove what the workers have left on other nodes than this one."""
        elsewhere = [rank for rank, node in enumerate(self._nodes) if node != self._here]
        await self._on_each(remove_journal, lambda rank: (self._folder(rank),), elsewhere)

    async def _on_each(
        self,
        function: Callable[..., Any],
        arguments: Callable[[int], tuple[Any, ...]],
        world_ranks: Iterable[int] | None = None,
    ) -> dict[int, Any]:
        """Call a function on the node of each rank, by default of all."""
        chosen = range(len(self._nodes)) if world_ranks is None else world_ranks
        calls = {rank: (self._nodes[rank], arguments(rank)) for rank in chosen}
        return await on_nodes(function, calls, timeout_s=_NODE_TIMEOUT_S)


def _read_after(folder: str, after: int) -> list[bytes]:
    return read_tail(folder, after=after)


def _end_and_read(folder: str, process: Process, after: int) -> list[bytes]:
    kill_if_stopped(process)
    return _read_after(folder, after)
