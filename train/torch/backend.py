"""``TorchBackend``: makes the process group before the train function, destroys it after.

Runs in the controller, which never imports torch: everything that does is in
``process_group.py`` and runs on the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..execution.backend import Backend, WorkerGroupHandle
from .process_group import destroy_group, forget_group, join_group, open_rendezvous

if TYPE_CHECKING:
    from .config import TorchConfig

__all__ = ["TorchBackend"]


class TorchBackend(Backend):
    """Sets up ``torch.distributed`` on the workers; keeps no state of its own."""

    def on_start(self, worker_group: WorkerGroupHandle, backend_config: TorchConfig) -> None:
        """Let all ranks meet: two rounds of calls, each to all ranks at once.

        Raises:
            WorkerStartError: A rank did not arrive in time, or the backend cannot be used; the
                text names the rank or the reason.
        """
        # Every rank takes part in the first round although only rank 0 opens a port: those
        # that have not finished `import torch` do it side by side.
        places = worker_group.execute(open_rendezvous, backend_config)
        address = next(place.address for place in places if place.address is not None)
        # Small whatever the size of the group: it is sent once per rank.
        worker_group.execute(join_group, backend_config, address, len({place.node_rank for place in places}))

    def on_shutdown(self, worker_group: WorkerGroupHandle, backend_config: TorchConfig) -> None:
        """Destroy the process group on every rank that still has one."""
        worker_group.execute(destroy_group)
        worker_group.execute(forget_group)
