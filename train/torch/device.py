"""The device of this worker."""

from __future__ import annotations

import os

import torch

from ..context.current import current_context
from .visible_devices import device_indices, visible_devices_variable

__all__ = ["get_device", "get_devices"]


def get_devices() -> list[torch.device]:
    """The devices of this worker, one per GPU assigned to it, in Ray's order; ``[cpu]`` without GPUs.

    The numbers are positions among the GPUs that this process sees, not local ranks: a worker
    that sees one GPU calls it ``cuda:0`` whatever its rank.

    In local mode, and outside a train function, it is torch's current CUDA device if the run
    asks for GPUs (outside: if there is one), else the CPU.

    Raises:
        RuntimeError: GPUs were assigned that torch cannot use: it was built without CUDA, the
            driver is missing, or ``CUDA_VISIBLE_DEVICES`` was changed to exclude them.
    """
    context = current_context()
    if context is None:
        return [_current_cuda() if torch.cuda.is_available() else torch.device("cpu")]
    assigned = context.get_assigned_gpu_ids()
    if not assigned and not context.get_resources().get("GPU", 0.0) > 0:
        return [torch.device("cpu")]
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"this worker has GPU {', '.join(assigned) or 'resources'}, but torch {torch.__version__} finds no usable "
            "CUDA device; install a CUDA build of torch that fits the driver, or set use_gpu=False"
        )
    if not assigned:
        return [_current_cuda()]
    variable = visible_devices_variable(os.environ, is_rocm=torch.version.hip is not None)
    try:
        indices = device_indices(assigned, os.environ.get(variable))
    except ValueError as error:
        raise RuntimeError(f"{error} ({variable}); was {variable} changed in this worker?") from None
    return [torch.device("cuda", index) for index in indices]


def get_device() -> torch.device:
    """The first device of this worker; see :func:`get_devices` for its number and for the errors."""
    return get_devices()[0]


def _current_cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
