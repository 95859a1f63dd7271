"""``prepare_data_loader``: each worker reads its part, in a new order every epoch, on its device."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..context.current import current_context
from ..data.marker import is_shard
from ..data.partition import REMAINDERS
from ..data.torch_shards import TorchStreamShard
from ..errors import ConfigError, ConfigTypeError
from .device import get_device
from .loader_workers import GoOn, start_workers
from .ranks import rank_and_world_size
from .samplers import PartOfSampler, RankSampler
from .transfer import move_batches

__all__ = ["PreparedDataLoader", "prepare_data_loader"]

logger = logging.getLogger(__name__)


class PreparedDataLoader(DataLoader[Any]):
    """A loader whose batches arrive on a device; everything else is the wrapped loader's.

    A ``DataLoader`` by type and by attributes, for the libraries that look.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None, *, auto_transfer: bool) -> None:
        # Not super().__init__(), which would check and build all over again what the loader has.
        self.__dict__.update(loader.__dict__)
        self.__dict__.update(_loader=loader, _device=device, _auto_transfer=auto_transfer, _last_epoch=None)
        self.__dict__["_goes_on"] = isinstance(loader.worker_init_fn, GoOn)

    def __getattr__(self, name: str) -> Any:
        # A loader of the user's own class may have more than DataLoader's attributes.
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Any:
        self._advance_epoch()
        batches = start_workers(self._loader) if self._goes_on else iter(self._loader)
        if self._device is None or self._device.type == "cpu":
            return batches
        return move_batches(batches, self._device, auto_transfer=self._auto_transfer)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of ``epoch``, which decides the order; not needed, passes are counted.

        Useful on resuming: ``loader.set_epoch(start_epoch)`` goes on with the order that
        would have come next.
        """
        sampler = _with_epochs(self._loader)
        if sampler is not None:
            sampler.set_epoch(epoch)
            self.__dict__["_last_epoch"] = None

    def _advance_epoch(self) -> None:
        """Count the passes for a ``DistributedSampler`` of the user's own: ours count themselves."""
        sampler = _with_epochs(self._loader)
        if sampler is None or isinstance(sampler, (RankSampler, PartOfSampler)):
            return
        # Unchanged since the last pass: then nobody else counts.
        if self._last_epoch is not None and sampler.epoch == self._last_epoch:
            sampler.set_epoch(sampler.epoch + 1)
        self.__dict__["_last_epoch"] = sampler.epoch


def _with_epochs(loader: DataLoader[Any]) -> Any:
    candidates = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    for sampler in candidates:
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    remainder: str = "wrap",
    seed: int = 0,
    shard_iterable: bool | None = None,
) -> DataLoader[Any]:
    """Make a DataLoader give each worker its own part of the data, on its device.

    The prepared loader keeps every setting of the given one, its class included. With several
    workers, each reads another part; ``len()`` is the number of batches that it yields, equal on all
    ranks by default. A loader that shuffles gives another order in each epoch, the same
    permutation on all ranks, without ``set_epoch``: each new iteration over the loader is the next
    epoch. ``loader.sampler.set_epoch(e)`` or ``loader.set_epoch(e)`` sets the next one. All
    ranks must begin equally many iterations, or set the epoch.

    * A sampler or batch sampler of the user's own is not replaced: each rank takes its part of the rows,
      or of the batches, that it gives.
    * A loader that has a ``DistributedSampler``, or another sampler with ``rank`` and
      ``num_replicas``, divides the data already and keeps it.
    * So does a shard from ``train.get_dataset_shard``, when the loader reads it directly or through a
      ``Subset``. Where it has become something else, a ``TensorDataset`` say, pass
      ``add_dist_sampler=False``, or the part is divided once more.
    * The loader's worker processes do not end by a SIGTERM to the whole process group, so that the rank can
      still save a checkpoint (see ``get_preemption_info``); a handler that ``worker_init_fn`` sets comes after.
    * An ``IterableDataset`` has no rows to choose from. It is left as it is, with a warning, unless
      ``shard_iterable`` says more.

    Args:
        data_loader: The loader. It is not changed.
        add_dist_sampler: Whether to divide the data among the workers.
        move_to_device: Whether batches are moved to this worker's device: tensors in mappings, lists,
            tuples, named tuples and dataclasses, whose types are kept.
        auto_transfer: On CUDA, copy the next batch while the current one is computed with.
        remainder: Rows that do not divide by the world size: ``"wrap"`` (equal counts; the first rows are
            read twice), ``"drop"`` (equal counts; the tail is not read), or ``"uneven"`` (each
            row exactly once, for evaluation; ranks may then have one batch more than others).
        seed: Decides the orders; must be the same on all ranks.
        shard_iterable: For an ``IterableDataset``: True to divide its stream among ranks and the loader's workers
            (each reads all of it and keeps its own items), False if it divides itself.

    Raises:
        ConfigTypeError: ``data_loader`` is no ``torch.utils.data.DataLoader``.
        ConfigError: An unknown ``remainder``.

    Source:
        ``torch.utils.data.DistributedSampler``, for which rows, and in which order.
    """
    if not isinstance(data_loader, DataLoader):
        raise ConfigTypeError(
            f"prepare_data_loader needs a torch.utils.data.DataLoader, got a {type(data_loader).__name__}"
        )
    if remainder not in REMAINDERS:
        raise ConfigError(f"prepare_data_loader: remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}")
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    rank, world_size = rank_and_world_size()
    loader = _clone(data_loader)
    if add_dist_sampler and (world_size > 1 or not isinstance(loader.dataset, IterableDataset)):
        _divide(loader, rank, world_size, remainder, seed, shard_iterable)
    context = current_context()
    if loader.num_workers > 0 and context is not None and context.takes_sigterm:
        loader.worker_init_fn = GoOn(loader.worker_init_fn)
    return PreparedDataLoader(loader, get_device() if move_to_device else None, auto_transfer=auto_transfer)


