"""What a worker does to join the process group, and to leave it.

torch is imported inside the functions: the controller imports this module to name them.
"""

from __future__ import annotations

import datetime
import json
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
# How long they wait for the one that looks who is missing.
_LOOK_S = 5.0

_STEP = "making the torch process group"


@attrs.frozen
class RankPlace:
    """Where one rank is.

    Attributes:
        node_rank: Its node's index.
        address: Host and port where the ranks meet; only rank 0 has one.
    """

    node_rank: int
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
    place = RankPlace(context.get_node_rank())
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


def join_group(config: TorchConfig, address: tuple[str, int], num_nodes: int) -> None:
    """Second round, on every rank at once: join the process group.

    What ranks need to know of each other they say through the store: sent along with this call
    for all ranks to each rank, it was 400 MB for 4,096 of them.

    Args:
        config: Backend, timeout, and whether to set ``MASTER_ADDR`` and ``MASTER_PORT``.
        address: Where rank 0 listens.
        num_nodes: Nodes of the whole group.

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
    membership.set_env(_rank_variables(context, num_nodes))
    if config.init_method == "env":
        membership.set_env({"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])})
    # Only in local mode: the user's script made a group of its own, and keeps it.
    has_own_group = dist.is_initialized()
    store = membership.store
    if not has_own_group:
        if store is None:
            store = membership.store = _connect(address, config.timeout_s)
        _tell_gpus(context, store)
        _wait_for_all(store, rank, world_size, min(config.timeout_s, _ARRIVAL_TIMEOUT_S))
    if use_gpu:
        _share_gpus_of_node(context, None if has_own_group else store, membership)
    device = get_device()
    # Hugging Face's accelerate would otherwise take the local rank for a device index.
    membership.set_env({"ACCELERATE_TORCH_DEVICE": str(device)})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if has_own_group:
        return
    assert store is not None
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=config.timeout_s),
        )
    except Exception as error:
        raise _explained(error, store, rank, world_size, config) from error
    membership.is_member = True
    _say("done", store, rank, world_size)


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


def _rank_variables(context: TrainContext, num_nodes: int) -> dict[str, str | None]:
    """The variables that torchrun sets, so that libraries written for it find their ranks.

    Those of torchrun's agent are taken away: a driver that torchrun started would hand them
    on, and they would send ``env://`` to an agent that knows nothing of this group.

    Source:
        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    rank, world_size = str(context.get_world_rank()), str(context.get_world_size())
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


def _tell_gpus(context: TrainContext, store: dist.Store) -> None:
    """Tell the ranks of this node which GPUs this one has; before it says that it is there."""
    key = f"ray_lite/gpus/{context.get_node_rank()}/{context.get_local_rank()}"
    store.set(key, json.dumps(context.get_assigned_gpu_ids()))


def _gpus_of_node(context: TrainContext, store: dist.Store) -> list[list[str]]:
    """GPU ids of each rank on this node, by local rank; all have told theirs."""
    keys = [f"ray_lite/gpus/{context.get_node_rank()}/{local}" for local in range(context.get_local_world_size())]
    return [json.loads(store.get(key)) for key in keys]


def _share_gpus_of_node(context: TrainContext, store: dist.Store | None, membership: _Membership) -> None:
    """Let this worker see the GPUs of all workers on its node: NCCL needs that for direct copies between them.

    Args:
        context: This rank's.
        store: Where all ranks have told theirs; None where this is the only one.
        membership: Takes note of what changes.
    """
    import torch

    if torch.cuda.is_initialized():
        # Too late: CUDA has read the variable, and the device numbers follow what it read.
        return
    of_node = [context.get_assigned_gpu_ids()] if store is None else _gpus_of_node(context, store)
    variable = visible_devices_variable(os.environ, is_rocm=torch.version.hip is not None)
    shared = shared_visible_devices(of_node, os.environ.get(variable))
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


def _say(word: str, store: dist.Store, rank: int, world_size: int) -> None:
    """Tell the others that this rank has come as far as ``word``."""
    store.set(f"ray_lite/{word}/{rank}", "")
    # The last tells that all have: one key to wait for, not one per rank.
    if store.add(f"ray_lite/{word}/count", 1) == world_size:
        store.set(f"ray_lite/{word}/all", "")


def _missing(word: str, store: dist.Store, world_size: int) -> str:
    """The ranks that have not said ``word``, for messages.

    One rank looks and tells the others: when each of 4,096 asked for each, rank 0 had 16 million answers to give.

    Raises:
        RuntimeError: The store is gone, and rank 0 with it.
    """
    answer = f"ray_lite/{word}/missing"
    if store.add(f"ray_lite/{word}/looks", 1) > 1:
        try:
            store.wait([answer], datetime.timedelta(seconds=_LOOK_S))
            return store.get(answer).decode()
        except RuntimeError as error:
            logger.debug("the rank that looks who is missing does not answer: %s", error)
    missing = _named(_absent([f"ray_lite/{word}/{rank}" for rank in range(world_size)], store))
    store.set(answer, missing)
    return missing


def _absent(keys: Sequence[str], store: dist.Store, first: int = 0) -> list[int]:
    """Positions, counted from ``first``, of the keys that the store lacks; few questions where few are missing."""
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [first]
    half = len(keys) // 2
    return [*_absent(keys[:half], store, first), *_absent(keys[half:], store, first + half)]


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    _say("here", store, rank, world_size)
    try:
        store.wait(["ray_lite/here/all"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        try:
            missing = _missing("here", store, world_size)
        except RuntimeError:
            raise WorkerStartError(_STEP, f"rank 0, where the ranks meet, went away ({error})") from error
        raise WorkerStartError(
            _STEP,
            f"{missing} did not arrive within {timeout_s:g} s; look at the log of that worker, "
            "or increase TorchConfig(timeout_s=...)",
        ) from error


def _explained(
    error: Exception, store: dist.Store, rank: int, world_size: int, config: TorchConfig
) -> WorkerStartError:
    """The error for a group that could not be made; names the ranks that neither joined nor failed."""
    detail = f"{type(error).__name__}: {error}"
    try:
        _say("done", store, rank, world_size)
        try:
            store.wait(["ray_lite/done/all"], datetime.timedelta(seconds=_SETTLE_S))
        except RuntimeError:
            detail = (
                f"{_missing('done', store, world_size)} did not answer within "
                f"TorchConfig(timeout_s={config.timeout_s:g}); look at the log of that worker ({detail})"
            )
    except RuntimeError as unreachable:
        # Rank 0 is gone and the store with it; what went wrong first says more.
        logger.debug("the rendezvous store cannot be asked: %s", unreachable)
    return WorkerStartError(_STEP, detail)


def _named(ranks: Sequence[int]) -> str:
    if not ranks:  # they came while they were looked for
        return "some rank"
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
