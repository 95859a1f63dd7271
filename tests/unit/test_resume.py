"""Taking up a run: from its newest checkpoint, from nothing, or not at all; and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite import train
from ray_lite.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, StorageError
from ray_lite.train.execution.resume import config_changes, describe_age

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=200), st.lists(st.integers(), max_size=3))
configs = st.dictionaries(st.text(max_size=5), st.one_of(st.dictionaries(st.text(max_size=5), plain), plain))


@given(config=configs)
def test_equal_configs_have_no_changes(config):
    assert config_changes(config, config) == []


@given(old=configs, new=configs)
def test_changes_are_few_and_short(old, new):
    changes = config_changes(old, new)
    assert len(changes) <= 13
    assert sum(map(len, changes)) < 3_000


def test_a_change_of_kind_is_a_change():
    assert config_changes({"a": {"x": 1}}, {"a": {"x": None}}) == ["a.x 1 -> None"]
    assert config_changes({"a": {"x": 1}}, {"a": {"x": [1]}}) == ["a.x"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s old"), (0.4, "0 s old"), (59, "59 s old"), (61, "1 min old"), (7_200, "2 h old"), (200_000, "2 d old")],
)
def test_ages(seconds, text):
    assert describe_age(seconds) == text


@pytest.fixture
def fit(tmp_path):
    def fit(fn, **options):
        options = {"storage_path": tmp_path / "storage", "name": "run", **options}
        return train.DataParallelTrainer(
            fn, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(**options)
        ).fit()

    return fit


def three_reports(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)

    def fn():
        checkpoint = train.get_checkpoint()
        start = 0
        if checkpoint is not None:
            with checkpoint.open("i") as stream:
                start = int(stream.read()) + 1
        for i in range(start, start + 3):
            (folder / "i").write_text(str(i))
            train.report({"i": i}, train.Checkpoint.from_directory(folder))
        return start

    return fn


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_never_leaves_the_earlier_runs_alone_and_begins_from_nothing(fit, tmp_path, caplog):
    fn = three_reports(tmp_path)
    config = CheckpointConfig(num_to_keep=1)
    assert fit(fn, resume="never", checkpoint_config=config).path.endswith("/run")
    before = snapshot(tmp_path / "storage" / "run")
    with caplog.at_level(logging.INFO, "ray_lite"):
        second = fit(fn, resume="never", checkpoint_config=config)
    assert second.return_value == 0
    assert second.path.endswith("/run_2")
    assert "there is a run run already, so this one is run_2" in caplog.text
    assert fit(fn, resume="never").path.endswith("/run_3")
    assert snapshot(tmp_path / "storage" / "run") == before
    # The second can be continued by its own name.
    assert fit(fn, name="run_2").return_value == 3


def test_never_restarts_from_its_own_checkpoints(fit, tmp_path):
    fn = three_reports(tmp_path)
    fit(fn)

    def fails_once():
        start = fn()
        if train.get_context().get_attempt() == 1:
            raise ValueError
        return start

    result = fit(fails_once, resume="never", failure_config=FailureConfig(max_failures=1))
    assert result.return_value == 3
    assert [row["i"] for row in result.metrics_history] == list(range(6))


def test_must_fails_without_a_run_and_continues_one(fit, tmp_path):
    fn = three_reports(tmp_path)
    with pytest.raises(StorageError, match="holds no checkpoint"):
        fit(fn, resume="must")
    fit(fn)
    assert fit(fn, resume="must").return_value == 3


def test_a_fit_that_continues_says_so_once_and_names_what_has_changed(fit, tmp_path, caplog):
    fn = three_reports(tmp_path)
    with caplog.at_level(logging.INFO, "ray_lite"):
        fit(fn)
        assert caplog.text == ""
        fit(fn, failure_config=FailureConfig(max_failures=2))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == ("since the last fit() of run these options have changed: failure_config.max_failures 0 -> 2")
    assert lines[1].startswith("continuing from checkpoint_000002 (report 2, ")
    assert len(lines) == 2


def test_a_restart_whose_checkpoint_nobody_reads_is_told_once(fit, tmp_path, caplog):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "w").write_text("1")

    def fn():
        for i in range(3):
            train.report({"i": i}, train.Checkpoint.from_directory(folder))
            if i == 1 and train.get_context().get_attempt() == 1:
                raise RuntimeError("once")

    result = fit(fn, failure_config=FailureConfig(max_failures=1))
    assert result.error is None
    assert caplog.text.count("no rank called train.get_checkpoint()") == 1
