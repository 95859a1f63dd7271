"""Directs a run on a Ray cluster: start the workers, take their reports, act on their end.

One actor without a CPU of its own. What to do is decided elsewhere (``decide``, ``ranks``,
``placement``), what is reported goes through the ledger; this file only connects them to Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..context.identity import RunIdentity
from ..context.journal import journal_root, read_tail, remove_journal
from ..errors import CollectiveError, ResourcesError, TrainError, WorkerStartError
from ..storage.store import RunStore
from . import placement
from .decide import Counts, FailureKind, after_failure, is_cascade
from .failures import WorkerFailure, capture, describe, died
from .ledger import Ledger, StartPoint
from .meeting import Meetings
from .messages import AttemptFailed, AttemptStarted, Event, Notice, RunEnd, RunReturn, RunSpec, WorkerSetup
from .worker_group import BackendWorkers, Room, WorkerGroup

__all__ = ["Controller"]

T = TypeVar("T")

_MAX_WAITING_EVENTS = 5_000
_ROOM_MESSAGE_S = 10.0
_START_TIMEOUT_S = 1_800.0
_START_NOTICE_S = 30.0
_MEETING_NOTICE_S = 30.0
_CAUSE_WINDOW_S = 1.0
_DEATH_WINDOW_S = 0.1
_END_TIMEOUT_S = 10.0
_SHUTDOWN_TIMEOUT_S = 5.0


class _AttemptError(Exception):
    """An attempt ended without success; carries what the decision needs."""

    def __init__(self, kind: FailureKind, failures: Sequence[WorkerFailure]) -> None:
        super().__init__(kind, failures)
        self.kind, self.failures = kind, tuple(failures)


class Controller:
    """Runs one ``fit()``.

    Args:
        spec: The run.
        counts: Failures that an earlier controller of the same ``fit()`` has counted.
    """

    def __init__(self, spec: RunSpec, counts: Counts | None = None) -> None:
        self._spec = spec
        self._counts = counts or Counts()
        self._world_size = spec.scaling_config.max_workers
        self._ledger = Ledger(
            RunStore(spec.root, spec.run_name),
            run_id=spec.run_id,
            checkpoint_config=spec.checkpoint_config,
            config_record=spec.config_record,
            start_checkpoint=spec.start_checkpoint,
            resume=spec.resume,
            wants_reports=spec.wants_reports,
        )
        # One thread: the ledger belongs to one thread at a time, and its order is the order of arrival.
        self._ledger_thread = ThreadPoolExecutor(1, thread_name_prefix="ray_lite-ledger")
        self._events: list[Event] = []
        self._num_dropped = 0
        self._events_changed = asyncio.Event()
        self._events_drained = asyncio.Event()
        self._attempt = 0
        self._num_received: list[int] = []
        self._meetings = Meetings(0)
        self._filled: dict[int, asyncio.Event] = {}
        self._ledger_error: asyncio.Future[BaseException] | None = None
        self._group: WorkerGroup | None = None
        self._room: Room | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._journal_root = str(journal_root() / spec.run_id)

    # -- called by the driver ------------------------------------------------------------------

    async def run(self) -> None:
        """Carry the run out; how it goes is told through ``next_events``."""
        self._run_task = asyncio.current_task()
        try:
            end = await self._run()
        except asyncio.CancelledError:
            end = RunEnd(state="interrupted", attempt=self._attempt, reason="interrupted")
        # Errors of the library's own and of the storage reach the driver as values, whatever they are.
        except Exception as error:  # noqa: BLE001
            end = await self._end_with(error)
        finally:
            self._release()
        self._emit([end])

    async def next_events(self, num_seen: int) -> list[Event]:
        """What has happened since the first ``num_seen`` events; waits until there is something."""
        del self._events[: max(0, num_seen - self._num_dropped)]
        self._num_dropped = max(self._num_dropped, num_seen)
        self._events_drained.set()
        while not self._events:
            self._events_changed.clear()
            await self._events_changed.wait()
        return list(self._events)

    async def stop(self) -> None:
        """End the run now: Ctrl-C on the driver. Returns when everything is given back."""
        self._is_stopping = True
        if self._group is not None:
            self._group.kill()
        task = self._run_task
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_END_TIMEOUT_S)
        await self._in_ledger(self._ledger.close, "interrupted")
        self._release()

    # -- called by the workers -----------------------------------------------------------------

    async def push(self, attempt: int, world_rank: int, first: int, records: list[bytes]) -> None:
        """Take records of one rank; returns when they are in the ledger.

        Raises:
            TrainError: The caller belongs to an attempt that is over.
        """
        if attempt != self._attempt:
            raise TrainError(f"attempt {attempt} of this run is over (attempt {self._attempt} has begun)")
        while len(self._events) > _MAX_WAITING_EVENTS:
            # Callbacks on the driver are slower than the reports: the reporters wait, memory does not grow.
            self._events_drained.clear()
            await self._events_drained.wait()
        await self._take(attempt, world_rank, first, records)

    async def meet(self, attempt: int, world_rank: int, kind: str, payload: Any, timeout_s: float) -> Any:
        """Bring a rank together with all others; returns what rank 0 brought, or why it cannot be.

        Each rank waits in at most one call at a time, and ``max_concurrency`` leaves room for all.
        """
        if attempt != self._attempt:
            return CollectiveError(f"attempt {attempt} of this run is over")
        try:
            number, meeting, is_complete = self._meetings.arrive(world_rank, kind, payload)
        except ValueError as error:
            return CollectiveError(str(error))
        filled = self._filled.setdefault(number, asyncio.Event())
        if is_complete:
            filled.set()
            del self._filled[number]
            return meeting.payload
        if not self._meetings.never_fills(meeting):
            deadline = time.monotonic() + timeout_s
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(filled.wait(), min(left, _MEETING_NOTICE_S))
                    break
                if world_rank == min(meeting.arrived) and deadline - time.monotonic() > 0:
                    text = f"{kind}() is still waiting for {self._meetings.missing(meeting)}"
                    self._emit([Notice(level=logging.WARNING, text=text)])
        if len(meeting.arrived) == self._world_size:
            return meeting.payload
        why = "they have finished" if self._meetings.never_fills(meeting) else f"not within timeout_s={timeout_s:g}"
        return CollectiveError(
            f"{kind}() on rank {world_rank} waits in vain for {self._meetings.missing(meeting)}: {why}; "
            "every rank must make the same collective calls"
        )

    async def _take(self, attempt: int, world_rank: int, first: int, records: Sequence[bytes]) -> None:
        def take() -> list[Event]:
            # A batch may come twice: once from the worker, once from its journal.
            known = self._num_received[world_rank]
            new = records[max(0, known - first) :]
            if attempt != self._attempt or not new:
                return []
            self._num_received[world_rank] += len(new)
            return self._ledger.add(world_rank, new)

        try:
            self._emit(await self._in_ledger(take))
        # A full disk, a conflict between ranks: the attempt ends with it, not just this call.
        except Exception as error:
            if self._ledger_error is not None and not self._ledger_error.done():
                self._ledger_error.set_result(error)
            raise

    # -- the run -------------------------------------------------------------------------------

    async def _run(self) -> RunEnd:
        config = self._spec.scaling_config
        self._check_room()
        self._room = Room(config, self._world_size)
        # While the storage is looked at, the room is being made.
        self._emit(await self._in_ledger(self._ledger.open))
        while True:
            try:
                return await self._attempt_once()
            except _AttemptError as error:
                step = after_failure(error.kind, self._counts, self._spec.failure_config)
                self._counts = step.counts
                self._emit(
                    [
                        AttemptFailed(
                            attempt=self._attempt,
                            failures=error.failures,
                            is_restart=step.is_restart,
                            reason=step.reason,
                        )
                    ]
                )
                if not step.is_restart:
                    await self._in_ledger(self._ledger.close, "failed", describe(error.failures))
                    return RunEnd(state="failed", attempt=self._attempt, reason=step.reason, failures=error.failures)
                what = f"attempt {self._attempt} failed, restarting ({step.reason}): {describe(error.failures)}"
                self._emit([Notice(level=logging.WARNING, text=what)])

    async def _attempt_once(self) -> RunEnd:
        spec = self._spec
        await self._wait_for_room()
        assert self._room is not None
        group = self._group = WorkerGroup(spec.scaling_config, self._room, spec.worker_runtime_env)
        self._ledger_error = asyncio.get_running_loop().create_future()
        try:
            starting = asyncio.ensure_future(group.assign(spec.backend_config.preload_modules))
            try:
                # Reading and checking the checkpoint goes on while the processes start.
                start, events = await self._in_ledger(self._ledger.begin_attempt, self._world_size)
                self._attempt, self._num_received = start.attempt, [0] * self._world_size
                self._meetings, self._filled = Meetings(self._world_size), {}
                self._emit(events)
                await self._bounded(starting, "starting the worker processes", group)
                await self._bounded(self._set_up(group, start), "setting up the workers", group)
            finally:
                starting.cancel()
            self._counts = self._counts.after_start()
            self._emit(
                [
                    AttemptStarted(
                        attempt=start.attempt,
                        world_size=len(group),
                        checkpoint_path=None if start.checkpoint is None else start.checkpoint.path,
                    )
                ]
            )
            end = await self._watch(group)
        except BaseException:
            group.kill()
            raise
        finally:
            if not self._is_stopping:
                await self._collect(group)
        await self._shut_down(group)
        return end

    async def _set_up(self, group: WorkerGroup, start: StartPoint) -> None:
        spec = self._spec
        run = RunIdentity(
            name=spec.run_name,
            path=self._ledger.path,
            run_id=spec.run_id,
            attempt=start.attempt,
            metadata=dict(spec.metadata),
        )
        me = ray.get_runtime_context().current_actor
        await asyncio.gather(
            *[
                group.call(
                    identity.world_rank,
                    "setup",
                    WorkerSetup(
                        identity=identity,
                        run=run,
                        root=spec.root,
                        scaling_config=spec.scaling_config,
                        first_report_index=start.first_report_index,
                        checkpoint=start.checkpoint,
                        datasets=_datasets_for(spec, identity.world_rank),
                        journal_folder=self._journal_folder(identity.world_rank),
                        log_level=spec.log_level,
                    ),
                    spec.function,
                    me,
                )
                for identity in group.identities
            ]
        )
        backend, workers = (
            spec.backend_config.backend_cls(),
            BackendWorkers(group, asyncio.get_running_loop(), _START_TIMEOUT_S),
        )
        await asyncio.to_thread(backend.on_start, workers, spec.backend_config)
        await asyncio.to_thread(backend.on_training_start, workers, spec.backend_config)

    async def _watch(self, group: WorkerGroup) -> RunEnd:
        """Wait for the train functions; the first failure ends the attempt."""
        assert self._ledger_error is not None
        value: Any = None
        value_problem: str | None = None
        pending: dict[asyncio.Future[Any], int] = {}
        for rank in range(len(group)):
            returned, pickled = group.call(rank, "run", num_returns=2)
            pending[asyncio.ensure_future(_await(returned))] = rank
            if rank == 0:
                value = pickled
        failures: list[WorkerFailure] = []
        has_read = False
        while pending and not failures:
            done, _ = await asyncio.wait([*pending, self._ledger_error], return_when=asyncio.FIRST_COMPLETED)
            if self._ledger_error in done:
                raise self._ledger_error.result()
            for future in done:
                rank = pending.pop(future)
                result = _result_of(future, rank, group)
                if isinstance(result, WorkerFailure):
                    failures.append(result)
                    continue
                has_read = has_read or result.has_read_checkpoint
                if rank == 0:
                    value_problem = result.value_problem
                await self._take_rest(group, rank, result.num_records)
                self._emit(await self._in_ledger(self._ledger.rank_finished, rank))
                for number in self._meetings.finished(rank):
                    self._filled[number].set()
        if failures:
            failures += await self._other_failures(group, pending, failures)
            raise _AttemptError(FailureKind.WORKER, failures)
        self._emit(await self._in_ledger(self._ledger.end_attempt))
        await self._in_ledger(self._ledger.close, "finished")
        return RunEnd(state="finished", attempt=self._attempt, value=value, value_problem=value_problem)

    async def _other_failures(
        self, group: WorkerGroup, pending: dict[asyncio.Future[Any], int], failures: Sequence[WorkerFailure]
    ) -> list[WorkerFailure]:
        """Failures that come right behind the first, so that the cause can be told from its echoes."""
        if any(not f.has_died and not is_cascade(f.type_name, f.message) for f in failures):
            return []
        window = _DEATH_WINDOW_S if any(f.has_died for f in failures) else _CAUSE_WINDOW_S
        deadline = time.monotonic() + window
        found: list[WorkerFailure] = []
        while pending and time.monotonic() < deadline:
            done, _ = await asyncio.wait(
                pending, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:
                rank = pending.pop(future)
                result = _result_of(future, rank, group)
                if isinstance(result, WorkerFailure):
                    found.append(result)
        return found

    # -- the end of an attempt -----------------------------------------------------------------

    async def _take_rest(self, group: WorkerGroup, world_rank: int, num_records: int) -> None:
        if self._num_received[world_rank] < num_records:
            await self._take_tail(group, world_rank)

    async def _collect(self, group: WorkerGroup) -> None:
        """Bring in what killed workers had reported, and close the books of the attempt."""
        if group.is_alive or not self._num_received:
            return
        for identity in group.identities:
            await self._take_tail(group, identity.world_rank)
        self._emit(await self._in_ledger(self._ledger.end_attempt))
        remove_journal(os.path.join(self._journal_root, f"attempt_{self._attempt}"))

    async def _take_tail(self, group: WorkerGroup, world_rank: int) -> None:
        identity = group.identities[world_rank]
        folder, after = self._journal_folder(world_rank), self._num_received[world_rank]
        if identity.node_id == ray.get_runtime_context().get_node_id():
            tail = await asyncio.to_thread(read_tail, folder, after=after)
        else:
            fetch = ray.remote(num_cpus=0, max_retries=0)(_read_and_remove).options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
            )
            try:
                tail = await asyncio.wait_for(_await(fetch.remote(folder, after)), _END_TIMEOUT_S)
            except (RayError, TimeoutError, asyncio.TimeoutError):
                # The node itself is gone, and what was on its way with it.
                text = f"the last reports of rank {world_rank} are lost with its node {identity.node_ip}"
                self._emit([Notice(level=logging.WARNING, text=text)])
                return
        if tail:
            await self._take(self._attempt, world_rank, after, tail)

    async def _shut_down(self, group: WorkerGroup) -> None:
        """All ranks have returned: let the backend and the workers end in order, within seconds."""
        backend = self._spec.backend_config.backend_cls()
        workers = BackendWorkers(group, asyncio.get_running_loop(), _SHUTDOWN_TIMEOUT_S)

        def shut_down() -> None:
            backend.on_shutdown(workers, self._spec.backend_config)

        try:
            await asyncio.wait_for(asyncio.to_thread(shut_down), _SHUTDOWN_TIMEOUT_S)
            await asyncio.wait_for(group.call_all("teardown"), _SHUTDOWN_TIMEOUT_S)
        # The run is finished and on disk; a clean-up that fails must not undo that.
        except Exception as error:  # noqa: BLE001
            text = f"the workers did not end in order and were killed: {type(error).__name__}: {error}"
            self._emit([Notice(level=logging.WARNING, text=text)])
        group.kill()

    async def _end_with(self, error: Exception) -> RunEnd:
        text = f"{type(error).__name__}: {error}"
        try:
            await self._in_ledger(self._ledger.close, "failed", text)
        except Exception as second:  # noqa: BLE001 - the first error is the one to report
            self._emit([Notice(level=logging.WARNING, text=f"the run record could not be written: {second}")])
        return RunEnd(state="failed", attempt=self._attempt, reason=text, error=error)

    def _release(self) -> None:
        if self._group is not None:
            self._group.kill()
        if self._room is not None:
            self._room.remove()
        remove_journal(self._journal_root)

    # -- waiting -------------------------------------------------------------------------------

    def _check_room(self) -> None:
        config = self._spec.scaling_config
        if config.resources_timeout_s is not None or _has_autoscaler():
            return
        totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not placement.can_ever_fit(config.worker_resources, self._world_size, config.placement_strategy, totals):
            total, free = ray.cluster_resources(), ray.available_resources()
            raise ResourcesError(placement.infeasible_message(config, self._world_size, total, free))

    async def _wait_for_room(self) -> None:
        assert self._room is not None
        config, began = self._spec.scaling_config, time.monotonic()
        timeout_s = config.resources_timeout_s
        wait_s = 1.0
        while not await asyncio.to_thread(self._room.wait, wait_s):
            waited = time.monotonic() - began
            text = placement.waiting_message(
                config, self._world_size, ray.cluster_resources(), ray.available_resources(), waited
            )
            if timeout_s is not None and waited >= timeout_s:
                raise ResourcesError(f"{text}; resources_timeout_s={timeout_s:g} is over")
            self._emit([Notice(level=logging.WARNING, text=text)])
            wait_s = _ROOM_MESSAGE_S if timeout_s is None else max(0.1, min(_ROOM_MESSAGE_S, timeout_s - waited))

    async def _bounded(self, work: Awaitable[T], step: str, group: WorkerGroup) -> T:
        """Wait for one step of the start-up; what goes wrong in it becomes an attempt that failed."""
        began = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=_START_NOTICE_S)
                if done:
                    return task.result()
                waited = time.monotonic() - began
                if waited > _START_TIMEOUT_S:
                    raise WorkerStartError(step, f"not done after {waited:.0f} s")
                self._emit([Notice(level=logging.WARNING, text=f"still {step} after {waited:.0f} s")])
        except asyncio.CancelledError:
            raise
        except ActorDiedError as error:
            raise _AttemptError(FailureKind.START, [died(-1, "?", _death_detail(error), step=step)]) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise _AttemptError(FailureKind.START, [_start_failure(cause, error, step)]) from error
        # Backends are user-extensible: any error of a hook is a start-up that failed.
        except Exception as error:
            raise _AttemptError(FailureKind.START, [capture(error, world_rank=-1, node_ip="?", step=step)]) from error
        finally:
            task.cancel()

    # -- small things --------------------------------------------------------------------------

    def _emit(self, events: Sequence[Event]) -> None:
        if events:
            self._events.extend(events)
            self._events_changed.set()

    async def _in_ledger(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._ledger_thread, lambda: function(*args))

    def _journal_folder(self, world_rank: int) -> str:
        return os.path.join(self._journal_root, f"attempt_{self._attempt}", f"rank_{world_rank}")


async def _await(reference: Any) -> Any:
    return await reference


def _result_of(future: asyncio.Future[Any], rank: int, group: WorkerGroup) -> RunReturn | WorkerFailure:
    node_ip = group.identities[rank].node_ip
    try:
        returned: RunReturn = future.result()
    except RayActorError as error:
        return died(rank, node_ip, _death_detail(error))
    # A return that cannot be opened here is the failure of that rank, with its own message.
    except Exception as error:  # noqa: BLE001
        return capture(error, world_rank=rank, node_ip=node_ip)
    return returned.failure if returned.failure is not None else returned


def _start_failure(cause: Exception, error: RayTaskError, step: str) -> WorkerFailure:
    failure = capture(cause, world_rank=-1, node_ip=getattr(error, "ip", "?"), step=step)
    return attrs.evolve(failure, text=str(error).rstrip())


def _death_detail(error: RayActorError) -> str:
    """What Ray knows about the end of a process, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:", "The actor died"))
    ]
    return " ".join(kept[:3]) or "the process ended unexpectedly"


def _datasets_for(spec: RunSpec, world_rank: int) -> dict[str, Any]:
    """The shipments for one rank, without the parts of the others."""
    out = {}
    for name, shipment in spec.datasets.items():
        if shipment.parts is not None:
            parts = tuple(part if rank == world_rank else None for rank, part in enumerate(shipment.parts))
            shipment = attrs.evolve(shipment, parts=parts)
        out[name] = shipment
    return out


def _read_and_remove(folder: str, after: int) -> list[bytes]:
    tail = read_tail(folder, after=after)
    remove_journal(folder)
    return tail


def _has_autoscaler() -> bool:
    """Whether nodes may be added by themselves."""
    from ray._private.state import state

    try:
        config = state.get_cluster_config()
    # Not there on every version of Ray; then nobody is known to add nodes.
    except (AttributeError, RayError, RuntimeError):
        return False
    return config is not None and len(getattr(config, "node_group_configs", ())) > 0
