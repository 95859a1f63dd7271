"""Room for the workers: can it ever be, and who says so when it cannot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.scaling import ScalingConfig

__all__ = [
    "bundle_selectors",
    "can_ever_fit",
    "describe_need",
    "infeasible_message",
    "matches",
    "num_fitting",
    "waiting_message",
]

_EPSILON = 1e-9
_MAX_SHOWN_SELECTORS = 3


def can_ever_fit(
    need: Mapping[str, float],
    num_workers: int,
    strategy: str,
    node_totals: Sequence[Mapping[str, float]],
    *,
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    node_labels: Sequence[Mapping[str, str]] | None = None,
) -> bool:
    """Whether ``num_workers`` equal bundles fit on the nodes when all else is idle.

    Args:
        need: Resources of one worker; zero entries do not count.
        num_workers: Bundles, >= 1.
        strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        node_totals: Total resources of each living node.
        label_selector: As in ``ScalingConfig``; a list has at least ``num_workers`` entries.
        node_labels: Labels of these nodes, in the same order; None: every node is taken for a match.
    """
    return _num_placeable(need, num_workers, strategy, node_totals, label_selector, node_labels) >= num_workers


def num_fitting(
    config: ScalingConfig,
    node_free: Sequence[Mapping[str, float]],
    node_labels: Sequence[Mapping[str, str]] | None = None,
) -> int:
    """How many workers would fit on what is free now, at most ``max_workers``; 0 when not even ``min_workers`` do.

    Args:
        config: Resources of a worker, placement strategy, label selector and range.
        node_free: Free resources of each living node.
        node_labels: Labels of these nodes, in the same order; None: every node is taken for a match.
    """
    size = _num_placeable(
        config.worker_resources,
        config.max_workers,
        config.placement_strategy,
        node_free,
        config.label_selector,
        node_labels,
    )
    return size if size >= config.min_workers else 0


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that the selector asks for.

    Of each label it asks for ``"value"``, ``"!value"`` (any other, or none at all), ``"in(a,b)"``
    or ``"!in(a,b)"``; all of them must hold.

    Args:
        selector: Label → what is asked of it.
        labels: The node's, as ``ray.nodes()`` gives them.

    Source:
        ``LabelSelector::ParseLabelSelectorValue`` and ``NodeResources::NodeLabelMatchesConstraint`` in Ray's
        sources, and what Ray 2.60 answers to each form.
    """
    for name, asked in selector.items():
        is_negated = asked.startswith("!")
        text = asked[1:] if is_negated else asked
        values = [text]
        if text.startswith("in(") and text.endswith(")"):
            values = [value.strip() for value in text[3:-1].split(",")]
        if (labels.get(name) in values) == is_negated:
            return False
    return True


def bundle_selectors(config: ScalingConfig, num_workers: int) -> list[dict[str, str]] | None:
    """The label selectors of the first ``num_workers`` bundles, for a placement group; None when there are none.

    Without blanks: Ray (2.60) takes ``"in(a, b)"`` for well formed, and then looks for a label ``" b"``.
    """
    selector = config.label_selector
    if selector is None:
        return None
    asked = [selector] * num_workers if isinstance(selector, Mapping) else selector[:num_workers]
    return [{name: text.replace(" ", "") for name, text in one.items()} for one in asked]


def describe_need(config: ScalingConfig, num_workers: int) -> str:
    """``2 x {CPU: 1}``, for messages; with the node labels, where some are asked for."""
    text = f"{num_workers} x {_show(config.worker_resources)}"
    selector = config.label_selector
    if not selector:
        return text
    asked = [selector] if isinstance(selector, Mapping) else _distinct(selector)[0]
    shown = " or ".join(map(_show_labels, asked[:_MAX_SHOWN_SELECTORS]))
    return f"{text} on nodes with the labels {shown}" + (" ..." if len(asked) > _MAX_SHOWN_SELECTORS else "")


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
    elif config.label_selector:
        advice = (
            "no nodes with these labels have room for what is asked; change label_selector or resources_per_worker, "
            "or add nodes with these labels"
        )
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


