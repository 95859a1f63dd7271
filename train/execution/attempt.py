"""One life of the worker group: set up, watched, and brought to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ..context.identity import RunIdentity, WorkerIdentity
from ..context.preemption import DEFAULT_GRACE_S
from ..errors import TrainError, WorkerStartError
from .datasets import divide, reads_by_tasks, release
from .decide import FailureKind, common_report, is_cascade
from .exits import death_detail
from .failures import WorkerFailure, capture, died, ended, format_ranks, hung
from .gathering import Gathering
from .hang import HangWatch, waits_for_others
from .ledger import Ledger, StartPoint
from .messages import (
    AttemptStarted,
    CheckpointCommitted,
    DatasetShipment,
    Event,
    Notice,
    RunReturn,
    RunSpec,
    WorkerSetup,
)
from .nodes import draining_nodes, find_lost_nodes
from .probe import probe_in
from .signs import deadline_ms
from .sites import Sites
from .worker_group import BackendWorkers, WorkerGroup, of_rank, rank_of

__all__ = ["Attempt", "AttemptFailedError", "Finished"]

logger = logging.getLogger("ray_lite.train")

T = TypeVar("T")

# Ray colours the tracebacks of its tasks.
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_START_TIMEOUT_S = 1_800.0
_START_NOTICE_S = 30.0
_CAUSE_WINDOW_S = 1.0
_DEATH_WINDOW_S = 0.05
_REST_WINDOW_S = 1.0
_SHUTDOWN_TIMEOUT_S = 5.0
_SILENCE_NOTICE_S = 600.0
_DRAIN_LOOK_S = 2.0
_UNKNOWN_DRAIN_S = 120.0
_SAME_MOMENT_S = 1.0


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
        wants_more: Whether there would be room for more workers (elastic runs), else None; takes whether it must
            look now, or may leave it for later.
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
        wants_more: Callable[[bool], bool] | None = None,
    ) -> None:
        self._spec, self._group, self._ledger = spec, group, ledger
        self._in_ledger, self._emit, self._start = in_ledger, emit, start
        self._world_size, self._journal_folder, self._wants_more = world_size, journal_folder, wants_more
        self._told = told
        self.number = start.attempt
        # Both taken once: while this attempt is being closed, the group already makes the next one.
        self._identities: list[WorkerIdentity] = []
        self._sites: Sites | None = None
        self._watch_began = time.monotonic()
        # Divided among the ranks of this attempt.
        self._datasets: Mapping[str, DatasetShipment] = {}
        self._num_received = [0] * world_size
        self._gathering = Gathering(world_size, self._warn)
        self._hang = HangWatch(world_size, time.monotonic())
        self._returned: dict[int, RunReturn] = {}
        self._ledger_error: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._ended: list[asyncio.Future[Any]] = []
        self._ledger_error.add_done_callback(lambda _: self._changed.set())
        self._preempted_until: float | None = None
        self._preempted_ranks: set[int] = set()
        self._asked_to_grow_at: float | None = None
        self._committed_since_asked = False
        self._has_warned_of_silence = False
        self.made_progress = False
        self.commands: list[dict[str, Any]] = []
        """What all ranks are to be told, in order."""

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
        self._hang.moved(world_rank, time.monotonic())
        return await self._gathering.meet(world_rank, kind, payload, timeout_s)

    async def preempt(self, nodes: dict[str, list[int]], deadline_s: float, why: str, extra_s: float = 0.0) -> None:
        """Tell all ranks that workers are about to be taken away.

        Args:
            nodes: Node id → world ranks on it; empty when all are.
            deadline_s: Seconds from now that they are told.
            why: For the log.
            extra_s: Seconds after that before they are ended from here.
        """
        until = time.monotonic() + deadline_s + extra_s
        found = sorted({rank for ranks_there in nodes.values() for rank in ranks_there})
        affected = set(found or range(self._world_size))
        is_known = affected <= self._preempted_ranks
        # The same notice, looked up again: two clocks are never apart by the very same time.
        if self._preempted_until is not None and self._preempted_until <= until + _SAME_MOMENT_S and is_known:
            return
        self._preempted_until = until if self._preempted_until is None else min(until, self._preempted_until)
        self._preempted_ranks |= affected
        ranks = format_ranks(found) if found else "all ranks"
        text = f"{ranks} will be taken away in {deadline_s:.0f} s ({why}); train functions are asked for a checkpoint"
        self._warn(text)
        if self._spec.failure_config.relax_collectives_on_preemption and found:
            self._gathering.excuse(found)
        command = {
            "kind": "preempt",
            "deadline_ms": deadline_ms(deadline_s),
            "nodes": nodes,
            "from_report": self._common_report(),
        }
        self._changed.set()
        await self._tell_all(command)

    def _common_report(self) -> int:
        elapsed_s = time.monotonic() - self._watch_began
        return common_report(self._start.first_report_index, max(self._num_received), elapsed_s)

    async def sigterm_received(self, world_rank: int) -> None:
        """The process of a rank was asked to end."""
        identity = self._identities[world_rank]
        grace = self._spec.failure_config.preemption_grace_s or DEFAULT_GRACE_S
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
        processes = [self._group.process(rank) for rank in range(len(self._group))]
        self._sites = Sites(self._identities, processes, self._journal_folder)
        try:
            self._datasets = await self._bounded(self._divide_datasets(), "splitting the datasets")
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
            release(self._datasets)
            self._sites.close()

    async def _divide_datasets(self) -> dict[str, DatasetShipment]:
        """New parts of the datasets that split themselves, one for each rank that there is now."""
        loop = asyncio.get_running_loop()
        node_ids = [identity.node_id for identity in self._identities]

        def fetch(reference: Any) -> Any:
            # Not ray.get(): in an async actor it would warn, from whichever thread it is called.
            return asyncio.run_coroutine_threadsafe(_await(reference), loop).result()

        # A user's split() may take long; the workers' calls are answered meanwhile.
        divided = await asyncio.to_thread(
            divide, self._spec.datasets, world_size=self._world_size, node_ids=node_ids, fetch=fetch
        )
        names = [name for name, shipment in divided.items() if reads_by_tasks(shipment)]
        if names and ray.available_resources().get("CPU", 0.0) < 1:
            text = (
                f"dataset {names[0]!r} is read by tasks of Ray Data, and the workers hold every CPU of the cluster: "
                "it may never give a batch; leave it at least one CPU"
            )
            self._warn(text)
        return divided

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
                    of_rank(
                        identity.world_rank,
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
                                datasets=_datasets_for(self._datasets, identity.world_rank),
                                journal_folder=self._journal_folder(identity.world_rank),
                                log_level=spec.log_level,
                                probe=probe,
                            ),
                            spec.function,
                            controller,
                        ),
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
                self._warn(f"still {step} after {waited:.0f} s")
        except asyncio.CancelledError:
            raise
        # Backends are user-extensible: any error of a hook is a start-up that failed.
        except Exception as error:
            raise await self._as_failed_start(error, step) from error
        finally:
            task.cancel()

    async def _as_failed_start(self, error: Exception, step: str) -> AttemptFailedError:
        rank = rank_of(error)
        node_ip = self._identities[rank].node_ip if rank >= 0 else "?"
        if isinstance(error, RayActorError):
            failure = died(rank, node_ip, death_detail(str(error)), step=step)
            if rank >= 0:
                if await find_lost_nodes({self._identities[rank].node_id}):
                    lost = attrs.evolve(failure, message=f"its node was lost; {failure.message}")
                    return AttemptFailedError(FailureKind.PREEMPTION, [lost])
                failure = await self._known_sites.explain(failure)
        elif isinstance(error, RayTaskError):
            cause = error.cause if isinstance(error.cause, Exception) else error
            node_ip = getattr(error, "ip", node_ip)
            failure = attrs.evolve(
                capture(cause, world_rank=rank, node_ip=node_ip, step=step), text=_ANSI.sub("", str(error)).rstrip()
            )
        else:
            failure = capture(error, world_rank=rank, node_ip=node_ip, step=step)
        return AttemptFailedError(FailureKind.START, [failure])

    # -- the watch -----------------------------------------------------------------------------

    async def _watch(self) -> Finished:
        """Wait for the train functions; the first failure ends the attempt."""
        # However long the start has taken, that was no silence.
        self._watch_began = time.monotonic()
        self._hang = HangWatch(self._world_size, self._watch_began)
        value: Any = None
        pending: dict[asyncio.Future[Any], int] = {}
        for rank in range(len(self._group)):
            returned, pickled = self._group.call(rank, "run", num_returns=2)
            end = asyncio.ensure_future(_await(returned))
            end.add_done_callback(self._note_end)
            pending[end] = rank
            if rank == 0:
                value = pickled
        drain_look = time.monotonic()
        while pending:
            ends = await self._some_ends(self._time_to_look())
            if self._ledger_error.done():
                raise self._ledger_error.result()
            failures = await self._take_ends(ends, pending)
            if failures:
                failures += await self._other_failures(pending, failures)
                raise await self._as_failed(failures, pending)
            if self._is_time_up():
                raise AttemptFailedError(FailureKind.PREEMPTION, [self._left("its time is up")])
            if pending:
                await self._look_for_hangs(set(pending.values()))
                await self._look_for_growth()
                if time.monotonic() - drain_look > _DRAIN_LOOK_S:
                    drain_look = time.monotonic()
                    await self._look_for_drains()
        if self._preempted_until is not None and any(r.has_seen_preemption for r in self._returned.values()):
            # It was told to hurry and left: that is not the end of the training.
            raise AttemptFailedError(FailureKind.PREEMPTION, [self._left("its train function left early")])
        has_read = any(returned.has_read_checkpoint for returned in self._returned.values())
        self._emit(self._ledger.checkpoint_was_read(has_read))
        self._emit(await self._in_ledger(self._ledger.end_attempt))
        return Finished(value, self._returned[0].value_problem)

    def _note_end(self, end: asyncio.Future[Any]) -> None:
        # Those of workers that are killed with the attempt are never asked; asyncio would print each.
        _take_note(end)
        self._ended.append(end)
        self._changed.set()

    async def _some_ends(self, timeout_s: float) -> list[asyncio.Future[Any]]:
        """The train functions that have ended since the last look; waits until there is one, or something else to see.

        Not ``asyncio.wait``, which looks at all that are still running each time.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()
        ends, self._ended = self._ended, []
        return ends

    async def _take_ends(
        self, ends: Sequence[asyncio.Future[Any]], pending: dict[asyncio.Future[Any], int]
    ) -> list[WorkerFailure]:
        failures: list[WorkerFailure] = []
        for future in ends:
            rank = pending.pop(future)
            result = self._result_of(future, rank)
            self._hang.finished(rank)
            if isinstance(result, WorkerFailure):
                failures.append(result)
                continue
            if self._num_received[rank] < result.num_records:
                after = self._num_received[rank]
                await self._take_in(rank, after, await self._known_sites.tail(rank, after))
            events = await self._in_ledger(self._ledger.rank_finished, rank)
            self._note_commits(events)
            self._emit(events)
            self._gathering.finished(rank)
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
        if any(not f.has_died and not is_cascade(f.type_name, f.message, f.causes) for f in failures):
            return []
        window = _DEATH_WINDOW_S if any(f.has_died for f in failures) else _CAUSE_WINDOW_S
        found: list[WorkerFailure] = []
        deadline = time.monotonic() + window
        while pending and (left := deadline - time.monotonic()) > 0:
            new = await self._take_ends(await self._some_ends(left), pending)
            found += new
            if any(not is_cascade(f.type_name, f.message, f.causes) for f in new):
                break
        return found

    async def _as_failed(
        self, failures: list[WorkerFailure], pending: dict[asyncio.Future[Any], int]
    ) -> AttemptFailedError:
        at_rest: list[int] = []
        self._gathering.end()
        # So are those that stand at the start of an epoch and wait for the rank that failed.
        release(self._datasets)
        if self._spec.failure_config.restart == "in_place":
            at_rest = await self._bring_to_rest(pending)
        dead = [f for f in failures if f.has_died]
        if self._is_of_preemption(failures):
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
            explained = await asyncio.gather(*map(self._known_sites.explain, dead))
            failures = [*explained, *(f for f in failures if not f.has_died)]
        return AttemptFailedError(FailureKind.WORKER, failures, at_rest)

    def _is_of_preemption(self, failures: Sequence[WorkerFailure]) -> bool:
        """Whether a notice explains the failures; an error of a rank that stays is one like any other."""
        if self._preempted_until is None:
            return False
        own = [f for f in failures if not f.has_died and not is_cascade(f.type_name, f.message, f.causes)]
        return not own or any(f.world_rank in self._preempted_ranks for f in failures)

    async def _bring_to_rest(self, pending: dict[asyncio.Future[Any], int]) -> list[int]:
        """Let go of the backend on the ranks that rest, so that the others stop waiting for them."""
        await self._shut_backend_down(sorted(self._returned))
        deadline = time.monotonic() + _REST_WINDOW_S
        while pending and (left := deadline - time.monotonic()) > 0:
            new = []
            for future in await self._some_ends(left):
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
        is_silent = self._hang.silent_for(time.monotonic()) >= notice
        if not is_silent:
            # Once it moves again, the next silence is worth a word too.
            self._has_warned_of_silence = False
        if not is_silent or self._preempted_until is not None or (limit is None and self._has_warned_of_silence):
            return
        ages = await self._known_sites.silences(unfinished)
        now = time.monotonic()
        for rank, age in ages.items():
            self._hang.moved(rank, now - age, num_signs=0)
        silent = self._hang.silent_for(now)
        if silent < notice:
            return
        # A warning must not disturb the run, so that no signal is sent for it.
        stacks = await self._known_sites.stacks(unfinished, may_signal=limit is not None)
        # A rank that cannot even answer is the one the others wait for.
        stopped = [rank for rank, stack in stacks.items() if "stopped" in stack.split("\n")[0]]
        not_waiting = [rank for rank, stack in stacks.items() if not waits_for_others(stack)]
        late = stopped[0] if stopped else self._hang.late_rank(not_waiting or None)
        assert late is not None
        failure = hung(late, self._identities[late].node_ip, silent, stacks)
        if limit is None:
            self._has_warned_of_silence = True
            self._warn(failure.text)
            return
        raise AttemptFailedError(FailureKind.WORKER, [failure])

    # -- nodes that leave, room that comes -----------------------------------------------------

    async def _look_for_drains(self) -> None:
        draining = await asyncio.to_thread(draining_nodes)
        nodes: dict[str, list[int]] = {}
        for identity in self._identities:
            if identity.node_id in draining:
                nodes.setdefault(identity.node_id, []).append(identity.world_rank)
        if nodes:
            known = [draining[node] for node in nodes if draining[node]]
            left = max(0.0, min(known) / 1_000 - time.time()) if known else _UNKNOWN_DRAIN_S
            # What comes after the deadline is no time that the ranks may count on.
            extra_s = self._spec.failure_config.preemption_grace_s
            await self.preempt(nodes, left, "its node is being drained", extra_s)

    def _is_time_up(self) -> bool:
        return self._preempted_until is not None and time.monotonic() >= self._preempted_until

    def _left(self, why: str) -> WorkerFailure:
        """An attempt that is over although nothing has failed."""
        rank = min(self._preempted_ranks, default=0)
        return ended(rank, self._identities[rank].node_ip, why, is_preempted=bool(self._preempted_ranks))

    async def _look_for_growth(self) -> None:
        if self._wants_more is None:
            return
        if self._committed_since_asked:
            # Others may have taken the room meanwhile.
            if await asyncio.to_thread(self._wants_more, True):
                raise AttemptFailedError(None, [self._left("there is room for more workers")])
            self._asked_to_grow_at, self._committed_since_asked = None, False
        elif self._asked_to_grow_at is None and await asyncio.to_thread(self._wants_more, False):
            self._asked_to_grow_at = time.monotonic()
            text = "there is room for more workers: the group grows at the next checkpoint"
            self._emit([Notice(level=logging.INFO, text=text)])
            task = asyncio.ensure_future(
                self._known_sites.tell_all({"kind": "checkpoint", "from_report": self._common_report()})
            )
            task.add_done_callback(_take_note)

    def _note_commits(self, events: Sequence[Event]) -> None:
        if self._asked_to_grow_at is not None and any(isinstance(event, CheckpointCommitted) for event in events):
            self._committed_since_asked = True
            self._changed.set()

    # -- the end -------------------------------------------------------------------------------

    async def shut_down(self) -> None:
        """All ranks have returned: let the backend and the workers end in order, within seconds."""
        problem = await self._shut_backend_down(range(len(self._group)))
        if problem is None:
            try:
                await asyncio.wait_for(self._group.call_all("teardown", True), _SHUTDOWN_TIMEOUT_S)
            except (RayError, asyncio.TimeoutError) as error:
                problem = error
        if problem is not None:
            # The run is finished and on disk; a clean-up that fails must not undo that.
            text = f"the workers did not end in order and were killed: {type(problem).__name__}: {problem}"
            self._warn(text)

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

    async def collect(self) -> None:
        """End stopped workers, bring in what killed ones had reported, and close the books of the attempt."""
        self._gathering.end()
        if self._sites is not None:
            # As it is now: more may arrive while the journals are read.
            after = list(self._num_received)
            for rank, tail in sorted((await self._sites.last_tails(after)).items()):
                await self._take_in(rank, after[rank], tail)
        self._emit(await self._in_ledger(self._ledger.end_attempt))
        if self._sites is not None:
            await self._sites.clean_up()

    async def _take_in(self, world_rank: int, after: int, tail: list[bytes] | Exception) -> None:
        """Take what a journal holds after its first ``after`` records, and say so where it cannot be read."""
        # asyncio's is an OSError too.
        if isinstance(tail, (RayError, asyncio.TimeoutError)):
            # Gone, and what was on its way with it; or drained, which takes no task that could read it.
            ip = self._identities[world_rank].node_ip
            self._warn(
                f"reports of rank {world_rank} that had not arrived yet are lost: its node {ip} is gone, or leaves"
            )
        elif isinstance(tail, Exception):
            raise tail
        elif tail:
            await self.take(world_rank, after, tail)

    # -- small things --------------------------------------------------------------------------

    @property
    def _known_sites(self) -> Sites:
        """Those of a group that is up."""
        assert self._sites is not None
        return self._sites

    async def _tell_all(self, command: dict[str, Any]) -> None:
        # In the answers to their reports too: a node that is being drained takes no task that would tell its ranks.
        self.commands.append({**command, "number": len(self.commands)})
        if self._sites is not None:
            await self._sites.tell_all(self.commands[-1])

    def _warn(self, text: str) -> None:
        self._emit([Notice(level=logging.WARNING, text=text)])


async def _await(reference: Any) -> Any:
    return await reference


def _take_note(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _datasets_for(shipments: Mapping[str, DatasetShipment], world_rank: int) -> dict[str, DatasetShipment]:
    """The shipments for one rank, without the parts of the others."""
    out = {}
    for name, shipment in shipments.items():
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
