"""How reported folders get into storage, in local mode: no Ray, everything else as on a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from waiting import wait_until

from ray_lite import train
from ray_lite.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    ConfigError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    UploadError,
    WorkerGroupError,
)
from ray_lite.train.context.journal import journal_root
from ray_lite.train.storage.store import RunStore

ASYNC, NO_UPLOAD = CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


class RefusingFileSystem(MemoryFileSystem):
    """Storage whose credentials are no good for some names."""

    protocol = "refusing"
    refused: tuple[str, ...] = ()

    def pipe_file(self, path, value, **kwargs):
        self._check(path)
        return super().pipe_file(path, value, **kwargs)

    def put_file(self, lpath, rpath, *args, **kwargs):
        self._check(rpath)
        return super().put_file(lpath, rpath, *args, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        if mode != "rb":
            self._check(path)
        return super()._open(path, mode=mode, **kwargs)

    def _check(self, path):
        if any(name in path for name in self.refused):
            raise PermissionError(f"403 {path}")


@pytest.fixture
def refusing():
    MemoryFileSystem.store.clear()
    yield RefusingFileSystem(skip_instance_cache=True)
    MemoryFileSystem.store.clear()


@pytest.fixture
def fit(tmp_path):
    """``fit(fn, **run_config)``; nothing of the run is left outside its folder, and no thread."""

    def fit(fn, **options):
        options = {"storage_path": tmp_path / "storage", "name": "run", **options}
        return train.DataParallelTrainer(
            fn, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(**options)
        ).fit()

    def scratch():
        return set(journal_root().glob("*/attempt_*/rank_*/scratch/*"))

    before = scratch()
    yield fit
    assert scratch() == before
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("ray_lite")], "no threads are left")
    run = tmp_path / "storage" / "run"
    assert [path.name for path in run.glob(".tmp-*")] == []


def make_folder(path: Path, **files: str) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(content)
    return Checkpoint.from_directory(path)


def contents(checkpoint: Checkpoint) -> dict[str, str]:
    found = {}
    for name in checkpoint.files():
        with checkpoint.open(name) as stream:
            found[name] = stream.read().decode()
    return found


def committed(result: train.Result) -> list[dict[str, str]]:
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()
    return [contents(checkpoint) for checkpoint, _ in result.best_checkpoints]


# -- SYNC --------------------------------------------------------------------------------------


def test_a_folder_of_the_users_own_is_copied_and_left_alone(fit, tmp_path):
    checkpoint = make_folder(tmp_path / "mine", keep="1")

    def fn():
        for i in range(3):
            train.report({"i": i}, checkpoint)
            assert contents(checkpoint) == {"keep": "1"}

    assert committed(fit(fn)) == [{"keep": "1"}] * 3


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
@pytest.mark.parametrize("where", ["run", "storage", "parent"])
def test_a_folder_that_holds_the_run_is_refused_and_the_next_report_works(fit, tmp_path, where, mode):
    mine = make_folder(tmp_path / "mine", w="1")

    def fn():
        run = Path(train.get_context().get_trial_dir())
        folder = {"run": run, "storage": run.parent, "parent": run.parent.parent}[where]
        with pytest.raises(UploadError, match="holds the place where it would be stored"):
            train.report({"i": 0}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
        train.report({"i": 1}, mine)

    result = fit(fn)
    assert committed(result) == [{"w": "1"}]
    assert [row["i"] for row in result.metrics_history] == [0, 1]


def test_a_folder_is_deleted_only_when_asked(fit, tmp_path):
    def fn():
        train.report({}, make_folder(tmp_path / "a", w="a"), delete_local_checkpoint_after_upload=True)
        train.report({}, make_folder(tmp_path / "b", w="b"), delete_local_checkpoint_after_upload=False)

    assert committed(fit(fn)) == [{"w": "a"}, {"w": "b"}]
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_what_others_need_is_not_deleted(fit, tmp_path, mode, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fn():
        train.report({"i": 0}, make_folder(tmp_path / "mine", w="1"))
        run = Path(train.get_context().get_trial_dir())
        for folder, text in (
            (run, "the run itself"),
            (tmp_path, "the working directory"),
            (run / "checkpoint_000000", "checkpoint of a run"),
        ):
            options = {"checkpoint_upload_mode": mode, "delete_local_checkpoint_after_upload": True}
            with pytest.raises(ConfigError, match=text):
                train.report({"no": 1}, Checkpoint.from_directory(folder), **options)

    result = fit(fn)
    assert result.metrics_history == [{"i": 0}]
    assert committed(result) == [{"w": "1"}]


def test_the_folder_can_be_named_and_later_attempts_add_their_number(fit, tmp_path):
    checkpoint = make_folder(tmp_path / "mine", w="1")

    def fn():
        context = train.get_context()
        train.report({}, checkpoint, checkpoint_dir_name=f"epoch-{context.get_attempt()}")
        if context.get_attempt() == 1:
            raise ValueError

    result = fit(fn, failure_config=FailureConfig(max_failures=1))
    assert [Path(c.path).name for c, _ in result.best_checkpoints] == ["epoch-1", "epoch-2_attempt_2"]
    assert committed(result) == [{"w": "1"}] * 2


# -- ASYNC -------------------------------------------------------------------------------------


def test_async_takes_the_folder_over_so_the_caller_may_delete_or_change_it_at_once(fit, tmp_path):
    def fn():
        for i in range(6):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "w").write_text(str(i))
                train.report({"i": i}, Checkpoint.from_directory(folder), checkpoint_upload_mode=ASYNC)
        for i in range(6, 9):
            checkpoint = make_folder(tmp_path / "reused", w=str(i))
            train.report({"i": i}, checkpoint, checkpoint_upload_mode=ASYNC)
            assert not (tmp_path / "reused").exists()

    assert committed(fit(fn)) == [{"w": str(i)} for i in range(9)]


def test_async_may_leave_the_folder_and_its_later_changes_are_not_seen(fit, tmp_path):
    def fn():
        for i in range(3):
            checkpoint = make_folder(tmp_path / "mine", w=str(i))
            train.report({"i": i}, checkpoint, checkpoint_upload_mode=ASYNC, delete_local_checkpoint_after_upload=False)
            (tmp_path / "mine" / "w").write_text("changed")

    assert committed(fit(fn)) == [{"w": str(i)} for i in range(3)]
    assert (tmp_path / "mine" / "w").read_text() == "changed"


@pytest.mark.parametrize("link", ["hard", "symbolic", "folder"])
def test_async_copies_what_has_a_second_name(fit, tmp_path, link):
    other = tmp_path / "other"
    other.write_text("as reported")

    def fn():
        checkpoint = make_folder(tmp_path / "mine", w="1")
        if link == "hard":
            os.link(other, tmp_path / "mine" / "x")
        elif link == "symbolic":
            os.symlink(other, tmp_path / "mine" / "x")
        else:
            shutil.copy(other, tmp_path / "mine" / "x")
            os.symlink(tmp_path / "mine", tmp_path / "name")
            checkpoint = Checkpoint.from_directory(tmp_path / "name")
        train.report({}, checkpoint, checkpoint_upload_mode=ASYNC)
        train.get_all_reported_checkpoints()
        other.write_text("changed afterwards")

    assert committed(fit(fn)) == [{"w": "1", "x": "as reported"}]


def test_async_copies_a_checkpoint_of_the_run_instead_of_moving_it(fit, tmp_path):
    def fn():
        train.report({"i": 0}, make_folder(tmp_path / "mine", w="1"))
        train.report({"i": 1}, train.get_checkpoint(), checkpoint_upload_mode=ASYNC)

    assert committed(fit(fn)) == [{"w": "1"}] * 2


def store_by_hand(gate: threading.Event | None = None):
    """A user's own upload, which may be held up."""
    run = Path(train.get_context().get_trial_dir())

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        if gate is not None:
            assert gate.wait(30)
        return Checkpoint(shutil.copytree(checkpoint.path, run / name))

    return upload


