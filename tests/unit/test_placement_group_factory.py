"""``PlacementGroupFactory``: bundles as a value."""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import pytest
from hypothesis import given

from ray_lite.train.configs import PlacementGroupFactory, ScalingConfig
from ray_lite.train.errors import ConfigError, ConfigTypeError
from strategies import bundles, placement_group_factories


@given(factory=placement_group_factories())
def test_a_factory_survives_pickling_evolving_and_the_way_through_a_config(factory: PlacementGroupFactory) -> None:
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert attrs.evolve(factory) == factory
    assert hash(attrs.evolve(factory)) == hash(factory)
    assert ScalingConfig.from_placement_group_factory(factory).as_placement_group_factory() == factory


@given(bundle=bundles)
def test_zero_amounts_do_not_count(bundle: dict[str, Any]) -> None:
    with_zeros = PlacementGroupFactory([{**bundle, "zero": 0}, {"CPU": 1, "GPU": 0.0}])
    without = PlacementGroupFactory([bundle, {"CPU": 1.0}])
    assert with_zeros == without
    assert hash(with_zeros) == hash(without)
    assert with_zeros != PlacementGroupFactory([bundle, {"CPU": 2}])
    assert with_zeros != attrs.evolve(with_zeros, strategy="SPREAD")


def test_an_empty_head_is_no_bundle() -> None:
    factory = PlacementGroupFactory([{"CPU": 0}, {"CPU": 1}, {"CPU": 1}])
    assert factory.head_bundle_is_empty
    assert factory.bundles == [{"CPU": 1}, {"CPU": 1}]
    assert factory.head_cpus == 0
    assert factory.required_resources == {"CPU": 2}


def test_a_head_comes_first() -> None:
    factory = PlacementGroupFactory([{"CPU": 2}, {"GPU": 1}])
    assert not factory.head_bundle_is_empty
    assert factory.bundles == [{"CPU": 2}, {"GPU": 1}]
    assert factory.head_cpus == 2
    assert factory.required_resources == {"CPU": 2, "GPU": 1}


def test_the_stored_bundles_cannot_be_changed_through_copies() -> None:
    mine: list[dict[str, float]] = [{}, {"CPU": 1}]
    factory = PlacementGroupFactory(mine)
    mine[1]["CPU"] = 9
    factory.bundles[0]["CPU"] = 9
    factory.worker_bundles[0]["CPU"] = 9
    assert factory == PlacementGroupFactory([{}, {"CPU": 1}])


def test_repr_can_be_evaluated() -> None:
    factory = PlacementGroupFactory([{}, {"CPU": 1}], "SPREAD")
    assert eval(repr(factory)) == factory


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ([], ConfigError, "at least the head bundle"),
        ({"CPU": 1}, ConfigTypeError, "must be a list of dicts"),
        ("CPU", ConfigTypeError, "must be a list of dicts"),
        (None, ConfigTypeError, "got None"),
        ([None], ConfigTypeError, "bundles[0] must be a dict"),
        ([{}, {"cpu": 1}], ConfigError, "PlacementGroupFactory.bundles[1] must use Ray's own names"),
        ([{"CPU": -1}], ConfigError, "bundles[0]['CPU'] must be a number >= 0, got -1"),
    ],
)
def test_bad_bundles_are_refused_by_name(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        PlacementGroupFactory(value)
    assert says in str(caught.value)


def test_bad_strategies_and_selectors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"PlacementGroupFactory\.strategy must be 'PACK'"):
        PlacementGroupFactory([{}], "PAKC")
    with pytest.raises(ConfigError, match=r"must have one dict per bundle \(1, .*got 2"):
        PlacementGroupFactory([{}], bundle_label_selector=[{}, {}])
    with pytest.raises(ConfigTypeError, match="one per bundle, or None, got 'a'"):
        PlacementGroupFactory([{}], bundle_label_selector="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("given_bundles", [[{}], [{}, {}], [{"CPU": 1}, {"CPU": 0}]])
def test_what_ray_cannot_reserve_is_refused_before_ray_is_asked(given_bundles: list[dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match="has an empty bundle"):
        PlacementGroupFactory(given_bundles).to_placement_group()
