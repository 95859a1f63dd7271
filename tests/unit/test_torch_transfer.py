"""Batches keep their types on the way to the device."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch

from ray_lite.train.torch.transfer import move_batches, move_to

# A device without storage, so that no GPU is needed to see that something was moved.
META = torch.device("meta")


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor
    label: str


class Tokens(collections.UserDict):
    extra = "kept"


class Names(list):
    pass


def one():
    return torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": one(), "label": "a"},
        collections.OrderedDict(x=one(), label="a"),
        collections.defaultdict(list, x=one(), label="a"),
        Tokens(x=one(), label="a"),
        Point(one(), "a"),
        Example(one(), "a"),
        (one(), "a"),
        [one(), "a"],
        Names([one(), "a"]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type(batch):
    """W37's sibling: named tuples became tuples, mappings became dicts."""
    moved = move_to(batch, META)
    assert type(moved) is type(batch)

    def parts(value: Any) -> list[Any]:
        if dataclasses.is_dataclass(value):
            return [value.x, value.label]
        return list(value.values()) if hasattr(value, "values") else list(value)

    assert [getattr(part, "device", part) for part in parts(moved)] == [META, "a"]
    assert parts(batch)[0].device.type == "cpu"


def test_a_defaultdict_keeps_its_factory():
    assert move_to(collections.defaultdict(list, x=one()), META)["new"] == []


def test_containers_in_containers():
    moved = move_to({"a": [Point(one(), "p"), (one(), None)]}, META)
    assert moved["a"][0].x.device == moved["a"][1][0].device == META
    assert moved["a"][1][1] is None


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    moved = move_to(types.MappingProxyType({"x": one()}), META)
    assert moved["x"].device == META


def test_objects_that_can_move_themselves_do():
    class Graph:
        def __init__(self, device="cpu"):
            self.device = device

        def to(self, device):
            return Graph(device)

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to([Graph(), packed], META)
    assert moved[0].device == META
    assert type(moved[1]) is type(packed)
    assert moved[1].data.device == META


@pytest.mark.parametrize("batch", [None, "text", 3, {1, 2}, object()])
def test_everything_else_is_passed_on(batch):
    assert move_to(batch, META) is batch


def test_none_is_a_batch_like_others():
    """A ``None`` used to end the iteration."""
    assert list(move_batches([None, 1, None], META, auto_transfer=True)) == [None, 1, None]
