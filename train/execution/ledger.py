"""The one place where the reports of a run are processed, whatever their kind.

Records of all ranks come in; history lines, committed checkpoints and events go out. Both
the controller and local mode feed it. It belongs to one thread at a time, and all it
waits for is the storage.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..configs.checkpoint import CheckpointConfig
from ..context.journal import journal_root
from ..context.records import Part, parse_record
from ..errors import CheckpointConflictError, CheckpointDamagedError, StorageError, UploadError, explained
from ..storage.checkpoint import Checkpoint
from ..storage.history import HISTORY_FOLDER, rescue
from ..storage.retention import best_first, score_of, select_to_delete
from ..storage.run_record import RunRecord
from ..storage.store import CommittedCheckpoint, HolderInfo, RunStore
from ..storage.uri import redact
from .aggregate import over_ranks
from .consolidate import ConsolidatedReport, Consolidator
from .messages import CheckpointCommitted, Event, Notice, ReportCompleted
from .progress import Progress
from .resume import config_changes, describe_age

__all__ = ["Ledger", "StartPoint"]

logger = logging.getLogger("ray_lite.train")

_MAX_REMEMBERED_BYTES = 16 << 20
_MAX_ERROR_CHARS = 4_000
# Often the temporary folder lies on the disk that is full; this one is memory.
_SECOND_RESCUE_ROOT = "/dev/shm"


@attrs.frozen(kw_only=True)
class StartPoint:
    """Where an attempt begins.

    Attributes:
        attempt: Its number, from 1, over all ``fit()`` calls of the run.
        first_report_index: Number of its first report.
        checkpoint: What its workers start from, or None.
    """

    attempt: int
    first_report_index: int
    checkpoint: Checkpoint | None


class Ledger:
    """Keeps the books of one run.

    Args:
        store: Where the run lies.
        run_id: 32 hex digits of this ``fit()``.
        checkpoint_config: Which checkpoints are kept.
        config_record: The run's configs as plain values, for the record.
        start_checkpoint: From ``resume_from_checkpoint``; used while the run has none of its own.
        resume: ``"auto"``, ``"never"`` or ``"must"``.
        wants_reports: Whether to bring the reports of all ranks together as events.
        metrics_over_ranks: What the history keeps over all ranks, of ``"mean"``, ``"min"``, ``"max"``.
        lock_id: What ``is_alive`` knows this process by; ``run_id`` by default.
        is_alive: Whether the holder of a lock on another machine lives; None: nobody can tell.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        run_id: str,
        checkpoint_config: CheckpointConfig,
        config_record: Mapping[str, Any],
        start_checkpoint: Checkpoint | None,
        resume: str,
        wants_reports: bool,
        metrics_over_ranks: Sequence[str] = (),
        lock_id: str = "",
        is_alive: Callable[[HolderInfo], bool | None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._run_id, self._checkpoint_config = store, run_id, checkpoint_config
        self._config_record, self._start_checkpoint = config_record, start_checkpoint
        self._resume, self._wants_reports, self._clock = resume, wants_reports, clock
        self._metrics_over_ranks = metrics_over_ranks
        self._shown = redact(store.path)
        self._lock_id, self._is_alive = lock_id or run_id, is_alive
        self._kept: list[CommittedCheckpoint] = []
        self._attempt = 0
        self._world_size = 0
        self._started_at = clock()
        # The newest standing report of rank 0: its number, and its metrics as they were written or read back.
        self._last_index = -1
        self._last_line: bytes | None = None
        self._last_metrics: dict[str, Any] | None = None
        self._is_open = False
        self._has_history = False
        self._has_start = False
        # The newest report whose checkpoint could not be committed, with its files.
        self._uncommitted: tuple[int, Mapping[int, tuple[Part, bytes]]] | None = None
        # Number of the first report that no storage took, and what to say of it.
        self._unstored: tuple[int, str] | None = None
        self._warned: set[str] = set()

    # -- the run -----------------------------------------------------------------------------

    def open(self) -> list[Event]:
        """Take the run and look at what it already holds.

        Raises:
            RunInUseError: Another live process writes to this run.
            StorageError: The storage cannot be used, or ``resume="must"`` finds no checkpoint.
        """
        self._store.check_writable()
        self._store.acquire(self._lock_id, is_alive=self._is_alive)
        self._is_open = True
        try:
            return self._look()
        except BaseException:
            # In local mode this process lives on, and would hold the run for ever.
            self._is_open = False
            self._store.release()
            raise

    def _look(self) -> list[Event]:
        record = self._store.read_record()
        self._kept = self._store.list_checkpoints()
        events: list[Event] = []
        if record is None:
            record = self._store.rebuild_record()
            if record is not None:
                text = f"{self._shown} has no usable run.json; what it said was found out from the checkpoints"
                events.append(Notice(level=logging.WARNING, text=text))
        # A lost record must not make an attempt number come twice.
        self._attempt = max(record.attempt if record else 0, self._store.last_attempt())
        if self._resume == "must" and not self._kept:
            raise StorageError(
                f'resume="must", but {self._shown} holds no checkpoint; check name and storage_path, '
                'or use resume="auto" to begin from nothing'
            )
        if self._resume == "never" and (record is not None or self._kept):
            raise StorageError(
                f'resume="never", but {self._shown} already holds a run; choose another name, '
                'delete that folder, or use resume="auto" to continue it'
            )
        changes = config_changes(record.config, self._config_record) if record is not None else []
        if changes:
            text = f"since the last fit() of {self._store.name} these options have changed: {', '.join(changes)}"
            events.append(Notice(level=logging.INFO, text=text))
        if record is not None and not self._kept and self._start_checkpoint is None:
            text = f"{self._shown} holds a run without a checkpoint: training begins from nothing"
            events.append(Notice(level=logging.INFO, text=text))
        return events

    def begin_attempt(self, world_size: int) -> tuple[StartPoint, list[Event]]:
        """Choose what the next attempt starts from, and record that it starts.

        Args:
            world_size: Ranks of its worker group, >= 1.

        Raises:
            StorageError: The storage cannot be used, or ``resume="must"`` finds no checkpoint that is whole.
        """
        events: list[Event] = []
        newest = self._store.newest_valid(verify="digest") if self._kept else None
        if newest is None and self._kept and self._resume == "must":
            raise StorageError(f'resume="must", but every checkpoint in {self._shown} is damaged')
        # What was found damaged is not offered again, nor counted by retention.
        up_to = -1 if newest is None else newest.report_index
        self._kept = [c for c in self._kept if c.report_index <= up_to]
        self._attempt += 1
        self._world_size = world_size
        first = up_to + 1
        self._uncommitted = None
        if self._unstored is not None and self._unstored[0] >= first:
            # Done again now.
            self._unstored = None
        checkpoint = self._start_checkpoint if newest is None else self._store.open_checkpoint(newest)
        # What was reported behind the checkpoint is done again, so it no longer stands.
        self._last_line, self._last_index = None, first - 1
        self._last_metrics = None if newest is None else dict(newest.manifest.metrics)
        self._has_start = checkpoint is not None
        if newest is not None:
            age = describe_age(self._clock() - newest.manifest.created_at)
            text = f"continuing from {newest.dir_name} (report {newest.report_index}, {age}) in {self._shown}"
            events.append(Notice(level=logging.INFO, text=text))
        elif checkpoint is not None:
            text = f"starting from resume_from_checkpoint={checkpoint!r}; {self._shown} has no checkpoint yet"
            events.append(Notice(level=logging.INFO, text=text))
        self._progress = Progress(world_size, first)
        self._consolidator = Consolidator(world_size) if self._wants_reports else None
        # For numbers over the ranks, a rank that is slow with its first report counts too.
        self._over_ranks = Consolidator(world_size, waits_for_all=True) if self._metrics_over_ranks else None
        self._parts: dict[int, dict[int, tuple[Part, bytes]]] = {}
        self._rank0_lines: dict[int, bytes] = {}
        self._rank0_bytes = 0
        self._committed_now: dict[int, Checkpoint] = {}
        self._history = self._store.history_writer(self._attempt)
        self._has_history = True
        self._write_record("running")
        self._store.remove_orphans(before_attempt=self._attempt)
        return StartPoint(attempt=self._attempt, first_report_index=first, checkpoint=checkpoint), events

    def add(self, world_rank: int, records: Sequence[bytes]) -> list[Event]:
        """Process records of one rank, in the order in which it made them.

        Raises:
            CheckpointConflictError: Two ranks reported different bytes under one file name.
            StorageError: The history or a checkpoint cannot be written.
        """
        events: list[Event] = []
        history: list[bytes] = []
        complete: list[ConsolidatedReport] = []
        for data in records:
            record = parse_record(data)
            index, part = record.report_index, record.part
            if record.line is None:
                line = self._parts.get(index, {}).get(world_rank, (part, b""))[1]
                if part is not None:
                    self._parts.setdefault(index, {})[world_rank] = (part, line)
                self._progress.upload_ended(world_rank, index)
                continue
            self._progress.reported(world_rank, index, is_pending=part is not None and part.is_pending)
            if part is not None:
                self._parts.setdefault(index, {})[world_rank] = (part, record.line)
            if world_rank == 0:
                history.append(record.line)
                self._remember(index, record.line)
            if self._consolidator is not None:
                events += self._completed(self._consolidator.add(world_rank, index, record.line))
            if self._over_ranks is not None:
                complete += self._over_ranks.add(world_rank, index, record.line)
        if history:
            self._last_line, self._last_index = history[-1], self._progress.num_reports(0) - 1
            self._history.append(history)
        self._write_over_ranks(complete)
        return self._commit_ready() + events

    def rank_finished(self, world_rank: int) -> list[Event]:
        """The train function of a rank has returned; all its records have been added."""
        self._progress.finished(world_rank)
        events = self._commit_ready()
        if self._consolidator is not None:
            events += self._completed(self._consolidator.finished(world_rank))
        if self._over_ranks is not None:
            self._write_over_ranks(self._over_ranks.finished(world_rank))
        return events

    def end_attempt(self) -> list[Event]:
        """All records that will ever come have been added; whatever is incomplete is dropped."""
        for index, parts in self._parts.items():
            for rank, (part, _) in parts.items():
                if part.uploaded is not None and part.is_pending:
                    # Its process is gone, its files are not: the checksums are made up for at the commit.
                    self._progress.upload_ended(rank, index)
        events = self._commit_ready()
        events += self._commit_again()
        if self._consolidator is not None:
            events += self._completed(self._consolidator.flush())
        if self._over_ranks is not None:
            self._write_over_ranks(self._over_ranks.flush())
        return events + self._check_kept() + self._end_history()

    def _commit_again(self) -> list[Event]:
        """Try once more to commit the newest checkpoint whose files arrived; the next attempt would remove them."""
        if self._uncommitted is None:
            return []
        failed, self._uncommitted = self._uncommitted, None
        try:
            events = self._commit(*failed)
        except CheckpointConflictError:
            # The first time it was committed after all, and only the answer was lost.
            return []
        # Of a second failure there is nothing new to say.
        return events if self._uncommitted is None else []

    def _check_kept(self) -> list[Notice]:
        """Say which committed checkpoints somebody has removed meanwhile."""
        try:
            gone = {committed.dir_name for committed in self._store.missing(self._kept)} if self._kept else set()
        except StorageError as error:
            logger.debug("whether all checkpoints are still there is not known: %s", error)
            return []
        if not gone:
            return []
        # Single old ones may have been removed on purpose; the newest is what the user is left with.
        level = logging.ERROR if self._kept[-1].dir_name in gone else logging.WARNING
        self._kept = [committed for committed in self._kept if committed.dir_name not in gone]
        text = (
            f"{len(gone)} committed checkpoints are no longer in {self._shown}, removed by somebody while the run went "
            f"on: {_shown_names(sorted(gone))}"
        )
        return [Notice(level=level, text=text)]

    def _end_history(self) -> list[Notice]:
        """Close the history of the attempt; what its storage refuses goes to a file elsewhere."""
        if not self._has_history:
            return []
        self._has_history = False
        unstored = self._history.close()
        if unstored is None:
            return []
        folder = f"{self._shown}/{HISTORY_FOLDER}"
        notices = []
        if unstored.lost:
            text = f"the history in {folder} is not whole: {unstored.lost}"
            notices.append(Notice(level=logging.ERROR, text=text))
        if unstored.lines:
            text = f"{unstored.num_lines} lines of history (of rank 0) could not be stored in {folder}: "
            text += redact(unstored.reason)
            try:
                # A name may be as long as the filesystem allows for one.
                own = f"{self._store.name[:50]}-{self._run_id}"
                roots = (str(journal_root().parent), _SECOND_RESCUE_ROOT)
                path = rescue(unstored, f"ray_lite-{os.getuid()}-rescued/{own}", roots)
            except OSError as error:
                # The training itself is done, and its checkpoints are safe.
                text += f"; nor elsewhere: {error}"
                self._unstored = unstored.first_report_index, text
                notices.append(Notice(level=logging.ERROR, text=text))
            else:
                text += (
                    f"; they lie in {path} on {socket.gethostname()}: once there is room, copy that file into {folder} "
                    "to put them back, before this machine restarts or clears its temporary files"
                )
                notices.append(Notice(level=logging.WARNING, text=text))
        return notices

    def checkpoint_was_read(self, has_been_read: bool) -> list[Event]:
        """Whether any rank of this attempt has asked for the checkpoint that it could start from."""
        if not self._has_start or has_been_read or not self._is_new_warning("unread"):
            return []
        text = (
            "this attempt could have continued from a checkpoint, but no rank called train.get_checkpoint(): the work "
            "up to it was done again; load it at the beginning of the train function"
        )
        return [Notice(level=logging.WARNING, text=text)]

    def close(self, state: str, error: str | None = None) -> None:
        """Write the last record and give the run back.

        Args:
            state: ``"finished"``, ``"failed"`` or ``"interrupted"``.
            error: Text of what ended it, or None.

        Raises:
            StorageError: The run would be finished, but reports of it are stored nowhere. It is given back all the
                same.
        """
        if not self._is_open:
            return
        self._is_open = False
        lost: StorageError | None = None
        try:
            # An error may have come in the way of end_attempt().
            for notice in self._end_history():
                logger.log(notice.level, "%s", notice.text)
            if state == "finished" and self._unstored is not None:
                error = f"the train function has finished, but {self._unstored[1]}; "
                error += (
                    f"the newest checkpoint is {self._kept[-1].dir_name}" if self._kept else "there is no checkpoint"
                )
                state, lost = "failed", StorageError(explained(error))
            if self._attempt:
                self._write_record(state, error)
        except StorageError as problem:
            # Only a summary: checkpoints and history say the same.
            logger.error("the run record could not be written: %s", problem)
        finally:
            self._store.release()
        if lost is not None:
            raise lost

    @property
    def last_metrics(self) -> dict[str, Any] | None:
        """Those of rank 0's newest report that still stands, whether or not it could be stored.

        None before ``begin_attempt``, and while there is no report.
        """
        return self._last_metrics if self._last_line is None else json.loads(self._last_line)["m"]

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self._store.path

    def num_reports(self, world_rank: int) -> int:
        """The number that the next report of this rank will have, as far as is known here."""
        return self._progress.num_reports(world_rank)

    def checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The kept checkpoints with their metrics, oldest first."""
        return [(self._store.open_checkpoint(c), dict(c.manifest.metrics)) for c in self._kept]

    def reported(self, num_reports: int) -> tuple[list[tuple[str, dict[str, Any]]], list[int]]:
        """The kept checkpoints, and whether those of the first ``num_reports`` reports are among them yet.

        Returns:
            Folder and metrics of each, as ``best_checkpoints`` orders them; and the ranks whose
            reports are waited for, empty when nothing is.
        """
        config = self._checkpoint_config
        ordered = best_first(
            self._kept, score_attribute=config.checkpoint_score_attribute, score_order=config.checkpoint_score_order
        )
        waiting = [index for index in self._parts if index < num_reports]
        late = self._progress.laggards(max(waiting)) if waiting else []
        return [(c.dir_name, dict(c.manifest.metrics)) for c in reversed(ordered)], late

    # -- commits -----------------------------------------------------------------------------

    def _commit_ready(self) -> list[Event]:
        events: list[Event] = []
        complete_below = self._progress.complete_below
        for index in sorted(index for index in self._parts if index < complete_below):
            events += self._commit(index, self._parts.pop(index))
        self._forget(complete_below)
        return events

    def _commit(self, index: int, parts: Mapping[int, tuple[Part, bytes]]) -> list[Event]:
        parts = {rank: (self._settled(part), line) for rank, (part, line) in parts.items()}
        failed = {rank: part.failure for rank, (part, _) in parts.items() if part.uploaded is None}
        if failed:
            rank, why = next(iter(failed.items()))
            return [
                Notice(
                    level=logging.WARNING,
                    text=f"report {index} has no checkpoint: the upload of rank {rank} failed ({why})",
                )
            ]
        uploaded = {rank: part.uploaded for rank, (part, _) in sorted(parts.items()) if part.uploaded is not None}
        # No checkpoint is ahead of the history.
        self._history.flush()
        try:
            committed = self._store.commit(
                uploaded,
                report_index=index,
                attempt=self._attempt,
                world_size=self._world_size,
                metrics=self._metrics_of(index, parts),
                is_deletable=self._checkpoint_config.num_to_keep is not None,
                created_at=self._clock(),
            )
        except CheckpointConflictError:
            raise
        except StorageError as error:
            # The files are there, only this commit is not: training goes on to the next one.
            if not isinstance(error, CheckpointDamagedError):
                self._uncommitted = index, parts
            return [Notice(level=logging.ERROR, text=f"the checkpoint of report {index} was not committed: {error}")]
        self._uncommitted = None
        self._kept.append(committed)
        checkpoint = self._store.open_checkpoint(committed)
        if self._consolidator is not None:
            self._committed_now[index] = checkpoint
        self._retain()
        events = self._score_warning(index, committed.metrics)
        events.append(CheckpointCommitted(report_index=index, checkpoint=checkpoint, metrics=committed.metrics))
        return events

    def _settled(self, part: Part) -> Part:
        """A part whose upload has ended, or will never end."""
        if not part.is_pending:
            return part
        if part.uploaded is None:
            return Part(failure="its upload had not ended")
        try:
            return Part(uploaded=self._store.add_digests(part.uploaded))
        except UploadError as error:
            return Part(failure=str(error))

    def _score_warning(self, index: int, metrics: Mapping[str, Any]) -> list[Event]:
        attribute = self._checkpoint_config.checkpoint_score_attribute
        if attribute is None or score_of(metrics, attribute) is not None or not self._is_new_warning("score"):
            return []
        text = (
            f"checkpoint_score_attribute={attribute!r} is no number in the metrics of report {index}, which has "
            f"{_shown_names(metrics)}; such a checkpoint counts as the worst"
        )
        return [Notice(level=logging.WARNING, text=text)]

    def _is_new_warning(self, what: str) -> bool:
        is_new = what not in self._warned
        self._warned.add(what)
        return is_new

    def _retain(self) -> None:
        config = self._checkpoint_config
        if config.num_to_keep is None:
            return
        doomed = select_to_delete(
            self._kept,
            num_to_keep=config.num_to_keep,
            score_attribute=config.checkpoint_score_attribute,
            score_order=config.checkpoint_score_order,
        )
        for committed in doomed:
            self._kept.remove(committed)
            self._store.delete(committed)

    def _metrics_of(self, index: int, parts: Mapping[int, tuple[Part, bytes]]) -> dict[str, Any]:
        """Rank 0's metrics of a report; those of the lowest rank with files if it made none."""
        line = self._rank0_lines.get(index)
        if line is None and 0 in parts:
            line = parts[0][1]
        if line is None and self._progress.num_reports(0) > index:
            # Long ago, while another rank lagged far behind: the history still has it.
            self._history.flush()
            for row in self._store.read_history():
                if row.report_index == index:
                    return dict(row.metrics)
        if line is None:
            line = parts[min(parts)][1]
        metrics: dict[str, Any] = json.loads(line)["m"]
        return metrics

    def _remember(self, index: int, line: bytes) -> None:
        if self._world_size == 1:
            return
        self._rank0_lines[index] = line
        self._rank0_bytes += len(line)
        while self._rank0_bytes > _MAX_REMEMBERED_BYTES:
            oldest = next(iter(self._rank0_lines))
            self._rank0_bytes -= len(self._rank0_lines.pop(oldest))

    def _forget(self, below: int) -> None:
        while self._rank0_lines:
            oldest = next(iter(self._rank0_lines))
            if oldest >= below:
                return
            self._rank0_bytes -= len(self._rank0_lines.pop(oldest))

    def _completed(self, reports: Iterator[ConsolidatedReport]) -> list[Event]:
        return [
            ReportCompleted(
                report_index=report.report_index,
                lines=report.lines,
                checkpoint=self._committed_now.pop(report.report_index, None),
            )
            for report in reports
        ]

    def _write_over_ranks(self, reports: Iterable[ConsolidatedReport]) -> None:
        """Behind rank 0's own lines, which they belong to."""
        lines = []
        for report in reports:
            # The history is rank 0's.
            if 0 in report.lines:
                values = over_ranks(report.lines.values(), self._metrics_over_ranks)
                lines.append(json.dumps({"i": report.report_index, "a": values}, separators=(",", ":")).encode())
        if lines:
            self._history.append(lines)

    # -- the record --------------------------------------------------------------------------

    def _write_record(self, state: str, error: str | None = None) -> None:
        self._store.write_record(
            RunRecord(
                name=self._store.name,
                attempt=self._attempt,
                state=state,
                started_at=self._started_at,
                updated_at=self._clock(),
                world_size=self._world_size,
                next_report_index=self._last_index + 1,
                metrics=self.last_metrics,
                error=error[:_MAX_ERROR_CHARS] if error else None,
                config=dict(self._config_record),
            )
        )


def _shown_names(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return (", ".join(shown[:20]) or "none") + more
