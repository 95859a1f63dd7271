"""The functions that a train function calls without holding the context.

Each is the method of ``TrainContext`` of the same name, with its signature and its text, on the
context of this process: an argument is written, checked and explained in one place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from .current import require_context
from .train_context import TrainContext

__all__ = [
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
    "staging_directory",
]

P = ParamSpec("P")
R = TypeVar("R")


def _on_this_context(method: Callable[Concatenate[TrainContext, P], R]) -> Callable[P, R]:
    """``method`` of the context of this process, as a function."""
    call = f"train.{method.__name__}()"

    @functools.wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(require_context(call), *args, **kwargs)

    # Of this module, not of the class: a pickle names a function by where it is found.
    function.__module__, function.__qualname__ = __name__, method.__name__
    signature = inspect.signature(method)
    without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
    function.__signature__ = without_self  # type: ignore[attr-defined]  # what help() and inspect read
    return function


report = _on_this_context(TrainContext.report)
get_checkpoint = _on_this_context(TrainContext.get_checkpoint)
get_all_reported_checkpoints = _on_this_context(TrainContext.get_all_reported_checkpoints)
get_dataset_shard = _on_this_context(TrainContext.get_dataset_shard)
get_preemption_info = _on_this_context(TrainContext.get_preemption_info)
staging_directory = _on_this_context(TrainContext.staging_directory)


def get_context() -> TrainContext:
    """The context of this worker: its ranks, its resources and the run.

    Raises:
        NotInTrainFunctionError: Not called inside a train function.
    """
    return require_context("train.get_context()")
