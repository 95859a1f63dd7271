"""``Checkpoint``: a folder somewhere, and how to read it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from ..errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from .envelope import EnvelopeError, open_envelope, seal
from .files import TEMPORARY_PREFIX
from .manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    OVERLAY_NAME,
    RESERVED_NAMES,
    FileEntry,
    Manifest,
    check_relative,
)
from .root import StorageRoot
from .transfer import download, problems_of, summary
from .uri import redact, resolve_storage_path, split_protocol

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

    from .files import Files

__all__ = ["Checkpoint"]

C = TypeVar("C", bound="Checkpoint")

_DICT_RECIPE = (
    "checkpoints are folders now: write your data into a folder (json, torch.save, ...) and use "
    "Checkpoint.from_directory(folder); read it back with checkpoint.as_directory()"
)
_URI_RECIPE = "use Checkpoint(uri) to open it and checkpoint.path to get it"
_PREPROCESSOR_RECIPE = "keep what you need in checkpoint.set_metadata({...}) or in a file of the checkpoint"


class _Removed:
    """A name of older versions: reading it, on the class or on an object, tells what to do instead."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"Checkpoint.{self._name} no longer exists: {self._recipe}")


class Checkpoint:
    """A folder of files, on a local disk or in any storage that fsspec opens.

    Treat it as read-only once it was reported. The object is small: it holds the place, never
    the content, and can be sent to other processes.

    Args:
        path: Local folder or URI; with ``filesystem``, the path inside it. A relative path is
            resolved against this process's folder now.
        filesystem: fsspec (or pyarrow) filesystem to use instead of the one for the URI's protocol.
        storage_options: Keyword arguments for fsspec when there is no ``filesystem``.

    Raises:
        ConfigError: The path is not one (see ``RunConfig.storage_path``).
        CheckpointError: The path is a local file.

    Two checkpoints are equal when they are the same place.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        filesystem: Any = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        resolved = resolve_storage_path(path, has_filesystem=filesystem is not None, what="Checkpoint path")
        self._root = StorageRoot(resolved, storage_options, filesystem)
        if self._root.is_local and os.path.isfile(resolved):
            raise CheckpointError(f"a checkpoint is a folder, and {resolved!r} is a file; put it into a folder")

    @classmethod
    def from_directory(cls: type[C], path: str | os.PathLike[str]) -> C:
        """A checkpoint of an existing local folder. The folder is neither copied nor moved nor removed.

        Raises:
            CheckpointNotFoundError: There is no such folder.
            CheckpointError: It is a file.
        """
        checkpoint = cls(path)
        if not checkpoint._root.is_local:
            raise CheckpointError(f"from_directory takes a local folder; use Checkpoint({os.fspath(path)!r})")
        if not os.path.isdir(checkpoint.path):
            raise CheckpointNotFoundError(f"no folder {checkpoint.path!r} to make a checkpoint of")
        return checkpoint

    @property
    def path(self) -> str:
        """Absolute local path, or URI; the path inside ``filesystem`` where one was given."""
        return self._root.path

    @property
    def is_local(self) -> bool:
        """Whether ``path`` is on a disk that the operating system opens."""
        return self._root.is_local

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The fsspec filesystem that holds it.

        Raises:
            StorageError: Its driver is not installed or it cannot be opened.
        """
        return self._root.open()[0]

    def files(self) -> list[str]:
        """Names of the files, relative to the checkpoint, sorted.

        Raises:
            CheckpointNotFoundError: There is no such folder.
            CheckpointDamagedError: It was committed, and its manifest cannot be read.
        """
        files, path = self._files()
        return [entry.path for entry in self._entries(files, path)]

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy all files into a local folder, which is then yours.

        The folder appears whole or not at all; in one that exists, files of the same name are
        replaced one by one. Checksums of a committed checkpoint are compared on the way.

        Args:
            path: The folder; None makes a new temporary one.

        Returns:
            The absolute path of the folder.

        Raises:
            CheckpointNotFoundError: The checkpoint is not there; nothing was made.
            CheckpointDamagedError: A file is missing or changed; nothing was made.
        """
        files, source = self._files()
        entries = self._entries(files, source)
        if path is None:
            target = tempfile.mkdtemp(prefix="ray_lite_checkpoint_")
        else:
            target = os.path.abspath(os.path.expanduser(os.fspath(path)))
        existed = path is not None and os.path.isdir(target)
        # Beside or inside the target: a rename needs the same filesystem.
        unfinished = os.path.join(
            target if existed else os.path.dirname(target), f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        )
        try:
            os.makedirs(unfinished)
            self._copy_into(unfinished, entries, files, source)
            if existed:
                _move_all(unfinished, target)
            else:
                os.rename(unfinished, target)
        except BaseException:
            if path is None:
                shutil.rmtree(target, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return target

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A local folder with the files, for the duration of the ``with`` block. Treat it as read-only.

        A local checkpoint is its own folder, without a copy. A remote one is downloaded once for
        all processes of this node that read it at the same time, and removed after the last.

        Raises:
            CheckpointNotFoundError: The checkpoint is not there.
            CheckpointDamagedError: A file is missing or changed (for a local one: has another size).
        """
        files, source = self._files()
        entries = self._entries(files, source)
        if files.is_local:
            # Names that were added do no harm here; verify() and resuming do look at them.
            problems = problems_of(entries, files, source, digests=False, may_hold=None)
            if problems:
                raise self._damaged(problems)
            yield source
            return
        from .shared_copy import shared_copy

        content = json.dumps([self._identity(), [[e.path, e.size_bytes, e.crc32] for e in entries]])
        key = hashlib.sha256(content.encode()).hexdigest()[:32]
        with shared_copy(key, lambda folder: self._copy_into(folder, entries, files, source)) as folder:
            yield folder

    def open(self, path: str, mode: str = "rb") -> IO[bytes]:
        """Stream one file without fetching the others.

        Args:
            path: Relative to the checkpoint, as in ``files()``.
            mode: ``"rb"``; checkpoints are read-only.

        Raises:
            CheckpointNotFoundError: No such file.
            CheckpointDamagedError: Its size is not the committed one.
            ValueError: The name leaves the checkpoint, or another mode was asked for.
        """
        if mode not in ("rb", "r"):
            raise ValueError(f"checkpoints are read-only: mode must be 'rb', got {mode!r}")
        check_relative(path)
        files, source = self._files()
        size = files.size(f"{source}/{path}")
        manifest = self._manifest(files, source)
        expected = {entry.path: entry.size_bytes for entry in manifest.files} if manifest else {}
        if size is None or (manifest is not None and path not in expected):
            if path in expected:
                raise CheckpointDamagedError(f"checkpoint {self._shown} is damaged: {path!r} is missing")
            raise CheckpointNotFoundError(f"checkpoint {self._shown} has no file {path!r}")
        if expected.get(path, size) != size:
            raise CheckpointDamagedError(
                f"checkpoint {self._shown} is damaged: {path!r} has {size} bytes instead of {expected[path]}"
            )
        return files.open_read(f"{source}/{path}")

    def verify(self, *, digests: bool = True) -> None:
        """Compare what is stored with what was committed.

        Args:
            digests: Read every byte; False compares names and sizes only.

        Raises:
            CheckpointNotFoundError: It is not there, or was never committed by a run.
            CheckpointDamagedError: Files are missing, extra, of another size, or changed; names them.
        """
        files, source = self._files()
        manifest = self._manifest(files, source)
        if manifest is None:
            raise CheckpointNotFoundError(
                f"checkpoint {self._shown} was never committed, so there is nothing to verify"
            )
        problems = problems_of(manifest.files, files, source, digests=digests, may_hold=RESERVED_NAMES)
        if OVERLAY_NAME in {entry.name for entry in files.entries(source)}:
            try:
                open_envelope(files.read(f"{source}/{OVERLAY_NAME}"))
            except EnvelopeError as error:
                problems.append(f"the metadata cannot be used: {error}")
        if problems:
            raise self._damaged(problems)

    def get_metadata(self) -> dict[str, Any]:
        """The user's metadata; empty when none was set."""
        files, source = self._files()
        with contextlib.suppress(FileNotFoundError):
            try:
                return open_envelope(files.read(f"{source}/{OVERLAY_NAME}"))
            except EnvelopeError as error:
                raise CheckpointDamagedError(
                    f"the metadata of checkpoint {self._shown} cannot be used: {error}"
                ) from error
        try:
            data = files.read(f"{source}/{METADATA_NAME}")
        except FileNotFoundError:
            return {}
        try:
            metadata = json.loads(data)
        except ValueError as error:
            raise CheckpointDamagedError(f"the metadata of checkpoint {self._shown} is not JSON: {error}") from error
        if not isinstance(metadata, dict):
            raise CheckpointDamagedError(f"the metadata of checkpoint {self._shown} is not a JSON object")
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata.

        Raises:
            TypeError: It is not a mapping that JSON can hold.
        """
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata must be a dict, got {type(metadata).__name__}")
        encoded = json.dumps(dict(metadata))
        files, source = self._files()
        if files.size(f"{source}/{MANIFEST_NAME}") is None:
            files.write(f"{source}/{METADATA_NAME}", encoded.encode())
        else:
            files.write(f"{source}/{OVERLAY_NAME}", seal(metadata))

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata, replacing values of the same key."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def _files(self) -> tuple[Files, str]:
        return self._root.files()

    def _damaged(self, problems: Sequence[str]) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"checkpoint {self._shown} is damaged: {summary(problems)}")

    @property
    def _shown(self) -> str:
        return redact(self.path)

    def _manifest(self, files: Files, source: str) -> Manifest | None:
        try:
            data = files.read(f"{source}/{MANIFEST_NAME}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return Manifest.from_bytes(data)
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(f"checkpoint {self._shown}: {error}") from error

    def _entries(self, files: Files, source: str) -> tuple[FileEntry, ...]:
        manifest = self._manifest(files, source)
        if manifest is not None:
            return manifest.files
        found = files.walk(source)
        if not found and not (files.is_local and os.path.isdir(source)):
            raise CheckpointNotFoundError(f"no checkpoint at {self._shown}")
        return tuple(FileEntry(name, found[name], "") for name in sorted(found) if name not in RESERVED_NAMES)

    def _copy_into(self, folder: str, entries: tuple[FileEntry, ...], files: Files, source: str) -> None:
        download(entries, files, source, folder)
        if files.size(f"{source}/{OVERLAY_NAME}") is not None:
            with open(os.path.join(folder, METADATA_NAME), "w") as file:
                json.dump(self.get_metadata(), file)

    def _identity(self) -> tuple[str, str]:
        if self._root.filesystem is not None:
            protocol = getattr(self._root.filesystem, "protocol", type(self._root.filesystem).__name__)
            name = protocol if isinstance(protocol, str) else str(next(iter(protocol)))
            rest = split_protocol(self.path)[1]
        else:
            name, rest = split_protocol(self.path)
        return ("file" if name == "local" else name), rest.strip("/")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint is not a path, since it may lie in remote storage; use "
            "'with checkpoint.as_directory() as folder:' or checkpoint.to_directory()"
        )

    from_dict = _Removed(_DICT_RECIPE)
    to_dict = _Removed(_DICT_RECIPE)
    from_bytes = _Removed(_DICT_RECIPE)
    to_bytes = _Removed(_DICT_RECIPE)
    get_internal_representation = _Removed(_DICT_RECIPE)
    from_uri = _Removed(_URI_RECIPE)
    to_uri = _Removed(_URI_RECIPE)
    uri = _Removed(_URI_RECIPE)
    get_preprocessor = _Removed(_PREPROCESSOR_RECIPE)
    set_preprocessor = _Removed(_PREPROCESSOR_RECIPE)


def _move_all(source: str, target: str) -> None:
    for folder, _, names in os.walk(source):
        destination = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
        os.makedirs(destination, exist_ok=True)
        for name in names:
            os.replace(os.path.join(folder, name), os.path.join(destination, name))
