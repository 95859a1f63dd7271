"""Folders on their way into storage and out of it: many files at once, checksums on the way."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import attrs

from ..errors import CheckpointDamagedError, UploadError
from .files import Files, is_temporary
from .manifest import RESERVED_NAMES, FileEntry, check_relative, format_crc32

__all__ = ["SourceFile", "download", "list_source", "problems_of", "run_concurrently", "summary", "upload"]

T = TypeVar("T")
R = TypeVar("R")

# A file whose stored size is wrong after this many uploads is given up.
_MAX_ROUNDS = 8


@attrs.frozen
class SourceFile:
    """A file of a local folder."""

    path: str
    """Relative to the folder, with ``/``."""
    local_path: str
    size_bytes: int


def list_source(folder: str) -> list[SourceFile]:
    """The files below a local folder, sorted by name; links are followed, empty folders are not kept.

    The names that the library itself uses are left out, so that a checkpoint which was read
    from storage can be reported again.

    Raises:
        UploadError: It is not a folder, or holds something that cannot be copied.
    """
    if not os.path.isdir(folder):
        reason = "it is a file; put it into a folder" if os.path.exists(folder) else "there is no such folder"
        raise UploadError(f"checkpoint {folder!r} cannot be stored: {reason}")
    found: list[SourceFile] = []
    _list_into(folder, "", frozenset(), found)
    return sorted((file for file in found if file.path not in RESERVED_NAMES), key=lambda file: file.path)


def _list_into(folder: str, prefix: str, above: frozenset[str], found: list[SourceFile]) -> None:
    real = os.path.realpath(folder)
    if real in above:
        raise UploadError(f"checkpoint folder {folder!r} cannot be stored: a link leads back to {real!r}")
    with os.scandir(folder) as entries:
        for entry in entries:
            relative = prefix + entry.name.replace(os.sep, "/")
            try:
                status = entry.stat()
            except FileNotFoundError:
                reason = "the link leads nowhere" if entry.is_symlink() else "it vanished while the folder was read"
                raise UploadError(f"checkpoint file {entry.path!r} cannot be stored: {reason}") from None
            if stat.S_ISDIR(status.st_mode):
                _list_into(entry.path, relative + "/", above | {real}, found)
            elif stat.S_ISREG(status.st_mode):
                found.append(SourceFile(relative, entry.path, status.st_size))
            else:
                # Opening a pipe would wait for ever.
                raise UploadError(f"checkpoint file {entry.path!r} cannot be stored: it is a pipe, socket or device")


def upload(sources: Sequence[SourceFile], files: Files, target: str, *, checksum: bool = True) -> tuple[FileEntry, ...]:
    """Copy ``sources`` to the folder ``target``, several at a time, and make sure that they arrived whole.

    Args:
        checksum: False leaves checksums out (empty) where they take time beside the copy.

    Raises:
        Exception: Whatever the filesystem raises after its retries.
    """

    def put(source: SourceFile) -> FileEntry:
        crc = files.put(source.local_path, f"{target}/{source.path}", source.size_bytes, checksum=checksum)
        return FileEntry(source.path, source.size_bytes, "" if crc is None else format_crc32(crc))

    # Large files first, so that none is left to run alone at the end.
    by_size = sorted(sources, key=lambda source: -source.size_bytes)
    entries = {entry.path: entry for entry in run_concurrently(put, by_size, files.max_concurrency)}
    if not files.is_local:
        _store_again_what_fell_short(by_size, entries, put, files, target)
    return tuple(entries[path] for path in sorted(entries))


def _store_again_what_fell_short(
    sources: Sequence[SourceFile],
    entries: dict[str, FileEntry],
    put: Callable[[SourceFile], FileEntry],
    files: Files,
    target: str,
) -> None:
    for _ in range(_MAX_ROUNDS):
        stored = files.walk(target) if sources else {}
        short = [
            source
            for source in sources
            # A listing may lag behind; the file itself decides.
            if stored.get(source.path) != source.size_bytes
            and files.size(f"{target}/{source.path}") != source.size_bytes
        ]
        if not short:
            return
        for entry in run_concurrently(put, short, files.max_concurrency):
            entries[entry.path] = entry
        sources = short
    names = ", ".join(repr(source.path) for source in sources[:5])
    raise OSError(f"the storage took fewer bytes than were written, {_MAX_ROUNDS} times in a row: {names}")


def download(entries: Sequence[FileEntry], files: Files, source: str, target: str) -> None:
    """Copy the files of a committed checkpoint into the existing local folder ``target``, checking each.

    Raises:
        CheckpointDamagedError: A file is missing, or its bytes are not those that were committed.
    """
    for entry in entries:
        os.makedirs(os.path.dirname(os.path.join(target, check_relative(entry.path))), exist_ok=True)

    def get(entry: FileEntry) -> str | None:
        local_path = os.path.join(target, entry.path)
        problem = None
        # Twice: damage on the way is not damage in storage.
        for _ in range(2):
            try:
                crc = files.get(f"{source}/{entry.path}", local_path, entry.size_bytes)
            except FileNotFoundError:
                return f"{entry.path!r} is missing"
            problem = _compare(entry, os.stat(local_path).st_size, crc)
            if problem is None:
                return None
        return problem

    by_size = sorted(entries, key=lambda entry: -entry.size_bytes)
    problems = [problem for problem in run_concurrently(get, by_size, files.max_concurrency) if problem]
    if problems:
        raise CheckpointDamagedError(f"checkpoint {source} is damaged: {summary(problems)}")


def problems_of(
    entries: Sequence[FileEntry], files: Files, folder: str, *, digests: bool, may_hold: Iterable[str] | None = ()
) -> list[str]:
    """What is wrong with the files of a committed checkpoint: missing, extra, of another size or content.

    Args:
        digests: Read every byte and compare checksums; else sizes only.
        may_hold: Names that are not in ``entries`` and yet belong there; None for any.
    """
    stored = files.walk(folder)
    problems: list[str] = []
    right_size: list[FileEntry] = []
    for entry in entries:
        size = stored.pop(entry.path, None)
        if size != entry.size_bytes and not files.is_local:
            size = files.size(f"{folder}/{entry.path}")  # a listing may lag behind
        problem = _compare(entry, size, None)
        if problem is None:
            right_size.append(entry)
        else:
            problems.append(problem)
    if may_hold is not None:
        # A write of metadata that was cut off is no reason to lose the checkpoint.
        strangers = sorted(name for name in set(stored) - set(may_hold) if not is_temporary(name))
        problems += [f"{name!r} was not committed with it" for name in strangers]
    if digests and not problems:

        def check(entry: FileEntry) -> str | None:
            try:
                return _compare(entry, entry.size_bytes, files.checksum(f"{folder}/{entry.path}", entry.size_bytes))
            except FileNotFoundError:
                return f"{entry.path!r} is missing"

        found = run_concurrently(check, right_size, files.max_concurrency)
        problems += [problem for problem in found if problem]
    return problems


def run_concurrently(operation: Callable[[T], R], items: Sequence[T], max_concurrency: int) -> list[R]:
    """``operation`` of every item, in order; after the first failure no further one is begun.

    Returns only when nothing runs any more, so a caller may clean up.
    """
    if len(items) <= 1 or max_concurrency <= 1:
        return [operation(item) for item in items]
    with ThreadPoolExecutor(min(max_concurrency, len(items)), thread_name_prefix="ray_lite-transfer") as pool:
        futures = [pool.submit(operation, item) for item in items]
        try:
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for future in pending:
            future.cancel()
        for future in done:
            if (error := future.exception()) is not None:
                raise error
    return [future.result() for future in futures]


def _compare(entry: FileEntry, size_bytes: int | None, crc: int | None) -> str | None:
    if size_bytes is None:
        return f"{entry.path!r} is missing"
    if size_bytes != entry.size_bytes:
        return f"{entry.path!r} has {size_bytes} bytes instead of {entry.size_bytes}"
    if crc is not None and entry.crc32 and format_crc32(crc) != entry.crc32:
        return f"{entry.path!r} has other content than was committed"
    return None


def summary(problems: Sequence[str]) -> str:
    """The first three of ``problems``, and how many more there are."""
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
