"""``StagingDirectory``: where a checkpoint is written so that committing it costs no copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UploadError
from ..storage.manifest import check_relative

if TYPE_CHECKING:
    from ..storage.checkpoint import Checkpoint

__all__ = ["StagingDirectory"]


class StagingDirectory(os.PathLike[str]):
    """A new, empty local folder for the files of the next checkpoint.

    Use it like a path: ``open(staging / "model.pt", "wb")``, ``os.path.join(staging, name)``,
    ``train.Checkpoint.from_directory(staging)``. Made by ``train.staging_directory()``.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def link_from(self, checkpoint: Checkpoint, name: str, *, to: str | None = None) -> Path:
        """Take over a file of an earlier checkpoint that has not changed.

        On the store's own disk that is a hard link: no copy, no space, and the file stays whole
        when the earlier checkpoint is deleted. Elsewhere it is copied. Never write into the file:
        both checkpoints would change. Remove it first and write a new one.

        Args:
            checkpoint: Usually ``train.get_checkpoint()``.
            name: The file's name in it.
            to: Its name here; the same by default.

        Returns:
            Where the file is now.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointDamagedError: Its size is not the committed one.
            ValueError: A name leaves its folder.
            UploadError: The file cannot be made here.
        """
        target = self.path / check_relative(name if to is None else to)
        # Opening it checks it against the manifest.
        with checkpoint.open(name) as stream:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if checkpoint.is_local and _link(os.path.join(checkpoint.path, name), target):
                    return target
                with open(target, "xb") as copy:
                    shutil.copyfileobj(stream, copy, 1 << 20)
            except OSError as error:
                raise UploadError(f"{name!r} of {checkpoint!r} cannot be taken into {self}: {error}") from error
        return target


def _link(source: str, target: Path) -> bool:
    try:
        os.link(os.path.realpath(source), target)
    except FileExistsError:
        raise
    # Another disk, a filesystem without links: a copy does as well.
    except OSError:
        return False
    return True
