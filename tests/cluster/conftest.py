"""The fixtures of the tests on a small cluster."""

from clusters import cluster, fit, living_actors, no_leaks, placement_groups, scratch, start_cluster
from proofs import pytest_collection_modifyitems, pytest_configure

__all__ = [
    "cluster",
    "fit",
    "living_actors",
    "no_leaks",
    "placement_groups",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "scratch",
    "start_cluster",
]
