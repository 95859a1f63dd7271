"""``DataParallelTrainer.fit()``: the driver's half of a run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from .callback import RunContext
from .configs import DataConfig, RunConfig, ScalingConfig
from .configs._options import expect_config
from .context.preemption import DEFAULT_GRACE_S
from .data.sources import check_datasets
from .errors import (
    DOCUMENT,
    ConfigError,
    ConfigTypeError,
    ControllerError,
    StorageError,
    TrainError,
    WorkerGroupError,
    explained,
)
from .execution.backend import BackendConfig
from .execution.controller_deaths import ControllerDeaths
from .execution.datasets import pack_datasets
from .execution.decide import Counts
from .execution.failures import build_error, culprit_first, restore_exception
from .execution.fresh import fresh_name
from .execution.ledger import Ledger
from .execution.messages import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    DatasetShipment,
    Event,
    Notice,
    ReportCompleted,
    RunEnd,
    RunSpec,
)
from .execution.train_function import check_train_function, pickle_train_function, size_warning
from .result import Result, build_result
from .storage.checkpoint import Checkpoint
from .storage.root import StorageRoot
from .storage.store import RunStore

if TYPE_CHECKING:
    from .execution.worker_group import WorkerGroup

__all__ = ["DataParallelTrainer"]

logger = logging.getLogger("ray_lite.train")

_INTERRUPT_TIMEOUT_S = 10.0
_STOP_LOOK_S = 0.5


class DataParallelTrainer:
    """Runs a training function on N workers.

    Args:
        train_loop_per_worker: The train function. It takes nothing, or ``train_loop_config``,
            and a parameter annotated with ``TrainContext`` if it wants the context handed over.
        train_loop_config: Passed to the train function; each worker gets its own copy.
        backend_config: What the framework needs around the train function.
        scaling_config: How many workers, and with which resources; ``num_workers=0`` runs the
            function in this process, without Ray.
        run_config: Name, storage, checkpoints, failures, callbacks.
        datasets: Name → data, for ``train.get_dataset_shard(name)``.
        dataset_config: Which of them are split over the workers, and how.
        metadata: For ``get_context().get_metadata()``; JSON-able values.
        resume_from_checkpoint: What the first attempt starts from while the run has no
            checkpoint of its own; never deleted by this run. A Checkpoint, or its path.

    Raises:
        ConfigError: An argument is of the wrong type or can never work. Nothing has started.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> None:
        owner = type(self).__name__
        self.backend_config = expect_config(f"{owner}(backend_config)", backend_config, BackendConfig)
        self.scaling_config = expect_config(f"{owner}(scaling_config)", scaling_config, ScalingConfig)
        self.run_config = expect_config(f"{owner}(run_config)", run_config, RunConfig)
        self.dataset_config = expect_config(f"{owner}(dataset_config)", dataset_config, DataConfig)
        self._function = check_train_function(train_loop_per_worker, train_loop_config)
        self._sources = check_datasets(datasets, self.dataset_config)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigTypeError(f"{owner}(metadata=...) must be a dict, got {type(metadata).__name__}")
        self._metadata = dict(metadata or {})
        if resume_from_checkpoint is None or isinstance(resume_from_checkpoint, Checkpoint):
            self._start_checkpoint = resume_from_checkpoint
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
            self._start_checkpoint = Checkpoint(os.fspath(resume_from_checkpoint))
        else:
            raise ConfigTypeError(
                f"{owner}(resume_from_checkpoint=...) must be a Checkpoint or its path, "
                f"got {type(resume_from_checkpoint).__name__}"
            )

    def fit(self) -> Result:
        """Run the training, and wait for its end.

        May be called from any thread, and again: with the same name, a second call continues
        from the newest checkpoint.

        Returns:
            Metrics, checkpoints, the return value of rank 0 and the path of the run.

        Raises:
            WorkerGroupError: A train function raised or a worker died, and no restart was
                left. ``__cause__`` is the user's exception, ``.result`` what was saved.
            TrainFunctionError: The function captures something that cannot be pickled.
            StorageError: The storage path cannot be used, or ``resume_from_checkpoint`` is not there; no worker
                has started.
            ResourcesError: The workers can never fit on this cluster.
            KeyboardInterrupt: Ctrl-C; the workers are gone and their room is given back.
        """
        with _visible_log(self.run_config.logging_config.log_level):
            return _Run(self).fit()


