"""What a train function can ask about itself."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConfigTypeError, DatasetNotFoundError, NotInTrainFunctionError
from ..storage.checkpoint import Checkpoint
from .identity import RunIdentity, WorkerIdentity
from .preemption import Notices, PreemptionInfo
from .reported import CheckpointConsistencyMode, ReportedCheckpoint
from .reporter import Reporter
from .staging import StagingDirectory
from .upload_mode import CheckpointUploadMode, UploadOptions

if TYPE_CHECKING:
    from ..configs.placement_group_factory import PlacementGroupFactory
    from ..configs.scaling import ScalingConfig
    from ..storage.store import RunStore

__all__ = ["TrainContext"]

logger = logging.getLogger("ray_lite.train")

_FLUSH_NOTICE_S = 30.0


class TrainContext:
    """One worker's view of the run: its ranks, its resources, and the way to report.

    A train function gets it from ``train.get_context()``, or as an argument that is
    annotated with this class; both are the same object. It belongs to the worker process,
    so every thread of the train function may use it. A forked child (a DataLoader's worker) may ask it
    for ranks, resources and the run; what speaks with the controller raises ``NotInTrainFunctionError`` there.

    Args:
        worker: This worker's place in the group.
        run: The run and attempt it works for.
        scaling_config: What the trainer was given.
        store: Where the run lies.
        reporter: Carries the reports.
        shards: Dataset name → function that makes this worker's shard.
        checkpoint: What this attempt starts from.
        meet: Brings the ranks together, see ``meet``; None where this is the only rank.
        committed: Folder and metrics of each kept checkpoint, once those of this rank's first *n*
            reports are settled or a time (seconds, None for ever) is over.
        notices: What the controller tells this worker; None where there is no controller.
        beat: Gives a sign of life; None where nobody looks for one.
    """

    def __init__(
        self,
        *,
        worker: WorkerIdentity,
        run: RunIdentity,
        scaling_config: ScalingConfig,
        store: RunStore,
        reporter: Reporter,
        shards: Mapping[str, Callable[[], Any]],
        checkpoint: Checkpoint | None = None,
        meet: Callable[[str, Any, float], Any] | None = None,
        committed: Callable[[int, float | None], list[tuple[str, dict[str, Any]]]] | None = None,
        notices: Notices | None = None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        self._worker, self._run, self._scaling_config = worker, run, scaling_config
        self._store, self._reporter = store, reporter
        self._shard_makers, self._shards = dict(shards), dict[str, Any]()
        # Re-entrant: a signal handler may ask for a shard while one is being made.
        self._shards_lock = threading.RLock()
        self._pid = os.getpid()
        self._start_checkpoint = checkpoint
        self._committed = committed or (lambda num_reports, timeout_s: [])
        self._notices = notices or Notices()
        self._beat = beat or (lambda: None)
        self._meet = meet or (lambda kind, payload, timeout_s: payload)
        self.takes_sigterm = notices is not None
        """Whether a SIGTERM to this process is a notice for the train function, and not its end."""
        self.has_read_checkpoint = False
        """Whether the train function has asked for the checkpoint it could continue from."""

    # -- reports ---------------------------------------------------------------------------

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
        validation: bool = False,
    ) -> None:
        """Report metrics, and perhaps a checkpoint, from this worker.

        Not a barrier: it returns without waiting for other ranks or for the controller. The
        n-th reports of all ranks belong together, but ranks may report a different number of
        times, and any of them may attach a checkpoint: the files of all are merged.

        Metrics of rank 0 are the run's metrics. They are taken as they are now: later changes
        to the dict are not seen. Numbers (numpy's and torch's scalars too, NaN and infinities),
        strings, lists and dicts are kept; anything else is kept as its ``repr`` with one warning.
        A report that has returned survives the death of this process; only the loss of its node
        can take it away.

        Args:
            metrics: Names to values.
            checkpoint: A folder to keep, from ``Checkpoint.from_directory``. It is copied into the
                run's storage and durable there when this call returns; the folder is left alone.
                One from ``staging_directory()`` gets there by rename, where storage is a local disk.
            checkpoint_dir_name: Name of the checkpoint's folder in the run, the same on every
                rank that attaches files; None: ``checkpoint_<number of the report>``. Attempts
                after the first append ``_attempt_<n>``.
            checkpoint_upload_mode: SYNC, as above. ASYNC: the folder is taken over by a rename
                (copied where that cannot be, or where it is not to be deleted), and a thread
                uploads it, in the order of the reports. The folder is gone when this returns.
                While two uploads wait behind the one that runs, the next call waits too. NO_UPLOAD:
                your own code has stored it directly in the run's folder (``get_trial_dir()``).
            delete_local_checkpoint_after_upload: None: only with ASYNC. No effect with NO_UPLOAD.
            checkpoint_upload_fn: Your own upload, ``(checkpoint, checkpoint_dir_name) -> Checkpoint``:
                stores the files in the run's folder and says where. Called by this thread, or
                with ASYNC by the uploading one. It must not report.
            validation: Not supported yet.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
            ConfigTypeError: An argument has the wrong type.
            ConfigError: An argument has a value that is not allowed, or others still need the
                folder that is to be deleted. The report does not count.
            UploadError: The files could not be stored: those of this call, or of an earlier ASYNC
                one. It may be caught: the report counts (without a checkpoint if its own files
                failed), and the next one works as usual. An ASYNC failure that no call has raised
                is raised at the end of the train function.
            TrainError: Called inside another ``report()`` of the same thread, as a signal handler may
                (set a flag there, and report from the loop), or by ``checkpoint_upload_fn``; or
                reports no longer reach the controller. The report does not count.
        """
        self._check_process("report()")
        options = UploadOptions.of_report(
            dir_name=checkpoint_dir_name,
            mode=checkpoint_upload_mode,
            deletes_local=delete_local_checkpoint_after_upload,
            upload_fn=checkpoint_upload_fn,
            validation=validation,
        )
        self._reporter.report(metrics, checkpoint, options)
        self._notices.reported()

    def get_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from.

        At the start of an attempt that is the newest committed checkpoint of the run, the same
        on every rank, or the one given as ``resume_from_checkpoint``, or None. After this rank
        has stored a checkpoint itself, it is that one.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
        """
        self.has_read_checkpoint = True
        return self._reporter.newest_checkpoint or self._start_checkpoint

    def get_all_reported_checkpoints(
        self,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.COMMITTED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """The checkpoints of the run that are kept now, those of earlier attempts included.

        Waits until those that this rank has reported are committed, which takes the same report
        of all ranks that are still running.

        Args:
            consistency_mode: COMMITTED; VALIDATED means the same, since there are no validation tasks.
            timeout_s: Seconds >= 0 to wait at most; then the list is what there is. None: as long as it takes.

        Returns:
            The best one last when a ``checkpoint_score_attribute`` is set, else the newest last.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
            ConfigError: An argument has a value that is not allowed.
        """
        self._check_process("get_all_reported_checkpoints()")
        CheckpointConsistencyMode.of(consistency_mode)
        if timeout_s is not None and not timeout_s >= 0:
            raise ConfigError(f"timeout_s must be >= 0 or None, got {timeout_s!r}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        # This rank's own uploads first: here it gives signs of life, and where it waits for other ranks it must not.
        self._reporter.wait(left())
        while not self._reporter.flush(_FLUSH_NOTICE_S if deadline is None else left() or 0.0) and deadline is None:
            logger.warning("get_all_reported_checkpoints() waits for the controller to take this worker's reports")
        return [
            ReportedCheckpoint(checkpoint=self._store.open_checkpoint_dir(dir_name), metrics=metrics)
            for dir_name, metrics in self._committed(self._reporter.num_reports, left())
        ]

    def staging_directory(self) -> AbstractContextManager[StagingDirectory]:
        """A folder for the files of the next checkpoint, on the storage's own disk.

        ::

            with train.staging_directory() as folder:
                torch.save(model.state_dict(), folder / "model.pt")
                train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))

        Reporting it renames the files instead of copying them, and their checksums are computed
        while the training goes on: 1 GiB in milliseconds. Where storage is no local disk it is a
        temporary folder that is uploaded like any other. ``folder.link_from(checkpoint, name)``
        shares a file that has not changed since an earlier checkpoint.

        The folder is gone after the ``with`` block; what a killed process leaves of it goes when
        the run starts again.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
            UploadError: The folder cannot be made.
        """
        self._check_process("staging_directory()")
        return self._reporter.staging_directory()

    def get_dataset_shard(self, dataset_name: str = "train") -> Any:
        """This worker's part of a dataset that was passed to the trainer.

        Not a barrier. The same object comes back on each call. See ``DataConfig`` for which
        datasets are split and what happens to rows that do not divide evenly.

        Args:
            dataset_name: Key in the trainer's ``datasets``.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
            DatasetNotFoundError: No dataset of that name; the text lists the known ones.
        """
        if dataset_name in self._shards:
            # In a forked child too, and without the lock, which the child may have inherited taken.
            return self._shards[dataset_name]
        self._check_process("get_dataset_shard()")
        with self._shards_lock:
            if dataset_name not in self._shards:
                if dataset_name not in self._shard_makers:
                    raise DatasetNotFoundError(dataset_name, tuple(sorted(self._shard_makers)))
                self._shards.setdefault(dataset_name, self._shard_makers[dataset_name]())
            return self._shards[dataset_name]

    def meet(self, kind: str, payload: Any, timeout_s: float) -> Any:
        """Come together with all ranks; what ``train.collective`` is made of.

        Args:
            kind: Name of the call, the same on every rank.
            payload: What this rank brings.
            timeout_s: Seconds to wait, > 0.

        Returns:
            What rank 0 brought.

        Raises:
            NotInTrainFunctionError: Called in a forked child of the train function's process.
            CollectiveError: The ranks did not come together.
        """
        self._check_process("train.collective")
        message = f"{kind}(timeout_s=...) must be a number of seconds > 0, got {timeout_s!r}"
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
            raise ConfigTypeError(message)
        if not timeout_s > 0:
            raise ConfigError(message)
        return self._meet(kind, payload, timeout_s)

    # -- the plans of others -----------------------------------------------------------------

    def get_preemption_info(self) -> PreemptionInfo | None:
        """Whether workers of this run are about to be taken away: a node is drained, or a process got SIGTERM.

        Not a barrier, unlike in Ray Train: each rank sees it within milliseconds of the others. A
        train function that was told, and then returns, has been preempted: the run goes on in the
        next attempt from the newest checkpoint, and no failure is counted.

        Returns:
            The deadline and the ranks on the nodes concerned, or None.

        Raises:
            NotInTrainFunctionError: Not called inside a train function.
        """
        self._check_process("get_preemption_info()")
        return self._notices.preemption

    def should_checkpoint(self) -> bool:
        """Whether a checkpoint now would save work: the workers are about to be taken away or their number to change.

        True until this rank's next report after it was told so, with files or without (others may have them). Not a
        barrier: ranks that report alike are told before the same report, some hundred milliseconds after the notice;
        but where their steps take seconds, or they report at different times, they may learn it a step apart, and
        then their files belong to two reports, of which the newer one lacks a part. Where every rank saves one, be
        sure and let rank 0 decide for all:
        ``train.collective.broadcast_from_rank_zero(context.should_checkpoint())``.

        A function that was told of a preemption and returns has left early: it is started again from the newest
        checkpoint.
        """
        self._check_process("should_checkpoint()")
        return self._notices.wants_checkpoint(self._reporter.num_reports)

    @property
    def has_seen_preemption(self) -> bool:
        """Whether the train function was told that it will be preempted."""
        return self._notices.has_seen_preemption

    def heartbeat(self) -> None:
        """Give a sign of life between two reports, for ``FailureConfig(hang_timeout_s=...)``; a microsecond.

        ``report()`` gives them by itself while it waits for storage or for the controller.

        Raises:
            NotInTrainFunctionError: Called in a forked child of the train function's process.
        """
        self._check_process("heartbeat()")
        self._beat()

    # -- ranks -----------------------------------------------------------------------------

    def get_world_size(self) -> int:
        """Number of workers in the group, >= 1."""
        return self._worker.world_size

    def get_world_rank(self) -> int:
        """This worker among all, in ``[0, world_size)``."""
        return self._worker.world_rank

    def get_local_rank(self) -> int:
        """This worker among those on its node, in ``[0, local_world_size)``.

        Not a GPU number: use ``train.torch.get_device()`` for that.
        """
        return self._worker.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this worker's node, >= 1."""
        return self._worker.local_world_size

    def get_node_rank(self) -> int:
        """Index of this worker's node, from 0, in the order of the nodes' lowest world ranks."""
        return self._worker.node_rank

    # -- this worker's own share -----------------------------------------------------------

    def get_num_cpus(self) -> float:
        """CPUs reserved for this worker alone; for threads, use ``max(1, int(get_num_cpus()))``.

        0.0 is possible: a GPU worker reserves no CPU unless ``resources_per_worker`` says so.
        """
        return float(self._worker.resources.get("CPU", 0.0))

    def get_resources(self) -> dict[str, float]:
        """Resources reserved for this worker alone: name → amount (``memory`` in bytes)."""
        return dict(self._worker.resources)

    def get_assigned_gpu_ids(self) -> list[str]:
        """Ids of the GPUs that Ray assigned to this worker, in Ray's order; empty without GPUs."""
        return list(self._worker.gpu_ids)

    # -- the run ---------------------------------------------------------------------------

    def get_experiment_name(self) -> str:
        """Name of the run: ``RunConfig.name``."""
        return self._run.name

    def get_trial_name(self) -> str:
        """Name of the trial; a run is its only trial, so the name of the run."""
        return self._run.name

    def get_trial_id(self) -> str:
        """32 hex digits, the same over all restarts of one ``fit()``."""
        return self._run.run_id

    def get_trial_dir(self) -> str:
        """Where the run lies: a URI, or a folder on the driver's disk.

        A node that does not share that disk reaches it through ``get_storage().filesystem`` alone.
        """
        return self._run.path

    def get_trial_resources(self) -> PlacementGroupFactory:
        """What the whole run reserves, as bundles. For this worker's own share see ``get_resources``."""
        return self._scaling_config.as_placement_group_factory()

    def get_metadata(self) -> dict[str, Any]:
        """The dict passed as ``Trainer(metadata=...)``, or an empty one."""
        return dict(self._run.metadata)

    def get_attempt(self) -> int:
        """Which life of the worker group this is, from 1; grows with each restart and each resumed ``fit()``."""
        return self._run.attempt

    def get_storage(self) -> RunStore:
        """The store of the run, for tools that work on its files (developer API)."""
        return self._store

    def _check_process(self, call: str) -> None:
        """Refuse a forked child: it has the journal's file and the locks, but not the threads that carry reports.

        Raises:
            NotInTrainFunctionError: This is another process than the one that the context was made in.
        """
        if os.getpid() != self._pid:
            raise NotInTrainFunctionError(call, "this is a forked child of the train function's process")
