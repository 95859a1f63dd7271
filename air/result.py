"""``ray_lite.air.result``: where Ray AIR kept ``Result``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _forward

if TYPE_CHECKING:
    from ray_lite.train import Result

__all__ = ["Result"]


def __getattr__(name: str) -> Any:
    if name == "Result":
        return _forward.to_train(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
