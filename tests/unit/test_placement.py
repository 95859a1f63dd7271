"""Whether workers can ever fit, and what is said when they cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.configs import ScalingConfig
from ray_lite.train.execution.placement import can_ever_fit, infeasible_message


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


@pytest.mark.parametrize(
    ("config", "total", "expected"),
    [
        (ScalingConfig(num_workers=3), {"CPU": 2.0}, ["3 x {CPU: 1}", "{CPU: 2} in total", "num_workers"]),
        (ScalingConfig(num_workers=1, use_gpu=True), {"CPU": 2.0}, ["GPU", "use_gpu=False"]),
    ],
)
def test_the_message_says_asked_total_free_and_what_to_do(config, total, expected):
    text = infeasible_message(config, config.max_workers, total, {"CPU": 0.5})
    for part in expected:
        assert part in text
    assert "free" in text
