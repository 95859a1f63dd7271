"""Hypothesis strategies for the configs: everything a user may write, and what comes of it is valid."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from ray_lite.train.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    PlacementGroupFactory,
    RunConfig,
    ScalingConfig,
)
from ray_lite.train.configs.placement_group_factory import PLACEMENT_STRATEGIES

__all__ = [
    "RecordingCallback",
    "bundles",
    "checkpoint_configs",
    "configs",
    "data_configs",
    "failure_configs",
    "integers_of_any_kind",
    "label_selectors",
    "logging_configs",
    "placement_group_factories",
    "plain_run_configs",
    "resource_amounts",
    "run_configs",
    "run_names",
    "scaling_configs",
    "seconds",
    "storage_paths",
]


@attrs.frozen
class RecordingCallback:
    """A callback with one of the hooks, which compares by value and can be pickled."""

    tag: str = ""

    def after_report(self, *args: Any) -> None:
        """Does nothing."""


def integers_of_any_kind(minimum: int, maximum: int) -> st.SearchStrategy[Any]:
    """Whole numbers as users have them: Python's own and numpy's."""
    plain = st.integers(minimum, maximum)
    return plain | plain.map(np.int64) | plain.map(np.int32)


# Fractions that Ray can count, and that survive JSON.
_fractions = st.integers(1, 9_999).map(lambda steps: steps / 10_000)
seconds = st.floats(0, 1e9, allow_nan=False) | integers_of_any_kind(0, 10_000)
# Small alphabets with something of everything: drawing from all of Unicode builds slow tables first.
_words = st.text("abXY01 _-./=é漢🙂", min_size=1, max_size=12).filter(lambda word: bool(word.strip()))


def resource_amounts(*, minimum: int = 0) -> st.SearchStrategy[Any]:
    """Amounts of one resource: fractions up to 1 and whole numbers, of Python and numpy."""
    return (
        integers_of_any_kind(minimum, 64)
        | _fractions
        | _fractions.map(np.float64)
        | st.integers(max(minimum, 1), 64).map(float)
    )


_custom_resources = st.sampled_from(["extra", "TPU", "memory", "accelerator_type:A100", "node:10.0.0.1"])


@st.composite
def _worker_resources(draw: st.DrawFn, *, use_gpu: bool) -> dict[str, Any]:
    resources = draw(st.dictionaries(st.just("CPU") | _custom_resources, resource_amounts(), max_size=4))
    if use_gpu and draw(st.booleans()):
        resources["GPU"] = draw(resource_amounts(minimum=1))
    if not use_gpu and draw(st.booleans()):
        resources["GPU"] = 0
    return resources


label_selectors = st.dictionaries(
    st.sampled_from(["zone", "market-type", "ray.io/node-id"]), st.sampled_from(["a", "!spot", "in(a, b)"]), max_size=3
)


@st.composite
def _worker_counts(draw: st.DrawFn) -> Any:
    low = draw(integers_of_any_kind(1, 8))
    high = draw(st.integers(int(low), 16))
    return draw(st.sampled_from([(low, high), [low, high]]) | integers_of_any_kind(0, 16))


@st.composite
def scaling_configs(draw: st.DrawFn) -> ScalingConfig:
    """Any ``ScalingConfig``: local, fixed or elastic, with and without GPUs, resources and labels."""
    num_workers = draw(_worker_counts())
    use_gpu = draw(st.booleans())
    as_written: Any = draw(st.sampled_from([use_gpu, np.bool_(use_gpu)]))
    most = int(num_workers[1]) if isinstance(num_workers, (tuple, list)) else int(num_workers)
    return ScalingConfig(
        num_workers=num_workers,
        use_gpu=as_written,
        resources_per_worker=draw(st.none() | _worker_resources(use_gpu=use_gpu)),
        placement_strategy=draw(st.sampled_from(PLACEMENT_STRATEGIES)),
        accelerator_type=draw(st.none() | st.sampled_from(["A100", "T4"])),
        label_selector=draw(st.none() | label_selectors | st.lists(label_selectors, min_size=most, max_size=most)),
        trainer_resources=draw(st.none() | st.dictionaries(st.sampled_from(["CPU", "extra"]), resource_amounts())),
        elastic_resize_monitor_interval_s=draw(seconds),
        resources_timeout_s=draw(st.none() | seconds),
    )


@st.composite
def checkpoint_configs(draw: st.DrawFn) -> CheckpointConfig:
    """Any ``CheckpointConfig``."""
    return CheckpointConfig(
        num_to_keep=draw(st.none() | integers_of_any_kind(1, 1_000)),
        checkpoint_score_attribute=draw(st.none() | st.sampled_from(["loss", "val/loss"]) | _words),
        checkpoint_score_order=draw(st.sampled_from(["max", "min"])),
    )


@st.composite
def failure_configs(draw: st.DrawFn) -> FailureConfig:
    """Any ``FailureConfig``."""
    fail_fast: Any = draw(st.sampled_from([False, True, "raise", "Raise"]))
    return FailureConfig(
        max_failures=0 if fail_fast else draw(integers_of_any_kind(-1, 100)),
        fail_fast=fail_fast,
        controller_failure_limit=draw(integers_of_any_kind(-1, 100)),
        max_preemption_failures=draw(integers_of_any_kind(-1, 100)),
        relax_collectives_on_preemption=draw(st.booleans()),
        preemption_grace_s=draw(seconds),
        restart=draw(st.sampled_from(["process", "in_place"])),
        standby_workers=draw(integers_of_any_kind(0, 8)),
        hang_timeout_s=draw(st.none() | st.floats(0.1, 1e6)),
    )


@st.composite
def data_configs(draw: st.DrawFn) -> DataConfig:
    """Any ``DataConfig`` without ``execution_options``."""
    return DataConfig(
        datasets_to_split=draw(st.just("all") | st.lists(_words, unique=True, max_size=4)),
        enable_shard_locality=draw(st.booleans()),
        remainder=draw(st.sampled_from(["wrap", "drop", "uneven"])),
    )


@st.composite
def logging_configs(draw: st.DrawFn) -> LoggingConfig:
    """Any ``LoggingConfig`` with one of Python's own levels, in any case."""
    names = [logging.getLevelName(level) for level in (10, 20, 30, 40, 50)]
    name = draw(st.sampled_from([*names, "WARN", "FATAL", "NOTSET"]))
    return LoggingConfig(log_level=draw(st.sampled_from([name, name.lower(), name.title()])))


