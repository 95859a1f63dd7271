"""What a train function can ask about itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DatasetNotFoundError
from ..storage.checkpoint import Checkpoint
from .identity import RunIdentity, WorkerIdentity
from .reporter import Reporter

if TYPE_CHECKING:
    from ..configs.placement_group_factory import PlacementGroupFactory
    from ..configs.scaling import ScalingConfig
    from ..storage.store import RunStore

__all__ = ["TrainContext"]


class TrainContext:
    """One worker's view of the run: its ranks, its resources, and the way to report.

    A train function gets it from ``train.get_context()``, or as an argument that is
    annotated with this class; both are the same object. It belongs to the worker process,
    so every thread of the train function may use it.

    Args:
        worker: This worker's place in the group.
        run: The run and attempt it works for.
        scaling_config: What the trainer was given.
        store: Where the run lies.
        reporter: Carries the reports.
        shards: Dataset name → function that makes this worker's shard.
        checkpoint: What this attempt starts from.
        meet: Brings the ranks together, see ``meet``; None where this is the only rank.
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
    ) -> None:
        self._worker, self._run, self._scaling_config = worker, run, scaling_config
        self._store, self._reporter = store, reporter
        self._shard_makers, self._shards, self._shards_lock = dict(shards), {}, threading.Lock()  # type: ignore[var-annotated]
        self._start_checkpoint = checkpoint
        self._meet = meet or (lambda kind, payload, timeout_s: payload)
        self.has_read_checkpoint = False
        """Whether the train function has asked for the checkpoint it could continue from."""

    # -- reports ---------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """The same as ``train.report``."""
        self._reporter.report(metrics, checkpoint)

    def get_checkpoint(self) -> Checkpoint | None:
        """The same as ``train.get_checkpoint``."""
        self.has_read_checkpoint = True
        return self._reporter.newest_checkpoint or self._start_checkpoint

    def get_dataset_shard(self, name: str = "train") -> Any:
        """The same as ``train.get_dataset_shard``."""
        with self._shards_lock:
            if name not in self._shards:
                if name not in self._shard_makers:
                    raise DatasetNotFoundError(name, tuple(sorted(self._shard_makers)))
                self._shards[name] = self._shard_makers[name]()
            return self._shards[name]

    def meet(self, kind: str, payload: Any, timeout_s: float) -> Any:
        """Come together with all ranks; what ``train.collective`` is made of.

        Args:
            kind: Name of the call, the same on every rank.
            payload: What this rank brings.
            timeout_s: Seconds to wait, > 0.

        Returns:
            What rank 0 brought.

        Raises:
            CollectiveError: The ranks did not come together.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be > 0, got {timeout_s!r}")
        return self._meet(kind, payload, timeout_s)

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
        """Where the run lies: a folder, or a URI for remote storage."""
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