class _Run:
    """One call of ``fit()``."""

    def __init__(self, trainer: DataParallelTrainer) -> None:
        self._trainer = trainer
        self._scaling = trainer.scaling_config
        config = self._config = trainer.run_config
        self._root = StorageRoot(
            path=config.storage_path, options=dict(config.storage_options or {}), filesystem=config.storage_filesystem
        )
        assert config.name is not None
        name = config.name
        if config.resume == "never":
            name = fresh_name(self._root, config.name)
            if name != config.name:
                logger.info('resume="never": there is a run %s already, so this one is %s', config.name, name)
        self._store = RunStore(self._root, name)
        self._run_id = uuid.uuid4().hex
        self._callbacks = list(config.callbacks)
        self._controller: Any = None
        self._first_group: WorkerGroup | None = None
        # Kept here, so that a controller that takes over goes on counting.
        self._counts = Counts()
        self._num_attempts = self._num_commits = 0
        self._context = RunContext(
            run_id=self._run_id,
            path=self._store.path,
            run_config=config,
            scaling_config=self._scaling,
            backend_config=trainer.backend_config,
            dataset_config=trainer.dataset_config,
            train_loop_config=trainer._function.config,
        )

    def fit(self) -> Result:
        end, value, error = self._fit_here() if self._scaling.is_local else self._fit_on_cluster()
        result = self._result(end, value)
        if end.state == "finished":
            if end.value_problem is not None:
                logger.warning("%s; result.return_value is None", end.value_problem)
            self._call("on_run_end", result)
            return result
        failure = self._failure(end, result, error)
        self._call("on_run_end", result)
        raise failure

    # -- local -------------------------------------------------------------------------------

    def _fit_here(self) -> tuple[RunEnd, Any, BaseException | None]:
        from .execution.local import run_locally

        self._check_start()

        shipments = self._pack(put=lambda value: value)
        spec = self._spec(function=None, datasets=shipments)
        ledger = Ledger(
            self._store,
            run_id=self._run_id,
            checkpoint_config=self._config.checkpoint_config,
            config_record=spec.config_record,
            start_checkpoint=self._trainer._start_checkpoint,
            resume=self._config.resume,
            wants_reports=spec.wants_reports,
            metrics_over_ranks=spec.metrics_over_ranks,
        )
        self._call("on_run_start")
        return run_locally(spec, ledger, self._trainer._function, self._handle)

    # -- on a cluster ------------------------------------------------------------------------

    def _fit_on_cluster(self) -> tuple[RunEnd, Any, BaseException | None]:
        with _late_interrupt():
            # Half of it, after Ctrl-C, could never be imported again in this process.
            import ray

        # What can fail without a cluster fails before there is one.
        function = pickle_train_function(self._trainer._function)
        if warning := size_warning(len(function)):
            logger.warning("%s", warning)
        if not self._root.is_shared_between_processes:
            raise ConfigError(
                f"{self._store.path} lies in the memory of one process, which workers cannot reach; use a folder "
                "or an object store, or num_workers=0"
            )
        self._store.check_writable()
        self._check_start()
        from .execution.cluster import connect, is_gone
        from .execution.probe import check_client_storage
        from .execution.worker_group import check_room, remove_rooms

        with connect(self._scaling, self._trainer.backend_config.preload_modules), _one_sigterm():
            check_client_storage(self._root.child(self._store.name))
            check_room(self._scaling)
            try:
                group = self._start_first_group()
                spec = self._spec(function=ray.put(function), datasets=self._pack(put=ray.put))
                self._call("on_run_start")
                end = self._direct(spec, group)
                value = None
                if end.value is not None:
                    value, problem = _fetch_value(end.value)
                    if problem is not None:
                        logger.warning("%s; result.return_value is None", problem)
                if self._controller is not None:
                    ray.kill(self._controller)
            except BaseException:
                if is_gone():
                    raise
                # Ctrl-C may come between any two lines: what was taken is looked up, not remembered.
                _give_back(self._first_group)
                with contextlib.suppress(Exception):
                    if self._controller is not None:
                        ray.kill(self._controller)
                    remove_rooms(self._run_id)
                raise
            finally:
                # The traceback of an exception that somebody keeps would hold on to what lies in the cluster.
                self._first_group = self._controller = None
        return end, value, None

    def _check_start(self) -> None:
        """See that the checkpoint to start from is there; the workers would only find out when they read it.

        Raises:
            CheckpointNotFoundError: It is not.
        """
        start = self._trainer._start_checkpoint
        # A run that has checkpoints of its own goes on from those.
        if start is not None and not self._store.list_checkpoints():
            start.files()

    def _start_first_group(self) -> WorkerGroup | None:
        """Ask for the first workers at once: they come up while the controller does.

        In an embedded cluster they also take the processes that have imported the framework
        ahead, before the controller can. An elastic group waits for the controller, which
        chooses its size.
        """
        from .execution.worker_group import Room, WorkerGroup

        if self._scaling.elasticity_enabled:
            return None
        group = self._first_group = WorkerGroup(
            self._scaling,
            Room(self._scaling, self._scaling.max_workers, self._run_id, self._store.name),
            self._config.worker_runtime_env,
            self._trainer.backend_config.preload_modules,
            self._config.failure_config.standby_workers,
        )
        group.fill()
        group.begin_imports()
        return group

    def _direct(self, spec: RunSpec, group: WorkerGroup | None) -> RunEnd:
        """Start a controller and follow it; start another when it dies."""
        import ray
        from ray.exceptions import RayActorError

        from .execution.cluster import is_gone
        from .execution.exits import death_detail
        from .execution.worker_group import remove_rooms

        deaths = ControllerDeaths()
        while True:
            attempts_before, commits_before = self._num_attempts, self._num_commits
            controller = self._controller = self._start_controller(spec, self._counts, group)
            running = controller.run.remote()
            try:
                return self._follow(controller)
            except RayActorError as error:
                _give_back(group)
                group = None
                remove_rooms(self._run_id)
                deaths = deaths.one_more(
                    has_started=self._num_attempts > attempts_before, has_committed=self._num_commits > commits_before
                )
                limit = self._config.failure_config.controller_failure_limit
                allowed = "without limit" if limit < 0 else f"controller_failure_limit={limit}"
                what = f"the controller of the run died: {death_detail(str(error))}; death {deaths.total} ({allowed})"
                if not deaths.may_restart(limit):
                    if deaths.without_attempt:
                        what += f", {deaths.without_attempt} in a row before any worker had started"
                    return RunEnd(state="failed", reason=what, error=error)
                after = f" in {deaths.delay_s:.0f} s, as it gets nowhere" if deaths.delay_s else ""
                logger.warning("%s", explained(f"{what}; a new one starts{after}"))
                threading.Event().wait(deaths.delay_s)
                # By now there is a run of this name, and it is this one.
                spec = attrs.evolve(spec, resume="auto")
            except BaseException as error:
                # Ctrl-C, SIGTERM, an error of our own: give everything back before it goes on. SIGTERM comes
                # as SystemExit from Ray's handler, and leaves the train functions time to save.
                grace_s = 0.0
                if isinstance(error, SystemExit):
                    grace_s = self._config.failure_config.preemption_grace_s or DEFAULT_GRACE_S
                    text = f"the driver was asked to end: train functions get {grace_s:g} s to save; {self._store.path}"
                    logger.warning("%s", explained(text))
                with contextlib.suppress(Exception):
                    _stop(controller, grace_s)
                with contextlib.suppress(Exception):
                    if not is_gone():
                        ray.kill(controller)
                raise
            finally:
                del running

    def _start_controller(self, spec: RunSpec, counts: Counts, group: WorkerGroup | None) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return (
            _controller_class()
            .options(
                num_cpus=0,
                max_restarts=0,
                # Each worker has one call under way at a time, and the driver two.
                max_concurrency=2 * self._scaling.max_workers + 1_000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            )
            .remote(spec, counts, group)
        )

    def _follow(self, controller: Any) -> RunEnd:
        import ray

        num_seen = 0
        while True:
            events: Sequence[Event] = ray.get(controller.next_events.remote(num_seen))
            num_seen += len(events)
            self._handle(events)
            if isinstance(events[-1], RunEnd):
                return events[-1]

    # -- events ------------------------------------------------------------------------------

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Notice):
                is_symptom = event.level >= logging.WARNING
                logger.log(event.level, "%s", explained(event.text) if is_symptom else event.text)
            elif isinstance(event, AttemptStarted):
                self._num_attempts += 1
            elif isinstance(event, ReportCompleted):
                self._on_report(event)
            elif isinstance(event, CheckpointCommitted):
                self._num_commits += 1
                self._call("after_checkpoint", event.checkpoint, dict(event.metrics))
            elif isinstance(event, AttemptFailed):
                self._counts = event.counts
                if self._callbacks:
                    by_rank = {f.world_rank: f for f in event.failures}
                    exceptions = {rank: restore_exception(by_rank[rank]) for rank in culprit_first(event.failures)}
                    self._call("after_exception", exceptions)
                if event.is_restart:
                    self._call("on_restart", event.attempt, event.reason)

    def _on_report(self, event: ReportCompleted) -> None:
        import json

        metrics: list[dict[str, Any]] = [{} for _ in range(max(event.lines) + 1)]
        for rank, line in event.lines.items():
            metrics[rank] = json.loads(line)["m"]
        self._call("after_report", metrics, event.checkpoint)

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            try:
                method(self._context, *args)
            # A callback watches the training; it must not be able to end it by accident.
            except Exception:
                logger.exception("%s.%s failed; the training goes on", type(callback).__name__, hook)

    # -- small things ------------------------------------------------------------------------

    def _spec(self, *, function: Any, datasets: Mapping[str, DatasetShipment]) -> RunSpec:
        config = self._config
        return RunSpec(
            run_name=self._store.name,
            run_id=self._run_id,
            root=self._root,
            function=function,
            scaling_config=self._scaling,
            checkpoint_config=config.checkpoint_config,
            failure_config=config.failure_config,
            backend_config=self._trainer.backend_config,
            datasets=datasets,
            metadata=self._trainer._metadata,
            worker_runtime_env=config.worker_runtime_env,
            start_checkpoint=self._trainer._start_checkpoint,
            resume=config.resume,
            wants_reports=any(_overrides(callback, "after_report") for callback in self._callbacks),
            metrics_over_ranks=config.metrics_over_ranks,
            log_level=config.logging_config.log_level,
            config_record={
                "scaling_config": self._scaling.to_dict(),
                "checkpoint_config": config.checkpoint_config.to_dict(),
                "failure_config": config.failure_config.to_dict(),
            },
        )

    def _pack(self, *, put: Callable[[Any], Any]) -> dict[str, DatasetShipment]:
        return pack_datasets(self._trainer._sources, remainder=self._trainer.dataset_config.remainder, put=put)

    def _result(self, end: RunEnd, value: Any) -> Result:
        metrics = end.metrics
        checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = []
        try:
            if metrics is None:
                # The controller could not say: it died.
                record = self._store.read_record()
                metrics = None if record is None else record.metrics
            checkpoints = [
                (self._store.open_checkpoint(committed), dict(committed.manifest.metrics))
                for committed in self._store.list_checkpoints()
            ]
        except StorageError as error:
            # The training is over: what it returned must not be lost for a last look at its storage.
            logger.warning("%s", explained(f"{error}; the result lacks the checkpoints that lie there"))
        return build_result(
            self._store,
            metrics=metrics,
            checkpoints=checkpoints,
            score_attribute=self._config.checkpoint_config.checkpoint_score_attribute,
            score_order=self._config.checkpoint_config.checkpoint_score_order,
            return_value=value,
        )

    def _failure(self, end: RunEnd, result: Result, error: BaseException | None) -> BaseException:
        if end.failures:
            failed = build_error(
                end.failures,
                attempt=end.attempt,
                reason=end.reason,
                run_path=self._store.path,
                result=result,
                is_preemption=end.is_preemption,
            )
            if error is not None:  # local mode: the very object, with its traceback
                failed.__cause__ = error
                if isinstance(failed, WorkerGroupError):
                    failed.worker_failures[0] = error
            failed.result = attrs.evolve(result, error=failed)
            if self._config.failure_config.fail_fast == "raise" and failed.__cause__ is not None:
                return failed.__cause__
            return failed
        if isinstance(end.error, TrainError):
            return end.error
        text = f"training failed: {end.reason}\nthe run lies in {self._store.path}\n{DOCUMENT} explains this message."
        controller_error = ControllerError(text, end.error, result)
        controller_error.__cause__ = end.error
        controller_error.result = attrs.evolve(result, error=controller_error)
        return controller_error


