"""Metrics over the ranks of one report: pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["over_ranks"]

_MAX_DEPTH = 10


def _mean(values: Sequence[float]) -> float:
    # Divided first: the sum of large numbers would overflow.
    return math.fsum(value / len(values) for value in values)


_FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "min": min, "max": max}


def over_ranks(lines: Iterable[bytes], functions: Sequence[str]) -> dict[str, float]:
    """Each number that ranks have reported, over the ranks that have it.

    Args:
        lines: History lines of the ranks.
        functions: Of ``"mean"``, ``"min"``, ``"max"``.

    Returns:
        ``{"loss/mean": ..., "loss/max": ...}``; nested metrics as ``"val/loss/mean"``. NaN on one
        rank is NaN in all. Booleans and whatever else is no number are left out.
    """
    values: dict[str, list[float]] = {}
    for line in lines:
        _collect(json.loads(line)["m"], "", values, depth=0)
    out = {}
    for name, found in values.items():
        for function in functions:
            has_nan = any(math.isnan(value) for value in found)
            out[f"{name}/{function}"] = math.nan if has_nan else _apply(function, found)
    return out


def _apply(function: str, values: Sequence[float]) -> float:
    try:
        return _FUNCTIONS[function](values)
    except (OverflowError, ValueError):
        # fsum of both infinities.
        return math.nan


def _collect(metrics: Mapping[str, Any], prefix: str, values: dict[str, list[float]], *, depth: int) -> None:
    for name, value in metrics.items():
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            _collect(value, f"{prefix}{name}/", values, depth=depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                values.setdefault(prefix + name, []).append(float(value))
            except OverflowError:
                values.setdefault(prefix + name, []).append(math.inf if value > 0 else -math.inf)
