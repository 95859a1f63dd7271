"""What driver, controller and workers say to each other: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..configs.checkpoint import CheckpointConfig
from ..configs.failure import FailureConfig
from ..configs.scaling import ScalingConfig
from ..context.identity import RunIdentity, WorkerIdentity
from ..storage.checkpoint import Checkpoint
from ..storage.root import StorageRoot
from .backend import BackendConfig
from .decide import Counts
from .failures import WorkerFailure
from .probe import Probe

__all__ = [
    "AttemptFailed",
    "AttemptStarted",
    "CheckpointCommitted",
    "DatasetShipment",
    "Event",
    "Notice",
    "ReportCompleted",
    "RunEnd",
    "RunReturn",
    "RunSpec",
    "WorkerSetup",
]


@attrs.frozen(kw_only=True)
class DatasetShipment:
    """One dataset on its way to the workers.

    Attributes:
        is_split: Each rank reads a part of it; otherwise all read the whole.
        remainder: ``DataConfig.remainder``.
        payload: Ray reference to what every rank gets, or the object itself in local mode;
            None for a dataset that splits itself.
        source: The same for a dataset that splits itself, on its way to where that is done;
            None when it is done, and for the others.
        parts: One object per rank of the attempt, once such a dataset is split; else None.
    """

    is_split: bool
    remainder: str
    payload: Any = None
    source: Any = None
    parts: tuple[Any, ...] | None = None


@attrs.frozen(kw_only=True)
class RunSpec:
    """All that a controller needs to direct a run.

    Attributes:
        run_name: Name of the run.
        run_id: 32 hex digits of this ``fit()``.
        root: Where runs are stored.
        function: Ray reference to the pickled train function and its config.
        wants_reports: Whether the driver has callbacks that see reports.
        metrics_over_ranks: ``RunConfig.metrics_over_ranks``.
    """

    run_name: str
    run_id: str
    root: StorageRoot = attrs.field(repr=False)
    function: Any = None
    scaling_config: ScalingConfig
    checkpoint_config: CheckpointConfig
    failure_config: FailureConfig
    backend_config: BackendConfig
    datasets: Mapping[str, DatasetShipment]
    metadata: Mapping[str, Any]
    worker_runtime_env: Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    start_checkpoint: Checkpoint | None = None
    resume: str = "auto"
    wants_reports: bool = False
    metrics_over_ranks: tuple[str, ...] = ()
    log_level: str = "INFO"
    config_record: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class WorkerSetup:
    """What a worker needs once the ranks are known.

    Attributes:
        probe: What tells whether this node has the driver's disk; None where storage is no disk.
    """

    identity: WorkerIdentity
    run: RunIdentity
    root: StorageRoot = attrs.field(repr=False)
    scaling_config: ScalingConfig
    first_report_index: int
    checkpoint: Checkpoint | None
    datasets: Mapping[str, DatasetShipment]
    journal_folder: str
    log_level: str
    probe: Probe | None = None


@attrs.frozen(kw_only=True)
class RunReturn:
    """How the train function of one rank ended.

    Attributes:
        failure: Its exception, or None.
        num_records: Records that this rank has made in the attempt.
        value_problem: Why the return value could not be sent, or None.
        has_read_checkpoint: Whether it asked for the checkpoint it could start from.
        has_seen_preemption: Whether it asked about a preemption and was told of one.
    """

    failure: WorkerFailure | None = None
    num_records: int = 0
    value_problem: str | None = None
    has_read_checkpoint: bool = False
    has_seen_preemption: bool = False


# -- events: controller -> driver ------------------------------------------------------------


@attrs.frozen(kw_only=True)
class AttemptStarted:
    """A worker group is up and its train functions are starting."""

    attempt: int
    world_size: int
    checkpoint_path: str | None


@attrs.frozen(kw_only=True)
class ReportCompleted:
    """The n-th reports of the ranks; only sent when a callback wants them."""

    report_index: int
    lines: Mapping[int, bytes]
    checkpoint: Checkpoint | None = None


@attrs.frozen(kw_only=True)
class CheckpointCommitted:
    """A checkpoint is complete and will survive."""

    report_index: int
    checkpoint: Checkpoint
    metrics: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class AttemptFailed:
    """An attempt ended without success.

    Attributes:
        counts: All failures until now, for a controller that takes over.
    """

    attempt: int
    failures: tuple[WorkerFailure, ...]
    is_restart: bool
    reason: str
    counts: Counts = attrs.field(factory=Counts)


@attrs.frozen(kw_only=True)
class Notice:
    """A line for the user's log."""

    level: int
    text: str


@attrs.frozen(kw_only=True)
class RunEnd:
    """The last event of a run.

    Attributes:
        state: ``"finished"``, ``"failed"`` or ``"interrupted"``.
        failures: What the last attempt failed with.
        value: Ray reference to rank 0's pickled return value, or None.
        value_problem: Why there is none.
        metrics: Rank 0's last report, from memory: the storage may have refused it. None where nobody knows.
        is_preemption: The failures are the loss of nodes or a request to end.
        error: An error that no worker raised (storage, resources, the library itself), or None.
    """

    state: str
    attempt: int = 0
    reason: str = ""
    failures: tuple[WorkerFailure, ...] = ()
    value: Any = None
    value_problem: str | None = None
    error: BaseException | None = None
    is_preemption: bool = False
    metrics: Mapping[str, Any] | None = None


Event = AttemptStarted | ReportCompleted | CheckpointCommitted | AttemptFailed | Notice | RunEnd
