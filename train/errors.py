"""Every error this library raises, in one tree.

::

    TrainError
    ├── ConfigError (ValueError)               a value that no run could use, found before anything starts
    │   ├── ConfigTypeError (TypeError)        the same, for a value of the wrong type
    │   └── TrainFunctionError                 the train function itself: arity, or captures that cannot be pickled
    ├── NotInTrainFunctionError (RuntimeError) a call that belongs inside a train function
    ├── CollectiveError (RuntimeError)         ranks did not come together in train.collective
    ├── DatasetNotFoundError (KeyError)        no dataset of that name was passed to the trainer
    ├── ResourcesError                         the cluster can never hold the workers asked for
    ├── StorageError (OSError)                 a storage path that cannot be read or written
    │   ├── CheckpointError                    one checkpoint cannot be used
    │   │   ├── CheckpointNotFoundError        it is not there, or was never committed
    │   │   ├── CheckpointDamagedError         its bytes are not those that were committed
    │   │   └── CheckpointConflictError        two ranks reported different bytes under one file name
    │   ├── UploadError                        this rank's files did not reach the storage
    │   └── RunInUseError                      another live process writes to the run of that name
    ├── LegacyAPIError (RuntimeError)          an old API that has no equivalent here
    ├── WorkerDiedError                        a worker process ended before its train function returned
    ├── HangError                              no rank moved for ``hang_timeout_s``
    ├── WorkerStartError                       a worker could not be set up
    └── TrainingFailedError (RuntimeError)     what ``fit()`` raises; ``.result`` holds what was saved
        ├── WorkerGroupError                   ``.worker_failures``: world rank → the exception
        ├── ControllerError                    ``.controller_failure``
        └── PreemptionError                    ``.preemption_info``

Constructors hand all their arguments to ``super().__init__``, so that each error survives
the way from one process to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_lite.train.result import Result

__all__ = [
    "CheckpointConflictError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CollectiveError",
    "ConfigError",
    "ConfigTypeError",
    "ControllerError",
    "DatasetNotFoundError",
    "HangError",
    "LegacyAPIError",
    "NotInTrainFunctionError",
    "PreemptionError",
    "RayLiteDeprecationWarning",
    "ResourcesError",
    "RunInUseError",
    "StorageError",
    "TrainError",
    "TrainFunctionError",
    "TrainingFailedError",
    "UploadError",
    "WorkerDiedError",
    "WorkerGroupError",
    "WorkerStartError",
]


DOCUMENT = "docs/why_did_my_run_stop.md"
"""Explains the messages by symptom; the project's path, because the documents travel with the source."""


def explained(text: str) -> str:
    """A message, with the document that explains it, unless it quotes one that has it."""
    return text if DOCUMENT in text else f"{text} (explained in {DOCUMENT})"


class TrainError(Exception):
    """Base of every error that ``ray_lite`` raises on purpose."""


class ConfigError(TrainError, ValueError):
    """An option holds a value that no run could use; raised where the object is built."""


class ConfigTypeError(ConfigError, TypeError):
    """An option holds a value of the wrong type, or has an unknown name."""


class TrainFunctionError(ConfigError):
    """The train function cannot be called or cannot be sent to the workers."""


class NotInTrainFunctionError(TrainError, RuntimeError):
    """A call that only means something inside a train function was made elsewhere."""

    def __init__(self, call: str, reason: str = "") -> None:
        super().__init__(call, reason)
        self.call, self.reason = call, reason

    def __str__(self) -> str:
        reason = self.reason or "no training runs in this process"
        return (
            f"{self.call} works only inside a train function run by fit(), and here {reason}; "
            "call it in the function that you pass to the trainer (its threads included)"
        )


class CollectiveError(TrainError, RuntimeError):
    """The ranks did not come together in a call of ``train.collective``; the text names who is missing."""


