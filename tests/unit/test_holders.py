"""Who holds what, in words."""

from __future__ import annotations

from ray_lite.train.configs import ScalingConfig
from ray_lite.train.execution.holders import Holder, describe_holders, room_name, room_prefix
from ray_lite.train.execution.placement import waiting_message


def test_equal_holders_and_bundles_are_counted():
    holders = [
        Holder("run 'a'", [{"CPU": 1.0}, {"CPU": 1.0}]),
        Holder("actor Holder", [{"CPU": 2.0, "memory": 5.0}]),
        Holder("actor Holder", [{"CPU": 2.0}]),
    ]
    assert describe_holders(holders, ["CPU"]) == ("run 'a' (2 x {CPU: 1}), 2 times actor Holder (1 x {CPU: 2})")


def test_who_holds_nothing_of_what_is_asked_is_left_out():
    assert describe_holders([Holder("a", [{"GPU": 1.0}]), Holder("b", [{}])], ["CPU"]) == ""


def test_a_long_list_is_cut():
    text = describe_holders([Holder(f"run {i}", [{"CPU": 1.0}]) for i in range(10)], ["CPU"])
    assert text.endswith("run 3 (1 x {CPU: 1}), 6 more")


def test_the_message_names_them():
    config = ScalingConfig(num_workers=2)
    text = waiting_message(config, 2, {"CPU": 2.0}, {"CPU": 0.0}, 11.0, "run 'a' (2 x {CPU: 1})")
    assert text.endswith("{CPU: 0} free; held by run 'a' (2 x {CPU: 1})")
    assert "held by" not in waiting_message(config, 2, {"CPU": 2.0}, {"CPU": 0.0}, 11.0)


def test_the_name_of_a_room_tells_whose_it_is():
    assert room_name("ab12", "cd34", "my run").startswith(room_prefix("ab12"))
