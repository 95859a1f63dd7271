"""Whether workers can ever fit, and what is said when they cannot."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.configs import ScalingConfig
from ray_lite.train.configs.placement_group_factory import PLACEMENT_STRATEGIES
from ray_lite.train.execution.placement import (
    bundle_selectors,
    can_ever_fit,
    infeasible_message,
    matches,
    num_fitting,
    waiting_message,
)


@given(rooms=st.lists(st.integers(0, 5), max_size=5), num_workers=st.integers(1, 12))
def test_it_agrees_with_counting(rooms, num_workers):
    totals = [{"CPU": float(room)} for room in rooms]
    need = {"CPU": 1.0}
    assert can_ever_fit(need, num_workers, "PACK", totals) == (sum(rooms) >= num_workers)
    assert can_ever_fit(need, num_workers, "STRICT_PACK", totals) == any(room >= num_workers for room in rooms)
    assert can_ever_fit(need, num_workers, "STRICT_SPREAD", totals) == (sum(r >= 1 for r in rooms) >= num_workers)


def test_a_bundle_must_fit_on_one_node():
    assert not can_ever_fit({"CPU": 4, "GPU": 1}, 1, "PACK", [{"CPU": 8}, {"CPU": 2, "GPU": 4}])


def test_fractions_add_up():
    assert can_ever_fit({"GPU": 0.1}, 10, "PACK", [{"GPU": 1.0}])


def test_nothing_needed_fits_anywhere():
    assert can_ever_fit({}, 5, "PACK", [{}])
    assert not can_ever_fit({}, 1, "PACK", [])


@given(
    rooms=st.lists(st.integers(0, 4), max_size=4),
    low=st.integers(1, 6),
    more=st.integers(0, 6),
    strategy=st.sampled_from(PLACEMENT_STRATEGIES),
)
def test_the_most_that_fit_is_the_largest_size_in_the_range_that_does(rooms, low, more, strategy):
    config = ScalingConfig(num_workers=(low, low + more), placement_strategy=strategy)
    free = [{"CPU": float(room)} for room in rooms]
    sizes = [n for n in range(low, low + more + 1) if can_ever_fit({"CPU": 1.0}, n, strategy, free)]
    assert num_fitting(config, free) == max(sizes, default=0)


@pytest.mark.parametrize(
    ("asked", "zone", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "a", False),
        ("!a", "b", True),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "b", True),
        ("in(b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a,b)", None, False),
        ("!in(a,b)", "a", False),
        ("!in(a, b)", "b", False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", None, True),
        ("", "a", False),
        ("", "", True),
        ("", None, False),
        ("inner", "inner", True),
    ],
)
def test_labels_match_as_ray_matches_them(asked, zone, expected):
    labels = {"ray.io/node-id": "1234"} if zone is None else {"ray.io/node-id": "1234", "zone": zone}
    assert matches({"zone": asked}, labels) == expected


def test_all_labels_of_a_selector_must_match_and_an_empty_one_matches_everything():
    assert matches({}, {"zone": "a"})
    assert matches({"zone": "a", "market": "!spot"}, {"zone": "a"})
    assert not matches({"zone": "a", "market": "!spot"}, {"zone": "a", "market": "spot"})


def test_only_nodes_that_match_count():
    """A cluster with room enough, on other nodes, made an elastic run wait for ever."""
    nodes, labels = [{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 9.0}], [{"zone": "a"}, {"zone": "b"}, {}]
    config = ScalingConfig(num_workers=(1, 20), label_selector={"zone": "in(a,b)"})
    assert num_fitting(config, nodes, labels) == 7
    assert num_fitting(config, nodes) == 16
    assert num_fitting(ScalingConfig(num_workers=(8, 20), label_selector={"zone": "in(a,b)"}), nodes, labels) == 0
    options = {"label_selector": {"zone": "a"}, "node_labels": labels}
    assert can_ever_fit({"CPU": 1.0}, 4, "STRICT_PACK", nodes, **options)
    assert not can_ever_fit({"CPU": 1.0}, 5, "PACK", nodes, **options)
    assert not can_ever_fit({"CPU": 1.0}, 2, "STRICT_SPREAD", nodes, **options)
    assert not can_ever_fit({}, 1, "PACK", nodes, label_selector={"zone": "c"}, node_labels=labels)


def fits_in_some_way(rooms, labels, selectors, strategy):
    """The definition: try every node for every bundle."""
    for chosen in itertools.product(range(len(rooms)), repeat=len(selectors)):
        if strategy == "STRICT_PACK" and len(set(chosen)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(chosen)) < len(chosen):
            continue
        if any(chosen.count(node) > room for node, room in enumerate(rooms)):
            continue
        if all(matches(selector, labels[node]) for node, selector in zip(chosen, selectors, strict=True)):
            return True
    return False


SELECTORS = st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}, {"zone": "!a"}, {"zone": "in(b,c)"}, {"disk": "fast"}])
LABELS = st.fixed_dictionaries({}, optional={"zone": st.sampled_from("abc"), "disk": st.just("fast")})


@given(data=st.data(), num_nodes=st.integers(1, 4), strategy=st.sampled_from(PLACEMENT_STRATEGIES))
def test_one_selector_per_worker_fits_when_any_arrangement_does(data, num_nodes, strategy):
    """Bundles that could go anywhere make room for those that cannot."""
    rooms = data.draw(st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes))
    labels = data.draw(st.lists(LABELS, min_size=num_nodes, max_size=num_nodes))
    selectors = data.draw(st.lists(SELECTORS, min_size=1, max_size=4))
    nodes = [{"CPU": float(room)} for room in rooms]
    sizes = [
        size for size in range(1, len(selectors) + 1) if fits_in_some_way(rooms, labels, selectors[:size], strategy)
    ]
    config = ScalingConfig(num_workers=(1, len(selectors)), placement_strategy=strategy, label_selector=selectors)
    assert num_fitting(config, nodes, labels) == max(sizes, default=0)
    for size in range(1, len(selectors) + 1):
        options = {"label_selector": selectors, "node_labels": labels}
        assert can_ever_fit({"CPU": 1.0}, size, strategy, nodes, **options) == (size in sizes)


def test_bundles_get_selectors_that_ray_reads_as_they_are_meant():
    """Ray 2.60 looks for the label " b" when it is given "in(a, b)"."""
    config = ScalingConfig(num_workers=3, label_selector={"zone": "in(a, b)", "market": "!spot"})
    assert bundle_selectors(config, 2) == [{"zone": "in(a,b)", "market": "!spot"}] * 2
    config = ScalingConfig(num_workers=(1, 2), label_selector=[{"zone": "!in(a, b)"}, {}])
    assert bundle_selectors(config, 1) == [{"zone": "!in(a,b)"}]
    assert bundle_selectors(ScalingConfig(num_workers=2), 2) is None


@pytest.mark.parametrize(
    ("config", "total", "expected"),
    [
        (ScalingConfig(num_workers=3), {"CPU": 2.0}, ["3 x {CPU: 1}", "{CPU: 2} in total", "num_workers"]),
        (ScalingConfig(num_workers=1, use_gpu=True), {"CPU": 2.0}, ["GPU", "use_gpu=False"]),
        (
            ScalingConfig(num_workers=1, label_selector={"zone": "a"}),
            {"CPU": 2.0},
            ["1 x {CPU: 1} on nodes with the labels {zone: a}", "change label_selector"],
        ),
    ],
)
def test_the_message_says_asked_total_free_and_what_to_do(config, total, expected):
    text = infeasible_message(config, config.max_workers, total, {"CPU": 0.5})
    for part in expected:
        assert part in text
    assert "free" in text


def test_who_waits_is_told_which_labels_it_waits_for():
    config = ScalingConfig(num_workers=4, label_selector=[{"zone": zone} for zone in "abcd"])
    text = waiting_message(config, 4, {"CPU": 8.0}, {"CPU": 8.0}, 12.0)
    assert "4 x {CPU: 1} on nodes with the labels {zone: a} or {zone: b} or {zone: c} ..." in text