def _num_fitting(need: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    counts = [math.floor((amounts.get(name, 0.0) + _EPSILON) / amount) for name, amount in need.items() if amount > 0]
    return min(counts, default=1 << 30)


def _num_placeable(
    need: Mapping[str, float],
    most: int,
    strategy: str,
    nodes: Sequence[Mapping[str, float]],
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None,
    node_labels: Sequence[Mapping[str, str]] | None,
) -> int:
    """How many of the first ``most`` bundles fit together, with one look at each node.

    No more fit in any arrangement. Ray's own search settles bundle by bundle, so where selectors
    differ it may find less, and a group of this size then waits.
    """
    rooms = [_num_fitting(need, amounts) for amounts in nodes]
    if label_selector is None or node_labels is None:
        label_selector, node_labels = {}, [{}] * len(rooms)
    asked = [label_selector] * most if isinstance(label_selector, Mapping) else label_selector[:most]
    selectors, kinds = _distinct(asked)
    # Nodes that suit the same bundles are alike, and count as one.
    alike: dict[tuple[bool, ...], list[int]] = {}
    for room, labels in zip(rooms, node_labels, strict=True):
        alike.setdefault(tuple(matches(selector, labels) for selector in selectors), []).append(room)
    if strategy == "STRICT_PACK":
        return max((min(max(found), _num_suited(kinds, suits)) for suits, found in alike.items()), default=0)
    if strategy == "STRICT_SPREAD":
        alike = {suits: [min(room, 1) for room in found] for suits, found in alike.items()}
    return _num_placed(kinds, list(alike), [sum(found) for found in alike.values()])


def _num_suited(kinds: Sequence[int], suits: Sequence[bool]) -> int:
    """How many bundles in a row from the first on a node suits."""
    return next((number for number, kind in enumerate(kinds) if not suits[kind]), len(kinds))


def _num_placed(kinds: Sequence[int], suits: Sequence[Sequence[bool]], free: list[int]) -> int:
    """How many bundles in a row from the first on find places together.

    A bundle for which all places are taken asks those that stand there to move, and those ask
    others in turn: the augmenting paths of bipartite matching, over kinds instead of bundles.

    Args:
        kinds: Kind of each bundle.
        suits: For each place, whether it suits each kind.
        free: How many bundles each place has room for; used up.
    """
    num_kinds = max(kinds, default=-1) + 1
    places_of = [[place for place, suit in enumerate(suits) if suit[kind]] for kind in range(num_kinds)]
    standing = [[0] * len(suits) for _ in places_of]
    for number, kind in enumerate(kinds):
        moves = _moves_that_place(kind, places_of, standing, free)
        if not moves:
            return number
        free[moves[0][1]] -= 1
        mover: int | None = None
        for taker, place in moves:
            standing[taker][place] += 1
            if mover is not None:
                standing[mover][place] -= 1
            mover = taker
    return len(kinds)


def _moves_that_place(
    kind: int, places_of: Sequence[Sequence[int]], standing: Sequence[Sequence[int]], free: Sequence[int]
) -> list[tuple[int, int]]:
    """Which kinds take which places so that one more of ``kind`` finds one; empty when there is no way.

    The first takes a free place, each further one the place that the one before it has left.
    """
    taken_by: dict[int, tuple[int, int] | None] = {kind: None}
    asked: set[int] = set()
    movers = [kind]
    for mover in movers:
        for place in places_of[mover]:
            if place in asked:
                continue
            asked.add(place)
            if free[place] > 0:
                moves = [(mover, place)]
                while (step := taken_by[moves[-1][0]]) is not None:
                    moves.append(step)
                return moves
            for other, counts in enumerate(standing):
                if other not in taken_by and counts[place] > 0:
                    taken_by[other] = (mover, place)
                    movers.append(other)
    return []


def _distinct(selectors: Sequence[Mapping[str, str]]) -> tuple[list[Mapping[str, str]], list[int]]:
    """The different selectors, and for each given one its index among them."""
    index_of: dict[tuple[tuple[str, str], ...], int] = {}
    distinct: list[Mapping[str, str]] = []
    indices = []
    for selector in selectors:
        key = tuple(sorted(selector.items()))
        if key not in index_of:
            index_of[key] = len(distinct)
            distinct.append(selector)
        indices.append(index_of[key])
    return distinct, indices


def _only(amounts: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: amounts.get(name, 0.0) for name in names}


def _show(amounts: Mapping[str, Any]) -> str:
    if not amounts:
        return "{}"
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items()) + "}"


def _show_labels(selector: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {text}" for name, text in selector.items()) + "}"
