"""What the train function sees: ``TrainContext`` and the functions that find it by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .current import current_context, require_context, set_context
from .functions import get_checkpoint, get_context, get_dataset_shard, report

if TYPE_CHECKING:
    from .train_context import TrainContext

__all__ = [
    "TrainContext",
    "current_context",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
    "require_context",
    "set_context",
]


def __getattr__(name: str) -> Any:
    # Late, because it brings fsspec with it and `from ray_lite import train` must stay light.
    if name == "TrainContext":
        from .train_context import TrainContext

        return TrainContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
