"""``ray_lite.air``: the session API of Ray AIR (Ray 2.0 to 2.6), on top of ``ray_lite.train``.

For scripts that were written against it. Every old name that is used says once, at the line
that uses it, what to write instead; ``migration_guide.md`` has the whole list. New scripts
need nothing from here, and ``ray_lite.train`` does not know this package.

::

    from ray_lite import air
    from ray_lite.air import session

    def train_func(config):
        session.report({"loss": loss}, checkpoint=air.Checkpoint.from_dict({"epoch": epoch}))

Importing it loads nothing heavy; ``Checkpoint`` comes on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _forward

if TYPE_CHECKING:
    from ray_lite.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig

    from .checkpoint import Checkpoint
    from .config import DatasetConfig

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "DatasetConfig",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "session",
]

_HOMES = {"Checkpoint": "checkpoint", "DatasetConfig": "config"}
_SUBMODULES = ("session", "config", "checkpoint", "result")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _forward.NAMES:
        # Not kept in globals(): each line that uses an old name is told.
        return _forward.to_train(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
