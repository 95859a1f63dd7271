"""Checkpoints of several ranks on a real cluster: nothing mixed, lost, moved or torn. The numbers are of cases.md."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import attrs
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers import first_time, folder_with, note, notes, rank, read
from waiting import wait_until

from ray_lite import train
from ray_lite.train import CheckpointConfig, CheckpointUploadMode, FailureConfig, RunInUseError, WorkerGroupError
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import HolderInfo, RunStore

ASYNC = CheckpointUploadMode.ASYNC


def verified(result: train.Result) -> list[list[str]]:
    """The files of each kept checkpoint, all of them whole."""
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()
    return [sorted(checkpoint.files()) for checkpoint, _ in result.best_checkpoints]


def leftovers(result: train.Result) -> list[str]:
    """What lies in the run's folder and belongs to no checkpoint, history or record."""
    known = {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints} | {"run.json", "metrics"}
    return [path.name for path in Path(result.path).iterdir() if path.name not in known]


def test_files_of_a_dead_attempt_are_not_mixed_into_the_next_checkpoint(fit, scratch):
    """Case 1."""

    def fn(config):
        age = "old" if first_time(config["scratch"], f"first-{rank()}") else "new"
        with folder_with(**{f"part-{rank()}-{age}": "x"}) as checkpoint:
            if age == "old" and rank() == 1:
                run = Path(train.get_context().get_trial_dir())
                wait_until(lambda: list(run.glob("checkpoint_*/part-0-old")), "rank 0 has uploaded its part")
                os.kill(os.getpid(), signal.SIGKILL)
            train.report({"i": 0}, checkpoint=checkpoint)

    result = fit(fn, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=1))
    assert verified(result) == [["part-0-new", "part-1-new"]]
    assert leftovers(result) == []


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
def test_the_folder_may_go_as_soon_as_report_returns(fit, mode):
    """Case 5. Large enough for the checksums to follow the report."""

    def fn(config):
        for i in range(4):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"w-{rank()}").write_bytes(os.urandom(5_000_000))
                train.report({"i": i}, train.Checkpoint.from_directory(folder), checkpoint_upload_mode=config["mode"])
            assert not os.path.exists(folder)

    result = fit(fn, cfg={"mode": mode})
    assert verified(result) == [["w-0", "w-1"]] * 4
    assert leftovers(result) == []


def test_a_users_own_folder_is_left_alone(fit, scratch):
    """Case 6; also the working directory, and the run's own folder."""

    def fn(config):
        mine = Path(config["scratch"], "mine")
        mine.mkdir()
        (mine / "keep").write_text("1")
        os.chdir(mine)
        for folder in (mine, Path(".")):
            train.report({}, train.Checkpoint.from_directory(folder))
        run = Path(train.get_context().get_trial_dir())
        for folder in (run, run.parent):
            with pytest.raises(train.UploadError, match="holds the place where it would be stored"):
                train.report({}, train.Checkpoint.from_directory(folder))
        train.report({}, train.Checkpoint.from_directory(run / "checkpoint_000000"))
        assert (mine / "keep").read_text() == "1"
        os.chdir("/")

    result = fit(fn, n=1, cfg={"scratch": str(scratch)})
    assert verified(result) == [["keep"]] * 3


def test_a_single_file_is_refused_where_the_checkpoint_is_made(fit, tmp_path):
    """Case 7."""
    file = tmp_path / "model.pt"
    file.write_bytes(b"1")

    def fn(config):
        for make in (train.Checkpoint.from_directory, train.Checkpoint):
            with pytest.raises(train.CheckpointError, match=r"model\.pt"):
                make(config["file"])
        for missing in ("/does/not/exist", ""):
            with pytest.raises((train.CheckpointNotFoundError, train.ConfigError)):
                train.Checkpoint.from_directory(missing)
        with pytest.raises(train.UploadError, match="no checkpoint at"):
            train.report({}, train.Checkpoint("/does/not/exist"))
        train.report({"i": 1})

    result = fit(fn, n=1, cfg={"file": str(file)})
    assert result.metrics == {"i": 1}
    assert verified(result) == []
    assert leftovers(result) == []


