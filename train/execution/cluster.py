"""The Ray cluster a run uses: the one that is there, or a small one of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import secrets
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs

from ..configs.scaling import ScalingConfig
from .preload import MODULES_VARIABLE, PLACES_VARIABLE

__all__ = ["connect", "is_gone"]

logger = logging.getLogger("ray_lite.train")

_NODE_TIMEOUT_S = 30.0
_POLL_S = 0.01

# Ray may hear a moment later of an actor that was made, or of the end of those of a run.
_ACTORS_SETTLE_S = 1.0
_MAX_SHOWN_ACTORS = 3


@attrs.define
class _Embedded:
    """A cluster that this process has started for itself.

    Attributes:
        node_id: Ray's id of its only node, by which it is told from what the user has connected to since.
        num_cpus: What it was started with.
        num_runs: Calls of ``fit()`` that are in it now.
    """

    node_id: str
    num_cpus: int
    num_runs: int = 0


# The connection, Ray's classes and the environment belong to the process: one thread at a time changes them.
# Reentrant, because a forgotten run may be collected, and leave, at any line of the thread that holds it.
_lock = threading.RLock()
_embedded: _Embedded | None = None


def connect(config: ScalingConfig, preload_modules: Sequence[str]) -> contextlib.ExitStack:
    """See that this process is connected to Ray.

    A connection that exists is used as it is; so is ``RAY_ADDRESS``, and a cluster that
    ``ray start`` has started on this machine. Otherwise a cluster is started for this
    process alone: no dashboard, as many CPUs as the run asks for (at least those of the machine),
    the backend's modules imported ahead in its idle workers. It ends with the process, or when
    a later run asks for more CPUs and nothing is lost with it: no other run, no actor and no
    object of the user's. May be called from any thread.

    Args:
        config: What the run asks for.
        preload_modules: Modules that workers will need.

    Returns:
        To be closed when the run has ended. Until then, or until it is forgotten, no other run
        replaces the cluster.
    """
    import ray

    global _embedded
    num_cpus = max(os.cpu_count() or 1, math.ceil(config.total_resources.get("CPU", 0.0)))
    in_use = contextlib.ExitStack()
    with _lock:
        if ray.is_initialized():
            if _embedded is None or not _is_connected_to(_embedded):
                return in_use
            if num_cpus > _embedded.num_cpus:
                reason = _why_it_stays(_embedded)
                if reason is None:
                    ray.shutdown()
                else:
                    logger.warning(
                        "this run asks for %d CPUs, and the Ray cluster that an earlier fit() of this process has "
                        "started has %d; it is not replaced by a larger one, because %s. To have room, call "
                        "ray.init(num_cpus=%d) before the first fit()",
                        num_cpus,
                        _embedded.num_cpus,
                        reason,
                        num_cpus,
                    )
        if not ray.is_initialized():
            if _join_cluster():
                return in_use
            _in_lasting_thread(lambda: _start_embedded(num_cpus, preload_modules))
            _embedded = _Embedded(ray.get_runtime_context().get_node_id(), num_cpus)
        assert _embedded is not None
        _embedded.num_runs += 1
        # Called once: when it is closed, or when it is collected.
        in_use.callback(weakref.finalize(in_use, _leave, _embedded))
    return in_use


def is_gone() -> bool:
    """Whether the cluster that this process has started, with ``ray.init`` or through ``connect``, has ended.

    A signal to the whole process group ends Ray's processes too, where the user has started them. Then no call
    is answered any more, and Ray waits for a minute each time.
    """
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    started = getattr(node, "all_processes", None) or {}
    return any(info.process.poll() is not None for name in ("raylet", "gcs_server") for info in started.get(name, ()))


def _leave(embedded: _Embedded) -> None:
    with _lock:
        embedded.num_runs -= 1


def _is_connected_to(embedded: _Embedded) -> bool:
    import ray

    try:
        return bool(ray.get_runtime_context().get_node_id() == embedded.node_id)
    # A client whose server is gone fails in several ways; whatever it is, it is not ours.
    except Exception as error:  # noqa: BLE001
        logger.debug("the connection that exists does not answer: %s", error)
        return False


def _why_it_stays(embedded: _Embedded) -> str | None:
    """What would be lost with the cluster; None when nothing would."""
    # What is in cycles that nobody holds any more, such as a traceback's, does not count.
    gc.collect()
    if embedded.num_runs:
        return "another fit() runs in it"
    try:
        actors, num_objects = _living_actors(), _num_objects()
    # Internals of Ray that look different: then nobody knows what would be lost.
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return f"it cannot be told what else lives in it ({error})"
    if actors:
        shown = ", ".join(actors[:_MAX_SHOWN_ACTORS]) + (", ..." if len(actors) > _MAX_SHOWN_ACTORS else "")
        return f"actors live in it, which would end ({shown})"
    if num_objects:
        return f"this process holds objects in it, which would be lost ({num_objects} references)"
    return None


def _living_actors() -> list[str]:
    """Class names of the actors that live on."""
    # Ray's public list of actors needs the API server, which an embedded cluster does without.
    from ray._private.state import actors
    from ray.actor import ActorHandle

    # By their exact type: isinstance() would run code of whatever else lives in this process.
    held = {thing._actor_id.hex() for thing in gc.get_objects() if type(thing) is ActorHandle}
    deadline = time.monotonic() + _ACTORS_SETTLE_S
    while True:
        table = actors()
        living = [str(actor["ActorClassName"]) for actor in table.values() if actor["State"] != "DEAD"]
        # Ray may not have heard yet of one that was made a moment ago; one of an earlier cluster it never knows.
        if (not living and held <= set(table)) or time.monotonic() > deadline:
            return living
        time.sleep(_POLL_S)


def _num_objects() -> int:
    """How many references to objects this process holds: results of tasks, and what it has put."""
    from ray._private import worker

    driver: Any = worker.global_worker
    return len(driver.core_worker.get_all_reference_counts())


def _join_cluster() -> bool:
    """Connect to the cluster that the environment or this machine names; False when there is none."""
    import ray

    address = os.environ.get("RAY_ADDRESS") or _cluster_here()
    if not address:
        return False
    ray.init(address=address, logging_level=logging.WARNING)
    return True


def _cluster_here() -> str | None:
    """Address of the cluster that ``ray start`` has left on this machine, if it still runs.

    Not ``ray.init("auto")``: when that cluster is gone, it takes any that runs here, and be it
    the one that another script has started for itself.
    """
    try:
        with open(_address_file()) as file:
            address = file.read().strip()
    except OSError:
        return None
    from ray._private import services

    find: Any = services.find_gcs_addresses
    find.cache_clear()
    return address if address in find() else None


def _address_file() -> str:
    """Where ``ray start`` writes the address.

    Source:
        ``ray._common.utils.get_default_system_temp_dir`` of Ray 2.60.
    """
    folder = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None)
    return os.path.join(
        folder or ("/tmp" if os.name == "posix" else tempfile.gettempdir()), "ray", "ray_current_cluster"
    )


def _in_lasting_thread(start: Callable[[], None]) -> None:
    """Call ``start`` in a thread that lives as long as this process.

    Ray asks Linux to kill its processes when their parent dies, and for Linux that is the thread
    that has started them: a cluster that was started by a ``fit()`` in a thread ended with that
    thread, under all others. The main thread lasts, and is where Ray can set its handler of SIGTERM.

    Source:
        prctl(2), ``PR_SET_PDEATHSIG``; ``set_kill_on_parent_death_linux`` in ``ray._private.utils``.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[None] = Future()

    def run() -> None:
        try:
            start()
        # Goes to the caller, whatever it is.
        except BaseException as error:  # noqa: BLE001
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Event().wait()

    threading.Thread(target=run, name="ray_lite-cluster", daemon=True).start()
    started.result()


