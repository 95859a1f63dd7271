"""What is reported comes back as the same numbers, and nothing a user reports can end a run."""

from __future__ import annotations

import enum
import math
import pathlib
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.context.metrics import decode_metrics, encode_metrics
from ray_lite.train.errors import ConfigTypeError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def same(left, right) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or left == right
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(metrics=st.dictionaries(st.text(), json_values, max_size=6))
def test_plain_values_survive_exactly(metrics):
    text, unstorable = encode_metrics(metrics)
    assert unstorable == ()
    assert "\n" not in text
    assert "\t" not in text
    assert text.isascii()
    assert same(decode_metrics(text), metrics)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.uint8(255), 255),
        (np.bool_(True), True),
        (np.float16(0.5), 0.5),
        (np.array(3.5), 3.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(3), 3),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (float("inf"), math.inf),
        (np.float32("-inf"), -math.inf),
    ],
)
@pytest.mark.parametrize("nest", [False, True])
def test_scalars_of_numpy_and_torch_become_numbers(value, number, nest):
    text, unstorable = encode_metrics({"a": {"b": [value]}} if nest else {"a": value})
    back = decode_metrics(text)["a"]
    assert same(back["b"][0] if nest else back, number)
    assert unstorable == ()


@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan"), torch.tensor(float("nan"))])
def test_nan_comes_back_as_nan(nan):
    assert math.isnan(decode_metrics(encode_metrics({"a": nan})[0])["a"])


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Color(enum.Enum):
    RED = 1


def endless() -> dict:
    loop: dict = {"n": 1}
    loop["self"] = loop
    return loop


@pytest.mark.parametrize(
    "value",
    [
        np.ones(3),
        torch.ones(2, 2),
        {1, 2},
        b"bytes",
        Color.RED,
        pathlib.Path("x"),
        threading.Lock(),
        BrokenRepr(),
        object(),
        1 + 2j,
        endless(),
        torch.ones((), device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_kept_as_its_repr_and_named_once(value):
    text, unstorable = encode_metrics({"ok": 1.5, "odd": value, "again": value})
    back = decode_metrics(text)
    assert back["ok"] == 1.5
    assert isinstance(back["odd"], (str, dict))
    assert len(unstorable) == 1


def test_keys_become_strings():
    text, unstorable = encode_metrics({1: "a", (2, 3): "b", None: "c", np.int64(4): "d", "t": {(5,): 6}})
    assert decode_metrics(text) == {"1": "a", "(2, 3)": "b", "null": "c", "4": "d", "t": {"(5,)": 6}}
    assert unstorable == ()


def test_the_dict_is_a_snapshot():
    metrics = {"a": [1]}
    text, _ = encode_metrics(metrics)
    metrics["a"].append(2)
    assert decode_metrics(text) == {"a": [1]}


@pytest.mark.parametrize("bad", [None, 3, [("a", 1)], "loss"])
def test_something_that_is_no_dict_is_refused_with_an_example(bad):
    with pytest.raises(ConfigTypeError, match=r"train\.report\(\{'loss': loss\}\)"):
        encode_metrics(bad)
