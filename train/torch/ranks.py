"""Which rank this process is, for the helpers that also work outside a train function."""

from __future__ import annotations

import torch.distributed as dist

from ..context.current import current_context

__all__ = ["rank_and_world_size"]


def rank_and_world_size() -> tuple[int, int]:
    """World rank and world size: of the train function's context, else of the process group, else ``(0, 1)``.

    So a script that uses the helpers runs alone too, and under torchrun.
    """
    context = current_context()
    if context is not None:
        return context.get_world_rank(), context.get_world_size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
