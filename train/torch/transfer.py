"""Batches on their way to the device, keeping every container's own type."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_leaves", "move_batches", "move_to"]


def _moves_itself(value: object) -> bool:
    """Whether ``value`` has a ``to`` method of its own: ``PackedSequence``, a graph, a ``BatchEncoding``."""
    return not isinstance(value, (torch.Tensor, torch.nn.Module, type)) and callable(getattr(value, "to", None))


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """``batch`` with ``function`` applied to each tensor, and to each object that can move itself, in it.

    Goes into mappings, lists, tuples, named tuples and dataclasses, and gives back the same
    types (a ``defaultdict`` stays one); everything else is passed on as it is.
    """
    if isinstance(batch, torch.Tensor) or _moves_itself(batch):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_leaves(function, value) for key, value in batch.items()}
        return items if type(batch) is dict else _like_mapping(batch, items)
    if isinstance(batch, tuple):
        values = [map_leaves(function, value) for value in batch]
        return type(batch)._make(values) if hasattr(batch, "_make") else type(batch)(values)
    if isinstance(batch, list):
        clone = copy.copy(batch)
        clone[:] = [map_leaves(function, value) for value in batch]
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Past a frozen dataclass's guard; the twin is ours.
            object.__setattr__(twin, field.name, map_leaves(function, getattr(batch, field.name)))
        return twin
    return batch


def _like_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not hasattr(batch, "__setitem__"):
        return items
    # A copy, for what a constructor would not know: a defaultdict's factory, extra attributes.
    clone: Any = copy.copy(batch)
    for key, value in items.items():
        clone[key] = value
    return clone


def move_to(batch: Any, device: torch.device) -> Any:
    """``batch`` with everything in it on ``device``; containers as in :func:`map_leaves`."""
    return map_leaves(lambda leaf: leaf.to(device), batch)


def move_batches(batches: Iterable[Any], device: torch.device, *, auto_transfer: bool) -> Iterator[Any]:
    """Each batch, on ``device``.

    With ``auto_transfer`` on CUDA, the next batch is copied on a stream of its own while the
    current one is computed with; they overlap only if the loader has ``pin_memory=True``.
    """
    if device.type == "cuda" and auto_transfer:
        return _prefetched(batches, device)
    return (move_to(batch, device) for batch in batches)


def _prefetched(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    copies = torch.cuda.Stream(device)

    def start(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def finish(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            # Nobody knows which memory it holds, so it is copied on the computing stream.
            return leaf.to(device)
        # The memory belongs to the copying stream; without this it could be given to a later
        # copy while the computation still reads it.
        leaf.record_stream(torch.cuda.current_stream(device))
        return leaf

    def start_copy(batch: Any) -> Any:
        with torch.cuda.stream(copies):
            return map_leaves(start, batch)

    def finish_copy(batch: Any) -> Any:
        torch.cuda.current_stream(device).wait_stream(copies)
        return map_leaves(finish, batch)

    remaining = iter(batches)
    # Not a test for None: a collate function may well return that as a batch.
    for first in remaining:
        pending = start_copy(first)
        for batch in remaining:
            # Finished before the next one starts: the wait would cover that copy too.
            ready = finish_copy(pending)
            pending = start_copy(batch)
            yield ready
        yield finish_copy(pending)
