"""``ray_lite.train``: run a training function on N workers.

::

    from ray_lite import train
    from ray_lite.train import RunConfig, ScalingConfig

    def train_func(config):
        ...
        train.report({"loss": loss}, checkpoint=train.Checkpoint.from_directory(folder))

    result = train.torch.TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="digits", storage_path="/data/runs"),
    ).fit()

Every name loads on first use: importing this module loads neither ray, torch, numpy nor fsspec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import collective, torch
    from .callback import Callback, RunContext, UserCallback
    from .configs import (
        CheckpointConfig,
        DataConfig,
        FailureConfig,
        LoggingConfig,
        PlacementGroupFactory,
        RunConfig,
        ScalingConfig,
    )
    from .context.functions import (
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        report,
        staging_directory,
    )
    from .context.preemption import PreemptionInfo
    from .context.reported import CheckpointConsistencyMode, ReportedCheckpoint, ReportedCheckpointStatus
    from .context.staging import StagingDirectory
    from .context.train_context import TrainContext
    from .context.upload_mode import CheckpointUploadMode
    from .errors import (
        CheckpointConflictError,
        CheckpointDamagedError,
        CheckpointError,
        CheckpointNotFoundError,
        CollectiveError,
        ConfigError,
        ConfigTypeError,
        ControllerError,
        DatasetNotFoundError,
        HangError,
        LegacyAPIError,
        NotInTrainFunctionError,
        PreemptionError,
        RayLiteDeprecationWarning,
        ResourcesError,
        RunInUseError,
        StorageError,
        TrainError,
        TrainFunctionError,
        TrainingFailedError,
        UploadError,
        WorkerDiedError,
        WorkerGroupError,
        WorkerStartError,
    )
    from .execution.backend import Backend, BackendConfig
    from .result import Result
    from .storage.checkpoint import Checkpoint
    from .trainer import DataParallelTrainer

# Where each public name lives, relative to this package.
_HOMES = {
    "report": "context.functions",
    "get_context": "context.functions",
    "get_checkpoint": "context.functions",
    "get_dataset_shard": "context.functions",
    "get_all_reported_checkpoints": "context.functions",
    "get_preemption_info": "context.functions",
    "staging_directory": "context.functions",
    "CheckpointConsistencyMode": "context.reported",
    "CheckpointUploadMode": "context.upload_mode",
    "ReportedCheckpoint": "context.reported",
    "ReportedCheckpointStatus": "context.reported",
    "StagingDirectory": "context.staging",
    "TrainContext": "context.train_context",
    "PreemptionInfo": "context.preemption",
    "Checkpoint": "storage.checkpoint",
    "Result": "result",
    "ScalingConfig": "configs",
    "RunConfig": "configs",
    "CheckpointConfig": "configs",
    "FailureConfig": "configs",
    "DataConfig": "configs",
    "LoggingConfig": "configs",
    "PlacementGroupFactory": "configs",
    "Backend": "execution.backend",
    "BackendConfig": "execution.backend",
    "Callback": "callback",
    "RunContext": "callback",
    "UserCallback": "callback",
    "DataParallelTrainer": "trainer",
    "TrainError": "errors",
    "ConfigError": "errors",
    "ConfigTypeError": "errors",
    "TrainFunctionError": "errors",
    "NotInTrainFunctionError": "errors",
    "DatasetNotFoundError": "errors",
    "ResourcesError": "errors",
    "StorageError": "errors",
    "CheckpointError": "errors",
    "CheckpointNotFoundError": "errors",
    "CollectiveError": "errors",
    "CheckpointDamagedError": "errors",
    "CheckpointConflictError": "errors",
    "UploadError": "errors",
    "RunInUseError": "errors",
    "LegacyAPIError": "errors",
    "HangError": "errors",
    "WorkerDiedError": "errors",
    "WorkerStartError": "errors",
    "TrainingFailedError": "errors",
    "WorkerGroupError": "errors",
    "ControllerError": "errors",
    "PreemptionError": "errors",
    "RayLiteDeprecationWarning": "errors",
}
_SUBPACKAGES = ("collective", "torch")
# What Ray Train's users look for here too.
_TORCH_NAMES = ("TorchTrainer", "TorchConfig", "prepare_model", "prepare_data_loader", "get_device")

__all__ = [
    "Backend",
    "BackendConfig",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConflictError",
    "CheckpointConsistencyMode",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointUploadMode",
    "CollectiveError",
    "ConfigError",
    "ConfigTypeError",
    "ControllerError",
    "DataConfig",
    "DataParallelTrainer",
    "DatasetNotFoundError",
    "FailureConfig",
    "HangError",
    "LegacyAPIError",
    "LoggingConfig",
    "NotInTrainFunctionError",
    "PlacementGroupFactory",
    "PreemptionError",
    "PreemptionInfo",
    "RayLiteDeprecationWarning",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "ResourcesError",
    "Result",
    "RunConfig",
    "RunContext",
    "RunInUseError",
    "ScalingConfig",
    "StagingDirectory",
    "StorageError",
    "TrainContext",
    "TrainError",
    "TrainFunctionError",
    "TrainingFailedError",
    "UploadError",
    "UserCallback",
    "WorkerDiedError",
    "WorkerGroupError",
    "WorkerStartError",
    "collective",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
    "staging_directory",
    "torch",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    # Tracebacks, reprs and docs give the name that users import.
    if getattr(value, "__module__", "").startswith(f"{__name__}."):
        value.__module__ = __name__
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    # Tools ask for many names that begin so; they want a quick no.
    if name.startswith("_"):
        return ""
    import difflib

    if name in _TORCH_NAMES:
        return f"; it is {__name__}.torch.{name}"
    near = difflib.get_close_matches(name, __all__, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
