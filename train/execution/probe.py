"""Whether two processes see the same disk: one writes some random bytes, the other looks for them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import attrs

from ..errors import ConfigError
from ..storage.checkpoint import Checkpoint
from ..storage.disk import DiskFiles
from ..storage.files import TEMPORARY_PREFIX
from ..storage.root import StorageRoot

__all__ = ["Probe", "as_seen_here", "check_client_storage", "probe_in"]


@attrs.frozen
class Probe:
    """A small file that nobody else could have made."""

    path: str
    content: bytes = attrs.field(repr=False)

    def is_found(self) -> bool:
        """Whether this process reads that very content at that path."""
        try:
            with open(self.path, "rb") as file:
                return file.read(len(self.content) + 1) == self.content
        # Not there, not readable, a mount that does not answer: in each case the path is of no use here.
        except OSError:
            return False


@contextlib.contextmanager
def probe_in(root: StorageRoot) -> Iterator[Probe | None]:
    """A probe in a folder, for the duration of the ``with`` block; None where ``root`` is not on a disk.

    Raises:
        OSError: It cannot be written.
    """
    if not root.is_local:
        yield None
        return
    token = secrets.token_hex(8)
    # Should this process die, it is rubbish by its name, and goes when the run starts again.
    probe = Probe(f"{root.files()[1]}/{TEMPORARY_PREFIX}{token}", secrets.token_bytes(32))
    DiskFiles().write(probe.path, probe.content)
    try:
        yield probe
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe.path)


def as_seen_here(
    root: StorageRoot, checkpoint: Checkpoint | None, probe: Probe | None, controller: Any
) -> tuple[StorageRoot, Checkpoint | None, bool]:
    """A storage path and the checkpoint to start from, as this process can reach them.

    Args:
        root: Where runs are stored, as the driver's node sees it.
        checkpoint: Likewise.
        probe: What the controller has left in the run's folder; None where that is not on a disk.
        controller: Handle of the controller's actor.

    Returns:
        Both, and whether the files of the run are carried.
    """
    is_carried = probe is not None and not probe.is_found()
    # One given by the user may lie on another disk of the driver than the run, which need not be on a disk at all.
    is_missing = checkpoint is not None and checkpoint.is_local and (is_carried or not os.path.isdir(checkpoint.path))
    if not is_carried and not is_missing:
        return root, checkpoint, False
    # Only here: most workers need no fsspec, and it takes a while to import.
    from .carry import CarryFileSystem, ControllerTransport

    filesystem = CarryFileSystem(ControllerTransport(controller))
    if is_carried:
        root = StorageRoot(root.files()[1], filesystem=filesystem)
    if checkpoint is not None and is_missing:
        checkpoint = type(checkpoint)(checkpoint.path, filesystem)
    return root, checkpoint, is_carried


def check_client_storage(root: StorageRoot) -> None:
    """Under Ray Client, see that the head node, where the run is directed, has the disk of this process.

    Args:
        root: The run's folder.

    Raises:
        ConfigError: It has not.
    """
    import ray
    import ray.util.client
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not root.is_local or not ray.util.client.ray.is_connected():
        return
    head = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    look = ray.remote(num_cpus=0)(Probe.is_found).options(scheduling_strategy=head)
    with probe_in(root) as probe:
        assert probe is not None
        if not ray.get(look.remote(probe)):
            raise ConfigError(
                f"storage_path {root.path!r} is on the disk of this machine, and under Ray Client the run is directed "
                "from the cluster's head node, which does not see it; use a URI (s3://..., gs://...) or a folder that "
                "both share, or start the script on the cluster"
            )
