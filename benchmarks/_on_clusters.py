"""Benchmarks on running clusters: ours and the floor on one, Ray Train on another."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from _harness import OURS, PEER, Measure, Side, arguments, compare
from _machine import peer_python
from _processes import Child, scratch

__all__ = ["FLOOR", "measure_on_clusters"]

FLOOR = "floor"


def measure_on_clusters(
    name: str,
    description: str,
    measures: Sequence[Measure],
    *,
    runs: int,
    ours: Mapping[str, Any] | None = None,
    peer: Mapping[str, Any] | None = None,
) -> None:
    """Put one question to all sides, in turns.

    Args:
        name: Of the benchmark, and of the question in ``ours.py`` and ``peer.py``; the floor's is ``<name>_floor``.
        description: For ``--help`` and below the table.
        measures: Rows of the table.
        runs: Turns if ``--runs`` is not given.
        ours: Details of the question for ours and the floor.
        peer: Details of the question for Ray Train.
    """
    options = arguments(description, runs=runs, sides=[OURS, FLOOR, PEER])
    python = peer_python(options.peer_python) if PEER in options.only else None
    with ExitStack() as stack:
        sides = []
        if OURS in options.only or FLOOR in options.only:
            child = stack.enter_context(Child(sys.executable, "ours.py", stack.enter_context(scratch())))
            sides.append(Side(name=OURS, measure=partial(child.ask, name, **(ours or {}))))
            sides.append(Side(name=FLOOR, measure=partial(child.ask, f"{name}_floor", **(ours or {}))))
        if python is not None:
            child = stack.enter_context(Child(python, "peer.py", stack.enter_context(scratch())))
            sides.append(Side(name=PEER, measure=partial(child.ask, name, **(peer or {}))))
        compare(
            name,
            [side for side in sides if side.name in options.only],
            measures,
            runs=options.runs,
            pythons={"ours": sys.executable, **({"peer": python} if python else {})},
            notes=["", *description.strip().splitlines()],
        )
