"""What a worker does to join the process group, and to leave it.

torch is imported inside the functions: the controller imports this module to name them.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..context.current import current_context
from ..errors import NotInTrainFunctionError, WorkerStartError
from .threads import choose_num_threads
from .visible_devices import shared_visible_devices, visible_devices_variable

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..context.train_context import TrainContext
    from .config import TorchConfig

__all__ = ["RankPlace", "destroy_group", "forget_group", "join_group", "open_rendezvous"]

logger = logging.getLogger(__name__)

# Every rank has answered the first round when the second begins, so one that does not
# arrive within this time is cut off from rank 0, however long collectives may take.
_ARRIVAL_TIMEOUT_S = 120.0
# A communicator that hangs here belongs to a process that is about to end.
_DESTROY_TIMEOUT_S = 10.0
# How long ranks that failed wait for the others to say that they failed too.
_SETTLE_S = 1.0

_STEP = "making the torch process group"


@attrs.frozen
class RankPlace:
    """Where one rank is, as the others need to know it.

    Attributes:
        node_rank: Its node's index.
        gpu_ids: GPUs assigned to it, as Ray gives them.
        address: Host and port where the ranks meet; only rank 0 has one.
    """

    node_rank: int
    gpu_ids: tuple[str, ...]
    address: tuple[str, int] | None = None


class _Membership:
    """What this process has changed on its way into the group, to be undone when it leaves."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self.is_member = False
        self._env: dict[str, str | None] = {}
        self._num_threads: int | None = None

    def set_env(self, values: Mapping[str, str | None]) -> None:
        """Set environment variables, or take away those whose value is None."""
        for name, value in values.items():
            self._env.setdefault(name, os.environ.get(name))
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def set_num_threads(self, num_threads: int) -> None:
        import torch

        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)

    def undo(self) -> None:
        import torch

        self.store = None
        # A train function may have changed a variable itself, but none of them means
        # anything without the group; local mode must leave the driver as it was.
        for name, value in self._env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)


# Of this process. A worker serves one run at a time, and its backend's calls come one by one.
_membership: _Membership | None = None


def _require_context() -> TrainContext:
    context = current_context()
    if context is None:
        raise NotInTrainFunctionError("TorchBackend")
    return context


def open_rendezvous(config: TorchConfig) -> RankPlace:
    """First round, on every rank: get torch ready; on rank 0 also open the place to meet.

    Args:
        config: ``timeout_s`` bounds the later waits.

    Raises:
        WorkerStartError: torch is missing or was built without ``torch.distributed``.
    """
    global _membership
    context = _require_context()
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        raise WorkerStartError(
            "importing torch", f"{error}; install it on every node: pip install ray-lite-train[torch]"
        ) from error
    if not dist.is_available():
        raise WorkerStartError("importing torch", "this build of torch has no torch.distributed")
    # Left over from an attempt that ended without a shutdown, on a worker that is used again.
    destroy_group()
    forget_group()
    _membership = _Membership()
    _set_num_threads(context, _membership)
    place = RankPlace(context.get_node_rank(), tuple(context.get_assigned_gpu_ids()))
    if context.get_world_rank() != 0:
        return place
    host = _own_host(context)
    store = dist.TCPStore(
        host,
        # Chosen by the kernel, and bound from this moment on: nobody can take it in between.
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=config.timeout_s),
    )
    _membership.store = store
    return attrs.evolve(place, address=(host, store.port))


def _own_host(context: TrainContext) -> str:
    # On one node the loopback is right even where the machine's own address changes (a laptop
    # that moves to another network) or is closed to itself by a firewall.
    if context.get_local_world_size() == context.get_world_size():
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


def _set_num_threads(context: TrainContext, membership: _Membership) -> None:
    if not _is_ray_worker():
        # Local mode: the driver's process has all its CPUs, and torch's own choice is right.
        return
    num_threads = choose_num_threads(context.get_num_cpus(), os.environ.get("OMP_NUM_THREADS"), _env_at_start())
    if num_threads is not None:
        membership.set_num_threads(num_threads)
        # For the children: data loaders' workers, and libraries that start threads later.
        membership.set_env({"OMP_NUM_THREADS": str(num_threads)})


