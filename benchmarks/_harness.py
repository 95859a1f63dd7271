"""Measure several sides turn by turn, and print and keep what came out.

Turn by turn (ours, floor, peer, ours, ...), because a shared machine changes its speed over
minutes: what is compared was then measured under the same load. Each side is warmed up once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
from _machine import machine

__all__ = ["OURS", "PEER", "Measure", "Side", "arguments", "compare"]

OURS = "ray_lite.train"
PEER = "Ray Train"

_OUT = Path(__file__).resolve().parent / "out"
_SCALE = {"s": 1.0, "ms": 1e3, "µs": 1e6, "per s": 1.0, "": 1.0}


@attrs.frozen(kw_only=True)
class Measure:
    """One row of the table.

    Attributes:
        key: Its name in what a side returns; times in seconds.
        text: Its name in the table.
        unit: What the table shows: ``s``, ``ms``, ``µs``, ``per s``, or nothing for a plain count.
        budget: The limit for ours: a value in ``unit``, or a factor where ``against`` is given; None for no limit.
        against: The side that ``budget`` is a factor of.
        is_rate: More is better.
    """

    key: str
    text: str
    unit: str = "s"
    budget: float | None = None
    against: str | None = None
    is_rate: bool = False


@attrs.frozen(kw_only=True)
class Side:
    """One column of the table.

    Attributes:
        name: Its heading.
        measure: Runs it once; key → value for the measures it knows.
        warm_up: Runs before the first turn; ``measure`` itself if None.
    """

    name: str
    measure: Callable[[], Mapping[str, float]]
    warm_up: Callable[[], object] | None = None


def arguments(description: str, *, runs: int, sides: Sequence[str]) -> argparse.Namespace:
    """The command line that all benchmarks share.

    Args:
        description: For ``--help``.
        runs: Turns if ``--runs`` is not given.
        sides: The names that ``--only`` takes.

    Returns:
        ``runs``, ``only`` (names of sides) and ``peer_python`` (str or None).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=runs, metavar="N", help=f"turns per side (default {runs})")
    parser.add_argument(
        "--only", action="append", choices=list(sides), metavar="SIDE", help=f"of {', '.join(sides)}; may be repeated"
    )
    parser.add_argument(
        "--peer-python",
        metavar="PATH",
        help="interpreter that has Ray Train (default: $BENCH_PEER_PYTHON, else .venv-peer, made by `make bench-peer`)",
    )
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    options.only = options.only or list(sides)
    return options


def compare(
    name: str,
    sides: Sequence[Side],
    measures: Sequence[Measure],
    *,
    runs: int,
    pythons: Mapping[str, str],
    notes: Sequence[str] = (),
) -> None:
    """Run the sides in turns, print the table and write ``out/<name>.json``.

    A side that fails loses its turn with a message, and the others go on; when ours has
    failed in every turn the process exits with 1.

    Args:
        name: Of the benchmark.
        sides: In the order of the columns.
        measures: In the order of the rows.
        runs: Turns, >= 1.
        pythons: Name → interpreter, whose package versions head the table.
        notes: Lines below the table.
    """
    header = machine(pythons)
    samples: dict[str, dict[str, list[float]]] = {m.key: {} for m in measures}
    also: dict[str, dict[str, list[float]]] = {}
    failures: list[str] = []
    alive = list(sides)
    for side in sides:
        _tell(f"{name}: {side.name}: warm-up")
        if _try(side.warm_up or side.measure, side, failures) is None:
            alive.remove(side)
    for turn in range(runs):
        # Another begins each time: what one leaves behind must not always meet the same other one.
        for side in alive[turn % len(alive) :] + alive[: turn % len(alive)] if alive else []:
            began = time.perf_counter()
            values = _try(side.measure, side, failures)
            if values is None:
                continue
            _tell(f"{name}: {side.name}: turn {turn + 1} of {runs}, {time.perf_counter() - began:.1f} s")
            for key, value in values.items():
                # What no row shows is kept all the same.
                by_side = (samples if key in samples else also).setdefault(key, {})
                by_side.setdefault(side.name, []).append(float(value))
    columns = [side.name for side in sides]
    lines = [*_heading(header), "", *_table(columns, measures, samples), ""]
    lines += [f"Median (least to most) of {runs} turns, one side after the other.", *notes, *failures]
    print("\n".join(lines), flush=True)
    _OUT.mkdir(exist_ok=True)
    document = {
        "name": name,
        "machine": header,
        "runs": runs,
        "measures": [attrs.asdict(m) for m in measures],
        "samples": samples,
        "also": also,
        "failures": failures,
        "table": lines,
    }
    path = _OUT / f"{name}.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _tell(f"written to {path}")
    if OURS in columns and not any(values.get(OURS) for values in samples.values()):
        sys.exit(1)


def _try(call: Callable[[], object], side: Side, failures: list[str]) -> Mapping[str, float] | None:
    try:
        result = call()
    # The peer may fail in ways of its own; the table then says so.
    except Exception as error:  # noqa: BLE001
        failures.append(f"{side.name} failed: {error}")
        _tell(failures[-1])
        return None
    return result if isinstance(result, Mapping) else {}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the table ---------------------------------------------------------------------------------


def _heading(header: Mapping[str, object]) -> list[str]:
    return [f"{key}: {value}  " for key, value in header.items()]


def _table(
    columns: Sequence[str], measures: Sequence[Measure], samples: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[str]:
    has_ours = OURS in columns
    others = [name for name in columns if has_ours and name != OURS]
    ratios = [_ratio_title(name) for name in others]
    titles = ["", *columns, *ratios, *(["budget", "kept"] if has_ours else [])]
    rows = [titles, ["---"] * len(titles)]
    for measure in measures:
        values = samples[measure.key]
        row = [f"{measure.text}{f' ({measure.unit})' if measure.unit else ''}"]
        row += [_cell(values.get(name, ()), measure) for name in columns]
        row += [_ratio(values, name, measure) for name in others]
        if has_ours:
            row += list(_verdict(values, measure))
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def _ratio_title(name: str) -> str:
    return f"{name} ÷ ours" if name == PEER else f"ours ÷ {name}"


def _ratio(values: Mapping[str, Sequence[float]], name: str, measure: Measure) -> str:
    ours, other = values.get(OURS), values.get(name)
    if not ours or not other:
        return "-"
    a, b = statistics.median(ours), statistics.median(other)
    if name == PEER:
        a, b = b, a
    if measure.is_rate and name == PEER:
        a, b = b, a
    return _digits(a / b) if b else "-"


def _cell(values: Sequence[float], measure: Measure) -> str:
    if not values:
        return "-"
    digits = _digits if measure.unit else "{:,.0f}".format
    scale = _SCALE[measure.unit]
    low, middle, high = (digits(v * scale) for v in (min(values), statistics.median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def _verdict(values: Mapping[str, Sequence[float]], measure: Measure) -> tuple[str, str]:
    if measure.budget is None:
        return "", ""
    sign = "≥" if measure.is_rate else "≤"
    limit: float | None = measure.budget
    text = f"{sign} {measure.budget:g} {measure.unit}".rstrip()
    if measure.against is not None:
        text = f"{sign} {measure.budget:g} x {measure.against}"
        base = values.get(measure.against)
        limit = measure.budget * statistics.median(base) * _SCALE[measure.unit] if base else None
    ours = values.get(OURS)
    if not ours or limit is None:
        return text, "-"
    value = statistics.median(ours) * _SCALE[measure.unit]
    return text, "yes" if (value >= limit if measure.is_rate else value <= limit) else "no"


def _digits(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