@functools.cache
def _controller_class() -> Any:
    """The actor class; Ray would pickle it anew for each run."""
    import ray

    from .execution.controller import Controller

    return ray.remote(Controller)


@contextlib.contextmanager
def _late_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])


@contextlib.contextmanager
def _one_sigterm() -> Iterator[None]:
    """Let the first SIGTERM reach its Python handler (Ray's, or the user's), and no other one; Ctrl-C still ends all.

    While the train functions save because of the first, another one says nothing new. And ``ray.init()`` (2.60)
    leaves a handler of C++'s in the place of that of Python, which calls the latter and aborts the process three
    seconds later, whoever still saves.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    has_come = False

    def once(number: int, frame: Any) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            handler(number, frame)

    signal.signal(signal.SIGTERM, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _stop(controller: Any, grace_s: float) -> None:
    """Ask the controller to end the run, and wait for it while there is a cluster that can answer."""
    import ray

    from .execution.cluster import is_gone

    stopped = controller.stop.remote(grace_s)
    deadline = time.monotonic() + grace_s + _INTERRUPT_TIMEOUT_S
    while time.monotonic() < deadline and not is_gone():
        if ray.wait([stopped], timeout=_STOP_LOOK_S)[0]:
            return


def _give_back(group: WorkerGroup | None) -> None:
    """End workers that the driver has started and nobody else will end."""
    if group is not None:
        group.close()
        group.room.remove()


def _overrides(callback: Any, hook: str) -> bool:
    from .callback import Callback

    method = getattr(type(callback), hook, None) or getattr(callback, hook, None)
    return method is not None and method is not getattr(Callback, hook)


def _fetch_value(reference: Any) -> tuple[Any, str | None]:
    import ray

    from .execution.worker import unpickle_value

    try:
        data = ray.get(reference)
        return (None if data is None else unpickle_value(data)), None
    # The value's class may need a module or a device that this process does not have.
    except Exception as error:  # noqa: BLE001
        return None, f"the return value of rank 0 cannot be opened here: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _visible_log(level: str) -> Iterator[None]:
    """Let the library's few lines be seen while ``fit()`` runs, unless the user has set up logging."""
    root = logging.getLogger("ray_lite")
    if root.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ray_lite: %(message)s"))
    old_level = root.level
    root.addHandler(handler)
    if root.level == logging.NOTSET:
        root.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(old_level)