def test_async_returns_before_the_upload_and_waits_when_three_are_behind(fit, tmp_path):
    gate, fourth_returned = threading.Event(), threading.Event()

    def fn():
        context, upload = train.get_context(), store_by_hand(gate)

        def report(i: int) -> None:
            checkpoint = make_folder(tmp_path / f"mine-{i}", w=str(i))
            train.report({"i": i}, checkpoint, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)

        report(0)
        wait_until(lambda: context._reporter.num_pending == 1, "one upload is under way")
        report(1)
        report(2)
        assert context._reporter.num_pending == 3
        assert context.get_checkpoint() is None
        assert train.get_all_reported_checkpoints(timeout_s=0.01) == []
        caller = threading.Thread(target=lambda: (report(3), fourth_returned.set()))
        caller.start()
        wait_until(lambda: context._reporter.num_pending == 4, "the fourth is taken")
        assert not fourth_returned.is_set()
        gate.set()
        caller.join()
        found = train.get_all_reported_checkpoints()
        assert [reported.metrics for reported in found] == [{"i": i} for i in range(4)]
        assert contents(context.get_checkpoint()) == {"w": "3"}

    assert committed(fit(fn)) == [{"w": str(i)} for i in range(4)]


def test_an_async_failure_is_raised_at_the_next_report_with_a_checkpoint_which_counts(fit, tmp_path, refusing):
    refusing.refused = ("checkpoint_000000",)

    def fn():
        context = train.get_context()
        train.report({"i": 0}, make_folder(tmp_path / "first", w="0"), checkpoint_upload_mode=ASYNC)
        wait_until(lambda: not context._reporter.num_pending, "the upload has failed")
        train.report({"i": 1})
        with pytest.raises(UploadError, match=r"report 0 could not be stored.*403.*the files are in") as caught:
            train.report({"i": 2}, make_folder(tmp_path / "second", w="2"))
        assert str(tmp_path / "first") in str(caught.value)
        train.report({"i": 3}, make_folder(tmp_path / "third", w="3"))

    result = fit(fn, storage_path="/bucket", storage_filesystem=refusing)
    assert committed(result) == [{"w": "2"}, {"w": "3"}]
    assert [row["i"] for row in result.metrics_history] == [0, 1, 2, 3]
    assert (tmp_path / "first" / "w").read_text() == "0"


