"""Datasets on their way from the driver to the train function."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ..data.shards import make_shard
from ..data.sources import DataSource
from ..errors import ConfigError
from .messages import DatasetShipment

__all__ = ["SealedSource", "divide", "pack_datasets", "reads_by_tasks", "release", "shard_makers"]


@attrs.frozen(repr=False)
class SealedSource:
    """A source that travels as bytes, and is opened by whom it was sent to.

    Ray opens what arrives in a thread of its own; a dataset that imports its library there, or
    asks Ray for more, would hold up everything else, or wait for itself.

    Attributes:
        content: The source; its pickle, once it has travelled.
    """

    content: DataSource | bytes

    def open(self) -> DataSource:
        """The source: the same one as long as it has not travelled, else a new one in each call."""
        if isinstance(self.content, DataSource):
            return self.content
        source: DataSource = pickle.loads(self.content)
        return source

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.content, bytes):
            return SealedSource, (self.content,)
        import ray.cloudpickle as cloudpickle

        try:
            # Now, while Ray pickles, and not before: so Ray sees which of its objects the dataset
            # refers to, and keeps them for as long as this.
            return SealedSource, (cloudpickle.dumps(self.content),)
        # What an object holds may refuse to be pickled with any error at all.
        except Exception as error:
            raise ConfigError(
                f"dataset {self.content.name!r} splits itself, and cannot be pickled for the process that splits it "
                f"in each attempt: {type(error).__name__}: {error}; open files, locks and connections in its methods "
                "instead of keeping them"
            ) from error


def pack_datasets(
    sources: Mapping[str, DataSource], *, remainder: str, put: Callable[[Any], Any]
) -> dict[str, DatasetShipment]:
    """Make the datasets ready for the way.

    Args:
        sources: What the trainer was given.
        remainder: ``DataConfig.remainder``.
        put: Stores an object once for all ranks (``ray.put``), or leaves it as it is.

    Raises:
        ConfigError: A function returned no dataset, or a dataset that splits itself cannot be pickled.
    """
    shipments: dict[str, DatasetShipment] = {}
    for name, given in sources.items():
        # A callable is evaluated here, once for this fit().
        source = given.load()
        # In lists, or Ray would fetch the data itself into each call that mentions it.
        shipments[name] = DatasetShipment(
            is_split=source.is_split,
            remainder=remainder,
            payload=None if source.splits_itself else [put(source.payload())],
            source=[put(SealedSource(source))] if source.splits_itself else None,
        )
    return shipments


def divide(
    shipments: Mapping[str, DatasetShipment],
    *,
    world_size: int,
    node_ids: Sequence[str] = (),
    fetch: Callable[[Any], Any],
) -> dict[str, DatasetShipment]:
    """Let the datasets that split themselves do so, for one attempt.

    Each attempt has parts of its own: another may have another world size, and has left the old
    parts half read. It may take long, and runs code of the user's: not for an event loop.

    Args:
        shipments: From ``pack_datasets``.
        world_size: Ranks of the attempt, >= 1.
        node_ids: The node of each rank, by world rank, so that data can be sent where it lies; empty without nodes.
        fetch: Opens what ``put`` gave.

    Returns:
        All shipments, with ``world_size`` parts in those that were divided. ``release`` ends them.

    Raises:
        ConfigError: A dataset could not be split; the text names it.
    """
    divided: dict[str, DatasetShipment] = {}
    try:
        for name, shipment in shipments.items():
            if shipment.source is not None:
                parts = _split(name, shipment, world_size, node_ids, fetch)
                shipment = attrs.evolve(shipment, source=None, parts=tuple(parts))
            divided[name] = shipment
    except BaseException:
        release(divided)
        raise
    return divided


def _split(
    name: str, shipment: DatasetShipment, world_size: int, node_ids: Sequence[str], fetch: Callable[[Any], Any]
) -> list[Any]:
    try:
        parts = fetch(shipment.source[0]).open().parts(world_size, node_ids=node_ids)
    except ConfigError:
        raise
    # The user's own split(), or a library that is not there: whatever it is, it must say which dataset.
    except Exception as error:
        raise ConfigError(
            f"dataset {name!r} could not be split among {world_size} workers: {type(error).__name__}: {error}"
        ) from error
    assert parts is not None
    return list(parts)


def reads_by_tasks(shipment: DatasetShipment) -> bool:
    """Whether the parts of a divided dataset come from tasks that need CPUs of their own: those of Ray Data do."""
    return shipment.parts is not None and type(shipment.parts[0]).__module__.startswith("ray.data")


def release(shipments: Mapping[str, DatasetShipment]) -> None:
    """End what runs for the parts of an attempt that is over; may be called again.

    The parts of Ray Data come from an actor of this process, which reads ahead on the CPUs of the
    cluster. Ray ends it when nobody refers to it any more: at some time, since the workers that are
    kept and the traces of exceptions do.

    Args:
        shipments: From ``divide``.
    """
    for shipment in shipments.values():
        # All parts of a dataset have the same one. Ray Train takes hold of it in this way too.
        coordinator = getattr(shipment.parts[0], "_coord_actor", None) if shipment.parts else None
        if coordinator is None:
            continue
        import ray

        # A train function that ran in this process may have left the cluster.
        if isinstance(coordinator, ray.actor.ActorHandle) and ray.is_initialized():
            ray.kill(coordinator, no_restart=True)


def shard_makers(
    shipments: Mapping[str, DatasetShipment], *, world_rank: int, world_size: int, fetch: Callable[[Any], Any]
) -> dict[str, Callable[[], Any]]:
    """For each dataset, a function that makes this rank's shard when first asked.

    Args:
        shipments: From ``divide``.
        world_rank: This rank, in ``[0, world_size)``.
        world_size: Ranks that read, >= 1.
        fetch: Opens what ``put`` gave (``ray.get``).
    """

    def maker(name: str, shipment: DatasetShipment) -> Callable[[], Any]:
        def make() -> Any:
            assert shipment.source is None, f"dataset {name!r} was not divided"
            if shipment.parts is not None:
                return shipment.parts[world_rank]
            return make_shard(
                fetch(shipment.payload[0]),
                is_split=shipment.is_split,
                remainder=shipment.remainder,
                world_rank=world_rank,
                world_size=world_size,
                name=name,
            )

        return make

    return {name: maker(name, shipment) for name, shipment in shipments.items()}
