"""The same numbers in every run."""

from __future__ import annotations

import importlib.util
import os
import random

import torch

from ..errors import ConfigError

__all__ = ["enable_reproducibility"]


def enable_reproducibility(seed: int = 0) -> None:
    """Seed every random generator and make torch use deterministic algorithms only.

    Call it first in the train function, before the GPU is used. It may cost speed, and torch
    raises where an operation has no deterministic version. The workers of a DataLoader are
    seeded from torch's generator by torch itself.

    Every rank gets the same seed, so that models start equal; pass ``seed + rank`` where the
    ranks must draw different numbers, for augmentations say.

    Args:
        seed: For ``torch``, ``random`` and, where it is installed, ``numpy``; in ``[0, 2**32)``.

    Raises:
        ConfigError: ``seed`` is outside that range.

    Source:
        https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"enable_reproducibility: seed must be in [0, 2**32), got {seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed)
    # Read by cuBLAS when it starts; without it, deterministic matrix products raise on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
