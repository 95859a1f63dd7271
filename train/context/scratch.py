"""A worker's own place on the local disk for what is under way."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from .journal import claim_folder

__all__ = ["Scratch"]

_NAME = "scratch"


class Scratch:
    """Folders that belong to one worker process, on its temporary disk.

    They lie beside the worker's journal, so that what a killed process leaves goes with that.

    Args:
        folder: Of this worker and attempt alone, below ``journal_root()``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def new(self, purpose: str) -> str:
        """Make an empty folder.

        Raises:
            OSError: The disk refuses.
        """
        claim_folder(self._folder)
        path = self._folder / _NAME / f"{purpose}-{secrets.token_hex(8)}"
        path.mkdir(parents=True)
        return str(path)

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._folder / _NAME, ignore_errors=True)
