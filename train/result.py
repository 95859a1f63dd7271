"""What a run has left behind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from .errors import ConfigError, StorageError, TrainError
from .storage.checkpoint import Checkpoint
from .storage.history import HistoryRow
from .storage.retention import score_of
from .storage.root import StorageRoot
from .storage.store import RunStore
from .storage.uri import resolve_storage_path

if TYPE_CHECKING:
    import pandas
    from fsspec import AbstractFileSystem

__all__ = ["Result"]


@attrs.frozen(kw_only=True)
class Result:
    """The outcome of ``fit()``, or of an earlier run read from storage.

    Attributes:
        metrics: Rank 0's last report, or None when there was none.
        checkpoint: The newest committed checkpoint, or None.
        best_checkpoints: All kept checkpoints with their metrics; the best one last when a
            ``checkpoint_score_attribute`` is set, else the newest last.
        path: Where the run lies: a folder, or a URI.
        error: What the run failed with, or None.
        return_value: What the train function of rank 0 returned; not kept in storage.
    """

    metrics: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    error: BaseException | None = None
    path: str = ""
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = attrs.field(
        factory=list, repr=lambda kept: f"<{len(kept)} checkpoints>"
    )
    return_value: Any = attrs.field(default=None, repr=False)
    _store: RunStore | None = attrs.field(default=None, repr=False, eq=False)

    def _rows(self) -> list[HistoryRow]:
        return [] if self._store is None else self._store.read_history()

    @property
    def filesystem(self) -> AbstractFileSystem | None:
        """The fsspec filesystem that ``path`` lies on; None when there is no storage."""
        return None if self._store is None else self._store.filesystem

    @property
    def metrics_history(self) -> list[dict[str, Any]]:
        """Every report of rank 0 in order, read from storage; work that a restart repeated counts once.

        With ``RunConfig(metrics_over_ranks=["mean"])`` there is ``loss/mean`` over all ranks beside ``loss``.
        """
        return [_columns(row) for row in self._rows()]

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """Every report of rank 0 as a row; the index is the report's number. None without reports.

        Metrics that appear later become columns of their own, empty above.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Result.metrics_dataframe needs pandas (pip install pandas); Result.metrics_history needs nothing"
            ) from error
        rows = self._rows()
        if not rows:
            return None
        return pandas.DataFrame(
            [_columns(row) for row in rows], index=pandas.Index([row.report_index for row in rows], name="report")
        )

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """The kept checkpoint whose metric is best.

        Args:
            metric: Name of the metric; ``a/b`` finds a nested one. A checkpoint without it, or
                with NaN, is never the best while another has a number.
            mode: ``"max"`` or ``"min"``.

        Returns:
            None when no checkpoint has a number under that name.

        Raises:
            ConfigError: ``mode`` is neither.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"mode must be 'max' or 'min', got {mode!r}")
        scored = [(c, m) for c, m in self.best_checkpoints if score_of(m, metric) is not None]
        if not scored:
            return None
        # Of equal ones the newer: the list is in report order unless a score orders it.
        sign = 1.0 if mode == "max" else -1.0
        return max(enumerate(scored), key=lambda item: (sign * (score_of(item[1][1], metric) or 0.0), item[0]))[1][0]

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        storage_filesystem: AbstractFileSystem | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Result:
        """Read a run from storage, while it goes on or after its end.

        Args:
            path: The run's folder or URI: ``Result.path`` of the run.
            storage_filesystem: As in ``RunConfig``.
            storage_options: As in ``RunConfig``.

        Raises:
            StorageError: There is no run at that path.
        """
        resolved = resolve_storage_path(path, has_filesystem=storage_filesystem is not None)
        parent, _, name = resolved.rstrip("/").rpartition("/")
        root = StorageRoot(path=parent or "/", options=dict(storage_options or {}), filesystem=storage_filesystem)
        store = RunStore(root, name)
        record = store.read_record()
        committed = store.list_checkpoints()
        rows = store.read_history()
        if record is None and not committed and not rows:
            raise StorageError(f"there is no run at {path}; pass the run's own folder, <storage_path>/<run name>")
        error: BaseException | None = None
        if record is not None and record.error is not None:
            error = TrainError(record.error)
        metrics = None if record is None else record.metrics
        # Either may be behind: the record is written now and then, and the end of the history may lie elsewhere.
        if rows and (record is None or rows[-1].report_index + 1 >= record.next_report_index):
            metrics = rows[-1].metrics
        order = (record.config if record is not None else {}).get("checkpoint_config") or {}
        return build_result(
            store,
            metrics=metrics,
            checkpoints=[(store.open_checkpoint(c), dict(c.manifest.metrics)) for c in committed],
            score_attribute=order.get("checkpoint_score_attribute"),
            score_order=order.get("checkpoint_score_order", "max"),
            error=error,
        )


def build_result(
    store: RunStore,
    *,
    metrics: Mapping[str, Any] | None,
    checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]],
    score_attribute: str | None,
    score_order: str,
    error: BaseException | None = None,
    return_value: Any = None,
) -> Result:
    """A result from what is kept, oldest checkpoint first."""
    ordered = list(checkpoints)
    if score_attribute is not None:
        sign = 1.0 if score_order == "max" else -1.0

        def key(item: tuple[Checkpoint, dict[str, Any]]) -> tuple[bool, float]:
            score = score_of(item[1], score_attribute)
            return (score is not None, 0.0 if score is None else sign * score)

        # sorted() is stable: among equals the newer stays behind the older.
        ordered = sorted(ordered, key=key)
    return Result(
        metrics=None if metrics is None else dict(metrics),
        checkpoint=checkpoints[-1][0] if checkpoints else None,
        error=error,
        path=store.path,
        best_checkpoints=ordered,
        return_value=return_value,
        store=store,
    )


def _columns(row: HistoryRow) -> dict[str, Any]:
    # Rank 0's own first, and under a name that both have its own.
    return {**row.metrics, **{name: value for name, value in row.over_ranks.items() if name not in row.metrics}}
