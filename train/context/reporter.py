"""From ``report()`` to a record: number it, see to its files, hand the line on."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, ConfigTypeError, StorageError, TrainError, UploadError
from ..storage.checkpoint import Checkpoint
from ..storage.store import RunStore, UploadedPart
from ..storage.uri import redact
from .beats import beating, silent
from .metrics import encode_metrics
from .naming import named
from .outbox import Outbox, RecordSink
from .ownership import OwnedFolder, check_deletable, delete_folder, take_over
from .records import Part, encode_report, encode_upload_end
from .scratch import Scratch
from .staging import StagingDirectory
from .upload_mode import CheckpointUploadMode, UploadOptions
from .uploads import UploadQueue

__all__ = ["Reporter"]

logger = logging.getLogger("ray_lite.train")

_DEFAULTS = UploadOptions()
_REENTERED = (
    "report() was called inside a report() of the same thread: by a signal handler, a callback, a logging handler or a "
    "checkpoint_upload_fn. Set a flag there, and report from the training loop when it is set; of a drained node or a "
    "SIGTERM the loop learns from should_checkpoint() and get_preemption_info(), without a handler"
)


class Reporter:
    """Numbers the reports of one rank and hands them on, in order.

    Args:
        store: Where the run lies.
        sink: Takes the records; from two threads.
        attempt: This life of the worker group, >= 1.
        first_report_index: Number of the first report of this attempt, >= 0.
        scratch: This worker's folder on its own disk.
        defers_checksums: Whether a copied folder's checksums may be computed after ``report()``
            has returned. Not where a commit should have happened by then.
        beat: Gives a sign of life; called at least every second while a call waits for storage.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: RunStore,
        sink: RecordSink,
        *,
        attempt: int,
        first_report_index: int,
        scratch: Scratch,
        defers_checksums: bool = True,
        beat: Callable[[], None] = silent,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._sink, self._attempt, self._clock = store, sink, attempt, clock
        self._scratch, self._defers_checksums, self._beat = scratch, defers_checksums, beat
        # Held over an upload too: a report of another thread gets the next number, and its place in the order.
        # Re-entrant, so that a second report inside one of the same thread (a signal handler's) gets as far as being
        # refused, instead of waiting for itself.
        self._lock = threading.RLock()
        self._is_reporting = False
        self._next_index = first_report_index
        self._uploads = UploadQueue(beat=beat)
        self._staged: set[str] = set()
        self._warned_types: set[str] = set()
        self._newest: tuple[int, Checkpoint] | None = None

    @property
    def num_reports(self) -> int:
        """The number that the next report of this rank gets."""
        return self._next_index

    @property
    def num_pending(self) -> int:
        """Checkpoints whose files or checksums are still on their way."""
        return self._uploads.num_pending

    @property
    def newest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint of this rank whose files are in storage, or None."""
        return None if self._newest is None else self._newest[1]

    def report(
        self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, options: UploadOptions = _DEFAULTS
    ) -> None:
        """One report of this rank; returns when it is queued, and its files are durable or taken over.

        Raises:
            ConfigTypeError: ``metrics`` is not a mapping, or ``checkpoint`` not a Checkpoint. Nothing was counted.
            ConfigError: The checkpoint cannot be treated as the options say. Nothing was counted.
            UploadError: Files could not be stored: this report's, or those of an earlier one that
                went up behind the scenes. This report counts in either case, so that the ranks
                stay in step, and the next one works as usual.
            TrainError: Called from inside another report of this thread, or from an upload behind
                the scenes; or reports no longer reach the controller. Nothing was counted.
        """
        self._uploads.refuse_jobs()
        metrics_json, unstorable = encode_metrics(metrics)
        if unstorable:
            self._warn_once(unstorable)
        if checkpoint is not None:
            self._check(checkpoint, options)
        with self._lock:
            if self._is_reporting:
                raise TrainError(_REENTERED)
            try:
                # Inside, so that no exception of a signal handler leaves it set.
                self._is_reporting = True
                if checkpoint is None:
                    self._sink.add(encode_report(self._next_index, self._clock(), metrics_json))
                    self._next_index += 1
                    return
                earlier = self._uploads.take_failures()
                try:
                    with beating(self._beat):
                        self._report_with_files(metrics_json, checkpoint, options)
                except BaseException:
                    _log(earlier)
                    raise
            finally:
                self._is_reporting = False
        _raise_first(earlier)

    @contextlib.contextmanager
    def staging_directory(self) -> Iterator[StagingDirectory]:
        """A folder whose files become a checkpoint by rename where the storage is a local disk.

        Raises:
            UploadError: The folder cannot be made.
        """
        if self._store.is_local:
            path = self._store.staging_directory(self._attempt)
        else:
            try:
                path = self._scratch.new("staging")
            except OSError as error:
                raise UploadError(f"no staging folder can be made: {error}") from error
        self._staged.add(path)
        pid = os.getpid()
        try:
            yield StagingDirectory(path)
        finally:
            self._staged.discard(path)
            # A child that was forked inside the block and leaves it by an exception has no part in the folder.
            if os.getpid() == pid:
                # Empty by now, or handed over, unless nobody reported it.
                shutil.rmtree(path, ignore_errors=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all records made so far have arrived; False if they have not in time.

        Raises:
            TrainError: They never will.
        """
        has_arrived = self._sink.flush(timeout_s)
        # The other kind of sink, that of local mode, has nothing on its way.
        if not has_arrived and isinstance(self._sink, Outbox):
            self._sink.check()
        return has_arrived

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no files are on their way any more; False if some still are.

        Raises:
            TrainError: Called from one of the uploads that are waited for.
        """
        return self._uploads.wait(timeout_s)

    def finish(self) -> None:
        """The train function has returned: let what is under way end.

        Raises:
            UploadError: A checkpoint could not be stored, and no ``report()`` has said so yet.
        """
        self._uploads.close()
        self._scratch.close()
        _raise_first(self._uploads.take_failures())

    def give_up(self, timeout_s: float) -> None:
        """The train function has failed: let what is under way end if it can within ``timeout_s``."""
        if not self._uploads.close(timeout_s):
            logger.warning("checkpoints that were still on their way after %g s are lost", timeout_s)
        _log(self._uploads.take_failures())
        self._scratch.close()

    # -- one report with files -----------------------------------------------------------------

    def _check(self, checkpoint: Checkpoint, options: UploadOptions) -> None:
        """Refuse what cannot work before anything is counted or touched."""
        if not isinstance(checkpoint, Checkpoint):
            raise ConfigTypeError(
                f"report(checkpoint=...) takes a ray_lite.train.Checkpoint, got {type(checkpoint).__name__}; "
                "wrap a folder with train.Checkpoint.from_directory(folder)"
            )
        if options.dir_name is not None:
            try:
                self._store.checkpoint_dir_name(0, self._attempt, options.dir_name)
            except StorageError as error:
                raise ConfigError(str(error)) from None
        if options.mode is CheckpointUploadMode.NO_UPLOAD and not self._store.holds(checkpoint):
            raise ConfigError(
                "with CheckpointUploadMode.NO_UPLOAD, the checkpoint must be a folder directly in "
                f"{redact(self._store.path)} (get_context().get_trial_dir()), and this one is {checkpoint!r}; "
                "upload it there, or report a small checkpoint that says where the files are"
            )
        if options.deletes_local and options.gives_folder_away and checkpoint.is_local:
            check_deletable(checkpoint.path, self._store)

    def _report_with_files(self, metrics_json: str, checkpoint: Checkpoint, options: UploadOptions) -> None:
        index = self._next_index
        name = self._store.checkpoint_dir_name(index, self._attempt, options.dir_name)
        failure: UploadError | None = None
        job: Callable[[], None] | None = None
        try:
            if options.mode is CheckpointUploadMode.ASYNC:
                part = Part(is_pending=True)
                job = self._hand_over(checkpoint, options, index, name)
            else:
                uploaded = self._store_files(checkpoint, options, index, name, digests=self._needs_digests(checkpoint))
                part = Part(uploaded=uploaded, is_pending=not uploaded.has_digests)
                if part.is_pending:
                    job = self._to_its_end(index, lambda: self._store.add_digests(uploaded))
        except UploadError as error:
            failure, part = error, Part(failure=str(error))
        # Numbered even when the upload failed: the n-th reports of all ranks belong together.
        self._sink.add(encode_report(index, self._clock(), metrics_json, part))
        self._next_index += 1
        if failure is not None:
            raise failure
        if part.uploaded is not None:
            self._stored(index, part.uploaded)
            if options.gives_folder_away and checkpoint.is_local and checkpoint.path not in self._staged:
                delete_folder(checkpoint.path)
        if job is not None:
            self._uploads.add(job)

    def _needs_digests(self, checkpoint: Checkpoint) -> bool:
        # On the way to remote storage they cost nothing; a rename is over long before they are known.
        return not self._store.is_local or not (self._defers_checksums or checkpoint.path in self._staged)

    def _store_files(
        self, checkpoint: Checkpoint, options: UploadOptions, index: int, name: str, *, digests: bool
    ) -> UploadedPart:
        if options.upload_fn is not None:
            return self._store.adopt(
                self._call_upload_fn(options.upload_fn, checkpoint, index, name),
                report_index=index,
                attempt=self._attempt,
            )
        if options.mode is CheckpointUploadMode.NO_UPLOAD:
            return self._store.adopt(checkpoint, report_index=index, attempt=self._attempt)
        return self._store.upload(checkpoint, report_index=index, attempt=self._attempt, dir_name=name, digests=digests)

    def _call_upload_fn(
        self, upload_fn: Callable[[Checkpoint, str], Checkpoint], checkpoint: Checkpoint, index: int, name: str
    ) -> Checkpoint:
        try:
            stored = upload_fn(checkpoint, name)
        # The user's own code may fail in any way; the report has a place in the order all the same. What is no
        # Exception passes: in the train function's thread it may be Ctrl-C, or the exit of a signal handler.
        except Exception as error:
            raise UploadError(f"checkpoint_upload_fn failed for report {index}: {named(error)}") from error
        if not isinstance(stored, Checkpoint):
            raise UploadError(
                f"checkpoint_upload_fn must return the Checkpoint that it stored in {redact(self._store.path)}/{name}, "
                f"got {type(stored).__name__}"
            )
        return stored

    def _to_its_end(
        self, index: int, work: Callable[[], UploadedPart], owned: OwnedFolder | None = None
    ) -> Callable[[], None]:
        """``work`` behind the scenes, and a record of its end however it ends: the commit waits for that."""

        def job() -> None:
            try:
                uploaded = work()
                self._stored(index, uploaded)
            # SystemExit too: no signal handler runs behind the scenes, so it is a failure of the upload and no more.
            except BaseException as error:
                is_told = isinstance(error, UploadError)
                text = str(error) if is_told else f"the upload of report {index} ended with {named(error)}"
                if owned is not None:
                    text += f"; the files are in {owned.give_back()}"
                self._sink.add(encode_upload_end(index, Part(failure=text)))
                raise UploadError(text) from error
            self._sink.add(encode_upload_end(index, Part(uploaded=uploaded)))
            if owned is not None:
                owned.uploaded()

        return job

    def _hand_over(self, checkpoint: Checkpoint, options: UploadOptions, index: int, name: str) -> Callable[[], None]:
        """Take the folder over; returns what uploads it."""
        owned = None
        if checkpoint.is_local:
            gives_away = options.gives_folder_away
            if gives_away and not options.deletes_local:
                # By default only: what others still need is copied, without a word.
                try:
                    check_deletable(checkpoint.path, self._store)
                except ConfigError:
                    gives_away = False
            owned = take_over(
                checkpoint.path,
                self._store,
                self._attempt,
                self._scratch,
                gives_folder_away=gives_away,
                is_staged=checkpoint.path in self._staged,
            )
            checkpoint = Checkpoint(owned.path)

        return self._to_its_end(index, lambda: self._store_files(checkpoint, options, index, name, digests=True), owned)

    def _stored(self, index: int, uploaded: UploadedPart) -> None:
        if self._newest is None or self._newest[0] < index:
            self._newest = index, self._store.open_checkpoint_dir(uploaded.dir_name)

    def _warn_once(self, types: tuple[str, ...]) -> None:
        new = [name for name in types if name not in self._warned_types]
        if new:
            self._warned_types.update(new)
            logger.warning(
                "report() got values of type %s, which are no numbers, strings, lists or dicts; "
                "they are kept as their repr(). Convert them first, e.g. with .tolist() or .item()",
                ", ".join(new),
            )


def _raise_first(failures: Sequence[Exception]) -> None:
    """Raise the oldest of them, if there is one, and log the others."""
    _log(failures[1:])
    if failures:
        raise failures[0]


def _log(failures: Sequence[Exception]) -> None:
    for error in failures:
        logger.warning("%s", error)
