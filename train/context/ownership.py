"""Taking a reported folder over, so that the train function can go on while it is uploaded.

A rename where one is possible (microseconds, whatever the size), a copy where not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket

import attrs

from ..errors import ConfigError, UploadError
from ..storage.checksum import copy_file
from ..storage.manifest import MANIFEST_NAME
from ..storage.store import RunStore
from ..storage.transfer import SourceFile, list_source
from .journal import is_running
from .scratch import Scratch

__all__ = ["OwnedFolder", "check_deletable", "delete_folder", "take_over"]

logger = logging.getLogger("ray_lite.train")

_BESIDE = ".ray_lite"


@attrs.frozen(kw_only=True)
class OwnedFolder:
    """A folder that only the library knows.

    Attributes:
        path: Where it is.
        original: Where it came from.
        is_moved: Whether it is the original itself, or a copy.
        deletes_original: Whether the original of a copy goes when the upload has succeeded.
    """

    path: str
    original: str
    is_moved: bool
    deletes_original: bool

    def uploaded(self) -> None:
        """The files are in storage: remove what was handed over."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.is_moved and self.deletes_original:
            delete_folder(self.original)

    def give_back(self) -> str:
        """The upload has failed: put the folder back where it was.

        Returns:
            Where the files are now.
        """
        if not self.is_moved:
            shutil.rmtree(self.path, ignore_errors=True)
            return self.original
        if os.path.lexists(self.original):
            return self.path
        try:
            os.rename(self.path, self.original)
        except OSError:
            return self.path
        return self.original


def check_deletable(folder: str, store: RunStore) -> None:
    """Refuse to give away a folder that others still need.

    Raises:
        ConfigError: The run, the working directory or the home folder lies in it, or it is a committed checkpoint.
    """
    inside = {"the working directory": os.getcwd(), "the home folder": os.path.expanduser("~")}
    if store.is_local:
        inside["the run itself"] = store.path
    for what, path in inside.items():
        if _lies_in(path, folder):
            raise ConfigError(
                f"report() was told to delete {folder!r} after the upload, and {what} lies in it ({path}); report a "
                "folder of its own, or pass delete_local_checkpoint_after_upload=False"
            )
    if os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
        raise ConfigError(
            f"report() was told to delete {folder!r} after the upload, and it is a checkpoint of a run; "
            "pass delete_local_checkpoint_after_upload=False"
        )


def delete_folder(folder: str) -> None:
    """Remove a folder that was uploaded; a failure is a warning."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("the uploaded folder %s could not be deleted: %s", folder, error)


def take_over(
    folder: str, store: RunStore, attempt: int, scratch: Scratch, *, gives_folder_away: bool, is_staged: bool
) -> OwnedFolder:
    """Make ``folder`` safe from whatever the train function does next.

    Args:
        folder: What was reported.
        store: Where the run lies. On a local disk the folder goes into a staging directory, so
            that its upload is a rename too.
        attempt: Leftovers on the store's disk go with those of this attempt.
        scratch: Where folders go that are on their way to other storage.
        gives_folder_away: False copies, and leaves the folder as it is.
        is_staged: It is a staging directory, whose hard links are meant.

    Raises:
        UploadError: There is no such folder, it holds the run, or it can be neither moved nor copied.
    """
    if store.is_local and _lies_in(store.path, folder):
        raise UploadError(
            f"the reported folder {folder!r} holds the place where it would be stored ({store.path}); "
            "report a folder of its own, for example a tempfile.TemporaryDirectory()"
        )
    sources = list_source(folder)
    try:
        if gives_folder_away and not os.path.islink(folder):
            path = _move(folder, sources, store, attempt, scratch, is_staged=is_staged)
            if path is not None:
                return OwnedFolder(path=path, original=folder, is_moved=True, deletes_original=False)
        path = store.staging_directory(attempt) if store.is_local else scratch.new("copy")
        _copy(sources, path)
    except OSError as error:
        if isinstance(error, UploadError):
            raise
        raise UploadError(f"the reported folder {folder!r} cannot be taken over: {error}") from error
    return OwnedFolder(path=path, original=folder, is_moved=False, deletes_original=gives_folder_away)


def _move(
    folder: str, sources: list[SourceFile], store: RunStore, attempt: int, scratch: Scratch, *, is_staged: bool
) -> str | None:
    """Rename the folder to where nobody looks; None where that is impossible."""
    # A file with a second name could be changed through that one after it was committed.
    if store.is_local and (is_staged or all(_has_one_name(file.local_path) for file in sources)):
        target = store.staging_directory(attempt)
        if _rename(folder, target):
            return target
        os.rmdir(target)
    target = scratch.new("moved")
    if _rename(folder, target):
        return target
    os.rmdir(target)
    # Another disk: next to where it is, under a name that tells whose it is.
    parent = os.path.dirname(os.path.abspath(folder))
    _sweep_beside(parent)
    target = os.path.join(parent, f"{_BESIDE}-{_host()}-{os.getpid()}-{secrets.token_hex(8)}")
    return target if _rename(folder, target) else None


def _lies_in(path: str, folder: str) -> bool:
    return (os.path.realpath(path) + os.sep).startswith(os.path.realpath(folder).rstrip(os.sep) + os.sep)


def _has_one_name(path: str) -> bool:
    status = os.lstat(path)
    return status.st_nlink == 1 and not os.path.islink(path)


def _rename(source: str, target: str) -> bool:
    try:
        os.rename(source, target)
    # Another disk, a mount point, a parent folder that we may not write: then another way is taken.
    except OSError:
        return False
    return True


def _copy(sources: list[SourceFile], target: str) -> None:
    for file in sources:
        path = os.path.join(target, file.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        copy_file(file.local_path, path, checksum=False)


def _sweep_beside(parent: str) -> None:
    """Remove what processes of this machine that no longer live had taken over here."""
    pattern = re.compile(rf"^{re.escape(_BESIDE)}-{re.escape(_host())}-(\d+)-[0-9a-f]{{16}}$")
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            match = pattern.match(name)
            if match and not is_running(match.group(1)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
