"""One life of a run, as the controller and its workers drive the store; used by the storage proofs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import attrs

from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.history import SegmentHistoryWriter
from ray_lite.train.storage.lock import HolderInfo
from ray_lite.train.storage.manifest import MANIFEST_NAME
from ray_lite.train.storage.retention import select_to_delete
from ray_lite.train.storage.run_record import RunRecord
from ray_lite.train.storage.store import RunStore
from ray_lite.train.testing.faulty import SimulatedCrash

WORLD_SIZE = 2


def content(report_index: int, rank: int) -> bytes:
    """What rank ``rank`` saves with report ``report_index``: 2 files' worth, different for each."""
    return f"report {report_index} of rank {rank} ".encode() * 40


def dead_holder() -> HolderInfo:
    """A process of this machine that is no more."""
    return attrs.evolve(HolderInfo.of_this_process(), pid=2**22 + 1, process_started="1")


@attrs.define
class Progress:
    """What a life was told by the store before it ended."""

    committed: list[int] = attrs.field(factory=list)
    resumed_from: int | None = None


def live(
    store: RunStore,
    progress: Progress,
    *,
    num_reports: int,
    num_to_keep: int | None = 1,
    on_commit: Callable[[int], None] = lambda index: None,
) -> None:
    """Resume, make ``num_reports`` reports with checkpoints, and end."""
    store.check_writable()
    store.acquire(holder=dead_holder())
    record = store.read_record() or store.rebuild_record()
    attempt = max(record.attempt if record else 0, store.last_attempt()) + 1
    newest = store.newest_valid()
    kept = store.list_checkpoints()
    progress.resumed_from = None if newest is None else newest.report_index
    first = 0 if newest is None else newest.report_index + 1
    if newest is not None:
        check_content(store.open_checkpoint(newest), newest.report_index)
    store.write_record(_record(store, attempt, "running", first))
    store.remove_orphans(before_attempt=attempt)
    history = store.history_writer(attempt)
    try:
        _report(store, progress, history, kept, attempt, range(first, first + num_reports), num_to_keep, on_commit)
        history.close()
    except SimulatedCrash:
        _die_with_its_process(history)
        raise
    store.write_record(_record(store, attempt, "finished", first + num_reports))
    store.release()


def _die_with_its_process(history):
    if isinstance(history, SegmentHistoryWriter):
        with history._changed:
            history._is_closed = True
            history._changed.notify()


def _report(store, progress, history, kept, attempt, indices, num_to_keep, on_commit):
    for index in indices:
        history.append([b'{"i":%d,"t":%d.5,"m":{"i":%d}}' % (index, index, index)])
        parts = {rank: _upload(store, index, attempt, rank) for rank in range(WORLD_SIZE)}
        history.flush()
        committed = store.commit(
            parts,
            report_index=index,
            attempt=attempt,
            world_size=WORLD_SIZE,
            metrics={"i": index},
            created_at=float(index),
        )
        progress.committed.append(index)
        on_commit(index)
        kept.append(committed)
        store.write_record(_record(store, attempt, "running", index + 1))
        for old in select_to_delete(kept, num_to_keep=num_to_keep):
            store.delete(old)
            kept.remove(old)


def _upload(store, index, attempt, rank):
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/shards")
        for name, data in ((f"shards/{rank}", content(index, rank)), ("common", b"the same on all ranks")):
            with open(f"{folder}/{name}", "wb") as file:
                file.write(data)
        return store.upload(Checkpoint.from_directory(folder), report_index=index, attempt=attempt)


def _record(store: RunStore, attempt: int, state: str, next_report_index: int) -> RunRecord:
    return RunRecord(
        name=store.name,
        attempt=attempt,
        state=state,
        started_at=1.0,
        updated_at=2.0,
        world_size=WORLD_SIZE,
        next_report_index=next_report_index,
        metrics={"i": next_report_index - 1},
    )


def check_content(checkpoint: Checkpoint, report_index: int) -> None:
    """A torn load is a failure here, whatever the store says."""
    with checkpoint.as_directory() as folder:
        for rank in range(WORLD_SIZE):
            with open(f"{folder}/shards/{rank}", "rb") as file:
                assert file.read() == content(report_index, rank)
        with open(f"{folder}/common", "rb") as file:
            assert file.read() == b"the same on all ranks"


def leftovers(store: RunStore) -> list[str]:
    """Everything in the run's folder that belongs to no committed checkpoint and to no run."""
    files, folder = store._open()
    committed = {checkpoint.dir_name: checkpoint for checkpoint in store.list_checkpoints()}
    found = []
    for entry in files.entries(folder):
        if not entry.is_dir:
            found += [] if entry.name in ("run.json", ".lock.json") else [entry.name]
        elif entry.name in committed:
            names = {file.path for file in committed[entry.name].manifest.files} | {MANIFEST_NAME}
            found += [f"{entry.name}/{name}" for name in files.walk(f"{folder}/{entry.name}") if name not in names]
        elif entry.name != "metrics":
            found.append(entry.name)
    return found
