"""How a worker's part of a dataset is told from a whole one."""

from __future__ import annotations

__all__ = ["Shard", "is_shard"]


class Shard:
    """Marks data that is one worker's part already, so that nothing divides it a second time."""

    __slots__ = ()


def is_shard(dataset: object) -> bool:
    """Whether ``dataset`` is a worker's part already, also inside ``torch.utils.data.Subset`` and its like."""
    seen = 0
    while not isinstance(dataset, Shard):
        inner = getattr(dataset, "dataset", None)
        # A bound, since a dataset may refer to itself.
        if inner is None or seen > 16:
            return False
        dataset, seen = inner, seen + 1
    return True
