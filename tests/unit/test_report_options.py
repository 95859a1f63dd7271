"""What ``report()`` accepts, and that a call that is refused leaves no trace."""

from __future__ import annotations

import enum
import inspect
import pickle
from pathlib import Path

import pytest

from ray_lite import train
from ray_lite.train import CheckpointUploadMode, ConfigError, ConfigTypeError, RunConfig, ScalingConfig


def fit(fn, tmp_path, **options):
    config = RunConfig(storage_path=tmp_path / "storage", name="run", **options)
    return train.DataParallelTrainer(fn, scaling_config=ScalingConfig(num_workers=0), run_config=config).fit()


class TheirMode(enum.Enum):
    """Like Ray Train's own."""

    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"checkpoint_upload_mode": "later"}, ConfigError, "CheckpointUploadMode.ASYNC, .* got 'later'"),
        ({"checkpoint_upload_mode": None}, ConfigError, "got None"),
        ({"checkpoint_dir_name": 5}, ConfigTypeError, "checkpoint_dir_name.*got 5"),
        ({"checkpoint_dir_name": "a/b"}, ConfigError, "one folder name"),
        ({"checkpoint_dir_name": ".hidden"}, ConfigError, "begin with a dot"),
        ({"checkpoint_dir_name": "metrics"}, ConfigError, "taken in every run"),
        ({"delete_local_checkpoint_after_upload": "yes"}, ConfigTypeError, "True, False or None, got 'yes'"),
        ({"checkpoint_upload_fn": "upload"}, ConfigTypeError, r"must be a function .* got str"),
        ({"validation": True}, ConfigError, "not supported yet"),
        (
            {"checkpoint_upload_fn": print, "checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD},
            ConfigError,
            "NO_UPLOAD does not",
        ),
        ({"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD}, ConfigError, "must be a folder directly in"),
    ],
)
def test_a_bad_option_is_refused_and_the_report_does_not_count(tmp_path, options, kind, text):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "w").write_text("1")

    def fn():
        with pytest.raises(kind, match=text):
            train.report({"bad": 1}, checkpoint=train.Checkpoint.from_directory(folder), **options)
        train.report({"good": 1}, checkpoint=train.Checkpoint.from_directory(folder))

    result = fit(fn, tmp_path)
    assert result.metrics_history == [{"good": 1}]
    assert Path(result.checkpoint.path).name == "checkpoint_000000"
    assert (folder / "w").read_text() == "1"


def test_ray_trains_own_members_and_plain_names_do_as_well(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "w").write_text("1")

    def fn():
        for mode in (TheirMode.SYNC, "SYNC"):
            train.report({}, train.Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)

    assert len(fit(fn, tmp_path).best_checkpoints) == 2


def test_the_modes_are_those_of_ray_train():
    assert [mode.value for mode in CheckpointUploadMode] == ["ASYNC", "SYNC", "NO_UPLOAD"]
    deletes = [mode.default_delete_local_checkpoint_after_upload() for mode in CheckpointUploadMode]
    assert deletes == [True, False, False]
    assert [mode.value for mode in train.CheckpointConsistencyMode] == ["COMMITTED", "VALIDATED"]


def test_function_and_method_have_one_signature():
    for name in ("report", "get_checkpoint", "get_all_reported_checkpoints", "get_dataset_shard", "staging_directory"):
        function, method = getattr(train, name), getattr(train.TrainContext, name)
        expected = list(inspect.signature(method).parameters.values())[1:]
        assert list(inspect.signature(function).parameters.values()) == expected
        assert inspect.getdoc(function) == inspect.getdoc(method)
        assert pickle.loads(pickle.dumps(function)) is function
    assert list(inspect.signature(train.report).parameters) == [
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
    ]


def test_enums_and_what_is_reported_survive_pickle():
    mode = CheckpointUploadMode.ASYNC
    assert pickle.loads(pickle.dumps(mode)) is mode
    status = train.ReportedCheckpointStatus.COMMITTED
    assert pickle.loads(pickle.dumps(status)) is status
