"""What the tests of old code share."""

from __future__ import annotations

import pytest

from ray_lite import train
from ray_lite.air import _warn


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    """Each test is told about each old name anew, as a new process would be."""
    monkeypatch.setattr(_warn, "_seen", set())
    monkeypatch.setattr(_warn, "_seen_subjects", set())


@pytest.fixture
def fit(tmp_path):
    """Run a train function in this process: the same context, reports and storage as on a cluster."""

    def run(function, **options):
        trainer = train.DataParallelTrainer(
            function,
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(name="old", storage_path=tmp_path),
            **options,
        )
        return trainer.fit()

    return run
