"""Imported by every idle worker of an embedded cluster: what a run will need, ahead of time.

Ray imports this module when such a process starts (``preload_python_modules``). There is a
place for each worker that the run asked for; a process that finds none (the controller's,
which never uses the framework) skips the import. The place of a worker that has ended is
free again.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

__all__ = ["MODULES_VARIABLE", "PLACES_VARIABLE"]

MODULES_VARIABLE = "RAY_LITE_PRELOAD"
"""Environment variable: modules to import, separated by commas."""

PLACES_VARIABLE = "RAY_LITE_PRELOAD_PLACES"
"""Environment variable: how many processes do so, and a name for them, ``<number>:<name>``."""

# Held as long as the process lives.
_place: socket.socket | None = None


def preload() -> None:
    """Import the modules that the environment names, if there is a place left."""
    if _take_place(os.environ.get(PLACES_VARIABLE, "")):
        for name in filter(None, os.environ.get(MODULES_VARIABLE, "").split(",")):
            importlib.import_module(name)


def _take_place(places: str) -> bool:
    """Take the first free place: an abstract socket name, which the kernel frees with the process."""
    global _place
    number, _, name = places.partition(":")
    if not number or sys.platform != "linux":
        return True
    for index in range(int(number)):
        candidate = socket.socket(socket.AF_UNIX)
        try:
            candidate.bind(f"\0{name}-{index}")
        except OSError:
            candidate.close()
            continue
        _place = candidate
        return True
    return False


if MODULES_VARIABLE in os.environ:
    preload()
