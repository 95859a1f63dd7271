"""The run record: where a run stands, small enough to be replaced at any time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import StorageError
from .envelope import EnvelopeError, open_envelope, seal

__all__ = ["RECORD_NAME", "RunRecord"]

RECORD_NAME = "run.json"

_FORMAT = "ray_lite.run/1"
_MAX_BYTES = 1 << 20
_MAX_ERROR_CHARS = 20_000
_MAX_VALUE_CHARS = 1_000

_STATES = ("running", "finished", "failed", "interrupted")


@attrs.frozen(kw_only=True)
class RunRecord:
    """Where a run stands. It is a summary: the checkpoints' manifests are the truth."""

    name: str
    attempt: int
    """The life of the worker group that wrote it, 1-based; grows over all ``fit()`` calls of one name."""
    state: str = attrs.field(validator=attrs.validators.in_(_STATES))
    """``"running"``, ``"finished"``, ``"failed"`` or ``"interrupted"``."""
    started_at: float
    """Seconds since the epoch."""
    updated_at: float
    world_size: int
    next_report_index: int
    metrics: dict[str, Any] | None = None
    """The last report's."""
    error: str | None = None
    config: dict[str, Any] = attrs.field(factory=dict)
    """What the run was started with, without secrets."""

    def to_bytes(self) -> bytes:
        """The stored form, at most 1 MiB: of what is too large, the metrics go first, then the config."""
        record = self
        if self.error is not None and len(self.error) > _MAX_ERROR_CHARS:
            # The end of a traceback names the error, its beginning the user's call.
            half = _MAX_ERROR_CHARS // 2
            record = attrs.evolve(self, error=f"{self.error[:half]}\n[...]\n{self.error[-half:]}")
        data = record._seal()
        if len(data) > _MAX_BYTES and record.metrics is not None:
            record = attrs.evolve(record, metrics=_small_values(record.metrics))
            data = record._seal()
        if len(data) > _MAX_BYTES:
            record = attrs.evolve(record, metrics=None, config={})
            data = record._seal()
        return data

    def _seal(self) -> bytes:
        return seal({"format": _FORMAT, **attrs.asdict(self, recurse=False)})

    @classmethod
    def from_bytes(cls, data: bytes) -> RunRecord:
        """The record stored in ``data``.

        Raises:
            StorageError: It is damaged or of an unknown format.
        """
        try:
            body = open_envelope(data)
            if body.pop("format", None) != _FORMAT:
                raise EnvelopeError(f"its format is not {_FORMAT!r}")
            # A newer version of this library may have added fields.
            known = {field.name for field in attrs.fields(cls)}
            return cls(**{name: value for name, value in body.items() if name in known})
        except (EnvelopeError, TypeError, ValueError) as error:
            raise StorageError(f"the run record cannot be used: {error}") from error


def _small_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    size = 0
    for key, value in metrics.items():
        length = len(key) + len(json.dumps(value, default=repr))
        if length <= _MAX_VALUE_CHARS and size + length <= _MAX_BYTES // 4:
            kept[key] = value
            size += length
    return kept