def _is_ray_worker() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _env_at_start() -> str | None:
    """``OMP_NUM_THREADS`` as this process was started with it, or None: before Ray set its own."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:  # not Linux
        return None
    values = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(b"OMP_NUM_THREADS=")]
    return values[0] if values else None


def join_group(config: TorchConfig, address: tuple[str, int], places: Sequence[RankPlace]) -> None:
    """Second round, on every rank at once: join the process group.

    Args:
        config: Backend, timeout, and whether to set ``MASTER_ADDR`` and ``MASTER_PORT``.
        address: Where rank 0 listens.
        places: All ranks' answers of the first round, in rank order.

    Raises:
        WorkerStartError: Rank 0 cannot be reached, a rank is missing (it is named), or the
            backend cannot be used.
    """
    import torch
    import torch.distributed as dist

    from .device import get_device

    context = _require_context()
    membership = _membership
    assert membership is not None, "open_rendezvous comes first"
    rank, world_size = context.get_world_rank(), context.get_world_size()
    use_gpu = context.get_resources().get("GPU", 0.0) > 0
    backend = config.resolve(use_gpu)
    _check_usable(backend)
    membership.set_env(_rank_variables(context, places))
    if config.init_method == "env":
        membership.set_env({"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])})
    if use_gpu:
        _share_gpus_of_node(context, places, membership)
    device = get_device()
    # Hugging Face's accelerate would otherwise take the local rank for a device index.
    membership.set_env({"ACCELERATE_TORCH_DEVICE": str(device)})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        # Only in local mode: the user's script made a group of its own, and keeps it.
        return
    if membership.store is None:
        membership.store = _connect(address, config.timeout_s)
    _wait_for_all(membership.store, rank, world_size, min(config.timeout_s, _ARRIVAL_TIMEOUT_S))
    try:
        dist.init_process_group(
            backend,
            store=membership.store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=config.timeout_s),
        )
    except Exception as error:
        raise _explained(error, membership.store, rank, world_size, config) from error
    membership.is_member = True
    membership.store.set(f"ray_lite/done/{rank}", "")


def _check_usable(backend: str) -> None:
    import torch.distributed as dist

    checks = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip()
        if name in checks and not checks[name]():
            raise WorkerStartError(
                _STEP,
                f"the backend {name!r} is not in this build of torch; install a build that has it, "
                "or choose another with TorchConfig(backend=...)",
            )


def _rank_variables(context: TrainContext, places: Sequence[RankPlace]) -> dict[str, str | None]:
    """The variables that torchrun sets, so that libraries written for it find their ranks.

    Those of torchrun's agent are taken away: a driver that torchrun started would hand them
    on, and they would send ``env://`` to an agent that knows nothing of this group.

    Source:
        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    rank, world_size = str(context.get_world_rank()), str(context.get_world_size())
    num_nodes = len({place.node_rank for place in places})
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "GROUP_RANK": str(context.get_node_rank()),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        **{name: None for name in os.environ if name.startswith("TORCHELASTIC_")},
    }


def _share_gpus_of_node(context: TrainContext, places: Sequence[RankPlace], membership: _Membership) -> None:
    """Let this worker see the GPUs of all workers on its node: NCCL needs that for direct copies between them."""
    import torch

    if torch.cuda.is_initialized():
        # Too late: CUDA has read the variable, and the device numbers follow what it read.
        return
    own_node = [place.gpu_ids for place in places if place.node_rank == context.get_node_rank()]
    variable = visible_devices_variable(os.environ, is_rocm=torch.version.hip is not None)
    shared = shared_visible_devices(own_node, os.environ.get(variable))
    if shared is not None:
        membership.set_env({variable: shared})


def _connect(address: tuple[str, int], timeout_s: float) -> dist.Store:
    import torch.distributed as dist

    host, port = address
    wait_s = min(timeout_s, _ARRIVAL_TIMEOUT_S)
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=wait_s))
    except RuntimeError as error:
        raise WorkerStartError(
            _STEP,
            f"cannot reach rank 0 at {host}:{port} within {wait_s:g} s; is a firewall between the nodes? ({error})",
        ) from error
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    store.set(f"ray_lite/here/{rank}", "")
    # The last to arrive tells the others: one key to wait for, not one per rank.
    if store.add("ray_lite/arrived", 1) == world_size:
        store.set("ray_lite/all", "")
    try:
        store.wait(["ray_lite/all"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other in range(world_size) if not store.check([f"ray_lite/here/{other}"])]
        raise WorkerStartError(
            _STEP,
            f"{_named(missing)} did not arrive within {timeout_s:g} s; look at the log of that worker, "
            "or increase TorchConfig(timeout_s=...)",
        ) from error


def _explained(
    error: Exception, store: dist.Store, rank: int, world_size: int, config: TorchConfig
) -> WorkerStartError:
    """The error for a group that could not be made; names the ranks that neither joined nor failed."""
    detail = f"{type(error).__name__}: {error}"
    try:
        store.set(f"ray_lite/done/{rank}", "")
        others = [f"ray_lite/done/{other}" for other in range(world_size)]
        try:
            store.wait(others, datetime.timedelta(seconds=_SETTLE_S))
        except RuntimeError:
            silent = [other for other, key in enumerate(others) if not store.check([key])]
            detail = (
                f"{_named(silent)} did not answer within TorchConfig(timeout_s={config.timeout_s:g}); "
                f"look at the log of that worker ({detail})"
            )
    except RuntimeError as unreachable:
        # Rank 0 is gone and the store with it; what went wrong first says more.
        logger.debug("the rendezvous store cannot be asked: %s", unreachable)
    return WorkerStartError(_STEP, detail)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def destroy_group() -> None:
    """Destroy the process group if this process still is a member; bounded in time."""
    membership = _membership
    if membership is None or not membership.is_member:
        return
    import torch.distributed as dist

    membership.is_member = False
    # The train function may have destroyed it itself.
    if dist.is_initialized():
        _run_bounded(dist.destroy_process_group, "destroy_process_group", _DESTROY_TIMEOUT_S)


def forget_group() -> None:
    """Undo what else joining the group changed in this process: environment, threads, cached GPU memory.

    Comes when all ranks have destroyed the group: rank 0 then closes the store, which NCCL's
    watchdogs on the other ranks talk to until the end.
    """
    global _membership
    membership, _membership = _membership, None
    if membership is None:
        return
    import torch

    membership.undo()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _run_bounded(function: Any, what: str, timeout_s: float) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  # handed to the caller's thread, which logs it
            errors.append(error)

    thread = threading.Thread(target=run, name=f"ray_lite-{what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("%s did not return within %g s (another rank is stuck?); going on without it", what, timeout_s)
    elif errors:
        logger.warning("%s failed: %s", what, errors[0])
