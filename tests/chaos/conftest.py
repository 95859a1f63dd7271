"""Faults on purpose, counted: ``make chaos`` runs the long form, ``make test`` a short one."""

import sys
from pathlib import Path

from clusters import cluster, fit, no_leaks, scratch
from proofs import pytest_collection_modifyitems, pytest_configure

# The small helpers of the cluster tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cluster"))

__all__ = ["cluster", "fit", "no_leaks", "pytest_collection_modifyitems", "pytest_configure", "scratch"]
