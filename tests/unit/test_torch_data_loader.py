"""``prepare_data_loader``: another part for each rank, and every setting kept."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch_workers import make_context

from ray_lite.train.context.current import set_context
from ray_lite.train.data import make_shard
from ray_lite.train.errors import ConfigError, ConfigTypeError
from ray_lite.train.torch import prepare_data_loader


@pytest.fixture(autouse=True)
def _no_context_afterwards():
    yield
    set_context(None)


def prepared(make_loader, world_size=2, **options):
    """The prepared loaders of all ranks; preparing and reading need no process group."""
    loaders = []
    for rank in range(world_size):
        set_context(make_context(rank, world_size))
        loaders.append(prepare_data_loader(make_loader(), **options))
    return loaders


def rows(loader):
    return [int(row) for batch in loader for row in torch.as_tensor(batch).flatten()]


class Numbers:
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("num_rows", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("remainder", ["wrap", "drop", "uneven"])
def test_len_is_the_number_of_batches_that_come(num_rows, drop_last, remainder):
    """Case 89: equal on all ranks, so that none waits alone in a collective."""
    loaders = prepared(lambda: DataLoader(Numbers(num_rows), batch_size=2, drop_last=drop_last), remainder=remainder)
    batches = [len(list(loader)) for loader in loaders]
    assert batches == [len(loader) for loader in loaders]
    if remainder != "uneven":
        assert len(set(batches)) == 1
    elif not drop_last:
        assert sorted(itertools.chain(*map(rows, loaders))) == list(range(num_rows))


def test_order_is_kept_without_shuffle_and_shared_with_it():
    plain = prepared(lambda: DataLoader(Numbers(6), batch_size=2))
    assert [rows(loader) for loader in plain] == [[0, 2, 4], [1, 3, 5]]
    shuffled = prepared(lambda: DataLoader(Numbers(50), batch_size=5, shuffle=True))
    orders = [[rows(loader) for loader in shuffled] for _ in range(3)]
    for order in orders:
        assert sorted(order[0] + order[1]) == list(range(50))
    assert len({tuple(order[0]) for order in orders}) == 3


@pytest.mark.parametrize("reach", [lambda loader: loader.sampler, lambda loader: loader])
def test_set_epoch_still_means_that_epoch(reach):
    counted, told = (prepared(lambda: DataLoader(Numbers(50), shuffle=True))[0] for _ in range(2))
    orders = [rows(counted) for _ in range(3)]
    for epoch in (0, 1, 2, 1):
        reach(told).set_epoch(epoch)
        assert rows(told) == orders[epoch]


def test_a_single_worker_gets_new_orders_too():
    (loader,) = prepared(lambda: DataLoader(Numbers(50), shuffle=True), world_size=1)
    first, second = rows(loader), rows(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def double(batch):
    return [2 * row for row in batch]


def seed_nothing(worker_id):
    return None


def test_every_setting_is_kept():
    """W37: batch_sampler, persistent_workers, prefetch_factor, multiprocessing_context, in_order were lost."""
    generator = torch.Generator()
    settings = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": double,
        "pin_memory": False,
        "drop_last": True,
        "timeout": 17,
        "worker_init_fn": seed_nothing,
        "multiprocessing_context": "forkserver",
        "generator": generator,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "pin_memory_device": "",
        "in_order": False,
    }
    original = DataLoader(Numbers(12), **settings)
    loader = prepared(lambda: original)[0]
    assert isinstance(loader, DataLoader)
    for name in [*settings, "dataset"]:
        assert getattr(loader, name) == getattr(original, name), name
    assert isinstance(original.sampler, SequentialSampler)
    assert original.batch_sampler.sampler is original.sampler


def test_persistent_workers_are_used_again_and_reshuffled():
    (loader,) = prepared(
        lambda: DataLoader(Numbers(20), shuffle=True, num_workers=1, persistent_workers=True), world_size=1
    )
    first, second = rows(loader), rows(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    # Ends the workers now, not when the garbage collector comes by.
    loader._loader._iterator._shutdown_workers()


def test_a_loader_of_the_users_own_class_stays_one():
    class Counting(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.label = "mine"

        def state_dict(self):
            return {"label": self.label, "rows": len(self.sampler)}

        def __iter__(self):
            return (("counted", batch) for batch in super().__iter__())

    loader = prepared(lambda: Counting(Numbers(4)))[1]
    assert loader.label == "mine"
    assert loader.state_dict() == {"label": "mine", "rows": 2}
    assert [(tag, int(row)) for tag, row in loader] == [("counted", 1), ("counted", 3)]


class Pairs(Sampler):
    """Batches of a user's own making."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows // 2

    def __iter__(self):
        return iter([[row, row + 1] for row in range(0, self.num_rows, 2)])


