"""``ray_lite.air.config``: where Ray AIR kept its config classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _forward
from ._table import not_supported_text

if TYPE_CHECKING:
    from ray_lite.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

__all__ = ["CheckpointConfig", "DatasetConfig", "FailureConfig", "RunConfig", "ScalingConfig"]

_FORWARDED = ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig")


class DatasetConfig:
    """Stands for Ray AIR's class of this name, so that importing it works and using it explains itself.

    Raises:
        LegacyAPIError: Always; the text names ``DataConfig``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from ray_lite.train.errors import LegacyAPIError

        raise LegacyAPIError(not_supported_text("DatasetConfig"))


DatasetConfig.__module__ = "ray_lite.air"


def __getattr__(name: str) -> Any:
    if name in _FORWARDED:
        return _forward.to_train(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
