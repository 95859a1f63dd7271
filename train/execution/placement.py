"""Room for the workers: can it ever be, and who says so when it cannot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.scaling import ScalingConfig

__all__ = ["can_ever_fit", "describe_need", "infeasible_message", "num_fitting", "waiting_message"]

_EPSILON = 1e-9


def can_ever_fit(
    need: Mapping[str, float], num_workers: int, strategy: str, node_totals: Sequence[Mapping[str, float]]
) -> bool:
    """Whether ``num_workers`` equal bundles fit on the nodes when all else is idle.

    Args:
        need: Resources of one worker; zero entries do not count.
        num_workers: Bundles, >= 1.
        strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        node_totals: Total resources of each living node.
    """
    rooms = [_num_fitting(need, totals) for totals in node_totals]
    if strategy == "STRICT_PACK":
        return any(room >= num_workers for room in rooms)
    if strategy == "STRICT_SPREAD":
        return sum(room >= 1 for room in rooms) >= num_workers
    return sum(rooms) >= num_workers


def num_fitting(config: ScalingConfig, node_free: Sequence[Mapping[str, float]]) -> int:
    """How many workers would fit on what is free now, at most ``max_workers``; 0 when not even ``min_workers`` do.

    Args:
        config: Resources of a worker, placement strategy and range.
        node_free: Free resources of each living node.
    """
    for size in range(config.max_workers, config.min_workers - 1, -1):
        if can_ever_fit(config.worker_resources, size, config.placement_strategy, node_free):
            return size
    return 0


def describe_need(config: ScalingConfig, num_workers: int) -> str:
    """``2 x {CPU: 1}``, for messages."""
    return f"{num_workers} x {_show(config.worker_resources)}"


def infeasible_message(
    config: ScalingConfig, num_workers: int, total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Why the workers can never start here, and what to change."""
    need = config.worker_resources
    short = {
        name: amount * num_workers
        for name, amount in need.items()
        if amount * num_workers > total.get(name, 0.0) + _EPSILON
    }
    names = list(need)
    lines = (
        f"the workers do not fit on this cluster: asked for {describe_need(config, num_workers)} "
        f"(placement_strategy={config.placement_strategy!r}), the cluster has {_show(_only(total, names))} in total, "
        f"{_show(_only(free, names))} free"
    )
    if short:
        first = next(iter(short))
        advice = f"reduce num_workers or resources_per_worker[{first!r}], or add nodes with {first}"
        if first == "GPU":
            advice = "use use_gpu=False, or a cluster with GPUs that Ray can see"
    else:
        advice = (
            "no node has room for what is asked in one place; reduce resources_per_worker or change placement_strategy"
        )
    return f"{lines}; {advice}. Set ScalingConfig(resources_timeout_s=...) to wait for nodes that join later"


def waiting_message(
    config: ScalingConfig,
    num_workers: int,
    total: Mapping[str, float],
    free: Mapping[str, float],
    waited_s: float,
    holders: str = "",
) -> str:
    """What the run is waiting for, and who holds it (``describe_holders``), if that is known."""
    names = list(config.worker_resources)
    return (
        f"waiting for room since {waited_s:.0f} s: asked for {describe_need(config, num_workers)}, "
        f"the cluster has {_show(_only(total, names))} in total, {_show(_only(free, names))} free"
        + (f"; held by {holders}" if holders else "")
    )


def _num_fitting(need: Mapping[str, float], totals: Mapping[str, float]) -> int:
    counts = [math.floor((totals.get(name, 0.0) + _EPSILON) / amount) for name, amount in need.items() if amount > 0]
    return min(counts, default=1 << 30)


def _only(amounts: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: amounts.get(name, 0.0) for name in names}


def _show(amounts: Mapping[str, Any]) -> str:
    if not amounts:
        return "{}"
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items()) + "}"
