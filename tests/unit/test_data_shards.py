"""What ``get_dataset_shard`` gives for each kind of dataset."""

from __future__ import annotations

import itertools
import logging
import pickle
import subprocess
import sys

import numpy as np
import pytest

from ray_lite.train.data import make_shard
from ray_lite.train.data.marker import is_shard


def shards_of(payload, world_size, remainder="wrap", is_split=True):
    return [
        make_shard(payload, is_split=is_split, remainder=remainder, world_rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


CASE_82 = [(0, 2), (1, 4), (3, 2), (7, 3), (25, 2)]


def _pandas(rows):
    return pytest.importorskip("pandas").DataFrame({"id": list(range(rows))})


def _tensor(rows):
    return pytest.importorskip("torch").arange(rows)


def _torch_dataset(rows):
    torch_data = pytest.importorskip("torch.utils.data")

    class Numbers(torch_data.Dataset):
        def __len__(self):
            return rows

        def __getitem__(self, index):
            if not 0 <= index < rows:
                raise IndexError(index)
            return index

    return Numbers()


KINDS = {
    "list": (lambda rows: list(range(rows)), list),
    "tuple": (lambda rows: tuple(range(rows)), list),
    "range": (range, list),
    "numpy": (np.arange, lambda shard: shard.tolist()),
    "dict": (lambda rows: {"id": np.arange(rows), "name": [f"{i}" for i in range(rows)]}, lambda s: s["id"].tolist()),
    "pandas": (_pandas, lambda shard: shard["id"].tolist()),
    "tensor": (_tensor, lambda shard: shard.tolist()),
    "torch_dataset": (_torch_dataset, lambda shard: [shard[i] for i in range(len(shard))]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "world_size"), CASE_82)
@pytest.mark.parametrize("remainder", ["wrap", "drop", "uneven"])
def test_rows_that_do_not_divide(kind, rows, world_size, remainder):
    """Equal lengths on all ranks by default, whatever the kind; each remainder keeps its word."""
    make, read = KINDS[kind]
    ids = [read(shard) for shard in shards_of(make(rows), world_size, remainder)]
    lengths = {len(shard) for shard in ids}
    everything = sorted(itertools.chain(*ids))
    if remainder == "wrap":
        assert lengths == {-(-rows // world_size)}
        assert set(everything) == set(range(rows))
    elif remainder == "drop":
        assert lengths == {rows // world_size}
        assert everything == list(range(rows // world_size * world_size))
    else:
        assert everything == list(range(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_that_is_not_split_is_whole_on_each_rank(kind):
    make, read = KINDS[kind]
    payload = make(5)
    for shard in shards_of(payload, 2, is_split=False):
        assert shard is payload
        assert read(shard) == list(range(5))


@pytest.mark.parametrize("rows", [4, 5])
def test_an_array_shard_is_writable_and_leaves_the_whole_alone(rows):
    """Ray hands out read-only arrays; whether a shard can be normalised in place must not depend on its length."""
    whole = np.arange(rows, dtype=np.float32).reshape(rows, 1)
    whole.flags.writeable = False
    for shard in shards_of(whole, 2):
        assert shard.dtype == np.float32
        assert shard.shape == (-(-rows // 2), 1)
        assert shard.flags.c_contiguous
        shard -= 1.0
    assert whole.sum() == sum(range(rows))


def test_columns_of_different_kinds_stay_in_step():
    first, second = shards_of({"x": np.arange(5) * 10, "y": ["a", "b", "c", "d", "e"]}, 2)
    assert (first["x"].tolist(), first["y"]) == ([0, 20, 40], ["a", "c", "e"])
    assert (second["x"].tolist(), second["y"]) == ([10, 30, 0], ["b", "d", "a"])


def test_a_list_shard_is_a_list():
    first, second = shards_of(["a", "b", "c"], 2, "uneven")
    assert first == ["a", "c"]
    assert isinstance(second, list)
    assert pickle.loads(pickle.dumps(first)) == first


def test_a_torch_shard_is_a_subset_and_fetches_batches_at_once():
    """``Subset`` is what torch users know, and it passes ``__getitems__`` on."""
    torch_data = pytest.importorskip("torch.utils.data")

    class Batched(torch_data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            raise AssertionError("batches must be fetched at once")

        def __getitems__(self, indices):
            return [i * 10 for i in indices]

    shard = shards_of(Batched(), 2)[1]
    assert isinstance(shard, torch_data.Subset)
    assert [batch.tolist() for batch in torch_data.DataLoader(shard, batch_size=2)] == [[10, 30], [0]]


def test_rows_are_read_only_when_asked_for():
    class Lazy:
        def __init__(self):
            self.read = []

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            self.read.append(index)
            return index

    whole = Lazy()
    shard = shards_of(whole, 10)[3]
    assert (len(shard), shard[0], shard[-1], shard[1:3]) == (100, 3, 993, [13, 23])
    assert whole.read == [3, 993, 13, 23]
    with pytest.raises(IndexError):
        shard[100]


class Stream:
    """Can be iterated over again and again, and has no rows."""

    def __init__(self, stop):
        self.stop = stop

    def __iter__(self):
        return iter(range(self.stop))


def test_a_stream_is_shared_out_on_every_pass():
    first, second = shards_of(Stream(5), 2)
    assert [list(first), list(second), list(second)] == [[0, 2, 4], [1, 3, 0], [1, 3, 0]]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_iterable_dataset_gives_each_item_once_over_ranks_and_loader_workers(loader_workers):
    """Case 85: every rank, and every worker of its DataLoader, used to get the same samples."""
    torch_data = pytest.importorskip("torch.utils.data")
    shards = shards_of(_Numbers(20), 2)
    assert all(isinstance(shard, torch_data.IterableDataset) for shard in shards)
    batches = [list(torch_data.DataLoader(s, batch_size=3, num_workers=loader_workers)) for s in shards]
    assert len(batches[0]) == len(batches[1])
    assert sorted(int(item) for own in batches for batch in own for item in batch) == list(range(20))


def test_an_iterable_dataset_with_a_length_keeps_one():
    torch_data = pytest.importorskip("torch.utils.data")
    shard = shards_of(_SizedNumbers(21), 2)[1]
    assert len(shard) == 11
    assert len(list(torch_data.DataLoader(shard, batch_size=4))) == 3
    with pytest.raises(TypeError):
        len(shards_of(_Numbers(21), 2)[1])


def test_huggingface_and_arrow_datasets_are_asked_for_their_rows():
    """By the methods they offer: indexing an arrow table would give columns."""

    class Table:
        num_rows = 5

        def take(self, rows):
            return [f"row {row}" for row in rows]

    class HuggingFace:
        column_names = ("text",)

        def __len__(self):
            return 5

        def __getitem__(self, index):
            raise AssertionError("select keeps the type, indexing does not")

        def select(self, rows):
            return [f"row {row}" for row in rows]

    for dataset in (Table(), HuggingFace()):
        assert shards_of(dataset, 2)[1] == ["row 1", "row 3", "row 0"]


def test_shards_are_known_as_such_also_inside_a_subset():
    """So that a sampler does not divide them a second time."""
    torch_data = pytest.importorskip("torch.utils.data")
    for kind in ("list", "range", "torch_dataset"):
        shard = shards_of(KINDS[kind][0](6), 2)[0]
        assert is_shard(shard)
        assert is_shard(torch_data.Subset(shard, [0]))
    assert is_shard(shards_of(_Numbers(4), 2)[0])
    assert not is_shard([1, 2])
    assert not is_shard(_torch_dataset(3))


def test_fewer_rows_than_workers_is_a_warning_once(caplog):
    caplog.set_level(logging.INFO, logger="ray_lite.train")
    shards_of([1], 4)
    shards_of(list(range(25)), 2)
    shards_of(list(range(24)), 2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_plain_data_needs_neither_numpy_nor_torch():
    code = """
import sys
from ray_lite.train.data import make_shard
make_shard([1, 2, 3], is_split=True, remainder="wrap", world_rank=1, world_size=2)
make_shard({"x": [1, 2, 3]}, is_split=True, remainder="wrap", world_rank=1, world_size=2)
print([name for name in ("numpy", "torch", "ray", "pandas", "fsspec") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


try:
    from torch.utils.data import IterableDataset
except ImportError:  # torch is an extra
    IterableDataset = object


class _Numbers(IterableDataset):
    def __init__(self, stop):
        self.stop = stop

    def __iter__(self):
        return iter(range(self.stop))


class _SizedNumbers(_Numbers):
    def __len__(self):
        return self.stop