def test_a_batch_sampler_gives_each_rank_whole_batches():
    """W37: the loader used to yield single samples."""
    loaders = prepared(lambda: DataLoader(Numbers(12), batch_sampler=Pairs(12)))
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10, 11]],
    ]
    assert [len(loader) for loader in loaders] == [3, 3]


def test_torchs_own_batch_sampler_is_divided_by_rows():
    loaders = prepared(lambda: DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, True)))
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_no_batches_at_all_is_a_setting_too():
    loaders = prepared(lambda: DataLoader(Numbers(4), batch_size=None))
    assert [list(loader) for loader in loaders] == [[0, 2], [1, 3]]


def test_a_sampler_of_the_users_own_is_divided_not_replaced():
    weights = [0.0, 1.0, 1.0, 0.0]
    loaders = prepared(lambda: DataLoader(Numbers(4), sampler=WeightedRandomSampler(weights, 100)))
    for loader in loaders:
        assert len(loader) == 50
        assert set(rows(loader)) == {1, 2}


@pytest.mark.parametrize("option", [{"sampler": [3, 1]}, {"batch_sampler": [[3], [1]]}])
def test_a_single_worker_keeps_samplers_of_its_own_untouched(option):
    (loader,) = prepared(lambda: DataLoader(Numbers(4), **option), world_size=1)
    assert [getattr(loader, name) for name in option] == list(option.values())
    assert rows(loader) == [3, 1]


def test_a_random_sampler_with_settings_keeps_them():
    loaders = prepared(
        lambda: DataLoader(Numbers(4), sampler=RandomSampler(range(4), replacement=True, num_samples=40))
    )
    assert [len(rows(loader)) for loader in loaders] == [20, 20]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_kept_and_gets_its_epochs(shuffle):
    """Its owner need not call ``set_epoch``, and may."""
    sampler = DistributedSampler(Numbers(40), num_replicas=2, rank=1, shuffle=shuffle)
    set_context(make_context(1, 2))
    loader = prepare_data_loader(DataLoader(Numbers(40), sampler=sampler))
    assert loader.sampler is sampler
    orders = [rows(loader) for _ in range(3)]
    assert sampler.epoch == 2
    assert (len({tuple(order) for order in orders}) == 3) is shuffle
    sampler.set_epoch(1)
    assert rows(loader) == orders[1]


def test_a_sampler_that_divides_already_is_kept():
    class Mine(Pairs):
        num_replicas, rank = 2, 0

    loader = prepared(lambda: DataLoader(Numbers(8), batch_sampler=Mine(8)))[0]
    assert len(list(loader)) == 4


@pytest.mark.parametrize("payload", [list(range(12)), range(12), TensorDataset(torch.arange(12))])
@pytest.mark.parametrize("wrap", [lambda shard: shard, lambda shard: Subset(shard, [0, 1, 2])])
def test_a_shard_is_not_divided_again(payload, wrap):
    """Two workers would train on a quarter of the data each."""
    shard = make_shard(payload, is_split=True, remainder="wrap", world_rank=1, world_size=2)
    loader = prepared(lambda: DataLoader(wrap(shard)))[1]
    assert len(loader) == len(wrap(shard))


