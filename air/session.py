"""``ray_lite.air.session``: what a train function of Ray AIR called.

Every function here does what its successor in ``ray_lite.train`` does. Outside a train function, where
the successors raise, these warn once and give the default value that Ray 2.2 to 2.9 gave.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_lite.train.context.current import current_context

from ._warn import warn_deprecated, warn_once

if TYPE_CHECKING:
    from ray_lite.train import Checkpoint as TrainCheckpoint
    from ray_lite.train import PlacementGroupFactory, TrainContext

    from .checkpoint import Checkpoint

__all__ = [
    "get_checkpoint",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "report",
]

# The dict that a rank other than 0 reported last, which is not stored.
_own_dicts: weakref.WeakKeyDictionary[TrainContext, TrainCheckpoint] = weakref.WeakKeyDictionary()


def report(metrics: Mapping[str, Any], *, checkpoint: TrainCheckpoint | None = None) -> None:
    """The same as ``ray_lite.train.report``.

    Of checkpoints made by ``Checkpoint.from_dict``, rank 0's alone is stored, as in the Ray
    releases that had it; every rank of a script written for them passes one.

    Raises:
        ConfigTypeError: ``metrics`` is not a mapping, or ``checkpoint`` not a Checkpoint.
        UploadError: The files could not be stored.
    """
    context = _context("report", "the metrics are lost")
    if context is None:
        return
    if checkpoint is not None and context.get_world_rank() != 0 and _holds_dict(checkpoint):
        context.report(metrics)
        _own_dicts[context] = checkpoint
        return
    context.report(metrics, checkpoint)
    if checkpoint is not None:
        _own_dicts.pop(context, None)


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint that this rank reported last, or the one to continue from, or None.

    Unlike that of ``ray_lite.train.get_checkpoint``, the object has Ray AIR's methods (``to_dict``).
    """
    context = _context("get_checkpoint", "it returns None")
    if context is None:
        return None
    from .checkpoint import Checkpoint

    newest = context.get_checkpoint()
    found = _own_dicts.get(context, newest)
    return None if found is None else Checkpoint.from_checkpoint(found)


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's part of a dataset; None, with a warning, when the trainer was given no datasets.

    Args:
        dataset_name: Key in the trainer's ``datasets``; may be left out when there is only one.

    Raises:
        DatasetNotFoundError: There are datasets, and none of that name.
        LegacyAPIError: No name was given, and there are several.
    """
    context = _context("get_dataset_shard", "it returns None")
    if context is None:
        return None
    from ray_lite.train.errors import DatasetNotFoundError, LegacyAPIError

    try:
        # No dataset has the empty name, so without a name this tells which there are.
        return context.get_dataset_shard(dataset_name or "")
    except DatasetNotFoundError as error:
        if not error.known:
            warn_once(
                "no datasets",
                "session.get_dataset_shard() returns None, because the trainer was given no datasets; "
                'pass datasets={"train": ...} to it',
            )
            return None
        if dataset_name:
            raise
        known = error.known
    if len(known) > 1:
        raise LegacyAPIError(
            "session.get_dataset_shard() without a name is not supported by ray_lite when the trainer has several "
            f"datasets. Instead: pass one of {', '.join(map(repr, known))}"
        )
    return context.get_dataset_shard(known[0])


def get_world_size() -> int:
    """Number of workers in the group; 1 outside a train function."""
    context = _context("get_world_size", "it returns 1")
    return 1 if context is None else context.get_world_size()


def get_world_rank() -> int:
    """This worker among all; 0 outside a train function."""
    context = _context("get_world_rank", "it returns 0")
    return 0 if context is None else context.get_world_rank()


def get_local_rank() -> int:
    """This worker among those on its node; 0 outside a train function."""
    context = _context("get_local_rank", "it returns 0")
    return 0 if context is None else context.get_local_rank()


def get_local_world_size() -> int:
    """Number of workers on this worker's node; 1 outside a train function, where Ray AIR gave 0."""
    context = _context("get_local_world_size", "it returns 1")
    return 1 if context is None else context.get_local_world_size()


def get_node_rank() -> int:
    """Index of this worker's node; 0 outside a train function."""
    context = _context("get_node_rank", "it returns 0")
    return 0 if context is None else context.get_node_rank()


def get_trial_name() -> str | None:
    """Name of the run; None outside a train function."""
    context = _context("get_trial_name", "it returns None")
    return None if context is None else context.get_trial_name()


def get_trial_id() -> str | None:
    """Id of the run, the same over its restarts; None outside a train function."""
    context = _context("get_trial_id", "it returns None")
    return None if context is None else context.get_trial_id()


def get_trial_resources() -> PlacementGroupFactory | None:
    """What the whole run reserves, not this worker alone; None outside a train function."""
    context = _context("get_trial_resources", "it returns None")
    return None if context is None else context.get_trial_resources()


def get_trial_dir() -> str | None:
    """Where the run lies; None outside a train function."""
    context = _context("get_trial_dir", "it returns None")
    return None if context is None else context.get_trial_dir()


def get_experiment_name() -> str | None:
    """``RunConfig.name``; None outside a train function."""
    context = _context("get_experiment_name", "it returns None")
    return None if context is None else context.get_experiment_name()


def _context(name: str, outside: str) -> TrainContext | None:
    """The context of this process, after the warnings that are due."""
    warn_deprecated(f"session.{name}")
    context = current_context()
    if context is None:
        warn_once(
            name,
            f"session.{name}() was called where no train function runs, so {outside}; "
            "call it inside the function that you pass to the trainer",
        )
    return context


def _holds_dict(checkpoint: object) -> bool:
    from .checkpoint import Checkpoint

    return isinstance(checkpoint, Checkpoint) and checkpoint.holds_dict()
