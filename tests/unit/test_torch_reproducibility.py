"""The same numbers in every run."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ray_lite.train.errors import ConfigError
from ray_lite.train.torch import enable_reproducibility


@pytest.fixture(autouse=True)
def _put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def numbers(seed):
    enable_reproducibility(seed)
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_seed_decides_all_generators():
    assert numbers(1) == numbers(1)
    assert all(a != b for a, b in zip(numbers(1), numbers(2), strict=True))


def test_torch_uses_deterministic_algorithms_only(monkeypatch):
    enable_reproducibility()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    enable_reproducibility()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_numpy_would_refuse_are_refused(seed):
    with pytest.raises(ConfigError, match=r"seed must be in \[0, 2\*\*32\)"):
        enable_reproducibility(seed)