def test_dividing_can_be_left_to_the_user():
    loaders = prepared(lambda: DataLoader(Numbers(3)), add_dist_sampler=False)
    assert [rows(loader) for loader in loaders] == [[0, 1, 2]] * 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_is_divided_on_request(num_workers):
    """Case 85: by rank and by loader worker; batch_size and drop_last stay."""
    loaders = prepared(
        lambda: DataLoader(Stream(), batch_size=3, num_workers=num_workers, drop_last=True), shard_iterable=True
    )
    batches = [list(loader) for loader in loaders]
    seen = [int(row) for own in batches for batch in own for row in batch]
    assert len(set(seen)) == len(seen)
    assert all(len(batch) == 3 for own in batches for batch in own)
    assert len(batches[0]) == len(batches[1])


def test_an_iterable_dataset_is_else_left_alone_with_a_warning():
    """It may divide itself, and dividing twice would lose data silently."""
    set_context(make_context(0, 2))
    with pytest.warns(
        UserWarning, match="Stream is an IterableDataset, so each of the 2 workers reads ALL of it"
    ) as seen:
        loader = prepare_data_loader(DataLoader(Stream(), batch_size=4))
    assert seen[0].filename == __file__
    assert rows(loader) == list(range(20))


@pytest.mark.parametrize("options", [{"shard_iterable": False}, {"add_dist_sampler": False}])
def test_the_warning_can_be_answered(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows(prepared(lambda: DataLoader(Stream()), **options)[0]) == list(range(20))


def test_a_single_worker_reads_all_of_a_stream_without_a_warning():
    assert rows(prepared(lambda: DataLoader(Stream()), world_size=1)[0]) == list(range(20))


def test_preparing_twice_changes_nothing():
    loader = prepared(lambda: DataLoader(Numbers(8)))[0]
    assert prepare_data_loader(loader) is loader


def test_outside_a_train_function_it_is_one_worker():
    assert rows(prepare_data_loader(DataLoader(Numbers(4), batch_size=2))) == [0, 1, 2, 3]


def test_what_is_no_data_loader_is_refused():
    with pytest.raises(ConfigTypeError, match=r"needs a torch\.utils\.data\.DataLoader, got a list"):
        prepare_data_loader([1, 2])
    with pytest.raises(ConfigError, match="remainder must be one of wrap, drop, uneven, got 'pad'"):
        prepare_data_loader(DataLoader([1]), remainder="pad")


# -- SIGTERM to the whole process group ------------------------------------------------------------


def _note_start(worker_id):
    os.environ["STARTED_BY"] = str(worker_id)


class StartedBy:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return int(os.environ["STARTED_BY"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_workers_outlive_a_sigterm_and_still_end_when_they_must(method, is_persistent):
    context = make_context()
    context.takes_sigterm = True
    set_context(context)
    loader = DataLoader(
        StartedBy(),
        batch_size=2,
        num_workers=2,
        worker_init_fn=_note_start,
        persistent_workers=is_persistent,
        multiprocessing_context=method,
    )
    batches = iter(prepare_data_loader(loader))
    first = next(batches)
    workers = batches._workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert sorted(torch.cat([first, *batches]).tolist()) == [0] * 20 + [1] * 20


class Stuck:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index > 3:
            threading.Event().wait()
        return index


def test_a_stuck_worker_is_ended_all_the_same(monkeypatch):
    # How long torch waits for each, before it uses force.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    context = make_context()
    context.takes_sigterm = True
    set_context(context)
    batches = iter(prepare_data_loader(DataLoader(Stuck(), num_workers=2)))
    assert [int(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    workers = batches._workers
    batches._shutdown_workers()
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == -signal.SIGKILL


def test_workers_end_by_sigterm_where_it_is_no_notice():
    set_context(make_context())
    loader = prepare_data_loader(DataLoader(StartedBy(), num_workers=1, worker_init_fn=_note_start))
    assert loader.worker_init_fn is _note_start
