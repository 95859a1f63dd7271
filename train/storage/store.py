"""``RunStore``: the folder of one run, and the order in which things are written there.

Write new, record it, delete old: a folder becomes a checkpoint by its manifest, which is
written last, and stops being one when its manifest is removed, which is done first.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ..errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UploadError,
    explained,
)
from .checkpoint import Checkpoint
from .files import TEMPORARY_PREFIX, Entry, Files, is_temporary
from .history import (
    HISTORY_FOLDER,
    FileHistoryWriter,
    HistoryRow,
    HistoryWriter,
    SegmentHistoryWriter,
    history_names,
    read_rows,
)
from .lock import LOCK_NAME, HolderInfo, RunLock
from .manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    RESERVED_NAMES,
    FileEntry,
    Manifest,
    UploadedPart,
    format_crc32,
    merge_parts,
)
from .retry import RetryPolicy, is_missing
from .root import StorageRoot
from .run_record import RECORD_NAME, RunRecord
from .transfer import SourceFile, list_source, problems_of, run_concurrently, summary, upload
from .uri import check_name_below, display_name, redact

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

__all__ = ["CommittedCheckpoint", "HolderInfo", "RunRecord", "RunStore", "UploadedPart"]

logger = logging.getLogger(__name__)

# Unfinished by its name, so whatever is left of it is rubbish for the attempts after.
_STAGING = re.compile(rf"^{re.escape(TEMPORARY_PREFIX)}staging-(\d+)-[0-9a-f]+$")
_DIR_NAME = re.compile(r"^checkpoint_(\d{6,})(?:_attempt_(\d+))?$")


@attrs.frozen
class CommittedCheckpoint:
    """A checkpoint that is in storage for good."""

    dir_name: str
    path: str
    """Full path or URI."""
    manifest: Manifest

    @property
    def report_index(self) -> int:
        """The report that it came with."""
        return self.manifest.report_index

    @property
    def attempt(self) -> int:
        """The attempt that made it."""
        return self.manifest.attempt

    @property
    def metrics(self) -> dict[str, Any]:
        """What was reported with it."""
        return self.manifest.metrics

    @property
    def is_deletable(self) -> bool:
        """Whether the run made these files, and so may remove them."""
        return self.manifest.is_deletable


class RunStore:
    """Everything that one run stores. Picklable; each process opens the storage for itself.

    Any number of worker processes may ``upload``; all else belongs to the one process that
    directs the run and holds its lock.

    Args:
        root: The storage path.
        run_name: Folder below it.
        retry: Patience with transient errors of remote storage.

    Raises:
        ConfigError: ``run_name`` is no folder name, or means something else in a URI.
        StorageError: The storage path has no usable driver (only when it is first used).
    """

    def __init__(self, root: StorageRoot, run_name: str, *, retry: RetryPolicy | None = None) -> None:
        self.name = check_name_below("run name", run_name, root.path, has_filesystem=root.filesystem is not None)
        self._storage_root = root
        self._root = root.child(run_name)
        self._retry = retry
        self._opened: tuple[Files, str] | None = None
        self._lock: RunLock | None = None

    def __reduce__(self) -> tuple[Callable[..., RunStore], tuple[Any, ...]]:
        return _make_store, (self._storage_root, self.name, self._retry)

    def __repr__(self) -> str:
        return f"RunStore({redact(self.path)!r})"

    @property
    def path(self) -> str:
        """The run's folder: local path or URI."""
        return self._root.path

    @property
    def root(self) -> StorageRoot:
        """The storage path that the run lies in."""
        return self._storage_root

    @property
    def filesystem(self) -> AbstractFileSystem:
        """The fsspec filesystem that holds the run. Raises StorageError when it cannot be opened."""
        return self._root.open()[0]

    @property
    def is_local(self) -> bool:
        """Whether the run's folder is on a disk that the operating system opens."""
        return self._root.is_local

    # Before the run.

    def check_writable(self) -> None:
        """Write, read and delete a small file; makes the run's folder where there are folders.

        Raises:
            StorageError: It failed; names the path, the reason and what to check. At once for
                missing permissions, buckets and drivers, after some retries for the rest.
        """
        probe = secrets.token_hex(8).encode()
        try:
            files, folder = self._open()
            path = f"{folder}/{TEMPORARY_PREFIX}probe-{probe.decode()}"
            files.write(path, probe)
            found = files.read(path)
            files.remove(path)
        except StorageError:
            raise
        except Exception as error:
            shown = redact(self._storage_root.path)
            raise StorageError(
                explained(f"storage_path {shown!r} cannot be written: {_reason(error)}; {self._advice(error)}")
            ) from error
        if found != probe:
            raise StorageError(f"storage_path {redact(self._storage_root.path)!r} does not give back what was written")

    def acquire(
        self,
        run_id: str = "",
        *,
        holder: HolderInfo | None = None,
        is_alive: Callable[[HolderInfo], bool | None] | None = None,
    ) -> HolderInfo:
        """Take the lock of the run.

        Args:
            run_id: Kept with the lock, for ``is_alive`` to recognise.
            holder: Who takes it; this process by default.
            is_alive: Asked about a holder on another machine; None means unknown.

        Raises:
            RunInUseError: Another process holds it and lives, or nobody can tell.
        """
        files, folder = self._open()
        holder = holder or HolderInfo.of_this_process(run_id=run_id)
        lock = RunLock(files, f"{folder}/{LOCK_NAME}", redact(self.path))
        lock.acquire(holder, is_alive)
        self._lock = lock
        return holder

    def release(self) -> None:
        """Give the lock back; nothing when this object does not hold it. Never raises."""
        if self._lock is None:
            return
        try:
            self._lock.release()
        except Exception as error:  # noqa: BLE001  # the next run recognises a dead holder
            logger.warning("the lock of %s could not be removed: %s", redact(self.path), _reason(error))
        self._lock = None

    # Workers.

    def checkpoint_dir_name(self, report_index: int, attempt: int, name: str | None = None) -> str:
        """The folder of a checkpoint. Each attempt has its own, so a lost worker of an old one cannot write into it.

        Args:
            name: What the user called it; a number is added only for attempts after the first.
        """
        base = f"checkpoint_{report_index:06d}" if name is None else self._check_dir_name(name)
        return base if attempt <= 1 else f"{base}_attempt_{attempt}"

    def staging_directory(self, attempt: int) -> str:
        """A new local folder whose files become the checkpoint without a copy.

        It lies on the store's own disk, so ``upload`` renames its files: 1 GiB takes microseconds
        instead of half a second, and afterwards the folder is empty and belongs to nobody. A file
        of an earlier checkpoint that did not change may be hard-linked into it. For remote storage
        it is an ordinary temporary folder, which is copied.

        Args:
            attempt: Leftovers are removed with those of this attempt.

        Raises:
            UploadError: The folder cannot be made.
        """
        try:
            files, folder = self._open()
            if not files.is_local:
                return tempfile.mkdtemp(prefix="ray_lite_staging_")
            path = f"{folder}/{TEMPORARY_PREFIX}staging-{attempt}-{secrets.token_hex(8)}"
            os.makedirs(path)
        except OSError as error:
            raise UploadError(f"no staging folder can be made in {redact(self.path)}: {_reason(error)}") from error
        return path

    def upload(
        self,
        checkpoint: Checkpoint,
        *,
        report_index: int,
        attempt: int,
        dir_name: str | None = None,
        digests: bool = True,
    ) -> UploadedPart:
        """Copy the files of one rank into storage. They become visible with ``commit``.

        The folder is read, never changed; it may be removed as soon as this returns. Only the files
        of a ``staging_directory`` are taken out of it.

        Args:
            checkpoint: Usually a local folder; one in remote storage is fetched first.
            report_index: 0-based number of the report.
            attempt: 1-based.
            dir_name: Name of the folder; ``checkpoint_dir_name`` by default.
            digests: False leaves out the checksums of large files on a disk, so that the copy has
                both cores to itself; ``add_digests`` makes up for it before the commit.

        Raises:
            UploadError: The folder cannot be read, or the storage cannot be written after
                retries. Nothing is left of this upload, and the next one may work.
        """
        name = self.checkpoint_dir_name(report_index, attempt) if dir_name is None else self._check_dir_name(dir_name)
        try:
            files, folder = self._open()
            with checkpoint.as_directory() as source:
                return self._upload_from(
                    source, files, f"{folder}/{name}", name, report_index, attempt, digests=digests
                )
        except UploadError:
            raise
        except CheckpointNotFoundError as error:
            raise UploadError(f"the reported checkpoint cannot be stored: {error}") from error
        except Exception as error:
            raise UploadError(
                explained(
                    f"the checkpoint of report {report_index} could not be stored in {redact(self.path)}/{name}: "
                    f"{_reason(error)}; {self._advice(error)}"
                )
            ) from error

    def _upload_from(
        self, source: str, files: Files, target: str, name: str, report_index: int, attempt: int, *, digests: bool
    ) -> UploadedPart:
        if files.is_local:
            _refuse_folder_around(source, target)
        sources = list_source(source)
        is_staged = files.is_local and _is_staging(source, os.path.dirname(target))
        if _DIR_NAME.match(name) is None:
            self._mark(files, target, report_index, attempt)
        try:
            if is_staged:
                return UploadedPart(name, self._take_staged(sources, files, target, digests=digests))
            return UploadedPart(name, upload(sources, files, target, checksum=digests))
        except BaseException:
            # Another rank's files may lie in the same folder, so only this rank's go.
            for file in sources:
                _remove_quietly(files, f"{target}/{file.path}")
            raise

    def _take_staged(
        self, sources: list[SourceFile], files: Files, target: str, *, digests: bool
    ) -> tuple[FileEntry, ...]:
        entries = []
        for file in sources:
            if os.path.islink(file.local_path):
                raise UploadError(f"staged file {file.path!r} is a symbolic link; stage the file itself or a hard link")
            crc = format_crc32(files.checksum(file.local_path, file.size_bytes)) if digests else ""
            entries.append(FileEntry(file.path, file.size_bytes, crc))
        moved: list[SourceFile] = []
        try:
            for file in sources:
                files.move(file.local_path, f"{target}/{file.path}")
                moved.append(file)
        except BaseException:
            # There is no other copy of them.
            for file in moved:
                files.move(f"{target}/{file.path}", file.local_path)
            raise
        return tuple(entries)

    def add_digests(self, part: UploadedPart) -> UploadedPart:
        """``part`` with the checksums that ``upload(digests=False)`` left out, read from storage.

        Raises:
            UploadError: A file cannot be read back.
        """
        missing = [file for file in part.files if not file.crc32]
        try:
            files, folder = self._open()
            checksums = run_concurrently(
                lambda file: files.checksum(f"{folder}/{part.dir_name}/{file.path}", file.size_bytes),
                missing,
                files.max_concurrency,
            )
        except Exception as error:
            raise UploadError(f"{redact(self.path)}/{part.dir_name} cannot be read back: {_reason(error)}") from error
        found = {file.path: format_crc32(crc) for file, crc in zip(missing, checksums, strict=True)}
        return attrs.evolve(
            part, files=tuple(attrs.evolve(file, crc32=found.get(file.path, file.crc32)) for file in part.files)
        )

    def _mark(self, files: Files, target: str, report_index: int, attempt: int) -> None:
        """Leave a note in a folder that the user named: whose it is, should it never be committed."""
        mark = {"report_index": report_index, "attempt": attempt}
        found = {entry.name for entry in files.entries(target)}
        if found and self._read_mark(files, target) != mark:
            raise UploadError(
                f"{redact(self.path)}/{target.rpartition('/')[2]} exists already and holds other files; "
                "give each report another checkpoint_dir_name"
            )
        files.write(f"{target}/{MARKER_NAME}", json.dumps(mark).encode())

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether ``checkpoint`` is a folder directly in the run's folder, or would be if it existed."""
        expected = self._root.child(checkpoint.path.rpartition("/")[2])
        return Checkpoint(expected.path, expected.filesystem) == checkpoint

    def adopt(self, checkpoint: Checkpoint, *, report_index: int, attempt: int) -> UploadedPart:
        """Take files that the user's own code stored in a folder of the run, as they are.

        Reads them once for their checksums.

        Raises:
            UploadError: The checkpoint is not a folder directly in the run's folder, or cannot be read.
        """
        if not self.holds(checkpoint):
            raise UploadError(
                f"a checkpoint that is not uploaded must lie directly in {redact(self.path)}, and this one lies in "
                f"{redact(checkpoint.path)}"
            )
        try:
            files, folder = self._open()
            name = self._check_dir_name(checkpoint.path.rpartition("/")[2])
            stored = files.walk(f"{folder}/{name}")
            paths = [path for path in sorted(stored) if path not in RESERVED_NAMES]
            if MANIFEST_NAME in stored:
                raise UploadError(f"{redact(checkpoint.path)} is a committed checkpoint already")
            checksums = run_concurrently(
                lambda path: files.checksum(f"{folder}/{name}/{path}", stored[path]), paths, files.max_concurrency
            )
        except UploadError:
            raise
        except Exception as error:
            raise UploadError(f"{redact(checkpoint.path)} cannot be read: {_reason(error)}") from error
        entries = [FileEntry(path, stored[path], format_crc32(crc)) for path, crc in zip(paths, checksums, strict=True)]
        return UploadedPart(name, tuple(entries))

    # The process that directs the run.

    def commit(
        self,
        parts: Mapping[int, UploadedPart],
        *,
        report_index: int,
        attempt: int,
        world_size: int,
        metrics: Mapping[str, Any],
        is_deletable: bool = True,
        created_at: float,
    ) -> CommittedCheckpoint:
        """Make the files of all ranks one checkpoint, which from then on is never lost.

        Costs one look at this checkpoint's own folder and one write, however many
        checkpoints there are.

        Args:
            parts: World rank → what ``upload`` returned there; not empty.
            created_at: Seconds since the epoch.

        Raises:
            CheckpointConflictError: Ranks contradict each other (see ``merge_parts``), or the folder's
                name was used before.
            CheckpointDamagedError: Files that were uploaded are gone.
            StorageError: The storage cannot be written. Nothing was committed.
        """
        if not parts:
            raise CheckpointError(f"report {report_index}: no rank brought a checkpoint, so there is none to commit")
        entries = merge_parts(parts)
        name = next(iter(parts.values())).dir_name
        manifest = Manifest(
            report_index=report_index,
            attempt=attempt,
            world_size=world_size,
            created_at=created_at,
            metrics=dict(metrics),
            files=entries,
            is_deletable=is_deletable,
            dir_name=name,
            ranks={rank: len(parts[rank].files) for rank in sorted(parts)},
        )
        try:
            files, folder = self._open()
            target = f"{folder}/{name}"
            self._clear_for_commit(files, target, entries, is_deletable)
            files.write(f"{target}/{MANIFEST_NAME}", manifest.to_bytes())
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"the checkpoint of report {report_index} could not be committed in {redact(self.path)}/{name}: "
                f"{_reason(error)}; {self._advice(error)}"
            ) from error
        if _DIR_NAME.match(name) is None:
            _remove_quietly(files, f"{target}/{MARKER_NAME}")
        return CommittedCheckpoint(name, self._root.child(name).path, manifest)

    def _clear_for_commit(self, files: Files, target: str, entries: tuple[FileEntry, ...], is_deletable: bool) -> None:
        """Make sure that the folder holds the files of this commit, and nothing else."""
        stored = files.walk(target)
        if MANIFEST_NAME in stored:
            raise CheckpointConflictError(
                f"{redact(self.path)}/{target.rpartition('/')[2]} holds a committed checkpoint; "
                "give each report another checkpoint_dir_name"
            )
        for entry in entries:
            size = stored.pop(entry.path, None)
            if size != entry.size_bytes:
                size = files.size(f"{target}/{entry.path}")  # a listing may lag behind
            if size != entry.size_bytes:
                raise CheckpointDamagedError(
                    f"{redact(self.path)}/{target.rpartition('/')[2]} cannot be committed: {entry.path!r} should have "
                    f"{entry.size_bytes} bytes and {'is missing' if size is None else f'has {size}'}"
                )
        if is_deletable:
            # Left by uploads that failed.
            for name in set(stored) - RESERVED_NAMES:
                files.remove(f"{target}/{name}")

    def open_checkpoint(self, committed: CommittedCheckpoint) -> Checkpoint:
        """The checkpoint itself, for reading."""
        return self.open_checkpoint_dir(committed.dir_name)

    def open_checkpoint_dir(self, dir_name: str) -> Checkpoint:
        """The checkpoint in a folder of the run, committed or not yet."""
        root = self._root.child(self._check_dir_name(dir_name))
        return Checkpoint(root.path, root.filesystem, storage_options=root.options)

    def list_checkpoints(self) -> list[CommittedCheckpoint]:
        """All committed checkpoints, oldest first. One with a damaged manifest is left out, with a warning.

        Raises:
            StorageError: The storage cannot be read.
        """
        try:
            files, folder = self._open()
            names = self._folders(files, folder)
            found = run_concurrently(
                lambda name: self._read_committed(files, folder, name),
                names,
                1 if files.is_local else files.max_concurrency,
            )
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{redact(self.path)} cannot be read: {_reason(error)}; {self._advice(error)}"
            ) from error
        committed = [checkpoint for checkpoint in found if checkpoint is not None]
        return sorted(committed, key=lambda checkpoint: (checkpoint.report_index, checkpoint.attempt))

    def missing(self, committed: Iterable[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
        """Those of ``committed`` whose folders are no longer there; costs one listing.

        Raises:
            StorageError: The storage cannot be read.
        """
        try:
            files, folder = self._open()
            found = set(self._folders(files, folder))
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{redact(self.path)} cannot be read: {_reason(error)}") from error
        return [checkpoint for checkpoint in committed if checkpoint.dir_name not in found]

    def newest_valid(self, *, verify: Literal["size", "digest"] = "digest") -> CommittedCheckpoint | None:
        """The newest checkpoint whose files are what was committed; None when there is none.

        Args:
            verify: ``"digest"`` reads every byte, ``"size"`` compares names and sizes.

        Raises:
            StorageError: The storage cannot be read.
        """
        files, folder = self._open()
        for committed in reversed(self.list_checkpoints()):
            try:
                problems = problems_of(
                    committed.manifest.files,
                    files,
                    f"{folder}/{committed.dir_name}",
                    digests=verify == "digest",
                    may_hold=RESERVED_NAMES,
                )
            except Exception as error:
                raise StorageError(f"{redact(committed.path)} cannot be read: {_reason(error)}") from error
            if not problems:
                return committed
            logger.warning(
                "%s",
                explained(
                    f"checkpoint {redact(committed.path)} is damaged and is skipped for the next older one: "
                    f"{summary(problems)}"
                ),
            )
        return None

    def delete(self, committed: CommittedCheckpoint) -> bool:
        """Remove a checkpoint. Never raises: a failure is a warning.

        Returns:
            Whether it is gone.
        """
        try:
            if not committed.is_deletable:
                raise CheckpointError("this run did not create it")
            files, folder = self._open()
            target = f"{folder}/{self._check_dir_name(committed.dir_name)}"
            stored = self._read_committed(files, folder, committed.dir_name)
            if stored is not None and (stored.report_index, stored.attempt) != (
                committed.report_index,
                committed.attempt,
            ):
                raise CheckpointError("another checkpoint took its place")
            # First it stops being a checkpoint; a crash from here on leaves an orphan.
            files.remove(f"{target}/{MANIFEST_NAME}")
            files.remove_tree(target)
        except Exception as error:  # noqa: BLE001  # a checkpoint too many must not end a training
            logger.warning("checkpoint %s could not be deleted: %s", redact(committed.path), _reason(error))
            return False
        return True

    def remove_orphans(self, *, before_attempt: int) -> list[str]:
        """Remove what dead attempts left: folders that were never committed, unfinished files.

        Never raises: a failure is a warning.

        Args:
            before_attempt: Folders of this attempt and later ones are let alone.

        Returns:
            Names of the folders and files removed.
        """
        removed: list[str] = []
        try:
            files, folder = self._open()
            entries = files.entries(folder)
        except Exception as error:  # noqa: BLE001  # as in delete
            logger.warning("%s could not be searched for leftovers: %s", redact(self.path), _reason(error))
            return removed
        for entry in entries + self._unfinished_history(files, folder):
            path = f"{folder}/{entry.name}"
            try:
                if not entry.is_dir:
                    if not display_name(entry.name).startswith(TEMPORARY_PREFIX):
                        continue
                    files.remove(path)
                elif _STAGING.match(entry.name):
                    if int(entry.name.split("-")[2]) >= before_attempt:
                        continue
                    files.remove_tree(path)
                elif entry.name == HISTORY_FOLDER or not self._is_orphan(files, path, entry.name, before_attempt):
                    continue
                else:
                    files.remove_tree(path)
            except Exception as error:  # noqa: BLE001  # as in delete
                logger.warning("leftover %s could not be removed: %s", redact(path), _reason(error))
                continue
            removed.append(entry.name)
        return removed

    def _unfinished_history(self, files: Files, folder: str) -> list[Entry]:
        try:
            found = files.entries(f"{folder}/{HISTORY_FOLDER}")
        except Exception:  # noqa: BLE001  # as in remove_orphans, and these are a few bytes
            return []
        return [
            Entry(f"{HISTORY_FOLDER}/{entry.name}", False, entry.size_bytes)
            for entry in found
            if is_temporary(entry.name)
        ]

    def _is_orphan(self, files: Files, path: str, name: str, before_attempt: int) -> bool:
        # A damaged manifest means that it was a checkpoint: perhaps something of it can be saved by hand.
        if files.size(f"{path}/{MANIFEST_NAME}") is not None:
            return False
        match = _DIR_NAME.match(name)
        if match:
            return int(match.group(2) or 1) < before_attempt
        mark = self._read_mark(files, path)
        return mark is not None and mark["attempt"] < before_attempt

    # What a run leaves besides checkpoints.

    def write_record(self, record: RunRecord) -> None:
        """Replace the run record.

        Raises:
            StorageError: The storage cannot be written; the old record is still there.
        """
        try:
            files, folder = self._open()
            files.write(f"{folder}/{RECORD_NAME}", record.to_bytes())
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                f"{redact(self.path)}/{RECORD_NAME} cannot be written: {_reason(error)}; {self._advice(error)}"
            ) from error

    def read_record(self) -> RunRecord | None:
        """The run record; None when there is none, and with a warning when it is damaged.

        Raises:
            StorageError: The storage cannot be read.
        """
        try:
            files, folder = self._open()
            data = files.read(f"{folder}/{RECORD_NAME}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{redact(self.path)}/{RECORD_NAME} cannot be read: {_reason(error)}") from error
        try:
            return RunRecord.from_bytes(data)
        except StorageError as error:
            logger.warning("%s/%s: %s; it is rebuilt from the checkpoints", redact(self.path), RECORD_NAME, error)
            return None

    def last_attempt(self) -> int:
        """The highest attempt that left anything here, 0 when none did; needs no run record.

        Raises:
            StorageError: The storage cannot be read.
        """
        try:
            files, folder = self._open()
            matches = (_DIR_NAME.match(entry.name) for entry in files.entries(folder) if entry.is_dir)
            attempts = [int(match.group(2) or 1) for match in matches if match]
            names = [entry.name for entry in files.entries(f"{folder}/{HISTORY_FOLDER}")]
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{redact(self.path)} cannot be read: {_reason(error)}") from error
        attempts += [attempt for attempt, _, _ in history_names(names)]
        attempts += [checkpoint.attempt for checkpoint in self.list_checkpoints()]
        return max(attempts, default=0)

    def holds_run(self) -> bool:
        """Whether a run has left anything here.

        Raises:
            StorageError: The storage cannot be read.
        """
        return self.last_attempt() > 0 or self.read_record() is not None

    def rebuild_record(self) -> RunRecord | None:
        """A run record made from the manifests, for when the stored one is missing or damaged.

        None when nothing was ever committed and no attempt left a trace.
        """
        attempt = self.last_attempt()
        committed = self.list_checkpoints()
        if not attempt:
            return None
        newest = committed[-1].manifest if committed else None
        return RunRecord(
            name=self.name,
            attempt=attempt,
            state="interrupted",
            started_at=committed[0].manifest.created_at if committed else 0.0,
            updated_at=newest.created_at if newest else 0.0,
            world_size=newest.world_size if newest else 0,
            next_report_index=newest.report_index + 1 if newest else 0,
            metrics=newest.metrics if newest else None,
        )

    def history_writer(self, attempt: int) -> HistoryWriter:
        """Where the reports of this attempt go: one file on a disk, segments elsewhere."""
        files, folder = self._open()
        prefix = f"{folder}/{HISTORY_FOLDER}/attempt_{attempt:06d}"
        if files.is_local:
            return FileHistoryWriter(f"{prefix}.jsonl")
        return SegmentHistoryWriter(files, prefix)

    def read_history(self) -> list[HistoryRow]:
        """Every report of the run that still stands, in order.

        Raises:
            StorageError: The storage cannot be read.
        """
        try:
            files, folder = self._open()
            base = f"{folder}/{HISTORY_FOLDER}"
            names = history_names(entry.name for entry in files.entries(base))
            contents = run_concurrently(
                lambda found: files.read(f"{base}/{found[2]}"), names, 1 if files.is_local else files.max_concurrency
            )
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"the history of {redact(self.path)} cannot be read: {_reason(error)}") from error
        return read_rows((attempt, data) for (attempt, _, _), data in zip(names, contents, strict=True))

    # Inside.

    def _open(self) -> tuple[Files, str]:
        if self._opened is None:
            self._opened = self._root.files(self._retry)
        return self._opened

    def _check_dir_name(self, name: str) -> str:
        has_filesystem = self._root.filesystem is not None
        check_name_below("checkpoint_dir_name", name, self.path, has_filesystem=has_filesystem)
        if name in (HISTORY_FOLDER, RECORD_NAME):
            raise UploadError(f"checkpoint_dir_name must not be {name!r}, which is taken in every run's folder")
        return name

    def _folders(self, files: Files, folder: str) -> list[str]:
        return [
            entry.name
            for entry in files.entries(folder)
            if entry.is_dir and entry.name != HISTORY_FOLDER and not entry.name.startswith(".")
        ]

    def _read_committed(self, files: Files, folder: str, name: str) -> CommittedCheckpoint | None:
        path = self._root.child(name).path
        try:
            data = files.read(f"{folder}/{name}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return None
        try:
            manifest = Manifest.from_bytes(data)
        except CheckpointDamagedError as error:
            logger.warning("checkpoint %s is left out: %s", redact(path), error)
            return None
        if manifest.dir_name != name:
            logger.warning(
                "checkpoint %s is left out: it was committed as %r, so folders were mixed up",
                redact(path),
                manifest.dir_name,
            )
            return None
        return CommittedCheckpoint(name, path, manifest)

    def _read_mark(self, files: Files, path: str) -> dict[str, int] | None:
        try:
            mark = json.loads(files.read(f"{path}/{MARKER_NAME}"))
            return {"report_index": int(mark["report_index"]), "attempt": int(mark["attempt"])}
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _advice(self, error: BaseException) -> str:
        if isinstance(error, PermissionError):
            return "check the permissions and credentials of this process"
        if is_missing(error):
            return "check that the bucket or folder exists" if not self.is_local else "check the path"
        if isinstance(error, TimeoutError):
            return "check the network and the endpoint"
        return "check the path, the space left and the credentials"


def _make_store(root: StorageRoot, run_name: str, retry: RetryPolicy | None) -> RunStore:
    return RunStore(root, run_name, retry=retry)


def _is_staging(source: str, run_folder: str) -> bool:
    return _STAGING.match(os.path.basename(source)) is not None and os.path.realpath(
        os.path.dirname(source)
    ) == os.path.realpath(run_folder)


def _refuse_folder_around(source: str, target: str) -> None:
    real_source, real_target = os.path.realpath(source), os.path.realpath(target)
    if (real_target + os.sep).startswith(real_source.rstrip(os.sep) + os.sep):
        raise UploadError(
            f"the reported folder {source!r} holds the place where it would be stored ({target}); "
            "report a folder of its own, for example a tempfile.TemporaryDirectory()"
        )


def _remove_quietly(files: Files, path: str) -> None:
    try:
        files.remove(path)
    except Exception:  # leftovers are removed with the next commit or start
        logger.debug("leftover %s stays for now", path, exc_info=True)


def _reason(error: BaseException) -> str:
    # Some services write a page; what matters is its first line.
    return redact(str(error).strip().partition("\n")[0].strip()) or type(error).__name__