class FlakyFileSystem(LocalFileSystem):
    """The first writes of each process fail for a moment; those of names with ``never`` always."""

    protocol = "flaky"
    num_failures = 2

    def put_file(self, path1, path2, *args, **kwargs):
        self._fail(path2)
        return super().put_file(path1, path2, *args, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._fail(path)
        return super().pipe_file(path, value, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        if mode != "rb":
            self._fail(path)
        return super()._open(path, mode=mode, **kwargs)

    def _fail(self, path):
        if "never" in path:
            raise PermissionError(13, "no", path)
        if FlakyFileSystem.num_failures > 0 and "checkpoint_" in path:
            FlakyFileSystem.num_failures -= 1
            raise ConnectionResetError(104, "reset by peer", path)


def test_a_transient_error_is_repeated_and_a_lasting_one_can_be_caught(fit, tmp_path):
    """Case 10."""

    def fn():
        for i in range(3):
            with folder_with(**{f"w-{rank()}": str(i)}) as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)
        with folder_with(never="x") as checkpoint, pytest.raises(train.UploadError, match="checkpoint_000003"):
            train.report({"i": 3}, checkpoint=checkpoint)
        train.report({"i": 4})

    result = fit(fn, storage_path=str(tmp_path / "storage"), storage_filesystem=FlakyFileSystem())
    assert result.metrics["i"] == 4
    assert verified(result) == [["w-0", "w-1"]] * 3


def test_a_worker_killed_while_its_files_go_up_leaves_nothing_torn(fit, scratch):
    """Case 11. Killed between the copy and the checksums, or while an ASYNC upload is under way."""

    def fn(config):
        checkpoint = train.get_checkpoint()
        start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
        note(config["scratch"], "starts", start)
        for i in range(start, 6):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "i").write_text(str(i))
                Path(folder, "w").write_bytes(bytes([i]) * 30_000_000)
                mode = ASYNC if i % 2 else CheckpointUploadMode.SYNC
                train.report({"i": i}, train.Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
            if i in (1, 4) and first_time(config["scratch"], f"kill-{i}"):
                os.kill(os.getpid(), signal.SIGKILL)

    result = fit(fn, n=1, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=2))
    starts = notes(scratch, "starts")
    # SYNC has returned, so 4 is there in any case; of an ASYNC upload that was killed nothing is.
    assert starts[0] == 0
    assert starts[1] in (1, 2)
    assert starts[2] == 5
    assert [row["i"] for row in result.metrics_history] == list(range(6))
    assert set(map(tuple, verified(result))) == {("i", "w")}
    assert leftovers(result) == []


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(fit):
    """Case 18."""

    def fn():
        for i in range(4):
            with folder_with(w=str(i)) as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)
            found = train.get_all_reported_checkpoints()
            if i == 1:
                # Somebody tidies up behind our back, and puts something in the way.
                path = Path(found[0].checkpoint.path)
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()

    result = fit(fn, n=1, cc=CheckpointConfig(num_to_keep=1))
    assert result.error is None
    assert result.metrics["i"] == 3
    assert read(result.checkpoint, "w") == "3"


def test_a_checkpoint_that_no_rank_read_after_a_restart_is_told_once(fit, scratch, caplog):
    """Case 24."""

    def fn(config):
        for i in range(3):
            with folder_with(w="1") as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)
            if i == 1 and first_time(config["scratch"], "raise"):
                raise RuntimeError("once")

    fit(fn, n=1, cfg={"scratch": str(scratch)}, fc=FailureConfig(max_failures=1))
    assert caplog.text.count("no rank called train.get_checkpoint()") == 1


def test_each_attempt_starts_from_the_newest_checkpoint_on_every_rank(fit, scratch):
    """Case 26."""

    def fn(config):
        start = int(read(train.get_checkpoint(), "i"))
        note(config["scratch"], f"starts-{rank()}", start)
        for i in range(start + 1, start + 4):
            with folder_with(i=str(i)) as checkpoint:
                train.report({"i": i}, checkpoint=checkpoint)
        assert read(train.get_checkpoint(), "i") == str(start + 3)
        train.collective.barrier()
        # Without this, a rank could raise before the other's last report has come.
        assert len(train.get_all_reported_checkpoints()) == start - 7
        if start < 16:
            raise RuntimeError

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "i").write_text("10")
        fit(
            fn,
            cfg={"scratch": str(scratch)},
            fc=FailureConfig(max_failures=2),
            trainer_options={"resume_from_checkpoint": folder},
        )
    assert notes(scratch, "starts-0") == notes(scratch, "starts-1") == [10, 13, 16]


