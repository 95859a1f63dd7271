"""Two worker processes that store in an object store: a real S3 server on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import first_time, folder_with, rank, read
from servers import Server

from ray_lite import train
from ray_lite.train import CheckpointConfig, FailureConfig


def save_parts(config):
    """Both ranks save their part; rank 1 fails once after the second report."""
    checkpoint = train.get_checkpoint()
    first = 0 if checkpoint is None else int(read(checkpoint, f"part-{rank()}").split()[0]) + 1
    for number in range(first, 4):
        with folder_with(**{f"part-{rank()}": f"{number} of {rank()}", "common": f"{number}"}) as folder:
            train.report({"number": number}, checkpoint=folder)
        if number == 1 and rank() == 1 and first_time(Path(config["scratch"]), "fail"):
            raise ValueError("on purpose")
    return first


@pytest.fixture
def s3(s3_server: Server) -> Server:
    """Before the cluster's own fixtures, so that the server is not taken for something left behind."""
    return s3_server


def test_two_workers_save_to_s3_fail_resume_and_finish(s3: Server, fit, scratch):
    uri = f"{s3.base}/cluster/{scratch.parent.name}"
    result = fit(
        save_parts,
        cfg={"scratch": str(scratch)},
        cc=CheckpointConfig(num_to_keep=2),
        fc=FailureConfig(max_failures=1),
        name="run",
        storage_path=uri,
        storage_options=s3.options,
    )
    assert result.metrics["number"] == 3
    assert [metrics["number"] for metrics in result.metrics_history] == [0, 1, 2, 3]
    result.checkpoint.verify()
    assert result.checkpoint.files() == ["common", "part-0", "part-1"]
    with result.checkpoint.as_directory() as folder:
        assert [Path(folder, f"part-{rank}").read_text() for rank in (0, 1)] == ["3 of 0", "3 of 1"]
    found = train.Result.from_path(f"{uri}/run", storage_options=s3.options)
    assert found.checkpoint == result.checkpoint
    assert len(found.best_checkpoints) == 2
    stored = s3.raw.keys(uri.partition("bucket/")[2])
    assert {key.split("/")[3] for key in stored if "checkpoint_" in key} == {
        checkpoint.path.rpartition("/")[2] for checkpoint, _ in found.best_checkpoints
    }
    for secret in s3.secrets:
        assert not [key for key in stored if secret.encode() in s3.raw.read(key)]
