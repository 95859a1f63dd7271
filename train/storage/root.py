"""Where runs are stored: a canonical path, and what it takes to open it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import StorageError
from .uri import is_local, join, redact, resolve_storage_path, split_protocol

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

    from .files import Files
    from .retry import RetryPolicy

__all__ = ["StorageRoot"]

# What to install for a protocol; each is an extra of this package where it has one.
_DRIVERS = {
    "s3": "ray-lite-train[s3]",
    "s3a": "ray-lite-train[s3]",
    "gs": "ray-lite-train[gcs]",
    "gcs": "ray-lite-train[gcs]",
    "abfs": "ray-lite-train[azure]",
    "abfss": "ray-lite-train[azure]",
    "az": "ray-lite-train[azure]",
    "adl": "ray-lite-train[azure]",
    "sftp": "ray-lite-train[sftp]",
    "ssh": "ray-lite-train[sftp]",
    "hdfs": "pyarrow",
    "webhdfs": "requests",
    "oss": "ossfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


def _plain_dict(options: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(options or {})


@attrs.frozen
class StorageRoot:
    """A place in a filesystem. Small and picklable; nothing is opened until ``files()`` or ``open()``.

    Args:
        path: Canonical (`uri.resolve_storage_path`), or a path inside ``filesystem``.
        options: Keyword arguments for fsspec. Never shown, never written to storage.
        filesystem: A filesystem made by the user (fsspec, or pyarrow's); used as it is.
    """

    path: str
    options: dict[str, Any] = attrs.field(factory=dict, converter=_plain_dict, repr=False)
    filesystem: Any = attrs.field(default=None, repr=False)

    @classmethod
    def resolve(
        cls, path: Any, options: Mapping[str, Any] | None = None, filesystem: AbstractFileSystem | None = None
    ) -> StorageRoot:
        """The root for a path as a user writes it (see `uri.resolve_storage_path`)."""
        resolved = resolve_storage_path(path, has_filesystem=filesystem is not None)
        return cls(resolved, options, filesystem)

    def child(self, *names: str) -> StorageRoot:
        """The same place, deeper."""
        return attrs.evolve(self, path=join(self.path, *names))

    @property
    def is_local(self) -> bool:
        """Whether the operating system opens the path itself."""
        if self.filesystem is not None:
            return _is_plain_local(self.filesystem)
        return is_local(self.path)

    @property
    def is_shared_between_processes(self) -> bool:
        """False for ``memory://``, which each process has for itself."""
        if self.filesystem is not None:
            protocol = getattr(self.filesystem, "protocol", "")
            return protocol != "memory" and "memory" not in protocol
        return split_protocol(self.path)[0] != "memory"

    def open(self) -> tuple[AbstractFileSystem, str]:
        """The fsspec filesystem, and the path inside it.

        Raises:
            StorageError: The protocol is unknown, its driver is not installed, or it cannot connect.
        """
        if self.filesystem is not None:
            filesystem = _as_fsspec(self.filesystem)
            return filesystem, _inside(filesystem, self.path)
        import fsspec

        protocol = split_protocol(self.path)[0]
        filesystem_class = self._driver(protocol)
        url_options = {} if protocol == "file" else filesystem_class._get_kwargs_from_urls(self.path)
        try:
            filesystem = fsspec.filesystem(protocol, **{**url_options, **self.options})
        except Exception as error:
            raise StorageError(
                f"storage_path {redact(self.path)!r} cannot be opened: {_text(error)}; "
                "check RunConfig(storage_options=...) and the credentials"
            ) from error
        return filesystem, _inside(filesystem, self.path)

    def files(self, retry: RetryPolicy | None = None) -> tuple[Files, str]:
        """The operations on this place, and the path inside it.

        Raises:
            StorageError: As ``open``.
        """
        if self.is_local:
            from .disk import DiskFiles

            return DiskFiles(), self._local_path()
        # Late, because it brings fsspec, which a local disk does without.
        from .remote import RemoteFiles

        filesystem, path = self.open()
        return RemoteFiles(filesystem, retry), path

    def _local_path(self) -> str:
        if self.filesystem is not None:
            return _inside(self.filesystem, self.path)
        return split_protocol(self.path)[1]

    def _driver(self, protocol: str) -> Any:
        import fsspec

        try:
            return fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            known = ", ".join(sorted(fsspec.available_protocols()))
            raise StorageError(
                f"storage_path {redact(self.path)!r}: no filesystem is registered for {protocol}://; known are {known}"
            ) from error
        except ImportError as error:
            package = _DRIVERS.get(protocol)
            advice = f"pip install '{package}'" if package else f"install its driver ({_text(error)})"
            raise StorageError(
                f"storage_path {redact(self.path)!r}: the driver for {protocol}:// is not installed here; {advice}"
            ) from error


def _inside(filesystem: AbstractFileSystem, path: str) -> str:
    return str(filesystem._strip_protocol(path)).rstrip("/")


def _is_plain_local(filesystem: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    # A subclass may do anything, so only the class itself is replaced by plain system calls.
    return type(filesystem) is LocalFileSystem


def _as_fsspec(filesystem: Any) -> AbstractFileSystem:
    from fsspec.spec import AbstractFileSystem

    if isinstance(filesystem, AbstractFileSystem):
        return filesystem
    if type(filesystem).__module__.partition(".")[0] == "pyarrow":
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem)
    raise StorageError(
        f"storage_filesystem must be an fsspec (or pyarrow) filesystem, got {type(filesystem).__name__}; "
        "pass for example s3fs.S3FileSystem(...)"
    )


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
