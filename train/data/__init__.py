"""Datasets: what a trainer accepts, and the part of it that each worker gets."""

from __future__ import annotations

from .partition import shard_indices
from .shards import make_shard
from .sources import DataSource, check_datasets

__all__ = ["DataSource", "check_datasets", "make_shard", "shard_indices"]
