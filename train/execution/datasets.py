"""Datasets on their way from the driver to the train function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..data.shards import make_shard
from ..data.sources import DataSource
from .messages import DatasetShipment

__all__ = ["pack_datasets", "shard_makers"]


def pack_datasets(
    sources: Mapping[str, DataSource], *, remainder: str, world_size: int, put: Callable[[Any], Any]
) -> dict[str, DatasetShipment]:
    """Make the datasets ready for the workers.

    Args:
        sources: What the trainer was given.
        remainder: ``DataConfig.remainder``.
        world_size: Ranks that will read, >= 1.
        put: Stores an object once for all ranks (``ray.put``), or leaves it as it is.
    """
    shipments: dict[str, DatasetShipment] = {}
    for name, given in sources.items():
        # A callable is evaluated here, once for this fit().
        source = given.load()
        parts = source.parts(world_size) if source.is_split else None
        shipments[name] = DatasetShipment(
            is_split=source.is_split,
            remainder=remainder,
            # In a list, or Ray would fetch the data itself into each call that mentions it.
            payload=None if parts is not None else [put(source.payload())],
            parts=None if parts is None else tuple(parts),
        )
    return shipments


def shard_makers(
    shipments: Mapping[str, DatasetShipment], *, world_rank: int, world_size: int, fetch: Callable[[Any], Any]
) -> dict[str, Callable[[], Any]]:
    """For each dataset, a function that makes this rank's shard when first asked.

    Args:
        shipments: From ``pack_datasets``.
        world_rank: This rank, in ``[0, world_size)``.
        world_size: Ranks that read, >= 1.
        fetch: Opens what ``put`` gave (``ray.get``).
    """

    def maker(name: str, shipment: DatasetShipment) -> Callable[[], Any]:
        def make() -> Any:
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