def test_an_async_failure_that_nobody_has_heard_of_fails_the_run(fit, tmp_path, refusing):
    refusing.refused = ("checkpoint_000001",)

    def fn():
        for i in range(2):
            train.report({"i": i}, make_folder(tmp_path / f"mine-{i}", w=str(i)), checkpoint_upload_mode=ASYNC)
        return "done"

    with pytest.raises(WorkerGroupError, match="report 1 could not be stored") as caught:
        fit(fn, storage_path="/bucket", storage_filesystem=refusing)
    assert isinstance(caught.value.__cause__, UploadError)
    assert committed(caught.value.result) == [{"w": "0"}]


def test_what_was_handed_over_is_stored_even_if_the_function_then_raises(fit, tmp_path):
    def fn():
        checkpoint = make_folder(tmp_path / "mine", w="last")
        train.report({}, checkpoint, checkpoint_upload_mode=ASYNC)
        raise ValueError("later")

    with pytest.raises(WorkerGroupError, match="later") as caught:
        fit(fn)
    assert committed(caught.value.result) == [{"w": "last"}]


def test_async_to_other_storage_moves_the_folder_aside_and_removes_it_afterwards(fit, tmp_path, refusing):
    def fn():
        for i in range(4):
            train.report({"i": i}, make_folder(tmp_path / "mine", w=str(i)), checkpoint_upload_mode=ASYNC)

    assert committed(fit(fn, storage_path="/bucket", storage_filesystem=refusing)) == [{"w": str(i)} for i in range(4)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".ray_lite", "mine"))] == []


# -- NO_UPLOAD and uploads of the user's own ----------------------------------------------------


