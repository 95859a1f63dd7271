"""The manifest: the one small file that makes a folder a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..errors import CheckpointConflictError, CheckpointDamagedError, explained
from .envelope import EnvelopeError, open_envelope, seal

__all__ = [
    "MANIFEST_NAME",
    "MARKER_NAME",
    "METADATA_NAME",
    "OVERLAY_NAME",
    "RESERVED_NAMES",
    "FileEntry",
    "Manifest",
    "UploadedPart",
    "check_relative",
    "format_crc32",
    "merge_parts",
]

MANIFEST_NAME = ".ray_lite.json"
"""Written last; a folder without it was never committed."""
MARKER_NAME = ".ray_lite.uploading.json"
"""In folders that the user named: which attempt made it, until it is committed."""
METADATA_NAME = ".metadata.json"
"""The user's metadata, a file like any other once the checkpoint is committed (as in Ray Train)."""
OVERLAY_NAME = ".ray_lite.metadata.json"
"""Metadata set after the commit, which must not touch a file that the manifest vouches for."""
RESERVED_NAMES = frozenset({MANIFEST_NAME, MARKER_NAME, OVERLAY_NAME})

_FORMAT = "ray_lite.checkpoint/1"


def format_crc32(crc: int) -> str:
    """A crc32 as it is stored: eight hexadecimal digits."""
    return f"{crc:08x}"


def check_relative(path: str) -> str:
    """Return ``path`` if it stays below the folder that it is relative to.

    Raises:
        ValueError: It is empty, absolute, has a drive, or climbs with ``..``.
    """
    segments = path.split("/")
    if (
        not path
        or "\x00" in path
        or any(segment in ("", ".", "..") for segment in segments)
        or (len(path) > 1 and path[1] == ":" and path[0].isalpha() and (len(path) == 2 or path[2] in "/\\"))
        or ".." in path.split("\\")
        or path.startswith("\\")
    ):
        raise ValueError(f"a file name that leaves the checkpoint: {path!r}")
    return path


@attrs.frozen
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint's folder, with ``/``."""
    size_bytes: int
    crc32: str
    """Eight hexadecimal digits; empty when it was not computed, and then only the size is checked."""


@attrs.frozen
class UploadedPart:
    """The files that one rank brought into storage for one report."""

    dir_name: str
    files: tuple[FileEntry, ...]

    @property
    def has_digests(self) -> bool:
        """Whether the checksum of every file is known."""
        return all(file.crc32 for file in self.files)


@attrs.frozen(kw_only=True)
class Manifest:
    """What was committed, and when."""

    report_index: int
    attempt: int
    world_size: int
    created_at: float
    """Seconds since the epoch."""
    metrics: dict[str, Any]
    files: tuple[FileEntry, ...]
    is_deletable: bool = True
    """False: the run did not create these files, so it never removes them."""
    dir_name: str = ""
    """The folder it was committed as; another name means that folders were mixed up."""
    ranks: dict[int, int] = attrs.field(factory=dict)
    """World rank → number of files that it brought."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """The stored form, which knows whether it is whole."""
        body = {
            "format": _FORMAT,
            "dir_name": self.dir_name,
            "report_index": self.report_index,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "created_at": self.created_at,
            "is_deletable": self.is_deletable,
            "ranks": self.ranks,
            "metrics": self.metrics,
            "files": [[file.path, file.size_bytes, file.crc32] for file in self.files],
        }
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest stored in ``data``.

        Raises:
            CheckpointDamagedError: It is not whole, of an unknown format, or names files outside its folder.
        """
        try:
            body = open_envelope(data)
            if body.get("format") != _FORMAT:
                raise EnvelopeError(f"its format is {body.get('format')!r}, this version reads {_FORMAT!r}")
            return cls(
                report_index=int(body["report_index"]),
                attempt=int(body["attempt"]),
                world_size=int(body["world_size"]),
                created_at=float(body["created_at"]),
                is_deletable=bool(body["is_deletable"]),
                dir_name=str(body["dir_name"]),
                ranks={int(rank): int(count) for rank, count in body["ranks"].items()},
                metrics=body["metrics"],
                files=tuple(
                    FileEntry(check_relative(str(path)), int(size), str(crc)) for path, size, crc in body["files"]
                ),
            )
        except (EnvelopeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamagedError(f"the manifest cannot be used: {error}") from error


def merge_parts(parts: Mapping[int, UploadedPart]) -> tuple[FileEntry, ...]:
    """The union of the files of all ranks, sorted by name.

    A file that several ranks brought with the same content is one file. (Ray Train lets one
    of them overwrite the others.)

    Raises:
        CheckpointConflictError: Two ranks brought different bytes under one name, a file where
            another has a folder, or named different folders. Names the ranks and the file.
    """
    merged: dict[str, tuple[int, FileEntry]] = {}
    for rank in sorted(parts):
        for file in parts[rank].files:
            first_rank, first = merged.setdefault(file.path, (rank, file))
            if (first.size_bytes, first.crc32) != (file.size_bytes, file.crc32):
                raise CheckpointConflictError(
                    explained(
                        f"ranks {first_rank} and {rank} reported different content under the name {file.path!r}; "
                        "put the rank into the file name, or report that file from one rank only"
                    )
                )
    folders: dict[str, int] = {}
    for path, (rank, _) in merged.items():
        for folder in _folders(path):
            folders.setdefault(folder, rank)
    for path, (rank, _) in merged.items():
        if path in folders:
            raise CheckpointConflictError(
                f"rank {rank} reported a file {path!r}, which is a folder in what rank {folders[path]} reported"
            )
    names = {part.dir_name for part in parts.values()}
    if len(names) > 1:
        raise CheckpointConflictError(
            "the ranks named different folders for one report: "
            + ", ".join(f"rank {rank}: {parts[rank].dir_name!r}" for rank in sorted(parts))
        )
    return tuple(merged[path][1] for path in sorted(merged))


def _folders(path: str) -> Iterable[str]:
    segments = path.split("/")
    return ("/".join(segments[:depth]) for depth in range(1, len(segments)))
