"""Warnings about old names: at the user's own line, once for each, and so that they are seen."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, cast

from ray_lite.train.context.current import current_context
from ray_lite.train.errors import RayLiteDeprecationWarning

from ._table import deprecation_text

__all__ = ["warn_deprecated", "warn_once"]

# Python's own filters: the first shows DeprecationWarning in __main__, the next hides it everywhere else.
_PYTHONS_FIRST = ("default", None, DeprecationWarning, "__main__", 0)
_OURS = ("default", None, RayLiteDeprecationWarning, None, 0)

_seen: set[tuple[str, str, int]] = set()
_seen_subjects: set[str] = set()


def warn_deprecated(old: str) -> None:
    """Warn about an old name, once for each line that uses it; in workers, rank 0 alone does.

    Args:
        old: Its key in ``_table.ROWS``.
    """
    context = current_context()
    if context is not None and context.get_world_rank() != 0:
        return
    frame = _users_frame()
    site = (old, frame.f_code.co_filename, frame.f_lineno)
    if site in _seen:
        return
    _make_visible()
    _warn_at(frame, deprecation_text(old), RayLiteDeprecationWarning)
    # Not before: where warnings are errors, the same line fails every time.
    _seen.add(site)


def warn_once(subject: str, text: str) -> None:
    """Warn with ``UserWarning`` at the user's line, once for each subject, wherever it comes up again.

    Args:
        subject: What the warning is about.
        text: What happened, and what to do.
    """
    if subject in _seen_subjects:
        return
    _warn_at(_users_frame(), text, UserWarning)
    _seen_subjects.add(subject)


def _users_frame() -> FrameType:
    """The nearest frame that is neither ours nor of Python's import system.

    Looked at, not counted: ``from ray_lite.air import X`` comes through the import system, ``air.X`` does not.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in ("ray_lite", "importlib")


def _warn_at(frame: FrameType, text: str, category: type[Warning]) -> None:
    warnings.warn_explicit(
        text,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _make_visible() -> None:
    """Show our own class where Python hides ``DeprecationWarning``, unless the user has said something else.

    The filter goes right before Python's, so whatever the user has put in front of those still counts.
    """
    filters = cast("list[Any]", warnings.filters)
    if not sys.warnoptions and _OURS not in filters and _PYTHONS_FIRST in filters:
        filters.insert(filters.index(_PYTHONS_FIRST), _OURS)
