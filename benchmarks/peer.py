"""The child that measures Ray Train, under an interpreter of its own (``make bench-peer``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray.train
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
)
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def trainer(function: Any, folder: Any, *, max_failures: int = 0, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder),
            name="run",
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
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
    time_reports(ray.train.report, config, f"reports-{ray.train.get_context().get_world_rank()}")


def reports(num_reports: int) -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    trainer(report_often, folder, num_reports=num_reports).fit()
    returned = time.time()
    notes = read_notes(folder, "reports-*")
    return {
        "p50": max(n["p50"] for n in notes),
        "p99": max(n["p99"] for n in notes),
        "most": max(n["most"] for n in notes),
        "calls_per_s": num_reports / max(n["ended"] - n["began"] for n in notes),
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


def save(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    seconds = time_sync(ray.train.report, ray.train.Checkpoint.from_directory, folder / "sync")
    note(str(folder), "checkpoint", sync=seconds)


def checkpoint() -> dict[str, float]:
    wait_until_free()
    folder = new_folder()
    DataParallelTrainer(
        save,
        train_loop_config={"folder": str(folder)},
        run_config=ray.train.RunConfig(storage_path=str(folder), name="run"),
    ).fit()
    (times,) = read_notes(folder, "checkpoint")
    return dict(times)


def save_small(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    seconds = time_small(ray.train.report, ray.train.Checkpoint.from_directory, folder / "small")
    note(str(folder), "s3", upload=seconds)


def s3(endpoint: str) -> dict[str, float]:
    import pyarrow.fs

    wait_until_free()
    folder = new_folder()
    filesystem = pyarrow.fs.S3FileSystem(access_key="any", secret_key="any", endpoint_override=endpoint)
    DataParallelTrainer(
        save_small,
        train_loop_config={"folder": str(folder)},
        run_config=ray.train.RunConfig(storage_path=f"bucket/{folder.name}", storage_filesystem=filesystem, name="run"),
    ).fit()
    (times,) = read_notes(folder, "s3")
    return dict(times)


if __name__ == "__main__":
    start_cluster()
    answer_questions(
        {"fit": fit, "memory": memory, "reports": reports, "recovery": recovery, "checkpoint": checkpoint, "s3": s3}
    )
