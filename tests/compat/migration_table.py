"""Writes the table of old and new names into ``migration_guide.md``: ``python tests/compat/migration_table.py``."""

from __future__ import annotations

from pathlib import Path

from ray_lite.air._table import REMOVED_IN, ROWS, SINCE

GUIDE = Path(__file__).resolve().parents[2] / "migration_guide.md"
BEGIN = "<!-- made by tests/compat/migration_table.py from air/_table.py: begin -->"
END = "<!-- end -->"


def table() -> str:
    """The text between the two marks."""
    lines = [
        f"These warn since {SINCE} and stay until {REMOVED_IN} at least.",
        "",
        "| Old, in `ray_lite.air` | New, in `ray_lite` | What is different |",
        "|---|---|---|",
        *[f"| `{old}` | `{row.new}` | {row.difference} |" for old, row in ROWS.items() if row.works],
        "",
        "These raise `LegacyAPIError` when they are called, with this advice:",
        "",
        "| Old, in `ray_lite.air` | See, in `ray_lite` | Instead |",
        "|---|---|---|",
        *[f"| `{old}` | `{row.new}` | {row.difference} |" for old, row in ROWS.items() if not row.works],
    ]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The guide with an up-to-date table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{GUIDE} must hold the lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{table()}\n\n{end}{after}"


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