def test_an_async_failure_fails_the_run_names_the_rank_and_gives_the_folder_back(fit, scratch):
    def fn(config):
        def upload(checkpoint, name):
            raise ConnectionError("the bucket is gone")

        if rank() == 1:
            folder = Path(config["scratch"], "mine")
            folder.mkdir()
            (folder / "w").write_text("1")
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report({}, checkpoint, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)

    with pytest.raises(WorkerGroupError, match="the bucket is gone") as caught:
        fit(fn, cfg={"scratch": str(scratch)})
    assert (scratch / "mine" / "w").read_text() == "1"
    assert set(caught.value.worker_failures) == {1}
    assert isinstance(caught.value.worker_failures[1], train.UploadError)


def test_what_a_rank_has_reported_can_be_waited_for_or_not(fit, scratch):
    def fn(config):
        if rank() == 1:
            wait_until(lambda: notes(config["scratch"], "looked"), "rank 0 has looked")
        with folder_with(**{f"w-{rank()}": "1"}) as checkpoint:
            train.report({"loss": rank()}, checkpoint=checkpoint)
        if rank() == 0:
            assert train.get_all_reported_checkpoints(timeout_s=0.05) == []
            note(config["scratch"], "looked", True)
        (found,) = train.get_all_reported_checkpoints()
        assert found.metrics == {"loss": 0}
        assert sorted(found.checkpoint.files()) == ["w-0", "w-1"]

    fit(fn, cfg={"scratch": str(scratch)})


def test_staged_folders_of_all_ranks_become_one_checkpoint(fit):
    def fn():
        for i in range(3):
            with train.staging_directory() as folder:
                previous = train.get_checkpoint()
                if previous is None:
                    (folder / f"frozen-{rank()}").write_bytes(b"x" * 3_000_000)
                else:
                    folder.link_from(previous, f"frozen-{rank()}")
                (folder / f"w-{rank()}").write_text(str(i))
                train.report({"i": i}, train.Checkpoint.from_directory(folder))

    result = fit(fn, cc=CheckpointConfig(num_to_keep=2))
    assert verified(result) == [["frozen-0", "frozen-1", "w-0", "w-1"]] * 2
    assert leftovers(result) == []


def test_a_lock_of_a_dead_controller_on_another_machine_is_taken_over(fit, tmp_path):
    """The actor is asked about, since the process cannot be."""
    import ray

    seen = tmp_path / "seen"

    def fn(config):
        run = Path(train.get_context().get_trial_dir())
        Path(config["seen"]).write_text((run / ".lock.json").read_text())

    fit(fn, n=1, name="one", cfg={"seen": str(seen)})
    lock = json.loads(seen.read_text())
    assert lock["run_id"].startswith(ray.get_runtime_context().get_session_name() + "/")
    elsewhere = HolderInfo(**{**lock, "machine": "another", "boot_identity": "another", "host": "another"})
    store = RunStore(StorageRoot(str(tmp_path / "storage")), "two")
    store.acquire(holder=elsewhere)
    assert fit(lambda: train.report({"ok": 1}), n=1, name="two").metrics == {"ok": 1}

    # An actor that lives, and one of a cluster that is not ours.
    @ray.remote(num_cpus=0)
    class Someone:
        def ping(self) -> str:
            return ray.get_runtime_context().get_actor_id()

    someone = Someone.remote()
    session = ray.get_runtime_context().get_session_name()
    alive = attrs.evolve(elsewhere, run_id=f"{session}/{ray.get(someone.ping.remote())}")
    for number, holder in enumerate([alive, attrs.evolve(elsewhere, run_id="session_x/abc")]):
        store = RunStore(StorageRoot(str(tmp_path / "storage")), f"held-{number}")
        store.acquire(holder=holder)
        with pytest.raises(RunInUseError, match=r"in use by process .* on another"):
            fit(lambda: None, n=1, name=f"held-{number}")
    ray.kill(someone)


def test_the_history_can_hold_numbers_over_all_ranks(fit):
    def fn():
        for i in range(3):
            train.report({"loss": i + rank()})

    result = fit(fn, metrics_over_ranks=["mean", "max"])
    assert result.metrics_history == [{"loss": i, "loss/mean": i + 0.5, "loss/max": i + 1.0} for i in range(3)]
    assert result.metrics == {"loss": 2}
