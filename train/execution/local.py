"""``num_workers=0``: the train function runs in the calling process, with everything else the same.

The same ledger, storage, records and context as on a cluster; no Ray, no threads, so a
debugger stops where the user expects.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..context.current import current_context, set_context
from ..context.identity import RunIdentity, WorkerIdentity
from ..context.reporter import Reporter
from ..context.train_context import TrainContext
from ..errors import NotInTrainFunctionError
from ..storage.store import RunStore
from .datasets import shard_makers
from .decide import Counts, FailureKind, after_failure
from .failures import capture, describe
from .ledger import Ledger
from .messages import AttemptFailed, AttemptStarted, Event, Notice, RunEnd, RunSpec
from .train_function import TrainFunction

__all__ = ["run_locally"]


class _DirectSink:
    """Hands each record to the ledger at once, in the reporting thread."""

    def __init__(self, ledger: Ledger, emit: Callable[[Sequence[Event]], None]) -> None:
        self._ledger, self._emit = ledger, emit

    def add(self, record: bytes) -> None:
        self._emit(self._ledger.add(0, [record]))

    def flush(self, timeout_s: float) -> bool:
        return True


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
    counts = Counts()
    emit(ledger.open())
    while True:
        start, events = ledger.begin_attempt(1)
        emit(events)
        context = _context(spec, ledger, start.attempt, start.first_report_index, start.checkpoint, emit)
        emit(
            [
                AttemptStarted(
                    attempt=start.attempt,
                    world_size=1,
                    checkpoint_path=None if start.checkpoint is None else start.checkpoint.path,
                )
            ]
        )
        set_context(context)
        try:
            value = function(context)
        except KeyboardInterrupt:
            ledger.end_attempt()
            ledger.close("interrupted")
            raise
        # As on a cluster, SystemExit and the like end the attempt, not the driver.
        except BaseException as error:  # noqa: BLE001
            emit(ledger.end_attempt())
            failure = capture(error, world_rank=0, node_ip="127.0.0.1")
            step = after_failure(FailureKind.WORKER, counts, spec.failure_config)
            counts = step.counts
            emit(
                [
                    AttemptFailed(
                        attempt=start.attempt, failures=(failure,), is_restart=step.is_restart, reason=step.reason
                    )
                ]
            )
            if not step.is_restart:
                ledger.close("failed", describe([failure]))
                end = RunEnd(state="failed", attempt=start.attempt, reason=step.reason, failures=(failure,))
                return end, None, error
            text = f"attempt {start.attempt} failed, restarting ({step.reason}): {describe([failure])}"
            emit([Notice(level=logging.WARNING, text=text)])
        else:
            emit(ledger.rank_finished(0))
            emit(ledger.end_attempt())
            ledger.close("finished")
            return RunEnd(state="finished", attempt=start.attempt), value, None
        finally:
            set_context(None)


def _context(
    spec: RunSpec,
    ledger: Ledger,
    attempt: int,
    first_report_index: int,
    checkpoint: Any,
    emit: Callable[[Sequence[Event]], None],
) -> TrainContext:
    store = RunStore(spec.root, spec.run_name)
    resources = {"CPU": float(os.cpu_count() or 1)}
    if spec.scaling_config.use_gpu:
        resources["GPU"] = 1.0
    return TrainContext(
        worker=WorkerIdentity(resources=resources, node_ip="127.0.0.1"),
        run=RunIdentity(
            name=spec.run_name, path=store.path, run_id=spec.run_id, attempt=attempt, metadata=dict(spec.metadata)
        ),
        scaling_config=spec.scaling_config,
        store=store,
        reporter=Reporter(store, _DirectSink(ledger, emit), attempt=attempt, first_report_index=first_report_index),
        shards=shard_makers(spec.datasets, world_rank=0, world_size=1, fetch=lambda payload: payload),
        checkpoint=checkpoint,
    )
