"""``num_workers=0``: the train function runs in the calling process, with everything else the same.

The same ledger, storage, records and context as on a cluster; no Ray, and no threads but for
uploads that were asked to go on behind the scenes, so a debugger stops where the user expects.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..context.current import current_context, set_context
from ..context.identity import RunIdentity, WorkerIdentity
from ..context.journal import journal_root, remove_journal, sweep
from ..context.reporter import Reporter
from ..context.scratch import Scratch
from ..context.train_context import TrainContext
from ..errors import NotInTrainFunctionError, TrainError
from ..storage.store import RunStore
from .datasets import divide, release, shard_makers
from .decide import Counts, FailureKind, after_failure
from .failures import capture, describe
from .ledger import Ledger, StartPoint
from .messages import AttemptFailed, AttemptStarted, DatasetShipment, Event, Notice, RunEnd, RunSpec
from .train_function import TrainFunction

__all__ = ["run_locally"]

_GIVE_UP_S = 30.0
_INTERRUPT_S = 5.0


class _DirectSink:
    """Hands each record to the ledger at once, in the reporting thread."""

    def __init__(self, ledger: Ledger, emit: Callable[[Sequence[Event]], None]) -> None:
        self._ledger, self._emit = ledger, emit
        # The ledger belongs to one thread at a time; a callback that runs under it may report again.
        self._lock = threading.RLock()
        self._is_closed = False

    def add(self, record: bytes) -> None:
        with self._lock:
            if self._is_closed:
                raise TrainError("the train function has ended; a thread of it that still runs cannot report")
            self._emit(self._ledger.add(0, [record]))

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def committed(self, num_reports: int, timeout_s: float | None, reporter: Reporter) -> list[tuple[str, Any]]:
        """As ``Controller.committed``, for the only rank there is."""
        reporter.wait(timeout_s)
        with self._lock:
            return self._ledger.reported(num_reports)[0]


def run_locally(
    spec: RunSpec, ledger: Ledger, function: TrainFunction, emit: Callable[[Sequence[Event]], None]
) -> tuple[RunEnd, Any, BaseException | None]:
    """Run the train function here, with restarts as on a cluster.

    Args:
        spec: The run; its datasets hold the objects themselves.
        ledger: The books of the run, opened here.
        function: What to call.
        emit: Takes events as they happen.

    Returns:
        How it ended, the return value, and the exception object of a failed run.

    Raises:
        NotInTrainFunctionError: A train function already runs in this process.
        StorageError: The storage cannot be used.
    """
    if current_context() is not None:
        raise NotInTrainFunctionError(
            "fit() with num_workers=0", "a train function already runs; use num_workers >= 1 inside one"
        )
    sweep(journal_root())
    emit(ledger.open())
    try:
        return _run_attempts(spec, ledger, function, emit)
    except BaseException as error:
        # Nothing to do where the run has ended in order; else the lock would be held while this process lives.
        ledger.close("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        remove_journal(journal_root() / spec.run_id)


def _run_attempts(
    spec: RunSpec, ledger: Ledger, function: TrainFunction, emit: Callable[[Sequence[Event]], None]
) -> tuple[RunEnd, Any, BaseException | None]:
    counts = Counts()
    while True:
        start, events = ledger.begin_attempt(1)
        emit(events)
        sink = _DirectSink(ledger, emit)
        datasets = divide(spec.datasets, world_size=1, fetch=_as_it_is)
        context, reporter = _context(spec, sink, start, datasets)
        emit(
            [
                AttemptStarted(
                    attempt=start.attempt,
                    world_size=1,
                    checkpoint_path=None if start.checkpoint is None else start.checkpoint.path,
                )
            ]
        )
        config = None if function.config is None else _own_copy(function.config)
        set_context(context)
        try:
            value = attrs.evolve(function, config=config)(context)
            reporter.finish()
        except KeyboardInterrupt:
            reporter.give_up(_INTERRUPT_S)
            sink.close()
            emit(ledger.end_attempt())
            ledger.close("interrupted")
            raise
        # As on a cluster, SystemExit and the like end the attempt, not the driver.
        except BaseException as error:  # noqa: BLE001
            reporter.give_up(_GIVE_UP_S)
            sink.close()
            emit(ledger.end_attempt())
            failure = capture(error, world_rank=0, node_ip="127.0.0.1")
            step = after_failure(FailureKind.WORKER, counts, spec.failure_config)
            counts = step.counts
            emit(
                [
                    AttemptFailed(
                        attempt=start.attempt,
                        failures=(failure,),
                        is_restart=step.is_restart,
                        reason=step.reason,
                        counts=counts,
                    )
                ]
            )
            if not step.is_restart:
                ledger.close("failed", describe([failure]))
                end = RunEnd(
                    state="failed",
                    attempt=start.attempt,
                    reason=step.reason,
                    failures=(failure,),
                    metrics=ledger.last_metrics,
                )
                return end, None, error
            text = f"attempt {start.attempt} failed, restarting ({step.reason}): {describe([failure])}"
            emit([Notice(level=logging.WARNING, text=text)])
        else:
            sink.close()
            emit(ledger.checkpoint_was_read(context.has_read_checkpoint))
            emit(ledger.rank_finished(0))
            emit(ledger.end_attempt())
            ledger.close("finished")
            return RunEnd(state="finished", attempt=start.attempt, metrics=ledger.last_metrics), value, None
        finally:
            set_context(None)
            release(datasets)


def _context(
    spec: RunSpec, sink: _DirectSink, start: StartPoint, datasets: Mapping[str, DatasetShipment]
) -> tuple[TrainContext, Reporter]:
    store = RunStore(spec.root, spec.run_name)
    reporter = Reporter(
        store,
        sink,
        attempt=start.attempt,
        first_report_index=start.first_report_index,
        scratch=Scratch(journal_root() / spec.run_id / f"attempt_{start.attempt}" / "rank_0"),
        # This process is all there is: what should survive it has to be committed when report() returns.
        defers_checksums=False,
    )
    resources = {"CPU": float(os.cpu_count() or 1)}
    if spec.scaling_config.use_gpu:
        resources["GPU"] = 1.0
    context = TrainContext(
        worker=WorkerIdentity(resources=resources, node_ip="127.0.0.1"),
        run=RunIdentity(
            name=spec.run_name,
            path=store.path,
            run_id=spec.run_id,
            attempt=start.attempt,
            metadata=_own_copy(dict(spec.metadata)),
        ),
        scaling_config=spec.scaling_config,
        store=store,
        reporter=reporter,
        shards=shard_makers(datasets, world_rank=0, world_size=1, fetch=_as_it_is),
        checkpoint=start.checkpoint,
        committed=lambda num_reports, timeout_s: sink.committed(num_reports, timeout_s, reporter),
    )
    return context, reporter


def _as_it_is(payload: Any) -> Any:
    """What was sent nowhere need not be fetched."""
    return payload


def _own_copy(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy for one attempt, as unpickling gives one to each worker on a cluster.

    What the train function changes in it reaches neither the next attempt nor the driver. An entry
    that cannot be copied (a lock, an open connection) is handed over itself: nothing has to be
    picklable here, and to refuse it would take away a use of this mode.
    """
    try:
        return copy.deepcopy(values)
    # Copying runs code of the user's, which may raise anything.
    except Exception:  # noqa: BLE001
        # One by one then; what is no plain dict may mean more than its entries, and stays as it is.
        return {name: _copy_or_self(value) for name, value in values.items()} if type(values) is dict else values


def _copy_or_self(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    # As above.
    except Exception:  # noqa: BLE001
        return value