def _start_embedded(num_cpus: int, preload_modules: Sequence[str]) -> None:
    import ray

    modules = ",".join(["ray_lite.train.execution.worker", *preload_modules])
    places = f"{num_cpus}:ray_lite-{secrets.token_hex(8)}"
    with _lean_node(), _environment({MODULES_VARIABLE: modules, PLACES_VARIABLE: places}), _quiet_token_notice():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _system_config={
                "preload_python_modules": ["ray_lite.train.execution.preload"],
                # Ray gives its workers the lowest priority but four; here they are what the user waits for.
                "worker_niceness": 0,
            },
        )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started meanwhile."""
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_token_notice() -> Iterator[None]:
    """Leave out Ray's notice that its token authentication is on, which is as it should be."""
    notice = logging.getLogger("ray._private.authentication.authentication_token_setup")
    old_level = notice.level
    notice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        notice.setLevel(old_level)


@contextlib.contextmanager
def _lean_node() -> Iterator[None]:
    """Start a node without the two servers that a cluster of one process never uses.

    ``ray.init`` has no option for it: even without a dashboard it starts the API server and
    the autoscaler's monitor, waits for the first, and waits for both again at the end (about
    2 s of the 8 s that a two-worker script takes on two cores). And it asks once a second
    whether the node is up. Its processes get a process group of their own, too: a SIGTERM to the
    group of the script is a notice for the train functions, and would end Ray before they have saved.
    (They end with this process all the same.) Where Ray's internals look different, it starts as usual.
    """
    from ray._private import node, services

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        if callable(getattr(owner, name, None)):
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    original_get_node = getattr(services, "get_node", None)
    original_popen: Any = getattr(services, "ConsolePopen", None)

    def popen_apart(*args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> Any:
        def before_exec() -> None:
            os.setpgid(0, 0)
            if preexec_fn is not None:
                preexec_fn()

        return original_popen(*args, preexec_fn=before_exec, **options)

    def get_node_soon(gcs_address: str, node_id: str) -> Any:
        _wait_for_node(gcs_address, node_id)
        assert original_get_node is not None
        return original_get_node(gcs_address, node_id)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Left out."""

    try:
        replace(node.Node, "start_api_server", nothing)
        replace(node.Node, "start_monitor", nothing)
        replace(services, "get_node", get_node_soon)
        if os.name == "posix":
            replace(services, "ConsolePopen", popen_apart)
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _wait_for_node(gcs_address: str, node_id: str) -> None:
    """Return when the node has registered; at the latest after ``_NODE_TIMEOUT_S``, for Ray to say what is wrong."""
    from ray import _raylet

    try:
        client = getattr(_raylet, "GcsClient")(address=gcs_address)  # noqa: B009 - not in Ray's stubs
        deadline = time.monotonic() + _NODE_TIMEOUT_S
        while time.monotonic() < deadline:
            if any(found.hex() == node_id for found in client.get_all_node_info(timeout=_NODE_TIMEOUT_S)):
                return
            time.sleep(_POLL_S)
    # Internals of Ray that look different: then the node is waited for in Ray's own way.
    except (AttributeError, TypeError) as error:
        logger.debug("the start of the node cannot be watched: %s", error)
