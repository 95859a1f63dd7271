"""One life of the worker group: set up, watched, and brought to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import attrs
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..context.identity import RunIdentity, WorkerIdentity
from ..context.journal import read_tail
from ..errors import CollectiveError, TrainError, WorkerStartError, explained
from .control import is_stopped, kill_process, read_heartbeat, read_stacks, send_command
from .decide import FailureKind, is_cascade
from .exits import Exits, death_detail, describe_exit, read_crash
from .failures import WorkerFailure, capture, died, format_ranks, hung
from .hang import HangWatch
from .ledger import Ledger, StartPoint
from .meeting import Meetings
from .messages import AttemptStarted, Event, Notice, RunReturn, RunSpec, WorkerSetup
from .nodes import find_lost_nodes, on_node
from .probe import probe_in
from .signs import deadline_ms
from .worker_group import BackendWorkers, WorkerGroup

__all__ = ["Attempt", "AttemptFailedError", "Finished"]

T = TypeVar("T")

# Ray colours the tracebacks of its tasks.
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_START_TIMEOUT_S = 1_800.0
_START_NOTICE_S = 30.0
_CAUSE_WINDOW_S = 1.0
_DEATH_WINDOW_S = 0.05
_REST_WINDOW_S = 1.0
_NODE_TIMEOUT_S = 10.0
_SHUTDOWN_TIMEOUT_S = 5.0
_MEETING_NOTICE_S = 30.0
_SILENCE_NOTICE_S = 600.0
_SIGTERM_GRACE_S = 30.0
_DRAIN_LOOK_S = 2.0


@attrs.frozen
class Finished:
    """The train function has returned on every rank.

    Attributes:
        value: Ray reference to rank 0's pickled return value, or None.
        value_problem: Why there is none.
    """

    value: Any = None
    value_problem: str | None = None


class AttemptFailedError(Exception):
    """An attempt ended without success.

    Attributes:
        kind: Which budget it counts against; None for a change of size, which counts nowhere.
        failures: The failed workers.
        at_rest: Ranks whose processes are well and whose train functions have come to rest.
    """

    def __init__(
        self, kind: FailureKind | None, failures: Sequence[WorkerFailure], at_rest: Sequence[int] = ()
    ) -> None:
        super().__init__(kind, failures)
        self.kind, self.failures, self.at_rest = kind, tuple(failures), tuple(at_rest)


class Attempt:
    """Watches over one attempt.

    Args:
        spec: The run.
        group: Its workers; their processes may still be starting.
        ledger: The books of the run.
        in_ledger: Calls a function in the ledger's thread.
        emit: Takes events.
        start: Where the attempt begins.
        journal_folder: World rank → the worker's own folder on its node.
        told: Marks of what the user is told only once; kept over all attempts.
        wants_more: Whether there would be room for more workers now (elastic runs), else None.
    """

    def __init__(
        self,
        spec: RunSpec,
        group: WorkerGroup,
        ledger: Ledger,
        in_ledger: Callable[..., Awaitable[Any]],
        emit: Callable[[Sequence[Event]], None],
        start: StartPoint,
        world_size: int,
        journal_folder: Callable[[int], str],
        told: set[str],
        wants_more: Callable[[], bool] | None = None,
    ) -> None:
        self._spec, self._group, self._ledger = spec, group, ledger
        self._in_ledger, self._emit, self._start = in_ledger, emit, start
        self._world_size, self._journal_folder, self._wants_more = world_size, journal_folder, wants_more
        self._told = told
        self.number = start.attempt
        # Taken once: while this attempt is being closed, the group already makes the next one.
        self._identities: list[WorkerIdentity] = []
        self._pids: list[int] = []
        self._exits = Exits(())
        self._here = ray.get_runtime_context().get_node_id()
        self._num_received = [0] * world_size
        self._meetings = Meetings(world_size)
        self._filled: dict[int, asyncio.Event] = {}
        self._hang = HangWatch(world_size, time.monotonic())
        self._returned: dict[int, RunReturn] = {}
        self._ledger_error: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._preempted_until: float | None = None
        self._preempted_rank = 0
        self._asked_to_grow_at: float | None = None
        self._committed_since_asked = False
        self._has_warned_of_silence = False
        self.made_progress = False

    # -- called from outside -------------------------------------------------------------------

    async def take(self, world_rank: int, first: int, records: Sequence[bytes]) -> None:
        """Bring records of a rank into the ledger, each once."""

        def take() -> list[Event]:
            # A batch may come twice: once from the worker, once from its journal.
            known = self._num_received[world_rank]
            new = records[max(0, known - first) :]
            if not new:
                return []
            self._num_received[world_rank] += len(new)
            return self._ledger.add(world_rank, new)

        self._hang.moved(world_rank, time.monotonic(), num_signs=len(records))
        self.made_progress = True
        try:
            events = await self._in_ledger(take)
        # A full disk, a conflict between ranks: the attempt ends with it, not just this call.
        except Exception as error:
            if not self._ledger_error.done():
                self._ledger_error.set_result(error)
            raise
        self._note_commits(events)
        self._emit(events)

    async def meet(self, world_rank: int, kind: str, payload: Any, timeout_s: float) -> Any:
        """Bring a rank together with all others; returns what rank 0 brought, or why it cannot be."""
        try:
            number, meeting, is_complete = self._meetings.arrive(world_rank, kind, payload)
        except ValueError as error:
            return CollectiveError(str(error))
        self._hang.moved(world_rank, time.monotonic())
        filled = self._filled.setdefault(number, asyncio.Event())
        if is_complete:
            filled.set()
            del self._filled[number]
            return meeting.payload
        deadline = time.monotonic() + timeout_s
        while not filled.is_set() and not self._meetings.never_fills(meeting):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(filled.wait(), min(left, _MEETING_NOTICE_S))
                break
            if world_rank == min(meeting.arrived) and deadline > time.monotonic():
                text = f"{kind}() is still waiting for {self._meetings.missing(meeting)}"
                self._emit([Notice(level=logging.WARNING, text=text)])
        if len(meeting.arrived) == self._world_size:
            return meeting.payload
        why = "they have finished" if self._meetings.never_fills(meeting) else f"not within timeout_s={timeout_s:g}"
        return CollectiveError(
            explained(
                f"{kind}() on rank {world_rank} waits in vain for {self._meetings.missing(meeting)}: {why}; "
                "every rank must make the same collective calls"
            )
        )

    async def preempt(self, nodes: dict[str, list[int]], deadline_s: float, why: str) -> None:
        """Tell all ranks that workers are about to be taken away.

        Args:
            nodes: Node id → world ranks on it.
            deadline_s: Seconds from now.
            why: For the log.
        """
        until = time.monotonic() + deadline_s
        if self._preempted_until is not None and self._preempted_until <= until:
            return
        self._preempted_until = until
        found = sorted({rank for ranks_there in nodes.values() for rank in ranks_there})
        self._preempted_rank = found[0] if found else 0
        ranks = format_ranks(found) if found else "all ranks"
        text = f"{ranks} will be taken away in {deadline_s:.0f} s ({why}); train functions are asked for a checkpoint"
        self._emit([Notice(level=logging.WARNING, text=text)])
        command = {"kind": "preempt", "deadline_ms": deadline_ms(deadline_s), "nodes": nodes}
        await self._tell_all(command)
        self._changed.set()

    async def sigterm_received(self, world_rank: int) -> None:
        """The process of a rank was asked to end."""
        identity = self._identities[world_rank]
        grace = self._spec.failure_config.preemption_grace_s or _SIGTERM_GRACE_S
        await self.preempt({identity.node_id: [world_rank]}, grace, f"rank {world_rank} received SIGTERM")

    # -- the start -----------------------------------------------------------------------------

    async def run(self, starting: asyncio.Future[None], controller: Any) -> Finished:
        """Set the workers up, run their train functions, and watch until all have returned.

        Args:
            starting: Done when all processes are up and have their ranks.
            controller: Handle for the workers to report to.

        Raises:
            AttemptFailedError: A worker failed, hangs, or is taken away.
        """
        await self._bounded(starting, "starting the worker processes")
        self._identities = self._group.identities
        self._pids = [self._group.pid(rank) for rank in range(len(self._group))]
        self._exits = Exits(self._pids[i.world_rank] for i in self._identities if i.node_id == self._here)
        try:
            await self._bounded(self._set_up(controller), "setting up the workers")
            checkpoint = self._start.checkpoint
            self._emit(
                [
                    AttemptStarted(
                        attempt=self.number,
                        world_size=len(self._group),
                        checkpoint_path=None if checkpoint is None else checkpoint.path,
                    )
                ]
            )
            self._group.raise_standbys()
            return await self._watch()
        finally:
            self._exits.close()

    async def _set_up(self, controller: Any) -> None:
        spec = self._spec
        run = RunIdentity(
            name=spec.run_name,
            path=self._ledger.path,
            run_id=spec.run_id,
            attempt=self.number,
            metadata=dict(spec.metadata),
        )
        with probe_in(spec.root.child(spec.run_name)) as probe:
            carried = await asyncio.gather(
                *[
                    self._group.call(
                        identity.world_rank,
                        "setup",
                        WorkerSetup(
                            identity=identity,
                            run=run,
                            root=spec.root,
                            scaling_config=spec.scaling_config,
                            first_report_index=self._start.first_report_index,
                            checkpoint=self._start.checkpoint,
                            datasets=_datasets_for(spec, identity.world_rank),
                            journal_folder=self._journal_folder(identity.world_rank),
                            log_level=spec.log_level,
                            probe=probe,
                        ),
                        spec.function,
                        controller,
                    )
                    for identity in self._identities
                ]
            )
        self._tell_of_carrying([rank for rank, is_carried in enumerate(carried) if is_carried])
        backend = spec.backend_config.backend_cls()
        workers = BackendWorkers(self._group, asyncio.get_running_loop(), _START_TIMEOUT_S)
        await asyncio.to_thread(backend.on_start, workers, spec.backend_config)
        await asyncio.to_thread(backend.on_training_start, workers, spec.backend_config)

    def _tell_of_carrying(self, ranks: Sequence[int]) -> None:
        nodes = ", ".join(dict.fromkeys(self._identities[rank].node_ip for rank in ranks))
        # Once, and again only if a restart has brought the workers to other nodes.
        if not ranks or f"carried {nodes}" in self._told:
            return
        self._told.add(f"carried {nodes}")
        text = (
            f"{self._ledger.path} is not on the disk of {format_ranks(ranks)} (node {nodes}): the files of such ranks "
            "are carried to the driver's disk, and checkpoints back to them"
        )
        self._emit([Notice(level=logging.INFO, text=text)])

    async def _bounded(self, work: Awaitable[T], step: str) -> T:
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
        except RayActorError as error:
            failure = died(-1, "?", death_detail(str(error)), step=step)
            raise AttemptFailedError(FailureKind.START, [failure]) from error
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            failure = attrs.evolve(
                capture(cause, world_rank=-1, node_ip=getattr(error, "ip", "?"), step=step),
                text=_ANSI.sub("", str(error)).rstrip(),
            )
            raise AttemptFailedError(FailureKind.START, [failure]) from error
        # Backends are user-extensible: any error of a hook is a start-up that failed.
        except Exception as error:
            failure = capture(error, world_rank=-1, node_ip="?", step=step)
            raise AttemptFailedError(FailureKind.START, [failure]) from error
        finally:
            task.cancel()

    # -- the watch -----------------------------------------------------------------------------

    async def _watch(self) -> Finished:
        """Wait for the train functions; the first failure ends the attempt."""
        value: Any = None
        pending: dict[asyncio.Future[Any], int] = {}
        for rank in range(len(self._group)):
            returned, pickled = self._group.call(rank, "run", num_returns=2)
            end = asyncio.ensure_future(_await(returned))
            # Those of workers that are killed with the attempt are never asked; asyncio would print each.
            end.add_done_callback(_take_note)
            pending[end] = rank
            if rank == 0:
                value = pickled
        drain_look = time.monotonic()
        while pending:
            changed = asyncio.ensure_future(self._changed.wait())
            done, _ = await asyncio.wait(
                [*pending, self._ledger_error, changed],
                timeout=self._time_to_look(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            changed.cancel()
            self._changed.clear()
            if self._ledger_error.done():
                raise self._ledger_error.result()
            failures = await self._take_ends(done, pending)
            if failures:
                failures += await self._other_failures(pending, failures)
                raise await self._as_failed(failures, pending)
            if self._is_time_up():
                raise AttemptFailedError(FailureKind.PREEMPTION, [self._preempted("its time is up")])
            if pending:
                await self._look_for_hangs(set(pending.values()))
                self._look_for_growth()
                if time.monotonic() - drain_look > _DRAIN_LOOK_S:
                    drain_look = time.monotonic()
                    await self._look_for_drains()
        if self._preempted_until is not None and any(r.has_seen_preemption for r in self._returned.values()):
            # It was told to hurry and left: that is not the end of the training.
            raise AttemptFailedError(FailureKind.PREEMPTION, [self._preempted("its train function left early")])
        has_read = any(returned.has_read_checkpoint for returned in self._returned.values())
        self._emit(self._ledger.checkpoint_was_read(has_read))
        self._emit(await self._in_ledger(self._ledger.end_attempt))
        return Finished(value, self._returned[0].value_problem)

    async def _take_ends(
        self, done: set[asyncio.Future[Any]], pending: dict[asyncio.Future[Any], int]
    ) -> list[WorkerFailure]:
        failures: list[WorkerFailure] = []
        for future in done:
            if future not in pending:
                continue
            rank = pending.pop(future)
            result = self._result_of(future, rank)
            self._hang.finished(rank)
            if isinstance(result, WorkerFailure):
                failures.append(result)
                continue
            if self._num_received[rank] < result.num_records:
                await self._take_tail(rank)
            events = await self._in_ledger(self._ledger.rank_finished, rank)
            self._note_commits(events)
            self._emit(events)
            for number in self._meetings.finished(rank):
                if number in self._filled:
                    self._filled[number].set()
        return failures

    def _result_of(self, future: asyncio.Future[Any], rank: int) -> RunReturn | WorkerFailure:
        node_ip = self._identities[rank].node_ip
        try:
            returned: RunReturn = future.result()
        except RayActorError as error:
            return died(rank, node_ip, death_detail(str(error)))
        # A return that cannot be opened here is the failure of that rank, with its own message.
        except Exception as error:  # noqa: BLE001
            return capture(error, world_rank=rank, node_ip=node_ip)
        self._returned[rank] = returned
        return returned.failure if returned.failure is not None else returned

    async def _other_failures(
        self, pending: dict[asyncio.Future[Any], int], failures: Sequence[WorkerFailure]
    ) -> list[WorkerFailure]:
        """Failures that come right behind the first, so that the cause can be told from its echoes."""
        if any(not f.has_died and not is_cascade(f.type_name, f.message) for f in failures):
            return []
        window = _DEATH_WINDOW_S if any(f.has_died for f in failures) else _CAUSE_WINDOW_S
        found: list[WorkerFailure] = []
        deadline = time.monotonic() + window
        while pending and (left := deadline - time.monotonic()) > 0:
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            new = await self._take_ends(done, pending)
            found += new
            if any(not is_cascade(f.type_name, f.message) for f in new):
                break
        return found

    async def _as_failed(
        self, failures: list[WorkerFailure], pending: dict[asyncio.Future[Any], int]
    ) -> AttemptFailedError:
        at_rest: list[int] = []
        if self._spec.failure_config.restart == "in_place":
            at_rest = await self._bring_to_rest(pending)
        dead = [f for f in failures if f.has_died]
        if self._preempted_until is not None:
            return AttemptFailedError(FailureKind.PREEMPTION, failures, at_rest)
        if dead:
            gone = await find_lost_nodes({self._identities[f.world_rank].node_id for f in dead})
            if gone:
                lost = [
                    attrs.evolve(f, message=f"its node was lost; {f.message}")
                    for f in dead
                    if self._identities[f.world_rank].node_id in gone
                ]
                return AttemptFailedError(FailureKind.PREEMPTION, lost, at_rest)
            explained = await asyncio.gather(*map(self._explain, dead))
            failures = [*explained, *(f for f in failures if not f.has_died)]
        return AttemptFailedError(FailureKind.WORKER, failures, at_rest)

    async def _explain(self, failure: WorkerFailure) -> WorkerFailure:
        """Say how a process on a living node has ended."""
        rank = failure.world_rank
        stack, status, was_out_of_memory = "", None, False
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            stack = await self._on_node(rank, read_crash, self._journal_folder(rank))
        if self._identities[rank].node_id == self._here:
            status = await asyncio.to_thread(self._exits.status, self._pids[rank])
            was_out_of_memory = self._exits.was_out_of_memory()
        ended = describe_exit(status, stack, was_out_of_memory=was_out_of_memory)
        detail = death_detail(failure.message, ended)
        return attrs.evolve(
            died(rank, failure.node_ip, detail, step=failure.step, stack=stack), failed_at=failure.failed_at
        )

    async def _bring_to_rest(self, pending: dict[asyncio.Future[Any], int]) -> list[int]:
        """Let go of the backend on the ranks that rest, so that the others stop waiting for them."""
        await self._shut_backend_down(sorted(self._returned))
        deadline = time.monotonic() + _REST_WINDOW_S
        while pending and (left := deadline - time.monotonic()) > 0:
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            new = []
            for future in done:
                rank = pending.pop(future)
                if not isinstance(self._result_of(future, rank), WorkerFailure) or rank in self._returned:
                    new.append(rank)
            await self._shut_backend_down(sorted(new))
        rested = []
        for rank in sorted(self._returned):
            try:
                await asyncio.wait_for(_await(self._group.call(rank, "teardown")), _SHUTDOWN_TIMEOUT_S)
            except (RayError, asyncio.TimeoutError):
                continue
            rested.append(rank)
        return rested

    def _time_to_look(self) -> float:
        limit = self._spec.failure_config.hang_timeout_s
        until = [_DRAIN_LOOK_S, *([limit / 4] if limit is not None else [])]
        if self._preempted_until is not None:
            until.append(self._preempted_until - time.monotonic())
        return max(0.0, min(until))

    # -- hangs ---------------------------------------------------------------------------------

    async def _look_for_hangs(self, unfinished: set[int]) -> None:
        limit = self._spec.failure_config.hang_timeout_s
        notice = _SILENCE_NOTICE_S if limit is None else limit
        if self._hang.silent_for(time.monotonic()) < notice or self._preempted_until is not None:
            return
        await self._read_heartbeats(unfinished)
        silent = self._hang.silent_for(time.monotonic())
        if silent < notice or (limit is None and self._has_warned_of_silence):
            return
        late = self._hang.late_rank()
        stacks = dict(zip(sorted(unfinished), await asyncio.gather(*map(self._stack, sorted(unfinished))), strict=True))
        # A rank that cannot even answer is the one the others wait for.
        stopped = [rank for rank, stack in stacks.items() if "stopped" in stack.split("\n")[0]]
        late = stopped[0] if stopped else late
        assert late is not None
        failure = hung(late, self._identities[late].node_ip, silent, stacks)
        if limit is None:
            self._has_warned_of_silence = True
            self._emit([Notice(level=logging.WARNING, text=failure.text)])
            return
        raise AttemptFailedError(FailureKind.WORKER, [failure])

    async def _read_heartbeats(self, ranks: set[int]) -> None:
        offset = time.time() - time.monotonic()
        for rank in ranks:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                beat = await self._on_node(rank, read_heartbeat, self._journal_folder(rank))
                self._hang.moved(rank, beat - offset, num_signs=0)

    async def _stack(self, rank: int) -> str:
        try:
            return await self._on_node(rank, read_stacks, self._journal_folder(rank), self._pids[rank])
        except (RayError, asyncio.TimeoutError) as error:
            return f"its node does not answer: {error}"

    # -- nodes that leave, room that comes -----------------------------------------------------

    async def _look_for_drains(self) -> None:
        from ray._private.state import state

        try:
            draining = await asyncio.to_thread(state.get_draining_nodes)
        # Not there on every version of Ray; then a node that leaves is noticed when it has left.
        except (AttributeError, RayError):
            return
        nodes: dict[str, list[int]] = {}
        for identity in self._identities:
            if identity.node_id in draining:
                nodes.setdefault(identity.node_id, []).append(identity.world_rank)
        if nodes:
            known = [draining[node] for node in nodes if draining[node]]
            left = max(0.0, min(known) / 1_000 - time.time()) if known else 120.0
            await self.preempt(nodes, left + self._spec.failure_config.preemption_grace_s, "its node is being drained")

    def _is_time_up(self) -> bool:
        return self._preempted_until is not None and time.monotonic() >= self._preempted_until

    def _preempted(self, why: str) -> WorkerFailure:
        rank = self._preempted_rank
        return died(rank, self._identities[rank].node_ip, f"preempted: {why}")

    def _look_for_growth(self) -> None:
        if self._wants_more is None:
            return
        if self._committed_since_asked:
            raise AttemptFailedError(None, [self._preempted("there is room for more workers")])
        if self._asked_to_grow_at is None and self._wants_more():
            self._asked_to_grow_at = time.monotonic()
            text = "there is room for more workers: the group grows at the next checkpoint"
            self._emit([Notice(level=logging.INFO, text=text)])
            task = asyncio.ensure_future(self._tell_all({"kind": "checkpoint"}))
            task.add_done_callback(_take_note)

    def _note_commits(self, events: Sequence[Event]) -> None:
        if self._asked_to_grow_at is not None and any(type(e).__name__ == "CheckpointCommitted" for e in events):
            self._committed_since_asked = True
            self._changed.set()

    # -- the end -------------------------------------------------------------------------------

    async def shut_down(self) -> None:
        """All ranks have returned: let the backend and the workers end in order, within seconds."""
        problem = await self._shut_backend_down(range(len(self._group)))
        if problem is None:
            try:
                await asyncio.wait_for(self._group.call_all("teardown"), _SHUTDOWN_TIMEOUT_S)
            except (RayError, asyncio.TimeoutError) as error:
                problem = error
        if problem is not None:
            # The run is finished and on disk; a clean-up that fails must not undo that.
            text = f"the workers did not end in order and were killed: {type(problem).__name__}: {problem}"
            self._emit([Notice(level=logging.WARNING, text=text)])

    async def _shut_backend_down(self, ranks: Sequence[int]) -> BaseException | None:
        if not ranks:
            return None
        backend = self._spec.backend_config.backend_cls()
        workers = BackendWorkers(self._group, asyncio.get_running_loop(), _SHUTDOWN_TIMEOUT_S, list(ranks))
        try:
            await asyncio.wait_for(
                asyncio.to_thread(backend.on_shutdown, workers, self._spec.backend_config), _SHUTDOWN_TIMEOUT_S + 1
            )
        # Whatever a user's backend raises: what follows is the same.
        except Exception as error:  # noqa: BLE001
            return error
        return None

    async def end_stopped_processes(self) -> None:
        """A process that is stopped does not hear that it is to end; its node's system does it."""
        for identity in self._identities:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                await self._on_node(identity.world_rank, _kill_if_stopped, self._pids[identity.world_rank])

    async def collect(self) -> None:
        """Bring in what killed workers had reported, and close the books of the attempt."""
        for identity in self._identities:
            await self._take_tail(identity.world_rank)
        self._emit(await self._in_ledger(self._ledger.end_attempt))

    async def _take_tail(self, world_rank: int) -> None:
        after = self._num_received[world_rank]
        try:
            tail = await self._on_node(world_rank, _read_after, self._journal_folder(world_rank), after)
        except (RayError, asyncio.TimeoutError):
            # The node itself is gone, and what was on its way with it.
            ip = self._identities[world_rank].node_ip
            text = f"the last reports of rank {world_rank} are lost with its node {ip}"
            self._emit([Notice(level=logging.WARNING, text=text)])
            return
        if tail:
            await self.take(world_rank, after, tail)

    # -- small things --------------------------------------------------------------------------

    async def _tell_all(self, command: dict[str, Any]) -> None:
        async def tell(rank: int) -> None:
            with contextlib.suppress(RayError, asyncio.TimeoutError):
                await self._on_node(rank, send_command, self._journal_folder(rank), command)

        await asyncio.gather(*map(tell, range(len(self._group))))

    async def _on_node(self, rank: int, function: Callable[..., T], *args: Any) -> T:
        return await on_node(self._identities[rank].node_id, function, *args, timeout_s=_NODE_TIMEOUT_S)


async def _await(reference: Any) -> Any:
    return await reference


def _take_note(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _read_after(folder: str, after: int) -> list[bytes]:
    return read_tail(folder, after=after)


def _kill_if_stopped(pid: int) -> None:
    if is_stopped(pid):
        kill_process(pid)


def _datasets_for(spec: RunSpec, world_rank: int) -> dict[str, Any]:
    """The shipments for one rank, without the parts of the others."""
    out = {}
    for name, shipment in spec.datasets.items():
        if shipment.parts is not None:
            parts = tuple(part if rank == world_rank else None for rank, part in enumerate(shipment.parts))
            shipment = attrs.evolve(shipment, parts=parts)
        out[name] = shipment
    return out


def check_attempt(attempt: Attempt | None, number: int) -> Attempt:
    """The attempt that a worker's call belongs to.

    Raises:
        TrainError: It is over.
    """
    if attempt is None or attempt.number != number:
        raise TrainError(f"attempt {number} of this run is over")
    return attempt
