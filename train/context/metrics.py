"""Metrics as one line of JSON: what goes in comes out as the same numbers.

NaN and the infinities are written as Python's ``json`` writes them (``NaN``, ``Infinity``).
Scalars of numpy and torch become Python numbers. Whatever JSON has no word for is kept as
its ``repr``, so that a report never fails a run over a value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigTypeError

__all__ = ["decode_metrics", "encode_metrics"]

_MAX_DEPTH = 50
_MAX_REPR_CHARS = 2_000


def encode_metrics(metrics: Mapping[Any, Any]) -> tuple[str, tuple[str, ...]]:
    """Metrics as JSON text, a snapshot of their values now.

    Args:
        metrics: Names to values. Keys that are not strings become strings, as in ``json``.

    Returns:
        The JSON text (ASCII, no line breaks), and the types of values that were kept only
        as their ``repr``, each once.

    Raises:
        ConfigTypeError: ``metrics`` is not a mapping.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigTypeError(
            f"report() takes a dict of metrics, got {type(metrics).__name__}; write train.report({{'loss': loss}})"
        )
    unstorable: list[str] = []

    def default(value: Any) -> Any:
        number = _as_number(value)
        if number is not None:
            return number
        unstorable.append(type(value).__name__)
        return _repr(value)

    # A copy first: another thread may be adding keys. The C encoder does the rest in one go.
    snapshot = dict(metrics)
    encoder = json.JSONEncoder(default=default, separators=(",", ":"))
    try:
        return encoder.encode(snapshot), tuple(dict.fromkeys(unstorable))
    except (TypeError, ValueError, RecursionError, RuntimeError):
        # Keys such as tuples, a structure that contains itself, or one that changes
        # under our hands: go through it piece by piece and keep what can be kept.
        unstorable.clear()
        plain = _plain(snapshot, unstorable, depth=0)
        return json.dumps(plain, separators=(",", ":")), tuple(dict.fromkeys(unstorable))


def decode_metrics(text: str | bytes) -> dict[str, Any]:
    """The metrics that ``encode_metrics`` wrote."""
    decoded = json.loads(text)
    if not isinstance(decoded, dict):
        raise ValueError(f"metrics must be a JSON object, got {type(decoded).__name__}")
    return decoded


def _as_number(value: Any) -> Any:
    """The Python number (or string) inside a numpy or torch scalar, else None."""
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return None
    try:
        number = value.item()
    # User objects may fail in any way here (a meta tensor, a lazy array); repr() is the answer to all.
    except Exception:  # noqa: BLE001
        return None
    return number if isinstance(number, (bool, int, float, str)) else None


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    # A broken __repr__ must not end a run.
    except Exception:  # noqa: BLE001
        text = f"<{type(value).__name__}: its repr() failed>"
    return text if len(text) <= _MAX_REPR_CHARS else text[:_MAX_REPR_CHARS] + "..."


def _plain(value: Any, unstorable: list[str], *, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {
                key if isinstance(key, str) else _key(key): _plain(item, unstorable, depth=depth + 1)
                for key, item in list(value.items())
            }
        if isinstance(value, (list, tuple)):
            return [_plain(item, unstorable, depth=depth + 1) for item in list(value)]
    number = _as_number(value)
    if number is not None:
        return number
    unstorable.append(type(value).__name__)
    return _repr(value)


def _key(key: Any) -> str:
    number = _as_number(key)
    if number is not None:
        key = number
    if key is None or isinstance(key, (bool, int, float)):
        return str(json.dumps(key))
    return _repr(key)
