"""Whole runs of the trainer against real servers, in this process; see cluster/test_remote_storage.py for workers."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from places import place_on
from servers import Server

from ray_lite import train
from ray_lite.train import CheckpointConfig, RunConfig, ScalingConfig
from ray_lite.train.errors import StorageError


def count(config: dict[str, Any]) -> int:
    """Reports each number of the way, each with a checkpoint; goes on after the last one saved."""
    first = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "number").read_text()) + 1
    for number in range(first, config["end"]):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "number").write_text(str(number))
            Path(folder, "deep").mkdir()
            Path(folder, "deep", "weights [1].pt").write_bytes(bytes([number]) * 100_000)
            train.report({"number": number}, checkpoint=train.Checkpoint.from_directory(folder))
    return first


def fit(server: Server, path: str, end: int, options: dict[str, Any] | None = None) -> train.Result:
    return train.DataParallelTrainer(
        count,
        train_loop_config={"end": end},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="my run",
            storage_path=path,
            storage_options=server.options if options is None else options,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def test_a_run_trains_is_read_back_and_resumes(server: Server, caplog: pytest.LogCaptureFixture):
    place = place_on(server)
    with caplog.at_level(logging.DEBUG, logger="ray_lite"):
        result = fit(server, place.root.path, 3)
    assert result.metrics is not None
    assert (result.return_value, result.metrics["number"]) == (0, 2)
    assert result.path == f"{place.root.path}/my run"
    kept = [f"my run/checkpoint_00000{number}" for number in (1, 2)]
    assert [name for name in place.stored("my run") if name.endswith("/number")] == [f"{name}/number" for name in kept]

    read = train.Result.from_path(result.path, storage_options=server.options)
    assert read.metrics == result.metrics
    assert [metrics["number"] for metrics in read.metrics_history] == [0, 1, 2]
    assert read.checkpoint == result.checkpoint
    assert [checkpoint.path for checkpoint, _ in read.best_checkpoints] == [
        f"{place.root.path}/{name}" for name in kept
    ]
    read.checkpoint.verify()
    with read.checkpoint.open("deep/weights [1].pt") as file:
        assert file.read() == b"\2" * 100_000

    again = fit(server, place.root.path, 5)
    assert again.return_value == 3
    assert [metrics["number"] for metrics in again.metrics_history] == [0, 1, 2, 3, 4]
    for secret in place.secrets:
        assert secret not in caplog.text
        assert secret not in repr(result)
        assert not [name for name in place.stored() if secret.encode() in place.raw.read(place.key(name))]


@pytest.mark.parametrize("kind", ["s3", "azure", "google"])
def test_a_missing_bucket_ends_the_run_before_the_train_function(kind: str, request: pytest.FixtureRequest):
    server: Server = request.getfixturevalue(f"{kind}_server")
    with pytest.raises(StorageError, match=f"'{server.missing}' cannot be written"):
        fit(server, server.missing, 1)
