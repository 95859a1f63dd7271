"""What there is to say about a run that is taken up again: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["config_changes", "describe_age"]

_MAX_CHANGES = 12
_MAX_TEXT_CHARS = 60
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How the options of two runs differ: ``"scaling_config.num_workers 2 -> 4"``.

    Only options that both have, since other versions of this library may have others. Values
    of options that are collections are left out: they can be long, and may hold anything.

    Args:
        old: Config name -> option -> plain value, from the run record.
        new: The same, now.
    """
    changes = []
    for section in sorted(old.keys() & new.keys()):
        before, after = old[section], new[section]
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for option in sorted(before.keys() & after.keys()):
            if before[option] != after[option]:
                changes.append(f"{section}.{option}{_shown_change(before[option], after[option])}")
    if len(changes) > _MAX_CHANGES:
        changes[_MAX_CHANGES:] = [f"and {len(changes) - _MAX_CHANGES} more"]
    return changes


def describe_age(seconds: float) -> str:
    """``"3 min old"``; a clock that was set back gives ``"0 s old"``."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} old"
    return "0 s old"


def _shown_change(before: Any, after: Any) -> str:
    if isinstance(before, (Mapping, list, tuple)) or isinstance(after, (Mapping, list, tuple)):
        return ""
    return f" {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT_CHARS else text[:_MAX_TEXT_CHARS] + "..."
