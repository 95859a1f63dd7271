"""Warnings about old names, that point at the user's own line."""

from __future__ import annotations

import sys
import warnings

from ..errors import RayLiteDeprecationWarning

__all__ = ["warn_deprecated"]

# Frames of these packages stand between the user and the warning.
_OURS = (__name__.partition(".")[0], "attr", "attrs")


def warn_deprecated(message: str) -> None:
    """Warn with ``RayLiteDeprecationWarning`` at the nearest line that is neither ours nor attrs'.

    The frames are looked at, not counted: an option may come through a constructor,
    ``from_dict``, ``attrs.evolve`` or an old name in ``ray_lite.air``, at different depths.

    Args:
        message: "``old`` is deprecated; use ``new``. <one sentence on a difference, if any>"
    """
    level = 2  # the caller of this function
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RayLiteDeprecationWarning, stacklevel=level)


def _is_ours(module: str, filename: str) -> bool:
    return module.partition(".")[0] in _OURS or filename.startswith("<attrs generated")
