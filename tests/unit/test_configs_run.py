"""``RunConfig``: names, places, nested configs, callbacks and old options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import assume, given
from hypothesis import strategies as st

from ray_lite.train.configs import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray_lite.train.configs.run import CALLBACK_HOOKS
from ray_lite.train.errors import ConfigError, ConfigTypeError, LegacyAPIError, RayLiteDeprecationWarning
from strategies import RecordingCallback, plain_run_configs, run_configs


def test_a_generated_name_says_when_and_is_never_the_same() -> None:
    """Many runs can start in one second; Ray Train gives them one name, and one folder."""
    names = {RunConfig().name for _ in range(50)}
    assert all(re.fullmatch(r"run_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}", name) for name in names)
    assert len(names) > 40


def test_generated_names_neither_follow_nor_disturb_the_users_seed() -> None:
    import random

    random.seed(0)
    first = RunConfig().name
    state = random.getstate()
    random.seed(0)
    assert random.getstate() == state
    assert RunConfig().name != first


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a\0b", "a\nb", "x" * 201, "é" * 101, "\ud800"]
)
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"RunConfig\.name must"):
        RunConfig(name=name)


def test_a_name_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match=r"RunConfig\.name must be a string, got 5"):
        RunConfig(name=5)  # type: ignore[arg-type]


def test_long_and_foreign_names_are_kept() -> None:
    for name in ("x" * 200, "é" * 100, "a b", "lauf №1", "a..b", "-x", "~"):
        assert RunConfig(name=name).name == name


@pytest.mark.parametrize("path", ["out", "./out", "out/", Path("out"), "a/../out"])
def test_relative_paths_are_resolved_where_the_config_is_built(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(storage_path=path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert config.storage_path == str(tmp_path / "out")
    assert attrs.evolve(config, resume="never").storage_path == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        (None, "~/ray_results"),
        ("~/out", "~/out"),
        (Path("~/out"), "~/out"),
        ("/tmp/a//b/", "/tmp/a/b"),
        ("file:///tmp/c/", "/tmp/c"),
        ("s3://bucket/runs/", "s3://bucket/runs"),
        (Path("s3://bucket/runs"), "s3://bucket/runs"),
    ],
)
def test_paths_are_stored_in_one_form(path: Any, resolved: str) -> None:
    assert RunConfig(storage_path=path).storage_path == os.path.expanduser(resolved)


@pytest.mark.parametrize(
    ("path", "error", "says"),
    [
        (3, ConfigTypeError, "must be a string or a path, got 3"),
        (b"/tmp", ConfigTypeError, "got b'/tmp'"),
        ("", ConfigError, "must not be empty"),
        ("a\0b", ConfigError, "NUL"),
        ("s3://key:hunter2@bucket/x", ConfigError, "storage_options"),
    ],
)
def test_bad_paths_are_refused_by_name(path: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=r"^RunConfig\.storage_path ") as caught:
        RunConfig(storage_path=path)
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_missing_parts_are_defaults() -> None:
    config = RunConfig(failure_config=None, checkpoint_config=None, logging_config=None)
    assert config.failure_config == FailureConfig()
    assert config.checkpoint_config == CheckpointConfig()
    assert config.logging_config == LoggingConfig()
    assert RunConfig(callbacks=None, storage_options=None, worker_runtime_env=None, name="a") == RunConfig(name="a")


@pytest.mark.parametrize(
    ("option", "value", "error", "says"),
    [
        ("checkpoint_config", {"num_to_keep": 1}, ConfigTypeError, "write CheckpointConfig(num_to_keep=...)"),
        ("checkpoint_config", CheckpointConfig, ConfigTypeError, "write CheckpointConfig()"),
        ("failure_config", 3, ConfigTypeError, "must be a ray_lite.train.FailureConfig, got an object of type int"),
        ("failure_config", CheckpointConfig(), ConfigTypeError, "must be a ray_lite.train.FailureConfig"),
        ("logging_config", "DEBUG", ConfigTypeError, "must be a ray_lite.train.LoggingConfig"),
        ("callbacks", print, ConfigTypeError, "must be a list of callbacks or None"),
        ("callbacks", RecordingCallback(), ConfigTypeError, "must be a list of callbacks or None"),
        ("callbacks", [RecordingCallback], ConfigTypeError, "write RecordingCallback()"),
        ("callbacks", [RecordingCallback(), 3], ConfigTypeError, "callbacks[1] must be an object with at least one"),
        ("storage_options", ["hunter2"], ConfigTypeError, "must be a dict of options for fsspec or None"),
        ("storage_options", {1: "hunter2"}, ConfigTypeError, "option names (strings) as keys"),
        ("storage_filesystem", "hunter2", ConfigTypeError, "write the protocol into storage_path"),
        ("storage_filesystem", MemoryFileSystem, ConfigTypeError, "write MemoryFileSystem(...)"),
        ("storage_filesystem", 3, ConfigTypeError, "must be an fsspec filesystem object or None"),
        ("worker_runtime_env", "env", ConfigTypeError, "must be a dict"),
        ("worker_runtime_env", {1: 2}, ConfigTypeError, "must have strings as keys"),
        ("worker_runtime_env", {"env_vars": ["hunter2"]}, ConfigTypeError, "['env_vars'] must be a dict"),
        ("worker_runtime_env", {"env_vars": {"A": 4711}}, ConfigTypeError, "got for 'A' (str) an object of type int"),
        ("resume", "sometimes", ConfigError, "must be 'auto', 'never' or 'must', got 'sometimes'"),
        ("resume", True, ConfigTypeError, "got True"),
    ],
)
def test_bad_values_are_refused_by_name(option: str, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        RunConfig(**{option: value})
    assert f"RunConfig.{option}" in str(caught.value)
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError) == (error is ConfigTypeError)
    # Storage options and environment variables are named by type only.
    assert "4711" not in str(caught.value)
    assert "hunter2" not in str(caught.value) or option == "storage_filesystem"


@pytest.mark.parametrize("hook", CALLBACK_HOOKS)
def test_one_hook_makes_a_callback(hook: str) -> None:
    callback = type("OneHook", (), {hook: lambda self, *args: None})()
    assert RunConfig(callbacks=[callback]).callbacks == (callback,)


def test_a_misspelt_hook_is_no_callback() -> None:
    callback = type("Misspelt", (), {"on_run_strat": lambda self: None})()
    with pytest.raises(ConfigTypeError, match="on_run_start, after_report"):
        RunConfig(callbacks=[callback])


def test_a_filesystem_object_needs_a_path_inside_it() -> None:
    filesystem = MemoryFileSystem()
    config = RunConfig(storage_filesystem=filesystem, storage_path="bucket/runs/")
    assert config.storage_path == "bucket/runs"
    assert config.storage_filesystem is filesystem
    assert attrs.evolve(config) == config
    assert "MemoryFileSystem" in repr(config)
    with pytest.raises(ConfigError, match=r"RunConfig\.storage_path must say where in storage_filesystem"):
        RunConfig(storage_filesystem=filesystem)
    with pytest.raises(ConfigError, match=r"RunConfig\.storage_options must be None together .*got anon, key;"):
        RunConfig(storage_filesystem=filesystem, storage_path="a", storage_options={"key": "x", "anon": True})


def test_real_filesystems_are_taken() -> None:
    for protocol in ("file", "memory", "local"):
        RunConfig(storage_filesystem=fsspec.filesystem(protocol), storage_path="/data")


def test_a_filesystem_of_pyarrow_is_answered_with_the_way_to_wrap_it() -> None:
    class ArrowLike:
        def open_input_stream(self, path: str) -> None:
            """What pyarrow.fs.FileSystem has and fsspec has not."""

    with pytest.raises(ConfigTypeError, match="ArrowFSWrapper"):
        RunConfig(storage_filesystem=ArrowLike(), storage_path="a")


def test_a_run_that_must_be_resumed_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"RunConfig\.resume='must' needs the name"):
        RunConfig(resume="must")
    assert RunConfig(resume="must", name="a").resume == "must"


def test_the_users_dicts_are_not_followed() -> None:
    options, variables = {"anon": True}, {"A": "1"}
    config = RunConfig(storage_options=options, worker_runtime_env={"env_vars": variables})
    options["anon"], variables["A"] = False, "2"
    assert config.storage_options == {"anon": True}
    assert config.worker_runtime_env == {"env_vars": {"A": "1"}}


@given(config=run_configs())
def test_the_plain_form_has_everything_but_secrets_and_objects(config: RunConfig) -> None:
    plain = config.to_dict()
    left_out = {"storage_options", "storage_filesystem", "callbacks"}
    assert set(plain) == {field.name for field in attrs.fields(RunConfig)} - left_out
    again = RunConfig.from_dict(plain)
    assert again.worker_runtime_env["env_vars"] == {}
    same: Any = {"storage_options": {}, "callbacks": (), "worker_runtime_env": again.worker_runtime_env}
    assert again == attrs.evolve(config, **same)


@given(config=plain_run_configs(), other=plain_run_configs())
def test_equal_configs_have_equal_plain_forms(config: RunConfig, other: RunConfig) -> None:
    assert (config == other) == (config.to_dict() == other.to_dict())


def test_the_plain_form_names_objects_by_their_type() -> None:
    plain = RunConfig(worker_runtime_env={"py_modules": [os, Path("code")]}).to_dict()
    assert plain["worker_runtime_env"] == {"py_modules": ["<module>", "code"]}


# ---- old options --------------------------------------------------------------------------


def _line_of(warning: Any) -> str:
    return str(Path(warning.filename).read_text().splitlines()[warning.lineno - 1].strip())


OLD_OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: RunConfig(local_dir="/tmp/old"), "use RunConfig(storage_path=...)"),  # type: ignore[call-arg]
    (lambda: RunConfig(sync_config=object()), "RunConfig(sync_config=...) is deprecated and has no effect"),  # type: ignore[call-arg]
    (lambda: RunConfig(verbose=1), "LoggingConfig(log_level=...)"),  # type: ignore[call-arg]
    (lambda: RunConfig(verbose=0), "RunConfig(verbose=...) is deprecated and has no effect"),  # type: ignore[call-arg]
    (lambda: RunConfig(progress_reporter=object()), "after_report() in RunConfig(callbacks=[...])"),  # type: ignore[call-arg]
    (lambda: RunConfig(log_to_file=True), "RunConfig(log_to_file=...) is deprecated and has no effect"),  # type: ignore[call-arg]
    (lambda: RunConfig.from_dict({"verbose": 2}), "RunConfig(verbose=...) is deprecated"),
    (lambda: attrs.evolve(RunConfig(), verbose=2), "RunConfig(verbose=...) is deprecated"),  # type: ignore[call-arg]
    (lambda: CheckpointConfig(checkpoint_frequency=5), "call train.report(metrics, checkpoint=...)"),  # type: ignore[call-arg]
    (lambda: CheckpointConfig(checkpoint_at_end=False), "has no effect"),  # type: ignore[call-arg]
    (lambda: CheckpointConfig(_checkpoint_keep_all_ranks=True), "from each rank"),  # type: ignore[call-arg]
    (lambda: CheckpointConfig(_checkpoint_upload_from_workers=True), "workers always upload"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("build", "says"), OLD_OPTIONS)
def test_an_old_option_warns_at_the_users_line(build: Callable[[], Any], says: str) -> None:
    """Python shows deprecations of ``__main__`` only, so a warning that points at our line is never seen."""
    with pytest.warns(RayLiteDeprecationWarning, match=re.escape(says)) as caught:
        build()
    assert [warning.filename for warning in caught] == [__file__]
    assert _line_of(caught[0]).startswith("(lambda: ")
    assert says in _line_of(caught[0])


def test_a_warning_names_the_line_of_the_call_itself() -> None:
    with pytest.warns(RayLiteDeprecationWarning) as caught:
        RunConfig(verbose=1)  # type: ignore[call-arg]
    assert _line_of(caught[0]) == "RunConfig(verbose=1)  # type: ignore[call-arg]"


@pytest.mark.parametrize(
    "build",
    [
        lambda: RunConfig(local_dir=None, sync_config=None, verbose=None, progress_reporter=None, stop=None),  # type: ignore[call-arg]
        lambda: RunConfig(log_to_file=False),  # type: ignore[call-arg]
        lambda: CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=None),  # type: ignore[call-arg]
        lambda: CheckpointConfig(_checkpoint_keep_all_ranks=False),  # type: ignore[call-arg]
    ],
)
def test_old_options_that_asked_for_nothing_are_taken_silently(build: Callable[[], Any]) -> None:
    build()  # a warning would fail the test


def test_local_dir_is_storage_path() -> None:
    with pytest.warns(RayLiteDeprecationWarning):
        config = RunConfig(local_dir=Path("/tmp/old/"))  # type: ignore[call-arg]
    assert config.storage_path == "/tmp/old"
    attrs.evolve(config, name="again")  # no second warning
    with pytest.raises(ConfigError, match=r"RunConfig\.local_dir is the old name of storage_path, got both"):
        RunConfig(local_dir="/tmp/a", storage_path="/tmp/b")  # type: ignore[call-arg]


@pytest.mark.parametrize("stop", [{}, {"training_iteration": 3}, print])
def test_stop_is_refused_with_what_to_do(stop: Any) -> None:
    with pytest.raises(LegacyAPIError, match=r"RunConfig\(stop=\.\.\.\) is not supported.*Instead: stop inside"):
        RunConfig(stop=stop)  # type: ignore[call-arg]


def test_a_negative_frequency_was_never_allowed() -> None:
    with pytest.raises(ConfigError, match=r"CheckpointConfig\.checkpoint_frequency must be an integer >= 0, got -1"):
        CheckpointConfig(checkpoint_frequency=-1)  # type: ignore[call-arg]


@given(config=plain_run_configs(), data=st.data())
def test_evolving_one_option_changes_that_one(config: RunConfig, data: st.DataObject) -> None:
    other = data.draw(plain_run_configs())
    name = data.draw(st.sampled_from([field.name for field in attrs.fields(RunConfig)]))
    # A name that is fine for a folder may mean something else in a URI, and is refused there.
    run_name = other.name if name == "name" else config.name
    assume(name not in ("name", "storage_path") or not (set("?#:") & set(run_name) or run_name.endswith(" ")))
    evolved = attrs.evolve(config, **{name: getattr(other, name)})
    for field in attrs.fields(RunConfig):
        source = other if field.name == name else config
        assert getattr(evolved, field.name) == getattr(source, field.name)


def test_a_scaling_config_is_no_part_of_a_run_config() -> None:
    with pytest.raises(ConfigTypeError, match=r"RunConfig\.checkpoint_config must be a ray_lite\.train\.Checkpoint"):
        RunConfig(checkpoint_config=ScalingConfig())  # type: ignore[arg-type]
