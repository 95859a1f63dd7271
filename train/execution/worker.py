"""One worker: an actor whose main thread runs the train function, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..context.current import set_context
from ..context.journal import Journal, remove_journal, sweep
from ..context.outbox import Outbox
from ..context.reporter import Reporter
from ..context.scratch import Scratch
from ..context.train_context import TrainContext
from ..errors import CollectiveError
from ..storage.store import RunStore
from .control import Process
from .datasets import shard_makers
from .failures import capture
from .messages import RunReturn, WorkerSetup
from .probe import as_seen_here
from .ranks import WorkerFacts
from .signs import WorkerSigns
from .train_function import TrainFunction, open_train_function

__all__ = ["Worker"]

logger = logging.getLogger("ray_lite.train")

_FLUSH_TIMEOUT_S = 30.0
_INLINE_BYTES = 100_000


class Worker:
    """Runs the train function of one rank.

    Its methods are called one after the other by the controller: ``describe``, ``setup``,
    then those of the backend through ``execute``, then ``run``. A plain actor with one
    thread runs them all in the process's main thread, so signal handlers, asyncio and
    libraries that insist on the main thread work.
    """

    def describe(self, preload_modules: Sequence[str]) -> WorkerFacts:
        """Where this worker landed. Imports the backend's modules first, while others still start."""
        import importlib

        import ray

        for module in preload_modules:
            importlib.import_module(module)
        runtime = ray.get_runtime_context()
        gpu_ids = tuple(str(gpu_id) for gpu_id in runtime.get_accelerator_ids().get("GPU", []))
        return WorkerFacts(
            node_id=runtime.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            started=Process.this().started,
            gpu_ids=gpu_ids,
        )

    def setup(self, setup: WorkerSetup, function: bytes, controller: Any) -> bool:
        """Make the context and the way back to the controller; open the train function.

        Returns:
            Whether files go through the controller, because this node does not have the driver's disk.
        """
        import ray

        logging.getLogger("ray_lite").setLevel(setup.log_level)
        identity, attempt = setup.identity, setup.run.attempt
        rank = identity.world_rank

        def send(first: int, records: Sequence[bytes]) -> None:
            for command in ray.get(controller.push.remote(attempt, rank, first, list(records))):
                self._signs.told(command)

        def meet(kind: str, payload: Any, timeout_s: float) -> Any:
            # In a list, so that the controller passes a reference on instead of fetching the data.
            brought = [ray.put(payload)] if isinstance(payload, bytes) and len(payload) > _INLINE_BYTES else payload
            got = ray.get(controller.meet.remote(attempt, rank, kind, brought, timeout_s))
            if isinstance(got, CollectiveError):
                raise got
            return ray.get(got[0]) if isinstance(got, list) else got

        def committed(num_reports: int, timeout_s: float | None) -> list[tuple[str, dict[str, Any]]]:
            found: list[tuple[str, dict[str, Any]]] = ray.get(
                controller.committed.remote(attempt, num_reports, timeout_s)
            )
            return found

        self._identity = identity
        # The controller has named the folder; where this process's own would be, does not matter.
        self._folder = setup.journal_folder
        sweep(Path(setup.journal_folder).parents[2])
        # It makes the folder, in which the signs lie too.
        journal = Journal(setup.journal_folder)
        self._signs = WorkerSigns(
            setup.journal_folder, on_sigterm=lambda: controller.sigterm_received.remote(attempt, rank)
        )
        self._outbox = Outbox(
            send,
            journal,
            is_temporary=lambda error: isinstance(error, ray.exceptions.ActorUnavailableError),
            beat=self._signs.beat,
        )
        root, checkpoint, is_carried = as_seen_here(setup.root, setup.checkpoint, setup.probe, controller)
        store = RunStore(root, setup.run.name)
        self._reporter = Reporter(
            store,
            self._outbox,
            attempt=attempt,
            first_report_index=setup.first_report_index,
            scratch=Scratch(setup.journal_folder),
            beat=self._signs.beat,
        )
        self._context = TrainContext(
            worker=identity,
            run=setup.run,
            scaling_config=setup.scaling_config,
            store=store,
            reporter=self._reporter,
            shards=shard_makers(setup.datasets, world_rank=rank, world_size=identity.world_size, fetch=ray.get),
            checkpoint=checkpoint,
            meet=meet,
            committed=committed,
            notices=self._signs.notices,
            beat=self._signs.beat,
        )
        set_context(self._context)
        self._function: TrainFunction = open_train_function(function)
        return is_carried

    def execute(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of the backend in this process."""
        return function(*args, **kwargs)

    def run(self) -> tuple[RunReturn, bytes | None]:
        """Call the train function.

        Returns:
            How it ended, and on rank 0 its pickled return value.
        """
        failure = value = value_problem = None
        pid = os.getpid()
        try:
            value = self._function(self._context)
            if os.getpid() != pid:
                _end_child(None)
            self._reporter.finish()
        # SystemExit, KeyboardInterrupt and GeneratorExit of the user's code end the rank like any other exception.
        except BaseException as error:  # noqa: BLE001
            if os.getpid() != pid:
                _end_child(error)
            failure = capture(error, world_rank=self._identity.world_rank, node_ip=self._identity.node_ip)
            # What was handed over before is stored, if the storage does not take too long.
            self._reporter.give_up(_FLUSH_TIMEOUT_S)
        pickled: bytes | None = None
        if failure is None and self._identity.world_rank == 0 and value is not None:
            pickled, value_problem = _pickle_value(value)
        del value
        # What does not arrive in time is read back from the journal.
        self._outbox.flush(_FLUSH_TIMEOUT_S)
        return RunReturn(
            failure=failure,
            num_records=self._outbox.num_added,
            value_problem=value_problem,
            has_read_checkpoint=self._context.has_read_checkpoint,
            has_seen_preemption=self._context.has_seen_preemption,
        ), pickled

    def teardown(self, has_arrived: bool = False) -> None:
        """The attempt is over: end the threads, take the context away.

        Args:
            has_arrived: Everything has arrived, so that this worker's own folder can go, too.
        """
        set_context(None)
        self._signs.close()
        self._outbox.close(_FLUSH_TIMEOUT_S)
        if has_arrived:
            remove_journal(self._folder)
            # Those of the attempt and of the run, once nobody else on this node has anything in them.
            for parent in list(Path(self._folder).parents)[:2]:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that the train function has forked, and that leaves the function by the same way as its parent.

    It has none of Ray's threads, so that its "result" would never arrive and the process never end.
    """
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _pickle_value(value: Any) -> tuple[bytes | None, str | None]:
    import ray.cloudpickle as cloudpickle

    try:
        return cloudpickle.dumps(value), None
    # A lock, a generator, a CUDA handle: the run is finished all the same.
    except Exception as error:  # noqa: BLE001
        return None, f"the return value ({type(value).__name__}) cannot be pickled: {error}"


def unpickle_value(data: bytes) -> Any:
    """The return value, on the driver."""
    return pickle.loads(data)
