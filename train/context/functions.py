"""The functions that a train function calls without holding the context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .current import require_context

if TYPE_CHECKING:
    from ..storage.checkpoint import Checkpoint
    from .train_context import TrainContext

__all__ = ["get_checkpoint", "get_context", "get_dataset_shard", "report"]


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
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

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
        ConfigTypeError: An argument has the wrong type.
        UploadError: The files could not be stored. It may be caught: the report counts
            without a checkpoint, and the next one works as usual.
    """
    require_context("train.report()").report(metrics, checkpoint)


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to continue from.

    At the start of an attempt that is the newest committed checkpoint of the run, the same
    on every rank, or the one given as ``resume_from_checkpoint``, or None. After this rank
    has reported a checkpoint itself, it is that one.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
    """
    return require_context("train.get_checkpoint()").get_checkpoint()


def get_dataset_shard(dataset_name: str = "train") -> Any:
    """This worker's part of a dataset that was passed to the trainer.

    Not a barrier. The same object comes back on each call. See ``DataConfig`` for which
    datasets are split and what happens to rows that do not divide evenly.

    Args:
        dataset_name: Key in the trainer's ``datasets``.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
        DatasetNotFoundError: No dataset of that name; the text lists the known ones.
    """
    return require_context("train.get_dataset_shard()").get_dataset_shard(dataset_name)


def get_context() -> TrainContext:
    """The context of this worker: its ranks, its resources and the run.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
    """
    return require_context("train.get_context()")
