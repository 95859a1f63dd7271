"""The context of this process: set while a train function runs, None otherwise.

It belongs to the process, not to a thread, so callbacks and threads of the train function
find it. A forked child (a data loader's worker) inherits the memory but not the threads
that carry reports, so there it counts as absent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import NotInTrainFunctionError

if TYPE_CHECKING:
    from .train_context import TrainContext

__all__ = ["current_context", "require_context", "set_context"]

_current: TrainContext | None = None
_pid: int = -1


def set_context(context: TrainContext | None) -> None:
    """Make ``context`` the one of this process; None takes it away."""
    global _current, _pid
    _current, _pid = context, os.getpid()


def current_context() -> TrainContext | None:
    """The context of this process, or None outside a train function."""
    if _current is None or _pid != os.getpid():
        return None
    return _current


def require_context(call: str) -> TrainContext:
    """The context of this process.

    Args:
        call: What the user wrote, for the message.

    Raises:
        NotInTrainFunctionError: No train function runs in this process.
    """
    context = current_context()
    if context is not None:
        return context
    if _current is not None:
        raise NotInTrainFunctionError(
            call, "this is a child process of a worker (a DataLoader worker?), which cannot report for it"
        )
    raise NotInTrainFunctionError(call)
