"""The Ray cluster a run uses: the one that is there, or a small one of its own."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Sequence

from ..configs.scaling import ScalingConfig

__all__ = ["connect"]

logger = logging.getLogger("ray_lite.train")

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
    if os.environ.get("RAY_ADDRESS") or _is_cluster_here():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", logging_level=logging.WARNING)
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise
        else:
            return
    start_embedded(num_cpus, preload_modules)
    _embedded_cpus = num_cpus


def start_embedded(num_cpus: int, preload_modules: Sequence[str]) -> None:
    """Start a cluster for this process alone."""
    import ray

    system_config = {"preload_python_modules": list(preload_modules)} if preload_modules else None
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        logging_level=logging.WARNING,
        _system_config=system_config,
    )


def _is_cluster_here() -> bool:
    """Whether ``ray start`` has left the address of a cluster on this machine."""
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if os.name == "posix" else tempfile.gettempdir())
    return os.path.exists(os.path.join(folder, "ray", "ray_current_cluster"))