def test_no_upload_commits_what_lies_in_the_run_already(fit, tmp_path):
    def fn():
        run = Path(train.get_context().get_trial_dir())
        for i in range(3):
            train.report({"i": i}, make_folder(run / f"epoch-{i}", w=str(i)), checkpoint_upload_mode=NO_UPLOAD)

    result = fit(fn, checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert committed(result) == [{"w": "1"}, {"w": "2"}]
    assert [Path(c.path).name for c, _ in result.best_checkpoints] == ["epoch-1", "epoch-2"]


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_an_upload_of_the_users_own_gets_the_name_and_says_where_it_put_the_files(fit, tmp_path, mode):
    def fn():
        upload = store_by_hand()
        for name in (None, "mine"):
            checkpoint = make_folder(tmp_path / "mine", w="1")
            train.report({}, checkpoint, name, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload)

    result = fit(fn)
    assert committed(result) == [{"w": "1"}] * 2
    assert [Path(c.path).name for c, _ in result.best_checkpoints] == ["checkpoint_000000", "mine"]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda checkpoint: None, "must return the Checkpoint that it stored in .*checkpoint_000000, got NoneType"),
        (lambda checkpoint: checkpoint, "must lie directly in"),
        (lambda checkpoint: 1 / 0, "checkpoint_upload_fn failed for report 0: ZeroDivisionError"),
    ],
)
def test_an_upload_of_the_users_own_that_fails_is_an_upload_error(fit, tmp_path, returned, text):
    checkpoint = make_folder(tmp_path / "mine", w="1")

    def fn():
        with pytest.raises(UploadError, match=text):
            train.report({"i": 0}, checkpoint, checkpoint_upload_fn=lambda c, name: returned(c))
        train.report({"i": 1}, checkpoint)

    result = fit(fn)
    assert committed(result) == [{"w": "1"}]
    assert len(result.metrics_history) == 2


