"""Directs a run on a Ray cluster: one attempt after the other, until it has finished or may not go on.

One actor without a CPU of its own. What to do is decided elsewhere (``decide``, ``ranks``,
``placement``), what is reported goes through the ledger, and ``attempt`` looks after one life
of the worker group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import ray

from ..context.journal import journal_root, remove_journal
from ..errors import CollectiveError, ResourcesError, TrainError, explained
from ..storage.store import RunStore
from . import placement
from .attempt import Attempt, AttemptFailedError, check_attempt
from .carrier import make_carrier
from .decide import Counts, FailureKind, after_failure
from .failures import describe, format_ranks
from .holders import describe_holders, find_holders
from .ledger import Ledger
from .lock_holder import is_alive, lock_id
from .messages import AttemptFailed, Event, Notice, RunEnd, RunSpec
from .nodes import draining_nodes
from .worker_group import Room, WorkerGroup

__all__ = ["Controller"]

T = TypeVar("T")

logger = logging.getLogger("ray_lite.train")

_MAX_WAITING_EVENTS = 5_000
_ROOM_MESSAGE_S = 10.0
_ROOM_LOOK_S = 1.0
_END_TIMEOUT_S = 10.0
_COLLECT_TIMEOUT_S = 3.0
_COMMITTED_NOTICE_S = 30.0
_ELASTIC_SETTLE_S = 2.0
_ELASTIC_ROOM_S = 10.0


class Controller:
    """Runs one ``fit()``.

    Args:
        spec: The run.
        counts: Failures that an earlier controller of the same ``fit()`` has counted.
        group: The first workers, which the driver has begun to start; None to start them here.
    """

    def __init__(self, spec: RunSpec, counts: Counts | None = None, group: WorkerGroup | None = None) -> None:
        self._spec = spec
        self._counts = counts or Counts()
        self._ledger = Ledger(
            RunStore(spec.root, spec.run_name),
            run_id=spec.run_id,
            checkpoint_config=spec.checkpoint_config,
            config_record=spec.config_record,
            start_checkpoint=spec.start_checkpoint,
            resume=spec.resume,
            wants_reports=spec.wants_reports,
            metrics_over_ranks=spec.metrics_over_ranks,
            lock_id=lock_id(),
            is_alive=is_alive,
        )
        # One thread: the ledger belongs to one thread at a time, and its order is the order of arrival.
        self._ledger_thread = ThreadPoolExecutor(1, thread_name_prefix="ray_lite-ledger")
        self._events: list[Event] = []
        self._num_dropped = 0
        self._events_changed = asyncio.Event()
        self._events_drained = asyncio.Event()
        self._ledger_changed = asyncio.Event()
        self._attempt: Attempt | None = None
        self._number = 0
        self._group = group
        self._room = None if group is None else group.room
        self._run_task: asyncio.Task[None] | None = None
        self._journal_root = str(journal_root() / spec.run_id)
        self._carrier = make_carrier(spec.root.child(spec.run_name), spec.start_checkpoint)
        self._told: set[str] = set()

    # -- called by the driver ------------------------------------------------------------------

    async def run(self) -> None:
        """Carry the run out; how it goes is told through ``next_events``."""
        self._run_task = asyncio.current_task()
        try:
            end = await self._run()
        except asyncio.CancelledError:
            end = RunEnd(state="interrupted", attempt=self._number, reason="interrupted")
        # Errors of the library's own and of the storage reach the driver as values, whatever they are.
        except Exception as error:  # noqa: BLE001
            end = await self._end_with(error)
        finally:
            self._release()
        self._emit([attrs.evolve(end, metrics=self._ledger.last_metrics)])

    async def next_events(self, num_seen: int) -> list[Event]:
        """What has happened since the first ``num_seen`` events; waits until there is something."""
        del self._events[: max(0, num_seen - self._num_dropped)]
        self._num_dropped = max(self._num_dropped, num_seen)
        self._events_drained.set()
        while not self._events:
            self._events_changed.clear()
            await self._events_changed.wait()
        return list(self._events)

    async def stop(self, grace_s: float = 0.0) -> None:
        """End the run: Ctrl-C or SIGTERM on the driver. Returns when everything is given back.

        Args:
            grace_s: Seconds >= 0 that the train functions get to save and leave.
        """
        task, attempt = self._run_task, self._attempt
        self._may_restart = False
        if grace_s > 0 and task is not None and not task.done() and attempt is not None:
            await attempt.preempt({}, grace_s, "the driver was asked to end")
            await asyncio.wait([task], timeout=grace_s + 1)
        if self._group is not None:
            self._group.close()
        if task is not None and not task.done():
            if attempt is not None:
                # The attempt ends with its workers, and brings in what they had reported.
                await asyncio.wait([task], timeout=_COLLECT_TIMEOUT_S)
            task.cancel()
            await asyncio.wait([task], timeout=_END_TIMEOUT_S)
        await self._in_ledger(self._ledger.close, "interrupted")
        self._release()

    _may_restart = True

    # -- called by the workers -----------------------------------------------------------------

    async def push(self, attempt: int, world_rank: int, first: int, records: list[bytes]) -> list[dict[str, Any]]:
        """Take records of one rank; returns, when they are in the ledger, what all ranks have been told.

        Raises:
            TrainError: The caller belongs to an attempt that is over.
        """
        while len(self._events) > _MAX_WAITING_EVENTS:
            # Callbacks on the driver are slower than the reports: the reporters wait, memory does not grow.
            self._events_drained.clear()
            await self._events_drained.wait()
        current = check_attempt(self._attempt, attempt)
        await current.take(world_rank, first, records)
        return current.commands

    async def meet(self, attempt: int, world_rank: int, kind: str, payload: Any, timeout_s: float) -> Any:
        """Bring a rank together with all others; returns what rank 0 brought, or why it cannot be.

        Each rank waits in at most one call at a time, and ``max_concurrency`` leaves room for all.
        """
        try:
            return await check_attempt(self._attempt, attempt).meet(world_rank, kind, payload, timeout_s)
        except TrainError as error:
            return CollectiveError(str(error))

    async def committed(
        self, attempt: int, num_reports: int, timeout_s: float | None
    ) -> list[tuple[str, dict[str, Any]]]:
        """Folder and metrics of each kept checkpoint, once those of the first ``num_reports`` reports are settled.

        Raises:
            TrainError: The caller belongs to an attempt that is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            check_attempt(self._attempt, attempt)
            # Taken before the look, so that what changes meanwhile is not missed.
            changed, look = self._ledger_changed, asyncio.get_running_loop().run_in_executor
            found, late = await look(self._ledger_thread, self._ledger.reported, num_reports)
            left = _COMMITTED_NOTICE_S if deadline is None else deadline - time.monotonic()
            if not late or left <= 0:
                return found
            try:
                await asyncio.wait_for(changed.wait(), min(left, _COMMITTED_NOTICE_S))
            except asyncio.TimeoutError:
                if deadline is None:
                    text = f"get_all_reported_checkpoints() waits for the reports of {format_ranks(late)}"
                    self._emit([Notice(level=logging.WARNING, text=text)])

    async def carry(self, operation: str, *args: Any) -> Any:
        """Do something on this node's disk for a worker on another one; an error comes back as a value."""
        return await self._carrier.serve(operation, args)

    async def sigterm_received(self, attempt: int, world_rank: int) -> None:
        """The process of a rank was asked to end by somebody."""
        if self._attempt is not None and self._attempt.number == attempt:
            await self._attempt.sigterm_received(world_rank)

    # -- the run -------------------------------------------------------------------------------

    async def _run(self) -> RunEnd:
        if self._room is None and not self._spec.scaling_config.elasticity_enabled:
            # While the storage is looked at, the room is being made.
            self._room = self._new_room(self._spec.scaling_config.max_workers)
        self._emit(await self._in_ledger(self._ledger.open))
        while True:
            try:
                return await self._attempt_once()
            except AttemptFailedError as error:
                end = await self._after(error)
                if end is not None:
                    return end

    async def _attempt_once(self) -> RunEnd:
        room = await self._find_room()
        if self._group is None:
            self._group = WorkerGroup(
                self._spec.scaling_config,
                room,
                self._spec.worker_runtime_env,
                self._spec.backend_config.preload_modules,
                self._spec.failure_config.standby_workers,
            )
        group = self._group
        group.fill()
        starting = asyncio.ensure_future(group.assign())
        attempt: Attempt | None = None
        try:
            if self._attempt is not None:
                # The processes of the next attempt start while the last words of this one are read.
                await self._close_attempt(self._attempt)
            # So does the reading and checking of the checkpoint.
            start, events = await self._in_ledger(self._ledger.begin_attempt, room.num_workers)
            self._emit(events)
            self._number = start.attempt
            attempt = self._attempt = Attempt(
                self._spec,
                group,
                self._ledger,
                self._in_ledger,
                self._emit,
                start,
                room.num_workers,
                self._journal_folder,
                self._told,
                self._room_for_more() if self._spec.scaling_config.elasticity_enabled else None,
            )
            finished = await attempt.run(starting, ray.get_runtime_context().current_actor)
        finally:
            starting.cancel()
        await self._in_ledger(self._ledger.close, "finished")
        await attempt.shut_down()
        return RunEnd(
            state="finished", attempt=self._number, value=finished.value, value_problem=finished.value_problem
        )

    async def _after(self, error: AttemptFailedError) -> RunEnd | None:
        """Decide what follows a failed attempt; None starts the next one."""
        group, attempt = self._group, self._attempt
        assert group is not None
        if error.kind is None:
            step = None
        else:
            step = after_failure(
                error.kind,
                self._counts,
                self._spec.failure_config,
                made_progress=attempt is not None and attempt.made_progress,
            )
            self._counts = step.counts
        is_restart = (step is None or step.is_restart) and self._may_restart
        reason = "the group changes its size" if step is None else step.reason
        group.kill(keep=error.at_rest if is_restart else ())
        what = describe(error.failures)
        if error.kind is not None:
            self._emit(
                [
                    AttemptFailed(
                        attempt=self._number,
                        failures=error.failures,
                        is_restart=is_restart,
                        reason=reason,
                        counts=self._counts,
                    )
                ]
            )
        if not is_restart:
            if attempt is not None:
                await self._close_attempt(attempt)
            state = "failed" if self._may_restart else "interrupted"
            await self._in_ledger(self._ledger.close, state, what)
            return RunEnd(
                state=state,
                attempt=self._number,
                reason=reason,
                failures=error.failures,
                is_preemption=error.kind is FailureKind.PREEMPTION,
            )
        self._emit([Notice(level=logging.WARNING, text=f"attempt {self._number} ended, restarting ({reason}): {what}")])
        if step is not None and step.delay_s > 0:
            delay = step.delay_s * random.uniform(0.5, 1.0)
            text = f"waiting {delay:.1f} s first, because {step.counts.failures_without_progress} attempts got nowhere"
            self._emit([Notice(level=logging.WARNING, text=text)])
            await asyncio.sleep(delay)
        return None

    async def _close_attempt(self, attempt: Attempt) -> None:
        self._attempt = None
        # Calls of its workers are refused from here on; what they had reported is in their journals.
        await attempt.collect()
        remove_journal(os.path.join(self._journal_root, f"attempt_{attempt.number}"))

    async def _end_with(self, error: Exception) -> RunEnd:
        if self._group is not None:
            self._group.kill()
        if self._attempt is not None:
            try:
                await self._close_attempt(self._attempt)
            except Exception as second:  # noqa: BLE001 - the first error is the one to report
                self._emit([Notice(level=logging.WARNING, text=f"the last reports could not be stored: {second}")])
        text = f"{type(error).__name__}: {error}"
        try:
            await self._in_ledger(self._ledger.close, "failed", text)
        except Exception as second:  # noqa: BLE001 - the first error is the one to report
            self._emit([Notice(level=logging.WARNING, text=f"the run record could not be written: {second}")])
        return RunEnd(state="failed", attempt=self._number, reason=text, error=error)

    def _release(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._room is not None:
            self._room.remove()
            self._room = None
        remove_journal(self._journal_root)

    # -- room ----------------------------------------------------------------------------------

    async def _find_room(self) -> Room:
        """The room for the next attempt: the one that is there, or one of another size."""
        if self._spec.scaling_config.elasticity_enabled:
            return await self._find_elastic_room()
        if self._attempt is not None and await asyncio.to_thread(self._is_room_drained):
            # No worker could start there any more.
            self._leave_room()
            self._room = self._new_room(self._spec.scaling_config.max_workers)
        room = self._room
        assert room is not None
        await self._wait_for(lambda: room.wait(0.0), room.wait, room.num_workers)
        return room

    def _is_room_drained(self) -> bool:
        draining = draining_nodes()
        return self._room is not None and bool(draining) and not set(draining).isdisjoint(self._room.nodes())

    def _leave_room(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._room is not None:
            self._room.remove()
            self._room = None

    async def _find_elastic_room(self) -> Room:
        while True:
            size = await self._choose_size()
            if self._room is not None and (self._room.num_workers != size or not await self._is_room_whole()):
                self._leave_room()
            if self._room is None:
                self._room = self._new_room(size)
            if await asyncio.to_thread(self._room.wait, _ELASTIC_ROOM_S):
                return self._room
            # What was free a moment ago is not: somebody was faster, or Ray's view of it was old.
            text = f"the room for {size} workers was not to be had within {_ELASTIC_ROOM_S:.0f} s; looking anew"
            self._emit([Notice(level=logging.WARNING, text=text)])
            self._room.remove()
            self._room = None

    def _new_room(self, num_workers: int) -> Room:
        return Room(self._spec.scaling_config, num_workers, self._spec.run_id, self._spec.run_name)

    async def _choose_size(self) -> int:
        """As many workers as fit now, within the range; waits until the least fit."""
        config = self._spec.scaling_config
        size = 0

        def fits() -> bool:
            nonlocal size
            size = placement.num_fitting(config, *_free_resources(self._room, config))
            return size >= config.min_workers

        await self._wait_for(fits, lambda wait_s: _sleep_until(fits, wait_s), config.min_workers)
        return min(size, config.max_workers)

    async def _is_room_whole(self) -> bool:
        room = self._room
        if room is None or await asyncio.to_thread(self._is_room_drained):
            return False
        return await asyncio.to_thread(room.wait, _ELASTIC_SETTLE_S)

    async def _wait_for(self, is_there: Callable[[], bool], wait: Callable[[float], bool], num_workers: int) -> None:
        config, began = self._spec.scaling_config, time.monotonic()
        timeout_s = config.resources_timeout_s
        if await asyncio.to_thread(is_there):
            return
        if self._attempt is not None:
            # This may take long, and what the last attempt has left is not to wait.
            await self._close_attempt(self._attempt)
        told = -_ROOM_MESSAGE_S
        while not await asyncio.to_thread(wait, _ROOM_LOOK_S):
            waited = time.monotonic() - began
            is_over = timeout_s is not None and waited >= timeout_s
            if waited - told < _ROOM_MESSAGE_S and not is_over:
                continue
            told = waited
            text = await asyncio.to_thread(self._what_is_missing, num_workers, waited)
            if is_over:
                raise ResourcesError(explained(f"{text}; resources_timeout_s={timeout_s:g} is over"))
            self._emit([Notice(level=logging.WARNING, text=text)])

    def _what_is_missing(self, num_workers: int, waited_s: float) -> str:
        config = self._spec.scaling_config
        holders = describe_holders(find_holders(self._spec.run_id), list(config.worker_resources))
        total, free = ray.cluster_resources(), ray.available_resources()
        return placement.waiting_message(config, num_workers, total, free, waited_s, holders)

    def _room_for_more(self) -> Callable[[bool], bool]:
        """A question for the attempt: would more workers fit? Looked up once per interval, or when it must be now."""
        config = self._spec.scaling_config
        next_look = time.monotonic() + config.elastic_resize_monitor_interval_s

        def wants_more(must_look: bool) -> bool:
            nonlocal next_look
            room = self._room
            if room is None or room.num_workers >= config.max_workers:
                return False
            if not must_look and time.monotonic() < next_look:
                return False
            next_look = time.monotonic() + config.elastic_resize_monitor_interval_s
            try:
                return placement.num_fitting(config, *_free_resources(room, config)) > room.num_workers
            # Ray's head does not answer now: no reason to end a run that trains; its client raises several kinds.
            except Exception as error:  # noqa: BLE001
                logger.debug("whether there is room for more workers cannot be told now: %s", error)
                return False

        return wants_more

    # -- small things --------------------------------------------------------------------------

    def _emit(self, events: Sequence[Event]) -> None:
        if events:
            self._events.extend(events)
            self._events_changed.set()

    async def _in_ledger(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._ledger_thread, lambda: function(*args))
        finally:
            self._ledger_changed.set()
            self._ledger_changed = asyncio.Event()

    def _journal_folder(self, world_rank: int) -> str:
        return os.path.join(self._journal_root, f"attempt_{self._number}", f"rank_{world_rank}")


def _sleep_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again, in a thread of its own; Ray tells nobody when resources come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def _free_resources(room: Room | None, config: Any) -> tuple[list[dict[str, float]], list[Mapping[str, str]]]:
    """What is free on each living node, the bundles of ``room`` counted as free; and the labels of these nodes."""
    from ray._private.state import available_resources_per_node

    draining = draining_nodes()
    living = {n["NodeID"]: n.get("Labels", {}) for n in ray.nodes() if n["Alive"] and n["NodeID"] not in draining}
    free = {node: dict(amounts) for node, amounts in available_resources_per_node().items() if node in living}
    if room is not None and room.group is not None:
        bundles = ray.util.placement_group_table(room.group).get("bundles_to_node_id", {})
        for node in bundles.values():
            if node in free:
                for name, amount in config.worker_resources.items():
                    free[node][name] = free[node].get(name, 0.0) + amount
    return list(free.values()), [living[node] for node in free]
