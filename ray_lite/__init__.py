"""The distribution's root: its version, and the way to ``ray_lite.train`` and ``ray_lite.air``.

Both load on first use, so ``import ray_lite`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_lite import air, train

__version__ = "0.1.0"

__all__ = ["__version__", "air", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "air"):
        return importlib.import_module(f"ray_lite.{name}")
    raise AttributeError(f"module 'ray_lite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
