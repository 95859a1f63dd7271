"""Where the address of the cluster of this machine is looked for: where ``ray start`` writes it."""

from __future__ import annotations

import sys

import pytest

from ray_lite.train.execution.cluster import _address_file


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere Ray does not look at TMPDIR")
@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": "/scratch"}, "/scratch"),
        ({"TMPDIR": "/scratch", "RAY_TMPDIR": "/ray"}, "/ray"),
    ],
)
def test_the_address_is_where_ray_writes_it(monkeypatch, environment, folder):
    """With TMPDIR, as on many HPC machines, the cluster was not found and a second one started."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _address_file() == f"{folder}/ray/ray_current_cluster"
