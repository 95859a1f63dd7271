"""``ScalingConfig``: what workers get, and what is refused."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given

from ray_lite.train.configs import PlacementGroupFactory, ScalingConfig
from ray_lite.train.errors import ConfigError, ConfigTypeError
from strategies import scaling_configs

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "cpus", "gpus", "others"),
    [
        ({}, 1, 0, {}),
        ({"num_workers": 2, "use_gpu": True}, 0, 1, {}),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, 0, 0.5, {}),
        ({"use_gpu": True, "resources_per_worker": {"CPU": 4}}, 4, 1, {}),
        ({"use_gpu": True, "resources_per_worker": {}}, 0, 1, {}),
        ({"resources_per_worker": {"CPU": 4}}, 4, 0, {}),
        ({"resources_per_worker": {"CPU": 0.5, "GPU": 0}}, 0.5, 0, {}),
        # Ray AIR gave these two no CPU, although it documented one.
        ({"resources_per_worker": {"extra": 1}}, 1, 0, {"extra": 1}),
        ({"resources_per_worker": {}}, 1, 0, {}),
        ({"resources_per_worker": {"CPU": 0}}, 0, 0, {}),
        ({"resources_per_worker": {"memory": 10**9, "TPU": 4}}, 1, 0, {"memory": 10**9, "TPU": 4}),
        ({"accelerator_type": "A100", "use_gpu": True}, 0, 1, {"accelerator_type:A100": 0.001}),
    ],
)
def test_worker_resources(options: dict[str, Any], cpus: float, gpus: float, others: dict[str, float]) -> None:
    config = ScalingConfig(**options)
    assert config.num_cpus_per_worker == cpus
    assert config.num_gpus_per_worker == gpus
    assert config.additional_resources_per_worker == others
    assert config.num_tpus_per_worker == others.get("TPU", 0)


@given(config=scaling_configs())
def test_the_parts_of_a_worker_add_up(config: ScalingConfig) -> None:
    resources = config.worker_resources
    assert all(amount > 0 for amount in resources.values())
    counted = {"CPU": config.num_cpus_per_worker, "GPU": config.num_gpus_per_worker}
    assert {**{k: v for k, v in counted.items() if v}, **config.additional_resources_per_worker} == resources
    assert (config.num_gpus_per_worker > 0) == config.use_gpu
    assert config.min_workers <= config.max_workers
    assert config.is_local == (config.num_workers == 0)
    for key, total in config.total_resources.items():
        expected = resources.get(key, 0) * config.max_workers + (config.trainer_resources or {}).get(key, 0)
        assert total == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given_value", "stored", "low", "high"),
    [
        (np.int64(2), 2, 2, 2),
        (np.uint8(3), 3, 3, 3),
        (0, 0, 0, 0),
        ((1, 4), (1, 4), 1, 4),
        ([np.int32(2), 2], (2, 2), 2, 2),
    ],
)
def test_num_workers_takes_any_whole_number_or_a_range(given_value: Any, stored: Any, low: int, high: int) -> None:
    config = ScalingConfig(num_workers=given_value)
    assert config.num_workers == stored
    assert (config.min_workers, config.max_workers) == (low, high)
    assert config.elasticity_enabled == isinstance(stored, tuple)
    counts = config.num_workers if isinstance(config.num_workers, tuple) else (config.num_workers,)
    assert all(type(count) is int for count in counts)


@pytest.mark.parametrize(
    ("option", "value", "error", "says"),
    [
        *[
            ("num_workers", value, error, "must be an integer >= 0 (0: in this process) or (min, max)")
            for value, error in [
                (-1, ConfigError),
                ("2", ConfigTypeError),
                (2.0, ConfigTypeError),
                (np.float64(2), ConfigTypeError),
                (True, ConfigTypeError),
                (np.bool_(True), ConfigTypeError),
                (None, ConfigTypeError),
                ((0, 2), ConfigError),
                ((3, 2), ConfigError),
                ((1, 2, 3), ConfigError),
                ((), ConfigError),
                ((1, 2.5), ConfigTypeError),
                ((True, 2), ConfigTypeError),
            ]
        ],
        ("use_gpu", "no", ConfigTypeError, "must be True or False, got 'no'"),
        ("use_gpu", 1, ConfigTypeError, "must be True or False, got 1"),
        ("resources_per_worker", {"GPU": 1}, ConfigError, "set use_gpu=True"),
        ("resources_per_worker", {"cpu": 1}, ConfigError, "got 'cpu'; write 'CPU'"),
        ("resources_per_worker", {"num_gpus": 1}, ConfigError, "got 'num_gpus'; write 'GPU'"),
        ("resources_per_worker", {"Memory": 1}, ConfigError, "got 'Memory'; write 'memory'"),
        ("resources_per_worker", {"CPU ": 1}, ConfigError, "got 'CPU '; write 'CPU'"),
        ("resources_per_worker", {"": 1}, ConfigError, "non-empty"),
        ("resources_per_worker", {1: 1}, ConfigTypeError, "got 1 (int)"),
        ("resources_per_worker", {"CPU": -1}, ConfigError, "['CPU'] must be a number >= 0, got -1"),
        ("resources_per_worker", {"CPU": "2"}, ConfigTypeError, "['CPU'] must be a number >= 0, got '2'"),
        ("resources_per_worker", {"CPU": True}, ConfigTypeError, "got True"),
        ("resources_per_worker", {"CPU": None}, ConfigTypeError, "got None"),
        ("resources_per_worker", {"CPU": NAN}, ConfigError, "got nan"),
        ("resources_per_worker", {"CPU": INF}, ConfigError, "got inf"),
        ("resources_per_worker", {"CPU": 10**30}, ConfigError, "must be at most"),
        ("resources_per_worker", {"CPU": 0.00001}, ConfigError, "smallest step"),
        ("resources_per_worker", [1], ConfigTypeError, "must be a dict"),
        ("trainer_resources", {"Cpu": 1}, ConfigError, "got 'Cpu'; write 'CPU'"),
        ("trainer_resources", 3, ConfigTypeError, "must be a dict"),
        ("placement_strategy", "PAKC", ConfigError, "'STRICT_PACK' or 'STRICT_SPREAD', got 'PAKC' (str); did you mean"),
        ("placement_strategy", None, ConfigTypeError, "got None"),
        ("accelerator_type", "", ConfigError, "non-empty"),
        ("accelerator_type", 3, ConfigTypeError, "got 3"),
        ("accelerator_type", "accelerator_type:T4", ConfigError, "write 'T4'"),
        ("label_selector", {"zone": 1}, ConfigTypeError, "strings to strings"),
        ("label_selector", "zone", ConfigTypeError, "must be a dict"),
        ("label_selector", [{}, {}], ConfigError, "max_workers=1"),
        ("label_selector", ["zone"], ConfigTypeError, "label_selector[0] must be a dict"),
        ("use_tpu", True, ConfigError, 'resources_per_worker={"TPU": n}'),
        ("topology", "4x4", ConfigError, "not supported"),
        ("elastic_resize_monitor_interval_s", -1, ConfigError, "a finite number of seconds >= 0, got -1.0"),
        ("elastic_resize_monitor_interval_s", NAN, ConfigError, "got nan"),
        ("elastic_resize_monitor_interval_s", INF, ConfigError, "got inf"),
        ("elastic_resize_monitor_interval_s", None, ConfigTypeError, "got None"),
        ("resources_timeout_s", "60", ConfigTypeError, "or None, got '60'"),
        ("resources_timeout_s", True, ConfigTypeError, "got True"),
        ("resources_timeout_s", -0.1, ConfigError, "got -0.1"),
    ],
)
def test_bad_values_are_refused_by_name(option: str, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        ScalingConfig(**{option: value})
    assert f"ScalingConfig.{option}" in str(caught.value)
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError) == (error is ConfigTypeError)


def test_no_gpu_for_workers_that_need_one_is_refused() -> None:
    """Ray accepts this and silently gives one GPU, or none, depending on its version."""
    with pytest.raises(ConfigError, match=r"use_gpu=True needs GPUs.*'GPU': 0"):
        ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0})


def test_part_of_several_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['GPU'\] must be a whole number or at most 1, got 1.5"):
        ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 1.5})


def test_a_removed_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"_max_cpu_fraction_per_node=\.\.\.\) was removed in Ray 2\.7"):
        ScalingConfig(_max_cpu_fraction_per_node=0.8)  # type: ignore[call-arg]


def test_the_users_dict_is_neither_changed_nor_followed() -> None:
    mine = {"CPU": 2, "GPU": 0}
    config = ScalingConfig(resources_per_worker=mine)
    assert mine == {"CPU": 2, "GPU": 0}
    mine["CPU"] = 99
    assert config.num_cpus_per_worker == 2
    config.worker_resources["CPU"] = 99
    assert config.num_cpus_per_worker == 2


@given(config=scaling_configs())
def test_the_bundles_are_the_trainers_and_one_per_worker(config: ScalingConfig) -> None:
    factory = config.as_placement_group_factory()
    assert factory.worker_bundles == [config.worker_resources] * config.max_workers
    assert factory.head_bundle == {k: v for k, v in (config.trainer_resources or {}).items() if v}
    assert factory.strategy == config.placement_strategy


@given(config=scaling_configs())
def test_a_config_made_of_bundles_asks_for_the_same(config: ScalingConfig) -> None:
    factory = config.as_placement_group_factory()
    again = ScalingConfig.from_placement_group_factory(factory)
    assert again.as_placement_group_factory() == factory
    assert again.max_workers == config.max_workers
    if config.max_workers:
        assert again.worker_resources == config.worker_resources


@pytest.mark.parametrize(
    ("config", "bundles"),
    [
        (ScalingConfig(), [{"CPU": 1}]),
        (ScalingConfig(num_workers=2), [{"CPU": 1}] * 2),
        (ScalingConfig(num_workers=2, use_gpu=True), [{"GPU": 1}] * 2),
        (ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4}), [{"CPU": 4}] * 2),
        (ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0, "extra": 1}), [{"extra": 1}] * 2),
        (ScalingConfig(num_workers=2, trainer_resources={"CPU": 1}), [{"CPU": 1}] * 3),
        (ScalingConfig(num_workers=2, trainer_resources={"CPU": 0}), [{"CPU": 1}] * 2),
        (ScalingConfig(num_workers=(1, 3)), [{"CPU": 1}] * 3),
        (ScalingConfig(num_workers=0), []),
    ],
)
def test_bundles(config: ScalingConfig, bundles: list[dict[str, float]]) -> None:
    assert config.as_placement_group_factory().bundles == bundles


def test_configs_that_a_factory_can_hold_in_full_come_back_equal() -> None:
    for config in (
        ScalingConfig(num_workers=3),
        ScalingConfig(num_workers=2, use_gpu=True, accelerator_type="T4"),
        ScalingConfig(num_workers=2, label_selector={"zone": "a"}, placement_strategy="SPREAD"),
        ScalingConfig(num_workers=2, label_selector=[{"zone": "a"}, {"zone": "b"}]),
        ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0, "extra": 1}, trainer_resources={"CPU": 2}),
    ):
        assert ScalingConfig.from_placement_group_factory(config.as_placement_group_factory()) == config


def test_bundles_that_no_config_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="bundles that differ"):
        ScalingConfig.from_placement_group_factory(PlacementGroupFactory([{}, {"CPU": 1}, {"CPU": 2}]))
    with pytest.raises(ConfigError, match="no node labels for the trainer"):
        ScalingConfig.from_placement_group_factory(
            PlacementGroupFactory([{}, {"CPU": 1}], bundle_label_selector=[{"zone": "a"}, {}])
        )
    with pytest.raises(ConfigTypeError, match=r"needs a ray_lite\.train\.PlacementGroupFactory"):
        ScalingConfig.from_placement_group_factory([{"CPU": 1}])  # type: ignore[arg-type]


def test_evolving_checks_again() -> None:
    config = attrs.evolve(ScalingConfig(), num_workers=np.int64(4))
    assert config == ScalingConfig(num_workers=4)
    with pytest.raises(ConfigError, match=r"ScalingConfig\.num_workers"):
        attrs.evolve(config, num_workers=-3)
