"""The processes of a session: what a script has started, and may have left behind."""

from __future__ import annotations

from pathlib import Path

__all__ = ["processes_of"]


def processes_of(session: int, *, titled: str = "", without: str = "") -> list[int]:
    """Processes of a session that live, whose title holds ``titled`` and, unless it is empty, not ``without``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            is_meant = titled in title and not (without and without in title)
            if int(fields[3]) == session and fields[0] != "Z" and is_meant:
                found.append(int(entry.name))
    return found
