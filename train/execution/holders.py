"""Who holds the resources that a run waits for, as far as Ray tells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

__all__ = ["Holder", "describe_holders", "find_holders", "room_name", "room_prefix"]

_MAX_NAMED = 4
_ROOM = re.compile(r"ray_lite-[0-9a-f]+-[0-9a-f]+-(.+)")


def room_prefix(run_id: str) -> str:
    """How the names of the placement groups of one ``fit()`` begin."""
    return f"ray_lite-{run_id}-"


def room_name(run_id: str, token: str, run_name: str) -> str:
    """Name of a placement group: other runs that wait can tell whose it is."""
    return f"{room_prefix(run_id)}{token}-{run_name}"


@attrs.frozen
class Holder:
    """Somebody who holds resources.

    Attributes:
        who: In words.
        bundles: What it holds, a mapping per bundle.
    """

    who: str
    bundles: Sequence[Mapping[str, float]]


def describe_holders(holders: Iterable[Holder], names: Sequence[str]) -> str:
    """``run 'a' (2 x {CPU: 1}), placement group 'b' (1 x {CPU: 4})``; empty when nobody is known.

    Args:
        holders: Who holds what.
        names: The resources that matter.
    """
    counted: Counter[str] = Counter()
    for holder in holders:
        kinds = Counter(_show(bundle, names) for bundle in holder.bundles)
        kinds.pop("", None)
        if kinds:
            amounts = ", ".join(f"{number} x {{{kind}}}" for kind, number in kinds.items())
            counted[f"{holder.who} ({amounts})"] += 1
    texts = [text if number == 1 else f"{number} times {text}" for text, number in counted.items()]
    if len(texts) > _MAX_NAMED:
        texts = [*texts[:_MAX_NAMED], f"{len(texts) - _MAX_NAMED} more"]
    return ", ".join(texts)


def _show(bundle: Mapping[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{name}: {bundle[name]:g}" for name in names if bundle.get(name, 0.0) > 0)


def find_holders(run_id: str) -> list[Holder]:
    """Placement groups and actors that hold resources now, but for those of one ``fit()``.

    Plain tasks are not listed: Ray keeps no table of what runs.
    """
    import ray

    found = []
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED" and not group["name"].startswith(room_prefix(run_id)):
            run = _ROOM.fullmatch(group["name"])
            name = group["name"] or group["placement_group_id"]
            who = f"run {run[1]!r}" if run else f"placement group {name!r}"
            found.append(Holder(who, list(group["bundles"].values())))
    return found + _actors()


def _actors() -> list[Holder]:
    """Living actors outside placement groups."""
    try:
        from ray._private.state import state
        from ray.core.generated import gcs_pb2

        rows: list[Any] = [
            gcs_pb2.ActorTableData.FromString(row)  # type: ignore[attr-defined]  # made by protobuf when imported
            for row in state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
        ]
        return [
            Holder(
                f"actor {row.class_name.rpartition('.')[2]}"
                + (f" {row.name!r}" if row.name else "")
                + f" (pid {row.pid})",
                [dict(row.required_resources)],
            )
            for row in rows
            if not row.placement_group_id.strip(b"\xff")
        ]
    # Not there, or otherwise, on another version of Ray: then they are not named.
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
