"""The configs of a run: frozen, keyword-only, and checked when they are built."""

from __future__ import annotations

from .checkpoint import CheckpointConfig
from .data import DataConfig
from .failure import FailureConfig
from .logging import LoggingConfig
from .placement_group_factory import PlacementGroupFactory
from .run import RunConfig
from .scaling import ScalingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FailureConfig",
    "LoggingConfig",
    "PlacementGroupFactory",
    "RunConfig",
    "ScalingConfig",
]
