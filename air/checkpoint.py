"""``ray_lite.air.Checkpoint``: a ``train.Checkpoint`` that can also be a dict, without any pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import weakref
import zipfile
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ray_lite.train.errors import CheckpointError, ConfigTypeError, LegacyAPIError
from ray_lite.train.storage import checkpoint as train_checkpoint
from ray_lite.train.storage.manifest import METADATA_NAME, RESERVED_NAMES, check_relative
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.shared_copy import shared_copy
from ray_lite.train.storage.transfer import list_source, upload

from ._dict_files import DICT_NAME, OLD_DICT_NAME, read_dict, write_dict
from ._table import not_supported_text
from ._warn import warn_deprecated

__all__ = ["Checkpoint"]

C = TypeVar("C", bound="Checkpoint")


class _OwnFolder:
    """A temporary folder that goes with the last checkpoint that lies in it.

    Held like a copy of a remote checkpoint: when a process is killed, the next one to hold any takes its away.
    """

    def __init__(self, fill: Callable[[str], None]) -> None:
        stack = contextlib.ExitStack()
        self.path = stack.enter_context(shared_copy(secrets.token_hex(16), fill))
        weakref.finalize(self, _close, stack, os.getpid())


# What a forked child was born with: to let go of it would take the folder away from the parent.
_of_parent: list[contextlib.ExitStack] = []


def _close(stack: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:
        stack.close()
    else:
        _of_parent.append(stack)


# The base says of most of these names that they are gone, hence the "override"s below: here they are back.
class Checkpoint(train_checkpoint.Checkpoint):
    """A checkpoint with the methods of Ray AIR's; everything that takes a ``train.Checkpoint`` takes it.

    One made from a dict lies in a temporary folder that is removed with the object; it takes its
    files along when it is pickled. Reported, they lie in the run's storage like any others.
    """

    _own_folder: _OwnFolder | None = None

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any]) -> C:  # type: ignore[override]
        """A checkpoint that holds a dict. The dict is neither kept nor changed.

        It may be empty, and be made of None, bool, int, float, str, bytes, lists, tuples, dicts with
        keys of these, numpy arrays and scalars, and torch tensors, to any depth. All come back equal;
        subclasses of dict as plain dicts, tensors on the CPU and without gradients.

        Raises:
            ConfigTypeError: ``data`` is not a dict.
            LegacyAPIError: It holds something else, which only a pickle could store; the text
                says where.
        """
        warn_deprecated("Checkpoint.from_dict")
        if not isinstance(data, dict):
            raise ConfigTypeError(f"Checkpoint.from_dict(data) must be a dict, got {type(data).__name__}")
        return cls._filled(lambda folder: write_dict(data, folder))

    def to_dict(self) -> dict[Any, Any]:  # type: ignore[override]
        """The dict that ``from_dict`` was given, each time a new one.

        Raises:
            LegacyAPIError: The checkpoint was made from a folder, or by Ray, whose pickles are not opened.
            CheckpointNotFoundError: The checkpoint is not there.
            CheckpointDamagedError: Its files are not as they were written.
        """
        warn_deprecated("Checkpoint.to_dict")
        with self.as_directory() as folder:
            if os.path.isfile(os.path.join(folder, DICT_NAME)):
                return read_dict(folder)
            if os.path.isfile(os.path.join(folder, OLD_DICT_NAME)):
                raise LegacyAPIError(
                    f"{self!r} holds a dict in Ray's format, a pickle, which is not supported by ray_lite. Instead: "
                    f"if you trust the file, open {OLD_DICT_NAME} in checkpoint.as_directory() with "
                    "pickle.load where ray is installed"
                )
        raise LegacyAPIError(
            f"{self!r} was not made by from_dict, so it has no to_dict() in ray_lite. "
            "Instead: read its files in checkpoint.as_directory()"
        )

    @classmethod
    def from_bytes(cls: type[C], data: bytes) -> C:  # type: ignore[override]
        """The checkpoint that ``to_bytes`` packed.

        Raises:
            ConfigTypeError: ``data`` is not bytes.
            LegacyAPIError: They come from Ray, whose pickles are not opened.
            CheckpointError: They are not what ``to_bytes`` gave.
        """
        warn_deprecated("Checkpoint.from_bytes")
        if not isinstance(data, (bytes, bytearray)):
            raise ConfigTypeError(f"Checkpoint.from_bytes(data) must be bytes, got {type(data).__name__}")
        if data[:1] == b"\x80":  # the opcode that every pickle of protocol 2 or later begins with
            raise LegacyAPIError(
                "Checkpoint.from_bytes() of a pickle is not supported by ray_lite. Instead: if you trust the "
                "bytes, use Checkpoint.from_dict(pickle.loads(data))"
            )
        return _unpacked(cls, bytes(data))

    def to_bytes(self) -> bytes:  # type: ignore[override]
        """All files of the checkpoint as a zip archive.

        Raises:
            CheckpointNotFoundError: The checkpoint is not there.
            CheckpointDamagedError: A file is missing or changed.
        """
        warn_deprecated("Checkpoint.to_bytes")
        return self._packed()

    @classmethod
    def from_uri(cls: type[C], uri: str) -> C:  # type: ignore[override]
        """The same as ``Checkpoint(uri)``."""
        warn_deprecated("Checkpoint.from_uri")
        return cls(uri)

    def to_uri(self, uri: str) -> str:  # type: ignore[override]
        """Copy all files to a folder in any storage that fsspec opens.

        Returns:
            The URI, or for ``file://`` the path.

        Raises:
            StorageError: The place cannot be written, or its driver is not installed.
            CheckpointNotFoundError: The checkpoint is not there.
        """
        warn_deprecated("Checkpoint.to_uri")
        target = StorageRoot.resolve(uri)
        if target.is_local:
            return self.to_directory(target.path)
        files, path = target.files()
        with self.as_directory() as folder:
            upload(list_source(folder), files, path)
        if metadata := self.get_metadata():
            train_checkpoint.Checkpoint(target.path).set_metadata(metadata)
        return target.path

    @property
    def uri(self) -> str:  # type: ignore[override]
        """Where the checkpoint lies, with ``file://`` in front of a local path."""
        warn_deprecated("Checkpoint.uri")
        return f"file://{self.path}" if self._root.is_local else self.path

    def get_internal_representation(self) -> tuple[str, str]:  # type: ignore[override]
        """``("local_path", path)`` or ``("uri", uri)``; Ray AIR's ``"data_dict"`` is a folder here."""
        warn_deprecated("Checkpoint.get_internal_representation")
        return ("local_path" if self._root.is_local else "uri"), self.path

    @classmethod
    def from_checkpoint(cls: type[C], other: train_checkpoint.Checkpoint) -> C:
        """The same place as an object of this class: ``air.Checkpoint.from_checkpoint(result.checkpoint).to_dict()``.

        Raises:
            ConfigTypeError: ``other`` is not a ``train.Checkpoint``.
        """
        if not isinstance(other, train_checkpoint.Checkpoint):
            raise ConfigTypeError(
                f"Checkpoint.from_checkpoint(other) must be a ray_lite.train.Checkpoint, got {type(other).__name__}"
            )
        checkpoint = cls.__new__(cls)
        checkpoint._root = other._root
        checkpoint._own_folder = getattr(other, "_own_folder", None)
        return checkpoint

    @classmethod
    def from_object_ref(cls, ref: Any) -> NoReturn:
        """Not supported: raises ``LegacyAPIError``, which says what to do."""
        raise LegacyAPIError(not_supported_text("Checkpoint.from_object_ref"))

    def to_object_ref(self) -> NoReturn:
        """Not supported: raises ``LegacyAPIError``, which says what to do."""
        raise LegacyAPIError(not_supported_text("Checkpoint.to_object_ref"))

    def get_preprocessor(self) -> NoReturn:  # type: ignore[override]
        """Not supported: raises ``LegacyAPIError``, which says what to do."""
        raise LegacyAPIError(not_supported_text("Checkpoint.get_preprocessor"))

    def set_preprocessor(self, preprocessor: Any) -> NoReturn:  # type: ignore[override]
        """Not supported: raises ``LegacyAPIError``, which says what to do."""
        raise LegacyAPIError(not_supported_text("Checkpoint.set_preprocessor"))

    def holds_dict(self) -> bool:
        """Whether it is a local one, made by ``from_dict``."""
        return self._root.is_local and os.path.isfile(os.path.join(self.path, DICT_NAME))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._own_folder is None:
            return super().__reduce_ex__(protocol)
        # The folder is on this machine and goes with this object.
        return _unpacked, (type(self), self._packed())

    @classmethod
    def _filled(cls: type[C], fill: Callable[[str], None]) -> C:
        own_folder = _OwnFolder(fill)
        checkpoint = cls(own_folder.path)
        checkpoint._own_folder = own_folder
        return checkpoint

    def _packed(self) -> bytes:
        buffer = io.BytesIO()
        metadata = self.get_metadata()
        # Stored, not compressed: weights hardly shrink, and the archive is a way of transport.
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name in self.files():
                if name != METADATA_NAME:
                    with self.open(name) as source, archive.open(name, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, 1 << 20)
            if metadata:
                archive.writestr(METADATA_NAME, json.dumps(metadata))
        return buffer.getvalue()


Checkpoint.__module__ = "ray_lite.air"


def _unpacked(cls: type[C], data: bytes) -> C:
    def unpack(folder: str) -> None:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.filename in RESERVED_NAMES:
                    raise CheckpointError(f"the bytes hold {info.filename!r}, a name that the library itself uses")
                path = os.path.join(folder, check_relative(info.filename))
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with archive.open(info) as source, open(path, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)

    try:
        return cls._filled(unpack)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"these bytes are not what Checkpoint.to_bytes() gave: {error}") from error
