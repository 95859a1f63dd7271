"""The fixtures of the tests on a small cluster."""

from clusters import cluster, fit, living_actors, no_leaks, placement_groups, scratch, start_cluster

__all__ = ["cluster", "fit", "living_actors", "no_leaks", "placement_groups", "scratch", "start_cluster"]
