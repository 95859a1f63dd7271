"""What a framework needs around the train function: hooks without state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

__all__ = ["Backend", "BackendConfig", "WorkerGroupHandle"]


class WorkerGroupHandle(Protocol):
    """The started workers, as a backend's hooks see them.

    A function that is handed over runs in the main thread of a worker, where
    ``train.get_context()`` already works. Results come in the order of the world ranks.
    """

    def __len__(self) -> int: ...

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn`` on all workers at once and wait; the first error is raised."""
        ...

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``fn`` on all workers; returns Ray object references."""
        ...

    def execute_single(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` on one worker and wait."""
        ...

    def execute_single_async(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start ``fn`` on one worker; returns a Ray object reference."""
        ...


class Backend:
    """Hooks around the life of a worker group.

    Subclasses override what they need and keep no state: an instance is made for each
    call, and all it may use are its arguments.
    """

    def on_start(self, worker_group: WorkerGroupHandle, backend_config: Any) -> None:
        """All workers are up and know their ranks; the train function is not running yet."""

    def on_training_start(self, worker_group: WorkerGroupHandle, backend_config: Any) -> None:
        """Right before the train function starts."""

    def on_shutdown(self, worker_group: WorkerGroupHandle, backend_config: Any) -> None:
        """The train function has returned on every worker; called only when all are alive."""


@attrs.frozen(kw_only=True)
class BackendConfig:
    """Settings of a backend; the base class has none and does nothing."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The hooks to run."""
        return Backend

    @property
    def preload_modules(self) -> tuple[str, ...]:
        """Modules that a worker imports while the rest of the group is still starting."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return attrs.asdict(self)
