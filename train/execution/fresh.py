"""``RunConfig(resume="never")``: a place for a run that continues no other."""

from __future__ import annotations

from ..storage.root import StorageRoot
from ..storage.store import RunStore

__all__ = ["fresh_name"]


def fresh_name(root: StorageRoot, name: str) -> str:
    """``name`` if no run of that name is stored, else the first of ``name_2``, ``name_3``, ... that is free.

    A folder of its own, because two runs in one folder would be taken for one: the earlier run's
    checkpoints would be resumed from, and counted and deleted by retention.

    Raises:
        StorageError: The storage cannot be read.
        ConfigError: The name is too long to be given a number.
    """
    candidate, number = name, 1
    while RunStore(root, candidate).holds_run():
        number += 1
        candidate = f"{name}_{number}"
    return candidate
