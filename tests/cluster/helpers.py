"""Small things that train functions of the tests do. Imported on the workers too."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_lite import train


@contextlib.contextmanager
def folder_with(**files: bytes | str) -> Iterator[train.Checkpoint]:
    """A checkpoint of these files, whose folder is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            Path(folder, name).write_bytes(data)
        yield train.Checkpoint.from_directory(folder)


def read(checkpoint: train.Checkpoint, name: str) -> str:
    with checkpoint.as_directory() as folder:
        return Path(folder, name).read_text()


def rank() -> int:
    return train.get_context().get_world_rank()


def first_time(scratch: Path, name: str) -> bool:
    """Whether nobody has asked for this name before, in any process."""
    try:
        os.close(os.open(Path(scratch) / f"flag-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(scratch: Path, name: str, value: Any) -> None:
    """Append a line that the test reads with ``notes``."""
    with open(Path(scratch) / f"notes-{name}", "a") as file:
        file.write(json.dumps(value) + "\n")


def notes(scratch: Path, name: str) -> list[Any]:
    path = Path(scratch) / f"notes-{name}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
