"""``CheckpointConfig``, ``FailureConfig``, ``DataConfig``, ``LoggingConfig``: what is allowed and what is not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.configs import CheckpointConfig, DataConfig, FailureConfig, LoggingConfig
from ray_lite.train.errors import ConfigError, ConfigTypeError

NAN, INF = float("nan"), float("inf")
KEEP = "must be an integer >= 1 or None, got"


@pytest.mark.parametrize(
    ("kind", "option", "value", "error", "says"),
    [
        (CheckpointConfig, "num_to_keep", 0, ConfigError, f"{KEEP} 0"),
        (CheckpointConfig, "num_to_keep", -1, ConfigError, f"{KEEP} -1"),
        (CheckpointConfig, "num_to_keep", 1.5, ConfigTypeError, f"{KEEP} 1.5"),
        (CheckpointConfig, "num_to_keep", 2.0, ConfigTypeError, f"{KEEP} 2.0"),
        (CheckpointConfig, "num_to_keep", "2", ConfigTypeError, f"{KEEP} '2'"),
        (CheckpointConfig, "num_to_keep", True, ConfigTypeError, f"{KEEP} True"),
        (CheckpointConfig, "checkpoint_score_order", "MAX", ConfigError, "'max' or 'min', got 'MAX' (str); did you"),
        (CheckpointConfig, "checkpoint_score_order", "minimum", ConfigError, "'max' or 'min', got 'minimum'"),
        (CheckpointConfig, "checkpoint_score_order", None, ConfigTypeError, "'max' or 'min', got None"),
        (CheckpointConfig, "checkpoint_score_attribute", 3, ConfigTypeError, "a non-empty string or None, got 3"),
        (CheckpointConfig, "checkpoint_score_attribute", " ", ConfigError, "a non-empty string or None, got ' '"),
        (FailureConfig, "max_failures", "2", ConfigTypeError, "an integer >= -1, got '2'"),
        (FailureConfig, "max_failures", 1.5, ConfigTypeError, "an integer >= -1, got 1.5"),
        (FailureConfig, "max_failures", None, ConfigTypeError, "an integer >= -1, got None"),
        (FailureConfig, "max_failures", -2, ConfigError, "got -2 (int); -1 restarts without limit"),
        (FailureConfig, "max_failures", True, ConfigTypeError, "got True"),
        (FailureConfig, "controller_failure_limit", -2, ConfigError, "an integer >= -1, got -2"),
        (FailureConfig, "max_preemption_failures", 0.5, ConfigTypeError, "an integer >= -1, got 0.5"),
        (FailureConfig, "relax_collectives_on_preemption", 0, ConfigTypeError, "True or False, got 0"),
        (FailureConfig, "preemption_grace_s", -1, ConfigError, "a finite number of seconds >= 0, got -1.0"),
        (FailureConfig, "preemption_grace_s", INF, ConfigError, "got inf"),
        (FailureConfig, "preemption_grace_s", NAN, ConfigError, "got nan"),
        (FailureConfig, "preemption_grace_s", "1", ConfigTypeError, "got '1'"),
        (FailureConfig, "fail_fast", "yes", ConfigError, "False, True or 'raise', got 'yes'"),
        (FailureConfig, "fail_fast", None, ConfigTypeError, "False, True or 'raise', got None"),
        (FailureConfig, "fail_fast", 1, ConfigTypeError, "False, True or 'raise', got 1"),
        (DataConfig, "datasets_to_split", "train", ConfigError, "write ['train']"),
        (DataConfig, "datasets_to_split", None, ConfigTypeError, "a list of dataset names, got None"),
        (DataConfig, "datasets_to_split", ["a", 1], ConfigTypeError, "a list of dataset names"),
        (DataConfig, "datasets_to_split", {"a"}, ConfigTypeError, "a list of dataset names"),
        (DataConfig, "datasets_to_split", ["a", "a"], ConfigError, "a name twice"),
        (DataConfig, "enable_shard_locality", "yes", ConfigTypeError, "True or False, got 'yes'"),
        (DataConfig, "remainder", "pad", ConfigError, "'wrap', 'drop' or 'uneven', got 'pad'"),
        (LoggingConfig, "log_level", 10, ConfigTypeError, "the name of a logging level"),
        (LoggingConfig, "log_level", "LOUD", ConfigError, "got 'LOUD'"),
        (LoggingConfig, "log_level", "10", ConfigError, "got '10'"),
        (LoggingConfig, "log_level", "Level 10", ConfigError, "got 'Level 10'"),
        (LoggingConfig, "log_level", None, ConfigTypeError, "got None"),
    ],
)
def test_bad_values_are_refused_by_name(kind: type, option: str, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        kind(**{option: value})
    assert str(caught.value).startswith(f"{kind.__name__}.{option} must be")
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError) == (error is ConfigTypeError)


def test_whole_numbers_of_numpy_are_stored_as_python_ints() -> None:
    assert type(CheckpointConfig(num_to_keep=np.int64(2)).num_to_keep) is int
    assert type(FailureConfig(max_failures=np.uint8(2)).max_failures) is int
    assert type(FailureConfig(preemption_grace_s=np.float32(2)).preemption_grace_s) is float
    yes: Any = np.bool_(True)
    assert FailureConfig(relax_collectives_on_preemption=yes).relax_collectives_on_preemption is True


@given(value=st.floats() | st.text() | st.booleans() | st.binary() | st.lists(st.integers()))
def test_nothing_but_whole_numbers_counts_restarts(value: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"^FailureConfig\.max_failures must be an integer >= -1, got "):
        FailureConfig(max_failures=value)


@pytest.mark.parametrize(("value", "stored"), [(True, True), ("raise", "raise"), ("RAISE", "raise"), (False, False)])
def test_fail_fast(value: Any, stored: Any) -> None:
    assert FailureConfig(fail_fast=value).fail_fast == stored


@pytest.mark.parametrize("fail_fast", [True, "raise"])
@pytest.mark.parametrize("max_failures", [-1, 3])
def test_failing_fast_and_restarting_contradict(fail_fast: Any, max_failures: int) -> None:
    with pytest.raises(ConfigError, match=rf"FailureConfig\.fail_fast=.*got max_failures={max_failures}"):
        FailureConfig(fail_fast=fail_fast, max_failures=max_failures)


def test_names_to_split_are_kept_in_order() -> None:
    assert DataConfig(datasets_to_split=["b", "a"]).datasets_to_split == ("b", "a")
    assert DataConfig(datasets_to_split=[]).datasets_to_split == ()


def test_execution_options_are_kept_as_they_are_and_left_out_of_the_plain_form() -> None:
    options = object()
    config = DataConfig(execution_options=options)
    assert config.execution_options is options
    assert "execution_options" not in config.to_dict()


@pytest.mark.parametrize(("value", "stored"), [("info", "INFO"), ("Warn", "WARNING"), ("FATAL", "CRITICAL")])
def test_levels_are_taken_in_any_case(value: str, stored: str) -> None:
    assert LoggingConfig(log_level=value).log_level == stored


def test_a_level_that_the_user_registered_is_taken() -> None:
    logging.addLevelName(5, "RAY_LITE_TEST_LEVEL")
    assert LoggingConfig(log_level="ray_lite_test_level").log_level == "RAY_LITE_TEST_LEVEL"
