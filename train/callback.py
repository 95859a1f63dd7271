"""Hooks for users: called in the driver's process, on the very object that was passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from .configs import DataConfig, RunConfig, ScalingConfig
    from .execution.backend import BackendConfig
    from .result import Result
    from .storage.checkpoint import Checkpoint

__all__ = ["Callback", "RunContext", "UserCallback"]


@attrs.frozen(kw_only=True)
class RunContext:
    """The run a callback is told about.

    Attributes:
        run_id: 32 hex digits of this ``fit()``.
        path: Where the run lies: a folder, or a URI.
        run_config: What the trainer was given, defaults filled in.
        scaling_config: What the trainer was given.
        backend_config: What the trainer was given.
        dataset_config: What the trainer was given.
        train_loop_config: What the trainer was given.
    """

    run_id: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend_config: BackendConfig
    dataset_config: DataConfig
    train_loop_config: Mapping[str, Any] | None = None

    def get_run_config(self) -> RunConfig:
        """The same as ``run_config``."""
        return self.run_config


class Callback:
    """Override what you need; every hook does nothing by default.

    The hooks run on the driver, so a callback can keep what it sees in its own attributes and
    be read after ``fit()``. While a hook runs, reports are queued; when many wait, the
    workers' ``report()`` waits too. An exception in a hook is logged with its traceback and
    does not touch the training.
    """

    def on_run_start(self, run_context: RunContext) -> None:
        """``fit()`` has checked everything and starts now."""

    def after_report(
        self, run_context: RunContext, metrics: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """The n-th reports of the ranks are in.

        Args:
            run_context: The run.
            metrics: One dict per world rank; empty for a rank that did not make this report.
            checkpoint: What was committed with it, or None.
        """

    def after_checkpoint(self, run_context: RunContext, checkpoint: Checkpoint, metrics: Mapping[str, Any]) -> None:
        """A checkpoint has been committed; ``metrics`` are rank 0's."""

    def after_exception(self, run_context: RunContext, worker_exceptions: Mapping[int, BaseException]) -> None:
        """An attempt has failed: world rank → exception, the likely cause first."""

    def on_restart(self, run_context: RunContext, attempt: int, reason: str) -> None:
        """Attempt number ``attempt`` has failed and the next one starts."""

    def on_run_end(self, run_context: RunContext, result: Result) -> None:
        """The run has ended; ``result.error`` says how."""


UserCallback = Callback
"""Ray Train's name for the same thing."""
