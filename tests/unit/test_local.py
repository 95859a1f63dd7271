"""``num_workers=0``: what one attempt does to what it was given reaches neither the next nor the driver."""

from __future__ import annotations

import threading
from collections import UserDict

import pytest

from ray_lite import train
from ray_lite.train import FailureConfig, RunConfig, ScalingConfig


@pytest.fixture
def fit(tmp_path):
    def fit(fn, *, max_failures=0, **options):
        run_config = RunConfig(
            storage_path=tmp_path / "storage", name="run", failure_config=FailureConfig(max_failures=max_failures)
        )
        trainer = train.DataParallelTrainer(
            fn, scaling_config=ScalingConfig(num_workers=0), run_config=run_config, **options
        )
        return trainer.fit()

    return fit


def uses_up(config):
    """Takes out of the config what it needs, as many train functions do; fails the first time."""
    seen = (config.pop("lr"), config["model"].pop("width"), list(config["layers"]))
    config["layers"].append(0)
    if train.get_context().get_attempt() == 1:
        raise RuntimeError("the first attempt fails")
    return seen


@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_each_attempt_gets_its_own_copy_of_the_config_and_the_driver_keeps_its_own(fit, mapping):
    """``config.pop()`` in the first attempt made the second fail with a KeyError."""
    config = mapping({"lr": 0.1, "model": {"width": 8}, "layers": [1, 2]})
    result = fit(uses_up, train_loop_config=config, max_failures=1)
    assert result.return_value == (0.1, 8, [1, 2])
    assert config == mapping({"lr": 0.1, "model": {"width": 8}, "layers": [1, 2]})


def test_values_that_are_one_object_stay_one_object(fit):
    def fn(config):
        return config["encoder"] is config["decoder"]

    weights = [1.0]
    assert fit(fn, train_loop_config={"encoder": weights, "decoder": weights}).return_value


def test_what_cannot_be_copied_is_handed_over_itself_and_the_rest_is_copied(fit):
    """Here nothing has to be picklable: a lock or an open connection in the config works, as it did."""

    class Refuses:
        def __deepcopy__(self, memo):
            raise ValueError("no copies of me")

    lock, refuses = threading.Lock(), Refuses()
    config = {"lock": lock, "refuses": refuses, "layers": [1, 2], "lr": 0.1, "model": {"width": 8}}

    def fn(config):
        seen = uses_up(config)
        return (*seen, config["lock"] is lock, config["refuses"] is refuses)

    result = fit(fn, train_loop_config=config, max_failures=1)
    assert result.return_value == (0.1, 8, [1, 2], True, True)
    assert config == {"lock": lock, "refuses": refuses, "layers": [1, 2], "lr": 0.1, "model": {"width": 8}}


def test_each_attempt_gets_its_own_copy_of_the_metadata_too(fit):
    def fn():
        tags = train.get_context().get_metadata()["tags"]
        tags.append(train.get_context().get_attempt())
        if tags[-1] == 1:
            raise RuntimeError("the first attempt fails")
        return tags

    metadata = {"tags": ["mine"]}
    assert fit(fn, metadata=metadata, max_failures=1).return_value == ["mine", 2]
    assert metadata == {"tags": ["mine"]}


def test_without_a_config_nothing_is_made_up(fit):
    def fn(config=None):
        return config

    assert fit(fn).return_value is None