class DatasetNotFoundError(TrainError, KeyError):
    """No dataset of that name was passed to the trainer."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def __str__(self) -> str:
        if not self.known:
            return f"no dataset named {self.name!r}: the trainer was given none; pass datasets={{{self.name!r}: ...}}"
        return f"no dataset named {self.name!r}; the trainer was given {', '.join(map(repr, self.known))}"


class ResourcesError(TrainError):
    """The cluster cannot hold the workers that were asked for."""


class StorageError(TrainError, OSError):
    """A storage path cannot be used; the text names the path and what to check."""

    def __str__(self) -> str:
        # OSError would print "[Errno ...]" when given two arguments.
        return " ".join(str(arg) for arg in self.args)


class CheckpointError(StorageError):
    """One checkpoint cannot be used."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint is not there, or was never committed."""


class CheckpointDamagedError(CheckpointError):
    """The bytes in storage are not those that were committed."""


class CheckpointConflictError(CheckpointError):
    """Two ranks reported different bytes under one file name."""


class UploadError(StorageError):
    """The files that one rank reported did not reach the storage; training may go on and report again."""


class RunInUseError(StorageError):
    """Another live process holds the run of that name."""


class LegacyAPIError(TrainError, RuntimeError):
    """An old API that has no equivalent here; the text says what to do instead."""


class WorkerDiedError(TrainError):
    """A worker process ended before its train function returned."""

    def __init__(self, world_rank: int, node_ip: str, detail: str) -> None:
        super().__init__(world_rank, node_ip, detail)
        self.world_rank, self.node_ip, self.detail = world_rank, node_ip, detail

    def __str__(self) -> str:
        return f"worker {self.world_rank} on {self.node_ip} died: {self.detail}"


class HangError(TrainError):
    """No rank has moved for ``FailureConfig.hang_timeout_s``; ``stacks`` shows where all of them stand."""

    def __init__(self, world_rank: int, node_ip: str, stacks: str) -> None:
        super().__init__(world_rank, node_ip, stacks)
        self.world_rank, self.node_ip, self.stacks = world_rank, node_ip, stacks

    def __str__(self) -> str:
        return f"rank {self.world_rank} on {self.node_ip} hangs: {self.stacks}"


class WorkerStartError(TrainError):
    """A worker could not be set up; ``step`` says what was being done."""

    def __init__(self, step: str, detail: str) -> None:
        super().__init__(step, detail)
        self.step, self.detail = step, detail

    def __str__(self) -> str:
        return f"the workers could not be started ({self.step}): {self.detail}"


class TrainingFailedError(TrainError, RuntimeError):
    """Training ended without success; raised by ``fit()``.

    Attributes:
        result: What was saved until then (metrics, checkpoints, path), or None when
            the run failed before it had a place in storage.
    """

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message, result)
        self.message, self.result = message, result

    def __str__(self) -> str:
        return self.message


class WorkerGroupError(TrainingFailedError):
    """A train function raised, or a worker died, and no restart was left.

    Attributes:
        worker_failures: World rank → the exception of that rank: the user's own
            object where it could be sent, else a ``TrainError`` that quotes it.
    """

    def __init__(
        self, message: str, worker_failures: Mapping[int, BaseException] | None = None, result: Result | None = None
    ) -> None:
        super().__init__(message, result)
        self.args = (message, worker_failures, result)
        self.worker_failures: dict[int, BaseException] = dict(worker_failures or {})


class ControllerError(TrainingFailedError):
    """The part of the library that directs the run failed.

    Attributes:
        controller_failure: The exception it failed with.
    """

    def __init__(
        self, message: str, controller_failure: BaseException | None = None, result: Result | None = None
    ) -> None:
        super().__init__(message, result)
        self.args = (message, controller_failure, result)
        self.controller_failure = controller_failure


class PreemptionError(TrainingFailedError):
    """Nodes were taken away more often than ``max_preemption_failures`` allows."""

    def __init__(
        self,
        message: str,
        preemption_info: Any = None,
        drain_timed_out: bool = False,
        result: Result | None = None,
    ) -> None:
        super().__init__(message, result)
        self.args = (message, preemption_info, drain_timed_out, result)
        self.preemption_info, self.drain_timed_out = preemption_info, drain_timed_out


class RayLiteDeprecationWarning(DeprecationWarning):
    """An old name was used; the text gives the new one."""