def _clone(loader: DataLoader[Any]) -> DataLoader[Any]:
    # A shallow copy, not a new loader: whatever settings this version of torch or the user's own
    # class has come along, without a list of them here.
    clone = copy.copy(loader)
    clone.__dict__["_iterator"] = None
    return clone


def _divide(
    loader: DataLoader[Any], rank: int, world_size: int, remainder: str, seed: int, shard_iterable: bool | None
) -> None:
    """Give ``loader`` this rank's part; ``loader`` is a clone, so it may be changed.

    For one worker too, where the part is everything: so that ``sampler.set_epoch`` exists,
    and the order is the one of this seed, whatever the number of workers.
    """
    if is_shard(loader.dataset):
        logger.info("prepare_data_loader: the dataset is this worker's shard already; it is not divided again")
        return
    if isinstance(loader.dataset, IterableDataset):
        _divide_stream(loader, rank, world_size, remainder, shard_iterable)
        return
    if _is_divided(loader.sampler) or _is_divided(loader.batch_sampler):
        return

    def part_of(sampler: Any) -> Any:
        shuffle = _plain_order(sampler, loader.dataset)
        if shuffle is None and world_size == 1:
            return sampler
        if shuffle is None:
            return PartOfSampler(sampler, rank=rank, world_size=world_size, seed=seed, remainder=remainder)
        return RankSampler(
            loader.dataset,  # type: ignore[arg-type]  # a loader with a sampler needs a length
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
        )

    # DataLoader refuses to have these replaced, since each depends on the other; here both are.
    own_batches = loader.batch_sampler
    if own_batches is None:
        loader.__dict__["sampler"] = part_of(loader.sampler)
    elif type(own_batches) is BatchSampler:
        # Rows are divided, not batches: so the ranks' batches are of equal size.
        sampler = part_of(own_batches.sampler)
        loader.__dict__["batch_sampler"] = BatchSampler(sampler, own_batches.batch_size, own_batches.drop_last)
        loader.__dict__["sampler"] = sampler
    elif world_size > 1:
        loader.__dict__["batch_sampler"] = PartOfSampler(
            own_batches, rank=rank, world_size=world_size, seed=seed, remainder=remainder
        )


def _plain_order(sampler: Any, dataset: Any) -> bool | None:
    """Whether ``sampler`` shuffles, if it is one that DataLoader makes by itself; None for any other."""
    if type(sampler) is SequentialSampler:
        return False if sampler.data_source is dataset else None
    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and sampler.data_source is dataset and len(sampler) == len(dataset)
        return True if is_plain else None
    return None


def _is_divided(sampler: Any) -> bool:
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(one, DistributedSampler) or (hasattr(one, "num_replicas") and hasattr(one, "rank"))
        for one in (sampler, inner)
    )


def _divide_stream(
    loader: DataLoader[Any], rank: int, world_size: int, remainder: str, shard_iterable: bool | None
) -> None:
    dataset: Any = loader.dataset
    if shard_iterable:
        loader.__dict__["dataset"] = TorchStreamShard(
            dataset, world_rank=rank, world_size=world_size, remainder=remainder
        )
    elif shard_iterable is None and rank == 0:
        warnings.warn(
            f"prepare_data_loader: {type(dataset).__name__} is an IterableDataset, so each of the {world_size} "
            "workers reads ALL of it, unless it divides itself. Pass shard_iterable=True to divide its stream "
            "among them, or shard_iterable=False if it divides itself",
            UserWarning,
            stacklevel=4,
        )
