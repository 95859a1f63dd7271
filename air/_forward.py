"""The classes that only moved: the old name gives the new object, after a warning."""

from __future__ import annotations

from typing import Any

from ._warn import warn_deprecated

__all__ = ["NAMES", "to_train"]

NAMES = ("CheckpointConfig", "FailureConfig", "Result", "RunConfig", "ScalingConfig")


def to_train(name: str) -> Any:
    """``ray_lite.train.<name>``, with a warning about ``ray_lite.air.<name>``."""
    warn_deprecated(name)
    from ray_lite import train

    return getattr(train, name)
