"""The child that measures this library, and on the same cluster the floor."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from _answers import answer_questions, new_folder, start_cluster, wait_until_free
from _train_functions import (
    beside_the_ranks,
    die_once,
    look_around,
    note,
    read_notes,
    stamp,
    time_reports,
    time_small,
    time_sync,
    write_files,
    write_small,
)
from floor import fit_floor, memory_floor, recovery_floor, reports_floor

from ray_lite import train
from ray_lite.train import FailureConfig, RunConfig, ScalingConfig


def trainer(function: Any, folder: Any, *, max_failures: int = 0, **config: Any) -> Any:
    return train.torch.TorchTrainer(
        function,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, name="run", failure_config=FailureConfig(max_failures=max_failures)),
    )


def fit() -> dict[str, float]:
    idle, folder = wait_until_free(), new_folder()
    ready = trainer(stamp, folder)
    called = time.time()
    ready.fit()
    returned = time.time()
    stamps = read_notes(folder, "stamp-*")
    return {
        "total": returned - called,
        "first_line": stamps[0]["first"] - called,
        "end": returned - max(s["last"] for s in stamps),
        "idle_workers": idle,
    }


def report_often(config: dict[str, Any]) -> None:
    time_reports(train.report, config, f"reports-{train.get_context().get_world_rank()}")


def reports(num_reports: int) -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    result = trainer(report_often, folder, num_reports=num_reports).fit()
    returned = time.time()
    rows = result.metrics_history
    assert [row["accuracy"] for row in rows] == [index * 1e-5 for index in range(num_reports)]
    notes = read_notes(folder, "reports-*")
    # The file's time is when the last line was written; looking at it disturbs nothing.
    on_disk = max(os.stat(path).st_mtime for path in (folder / "run" / "metrics").iterdir())
    return {
        "p50": max(n["p50"] for n in notes),
        "p99": max(n["p99"] for n in notes),
        "most": max(n["most"] for n in notes),
        "calls_per_s": num_reports / max(n["ended"] - n["began"] for n in notes),
        "to_disk_per_s": num_reports / (on_disk - notes[0]["began"]),
        "end": returned - max(n["ended"] for n in notes),
    }


def memory() -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    trainer(look_around, folder).fit()
    return beside_the_ranks(folder)


def recovery() -> dict[str, float]:
    idle, folder = wait_until_free(), new_folder()
    trainer(die_once, folder, max_failures=1).fit()
    (killed,) = read_notes(folder, "killed")
    return {"restart": read_notes(folder, "second-0")[0]["first"] - killed["at"], "idle_workers": idle}


def save_often(config: dict[str, Any]) -> None:
    folder, times = Path(config["folder"]), {}
    times["sync"] = time_sync(train.report, train.Checkpoint.from_directory, folder / "sync")
    write_files(folder / "async", 512)
    began = time.perf_counter()
    train.report(
        {},
        checkpoint=train.Checkpoint.from_directory(folder / "async"),
        checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
    )
    times["async"] = time.perf_counter() - began
    with train.staging_directory() as staged:
        write_files(Path(staged) / "files", 1_024)
        began = time.perf_counter()
        train.report({}, checkpoint=train.Checkpoint.from_directory(staged))
        times["staged"] = time.perf_counter() - began
    note(str(folder), "checkpoint", **times)


def commit_often(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    (folder / "small").mkdir()
    (folder / "small" / "weights").write_bytes(b"x" * 1_000)
    small = train.Checkpoint.from_directory(folder / "small")
    for index in range(config["num_commits"]):
        train.report({"index": index}, checkpoint=small)


def checkpoint(num_commits: int) -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    train.DataParallelTrainer(
        save_often,
        train_loop_config={"folder": str(folder)},
        run_config=RunConfig(storage_path=folder, name="run"),
    ).fit()
    (times,) = read_notes(folder, "checkpoint")
    commits = new_folder()
    train.DataParallelTrainer(
        commit_often,
        train_loop_config={"folder": str(commits), "num_commits": num_commits},
        run_config=RunConfig(storage_path=commits, name="run"),
    ).fit()
    manifests = sorted((commits / "run").glob("checkpoint_*/.ray_lite.json"))
    # When each manifest was written: the commits of a run that never waits follow each other as fast as they can.
    written = [path.stat().st_mtime_ns / 1e9 for path in manifests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    early, late = statistics.median(gaps[5:105]), statistics.median(gaps[-105:-5])
    return {**times, "early": early, "late": late, "growth": late / early}


def checkpoint_floor(num_commits: int) -> dict[str, float]:
    folder = new_folder()
    write_files(folder / "source", 512)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(folder / "source"), str(folder / "copy")], check=True)
    return {"sync": time.perf_counter() - began}


S3_OPTIONS = {"key": "any", "secret": "any"}


def save_small(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    note(str(folder), "s3", upload=time_small(train.report, train.Checkpoint.from_directory, folder / "small"))


def s3(endpoint: str) -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    train.DataParallelTrainer(
        save_small,
        train_loop_config={"folder": str(folder)},
        run_config=RunConfig(
            storage_path=f"s3://bucket/{folder.name}",
            storage_options={**S3_OPTIONS, "endpoint_url": endpoint},
            name="run",
        ),
    ).fit()
    (times,) = read_notes(folder, "s3")
    return dict(times)


def s3_floor(endpoint: str) -> dict[str, float]:
    import fsspec

    folder = new_folder()
    write_small(folder / "small")
    files = fsspec.filesystem("s3", **S3_OPTIONS, endpoint_url=endpoint)
    began = time.perf_counter()
    files.put(str(folder / "small"), f"bucket/{folder.name}", recursive=True)
    return {"upload": time.perf_counter() - began}


if __name__ == "__main__":
    start_cluster()
    answer_questions(
        {
            "fit": fit,
            "fit_floor": fit_floor,
            "memory": memory,
            "memory_floor": memory_floor,
            "reports": reports,
            "reports_floor": reports_floor,
            "checkpoint": checkpoint,
            "checkpoint_floor": checkpoint_floor,
            "s3": s3,
            "s3_floor": s3_floor,
            "recovery": recovery,
            "recovery_floor": recovery_floor,
        }
    )
