"""Small collectives between the ranks of a run, without torch: a barrier, and a broadcast from rank 0.

For control, not for tensors: each call is a few milliseconds over the controller. Every rank
must make the same calls in the same order; a rank that does not is named when the wait ends.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

from .context.current import require_context
from .errors import CollectiveError

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 1_800.0


def barrier(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Return once every rank has called it.

    Args:
        timeout_s: Seconds to wait for the others, > 0.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
        ConfigError: ``timeout_s`` is no number of seconds > 0.
        CollectiveError: Ranks are missing after ``timeout_s``, have finished, or made another
            call; the text names them.
    """
    require_context("train.collective.barrier()").meet("barrier", None, timeout_s)


def broadcast_from_rank_zero(data: T, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
    """Give rank 0's object to every rank; returns it on each, once all have called.

    Args:
        data: Any object that can be pickled; only rank 0's is used. A large one travels
            through Ray's object store.
        timeout_s: Seconds to wait for the others, > 0.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
        ConfigError: ``timeout_s`` is no number of seconds > 0.
        CollectiveError: Ranks are missing after ``timeout_s``, have finished, or made another
            call; or rank 0's object cannot be pickled.
    """
    context = require_context("train.collective.broadcast_from_rank_zero()")
    payload: bytes | None = None
    if context.get_world_rank() == 0:
        import ray.cloudpickle as cloudpickle

        try:
            payload = cloudpickle.dumps(data)
        # Pickling runs the user's code; the other ranks must hear of it too, or they would wait.
        except Exception as error:
            context.meet("broadcast", f"rank 0's {type(data).__name__} cannot be pickled: {error}", timeout_s)
            raise CollectiveError(f"rank 0's {type(data).__name__} cannot be pickled: {error}") from error
    received = context.meet("broadcast", payload, timeout_s)
    if isinstance(received, str):
        raise CollectiveError(received)
    if context.get_world_rank() == 0:
        return data
    value: T = pickle.loads(received)
    return value
