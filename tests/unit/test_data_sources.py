"""A trainer's ``datasets``: what is accepted, and what each refusal says."""

from __future__ import annotations

import functools
import pathlib
import pickle

import numpy as np
import pytest

from ray_lite.train.configs import DataConfig
from ray_lite.train.data import check_datasets
from ray_lite.train.errors import ConfigError, ConfigTypeError


@pytest.mark.parametrize("datasets", [None, {}])
def test_no_datasets_are_no_sources(datasets):
    assert check_datasets(datasets, None) == {}


def test_all_datasets_are_split_by_default():
    sources = check_datasets({"train": range(4), "val": [1]}, None)
    assert {name: source.is_split for name, source in sources.items()} == {"train": True, "val": True}
    assert sources["train"].remainder == "wrap"


@pytest.mark.parametrize(("to_split", "split"), [(["train"], {"train"}), ([], set()), ("all", {"train", "val"})])
def test_datasets_to_split_says_which(to_split, split):
    sources = check_datasets({"train": range(4), "val": [1]}, DataConfig(datasets_to_split=to_split))
    assert {name for name, source in sources.items() if source.is_split} == split


def test_an_unknown_name_to_split_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"names 'nope', which is not in datasets; .*'train', 'val'"):
        check_datasets({"train": range(4), "val": [1]}, DataConfig(datasets_to_split=["train", "nope"]))
    with pytest.raises(ConfigError, match="the trainer has none"):
        check_datasets(None, DataConfig(datasets_to_split=["train"]))


def _generator():
    yield 1


class _NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "dataset 'train' is None; leave the name out"),
        (iter([1]), "one-shot iterator .*empty after the first epoch; pass list"),
        (_generator(), "one-shot iterator"),
        ("data.csv", "is text; load the file first"),
        (pathlib.Path("data.csv"), "is a path; load the file first"),
        ({1, 2}, "is a set, whose order differs between processes"),
        (3, "is a int, which cannot be used as data"),
        (np.float32(3), "is a single value of type float32"),
        (_NoLength(), "has rows but no length: give it a __len__"),
        ({}, "is an empty dict"),
        ({"x": [1, 2], "y": [1]}, r"columns of different lengths \('x': 2, 'y': 1\)"),
        ({"x": [1, 2], "y": "ab"}, "is a dict of columns, and column 'y' is text"),
        ({"x": {"deep": [1]}}, "column 'x' is a dict, not an array or a list"),
        (lambda path: [path], r"is a function that needs arguments \(path\)"),
    ],
)
def test_what_cannot_be_a_dataset_is_refused_with_the_reason(value, message):
    with pytest.raises(ConfigTypeError, match=message):
        check_datasets({"train": value}, None)


@pytest.mark.parametrize("datasets", [[1, 2], "train", range(3)])
def test_datasets_must_be_a_dict(datasets):
    with pytest.raises(ConfigTypeError, match="datasets must be a dict of names to datasets, got a"):
        check_datasets(datasets, None)


@pytest.mark.parametrize("name", [1, "", None])
def test_names_must_be_strings(name):
    with pytest.raises(ConfigTypeError, match="keys of datasets must be non-empty strings"):
        check_datasets({name: [1]}, None)


def test_dataset_config_must_be_a_data_config():
    with pytest.raises(ConfigTypeError, match=r"must be a ray_lite\.train\.DataConfig or None, got a dict"):
        check_datasets({"train": [1]}, {"datasets_to_split": "all"})


def test_a_function_is_called_once_per_load():
    calls = []

    def make(rows):
        calls.append(rows)
        return list(range(rows))

    source = check_datasets({"train": functools.partial(make, 3)}, None)["train"]
    assert calls == []
    loaded = source.load()
    assert (loaded.payload(), loaded.parts(2), loaded.load() is loaded) == ([0, 1, 2], None, True)
    assert calls == [3]
    source.load()
    assert calls == [3, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, r"dataset 'train' \(what its function returned\) is None"), (lambda: [1], "is a function again")],
)
def test_what_a_function_returns_is_checked_too(returned, message):
    source = check_datasets({"train": lambda: returned}, None)["train"]
    with pytest.raises(ConfigTypeError, match=message):
        source.load()


class _OldSplit:
    """Ray's way before ``streaming_split``, without the ``equal`` argument."""

    def split(self, n):
        return [f"part {i} of {n}" for i in range(n)]


class _EqualSplit:
    def split(self, n, *, equal=False):
        return [(i, equal) for i in range(n)]


class _Streaming:
    def __init__(self):
        self.asked = None

    def streaming_split(self, n, *, equal, locality_hints):
        self.asked = (n, equal, locality_hints)
        return [f"stream {i}" for i in range(n)]


def test_datasets_that_split_themselves_are_asked_to():
    sources = check_datasets({"old": _OldSplit(), "equal": _EqualSplit()}, None)
    assert sources["old"].parts(2) == ["part 0 of 2", "part 1 of 2"]
    assert sources["equal"].parts(2) == [(0, True), (1, True)]
    uneven = check_datasets({"equal": _EqualSplit()}, DataConfig(remainder="uneven"))
    assert uneven["equal"].parts(1) == [(0, False)]


def test_what_splits_itself_is_known_once_its_function_was_called():
    sources = check_datasets({"stream": _Streaming(), "made": _Streaming, "list": [1]}, None)
    assert {name: source.splits_itself for name, source in sources.items()} == {
        "stream": True,
        "made": False,
        "list": False,
    }
    assert sources["made"].load().splits_itself
    whole = check_datasets({"stream": _Streaming()}, DataConfig(datasets_to_split=[]))
    assert not whole["stream"].splits_itself


@pytest.mark.parametrize(("locality", "hints"), [(True, ["a", "b"]), (False, None)])
def test_streaming_split_gets_the_workers_nodes(locality, hints):
    dataset = _Streaming()
    source = check_datasets({"train": dataset}, DataConfig(enable_shard_locality=locality))["train"]
    assert source.parts(2, node_ids=["a", "b"]) == ["stream 0", "stream 1"]
    assert dataset.asked == (2, True, hints)


def test_a_whole_dataset_is_not_split():
    source = check_datasets({"train": _Streaming()}, DataConfig(datasets_to_split=[]))["train"]
    assert source.parts(2) is None


def test_a_wrong_number_of_parts_is_an_error():
    class Broken:
        def split(self, n):
            return ["only one"]

    with pytest.raises(ConfigError, match=r"split\(2\) gave 1 parts"):
        check_datasets({"train": Broken()}, None)["train"].parts(2)


def test_torch_tensors_are_rows_although_they_have_a_split_method():
    torch = pytest.importorskip("torch")
    assert check_datasets({"train": torch.arange(4)}, None)["train"].parts(2) is None


def test_sources_travel_and_do_not_show_their_data():
    source = pickle.loads(pickle.dumps(check_datasets({"train": ["secret row"]}, None)["train"]))
    assert source.payload() == ["secret row"]
    assert "secret" not in repr(source)
