"""A data loader's workers, when the whole process group is asked to end.

A scheduler that takes a node away sends SIGTERM to every process there. To the rank it is a notice:
it still saves a checkpoint. Its loader's workers would die at once, and take the rank with them
("DataLoader worker is killed by signal: Terminated"), before it has saved anything.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

__all__ = ["GoOn", "start_workers"]


class GoOn:
    """A ``worker_init_fn`` after which SIGTERM does not end the worker; then calls the user's.

    The worker's life is its parent's all the same: torch's watchdog ends a worker without one.

    Args:
        init_fn: The user's ``worker_init_fn``, or None.
    """

    def __init__(self, init_fn: Callable[[int], Any] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        # A handler, not SIG_IGN: programs that the worker starts would inherit that.
        signal.signal(signal.SIGTERM, _do_nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self._init_fn is not None:
            self._init_fn(worker_id)


def _do_nothing(number: int, frame: Any) -> None:
    """The rank decides when its workers end."""


def start_workers(loader: Any) -> Any:
    """Begin to iterate over a loader whose ``worker_init_fn`` is a ``GoOn``.

    Returns:
        Its iterator, whose workers end by SIGKILL where torch and ``multiprocessing`` would use SIGTERM,
        for one that is stuck.
    """
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() != "fork":
        # Other ways to start processes need a helper, and starting that lets the signal in again.
        resource_tracker.ensure_running()
    # Inherited by the workers, and taken back by each once it is ready: none dies while it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for process in getattr(batches, "_workers", ()):
        for target in (process, getattr(process, "_popen", None)):
            if target is not None:
                target.terminate = target.kill
    return batches
