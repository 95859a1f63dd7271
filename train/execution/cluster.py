"""The Ray cluster a run uses: the one that is there, or a small one of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..configs.scaling import ScalingConfig
from .preload import MODULES_VARIABLE, PLACES_VARIABLE

__all__ = ["connect"]

logger = logging.getLogger("ray_lite.train")

_NODE_TIMEOUT_S = 30.0
_NODE_POLL_S = 0.01

_embedded_cpus: int | None = None


def connect(config: ScalingConfig, preload_modules: Sequence[str]) -> None:
    """See that this process is connected to Ray.

    A connection that exists is used as it is; so is ``RAY_ADDRESS``, and a cluster that
    ``ray start`` has started on this machine. Otherwise a cluster is started for this
    process alone: no dashboard, as many CPUs as the run asks for (at least those of the machine),
    the backend's modules imported ahead in its idle workers. It ends with the process.

    Args:
        config: What the run asks for.
        preload_modules: Modules that workers will need.
    """
    import ray

    global _embedded_cpus
    num_cpus = max(os.cpu_count() or 1, math.ceil(config.total_resources.get("CPU", 0.0)))
    if ray.is_initialized():
        if _embedded_cpus is None or num_cpus <= _embedded_cpus:
            return
        # Our own cluster, from an earlier and smaller run of this process.
        ray.shutdown()
    _embedded_cpus = None
    address = os.environ.get("RAY_ADDRESS")
    if address or _is_cluster_here():
        try:
            ray.init(address=address or "auto", logging_level=logging.WARNING)
        except ConnectionError:
            if address:
                raise
            # The file of a cluster that is gone.
        else:
            return
    _start_embedded(num_cpus, preload_modules)
    _embedded_cpus = num_cpus


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
                del os.environ[name]
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
    whether the node is up. Where Ray's internals look different, it starts as usual.
    """
    from ray._private import node, services

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        if callable(getattr(owner, name, None)):
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    original_get_node = getattr(services, "get_node", None)

    def get_node_soon(gcs_address: str, node_id: str) -> Any:
        _wait_for_node(gcs_address, node_id)
        assert original_get_node is not None
        return original_get_node(gcs_address, node_id)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Left out."""

    replace(node.Node, "start_api_server", nothing)
    replace(node.Node, "start_monitor", nothing)
    replace(services, "get_node", get_node_soon)
    try:
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
            time.sleep(_NODE_POLL_S)
    # Internals of Ray that look different: then the node is waited for in Ray's own way.
    except (AttributeError, TypeError) as error:
        logger.debug("the start of the node cannot be watched: %s", error)


def _is_cluster_here() -> bool:
    """Whether ``ray start`` has left the address of a cluster on this machine."""
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if os.name == "posix" else tempfile.gettempdir())
    return os.path.exists(os.path.join(folder, "ray", "ray_current_cluster"))