run_names = st.text("abXY01 _-.~%?#[]:*é漢🙂", min_size=1, max_size=50).filter(
    lambda name: bool(name.strip()) and not name.startswith(".")
)
storage_paths = st.sampled_from(
    ["out", "./out", "~/out", "out/", "/data/runs", "/data/a//b/", "file:///data/c/", "s3://bucket/runs", "memory://r"]
)


@st.composite
def plain_run_configs(draw: st.DrawFn) -> RunConfig:
    """Any ``RunConfig`` without callbacks, filesystem, storage options and environment variables.

    These are the ones that ``to_dict`` describes in full.
    """
    storage_path = draw(st.none() | storage_paths)
    names = run_names
    if "://" in str(storage_path) and not str(storage_path).startswith("file:"):
        # In a URI these mean something else, and are refused.
        names = names.filter(lambda name: not set("?#") & set(name) and "::" not in name and name == name.rstrip())
    return RunConfig(
        name=draw(st.none() | names),
        storage_path=storage_path,
        failure_config=draw(st.none() | failure_configs()),
        checkpoint_config=draw(st.none() | checkpoint_configs()),
        logging_config=draw(st.none() | logging_configs()),
        worker_runtime_env=draw(
            st.none() | st.fixed_dictionaries({}, optional={"working_dir": st.just("."), "pip": st.lists(_words)})
        ),
        resume=draw(st.sampled_from(["auto", "never"])),
    )


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    """Any ``RunConfig`` without a filesystem object, secrets and callbacks included."""
    plain = draw(plain_run_configs())
    return attrs.evolve(
        plain,
        storage_options=draw(st.none() | st.dictionaries(_words, _words)),
        callbacks=draw(st.none() | st.lists(st.builds(RecordingCallback, _words), max_size=3)),
        worker_runtime_env={**plain.worker_runtime_env, "env_vars": draw(st.dictionaries(_words, _words))},
    )


def configs() -> st.SearchStrategy[Any]:
    """Any config that ``to_dict`` describes in full."""
    return (
        scaling_configs()
        | checkpoint_configs()
        | failure_configs()
        | data_configs()
        | logging_configs()
        | plain_run_configs()
    )


bundles = st.dictionaries(st.sampled_from(["CPU", "GPU", "extra"]), resource_amounts(), max_size=3)


@st.composite
def placement_group_factories(draw: st.DrawFn) -> PlacementGroupFactory:
    """Those that a ``ScalingConfig`` can stand for: a head, and any number of equal workers."""
    num_workers = draw(st.integers(0, 6))
    labels = draw(st.lists(label_selectors, min_size=num_workers, max_size=num_workers))
    return PlacementGroupFactory(
        [draw(bundles), *[draw(bundles)] * num_workers],
        strategy=draw(st.sampled_from(PLACEMENT_STRATEGIES)),
        bundle_label_selector=draw(st.sampled_from([None, [{}, *labels]])),
    )