class MuteError(Exception):
    """Fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, MuteError])
def test_an_async_upload_has_ended_whatever_it_raised(fit, tmp_path, kind):
    """A command-line tool that is called as a library ends with SystemExit, which a thread swallows without a word."""

    def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise kind(1)

    def fn():
        context = train.get_context()
        checkpoint = make_folder(tmp_path / "first", w="0")
        train.report({"i": 0}, checkpoint, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=fail)
        assert context._reporter.wait(30)
        assert train.get_all_reported_checkpoints() == []
        with pytest.raises(UploadError, match=rf"report 0.*{kind.__name__}.*the files are in {tmp_path / 'first'}"):
            train.report({"i": 1}, make_folder(tmp_path / "second", w="1"))

    result = fit(fn)
    assert committed(result) == [{"w": "1"}]
    assert [row["i"] for row in result.metrics_history] == [0, 1]
    assert (tmp_path / "first" / "w").read_text() == "0"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_train_function_passes_through_a_sync_upload(fit, tmp_path, kind):
    """It may come from a signal handler, or be Ctrl-C: no upload may swallow it."""
    checkpoint = make_folder(tmp_path / "mine", w="1")

    def fail(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise kind(1)

    def fn():
        train.report({"i": 0}, checkpoint)
        with pytest.raises(kind):
            train.report({"no": 1}, checkpoint, checkpoint_upload_fn=fail)
        train.report({"i": 1}, checkpoint)

    result = fit(fn)
    assert committed(result) == [{"w": "1"}] * 2
    assert [row["i"] for row in result.metrics_history] == [0, 1]


@pytest.mark.parametrize("kind", [SystemExit, OSError, UploadError])
def test_checksums_have_ended_whatever_they_raised(fit, monkeypatch, kind):
    def fail(self, part):
        raise kind("no")

    monkeypatch.setattr(RunStore, "add_digests", fail)

    def fn():
        with train.staging_directory() as folder:
            (folder / "w").write_text("1")
            train.report({"i": 0}, Checkpoint.from_directory(folder))
        assert train.get_context()._reporter.wait(30)
        assert train.get_all_reported_checkpoints() == []

    with pytest.raises(WorkerGroupError, match="no") as caught:
        fit(fn)
    assert isinstance(caught.value.__cause__, UploadError)
    assert committed(caught.value.result) == []


# -- staging -----------------------------------------------------------------------------------


def test_a_staged_folder_is_committed_without_a_copy(fit):
    inodes = []

    def fn():
        for mode in (CheckpointUploadMode.SYNC, ASYNC):
            with train.staging_directory() as folder:
                (folder / "w").write_text(mode.name)
                Path(os.path.join(folder, "v")).write_text(str(folder))
                inodes.append(os.stat(folder / "w").st_ino)
                train.report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
            assert not os.path.exists(folder)

    result = fit(fn)
    assert [files["w"] for files in committed(result)] == ["SYNC", "ASYNC"]
    assert [os.stat(f"{c.path}/w").st_ino for c, _ in result.best_checkpoints] == inodes


def test_the_loop_stops_for_milliseconds_however_large_a_staged_file_is(fit):
    stalls = []

    def fn():
        for mode in (CheckpointUploadMode.SYNC, ASYNC):
            with train.staging_directory() as folder:
                with open(folder / "w", "wb") as file:
                    file.truncate(128 << 20)
                began = time.perf_counter()
                train.report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
                stalls.append(time.perf_counter() - began)

    assert len(fit(fn).best_checkpoints) == 2
    # The budget is 20 ms; the rest is for a machine that does other things.
    assert max(stalls) < 0.2, stalls


def test_a_file_of_an_earlier_checkpoint_is_shared_and_survives_it(fit):
    def fn():
        for i in range(3):
            previous = train.get_checkpoint()
            with train.staging_directory() as folder:
                (folder / "w").write_text(str(i))
                if previous is None:
                    (folder / "sub").mkdir()
                    (folder / "sub" / "vocabulary").write_text("same")
                else:
                    assert folder.link_from(previous, "sub/vocabulary") == folder / "sub" / "vocabulary"
                train.report({"i": i}, Checkpoint.from_directory(folder))

    result = fit(fn, checkpoint_config=CheckpointConfig(num_to_keep=1))
    assert committed(result) == [{"w": "2", "sub/vocabulary": "same"}]


def test_sharing_uses_one_file_on_the_disk_and_refuses_what_is_not_there(fit):
    def fn():
        with train.staging_directory() as folder:
            (folder / "v").write_text("same")
            train.report({}, Checkpoint.from_directory(folder))
        first = train.get_checkpoint()
        with train.staging_directory() as folder:
            folder.link_from(first, "v", to="renamed")
            assert os.stat(folder / "renamed").st_ino == os.stat(f"{first.path}/v").st_ino
            with pytest.raises(train.CheckpointNotFoundError):
                folder.link_from(first, "other")
            with pytest.raises(ValueError, match="leaves the checkpoint"):
                folder.link_from(first, "v", to="../v")
            with pytest.raises(UploadError, match="File exists"):
                folder.link_from(first, "v", to="renamed")

    fit(fn)


def test_staging_is_an_ordinary_upload_where_storage_is_no_disk(fit, refusing):
    def fn():
        for i in range(2):
            with train.staging_directory() as folder:
                (folder / "w").write_text(str(i))
                if i:
                    folder.link_from(train.get_checkpoint(), "w", to="old")
                train.report({"i": i}, Checkpoint.from_directory(folder))
            assert not os.path.exists(folder)

    result = fit(fn, storage_path="/bucket", storage_filesystem=refusing)
    assert committed(result) == [{"w": "0"}, {"w": "1", "old": "0"}]


def test_a_staging_folder_that_nobody_reports_goes_too(fit):
    def fn():
        with contextlib.suppress(KeyError), train.staging_directory() as folder:
            (folder / "w").write_text("1")
            raise KeyError

    assert fit(fn).best_checkpoints == []


# -- what has been reported ----------------------------------------------------------------------


def test_all_reported_checkpoints_are_those_kept_best_last(fit, tmp_path):
    checkpoint = make_folder(tmp_path / "mine", w="1")

    def fn():
        assert train.get_all_reported_checkpoints() == []
        for score in (1, 3, 2, 0):
            train.report({"score": score}, checkpoint)
        found = train.get_all_reported_checkpoints(train.CheckpointConsistencyMode.VALIDATED, timeout_s=5)
        assert [reported.metrics["score"] for reported in found] == [0, 2, 3]
        assert {reported.status for reported in found} == {train.ReportedCheckpointStatus.COMMITTED}
        assert contents(found[-1].checkpoint) == {"w": "1"}
        for bad in ({"consistency_mode": "all"}, {"timeout_s": -1}):
            with pytest.raises(ConfigError, match="must be"):
                train.get_all_reported_checkpoints(**bad)

    fit(fn, checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"))
