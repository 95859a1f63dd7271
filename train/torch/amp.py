"""``accelerate``, ``prepare_optimizer`` and ``backward``: the old way to mixed precision, on ``torch.amp``."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from ..configs._deprecation import warn_deprecated
from ..context.current import current_context
from ..errors import ConfigTypeError
from .device import get_device

__all__ = ["accelerate", "autocast_forward", "backward", "plain_forward", "prepare_optimizer"]

_ADVICE = (
    "use torch.autocast and torch.amp.GradScaler in the train function. "
    "See https://docs.pytorch.org/docs/stable/amp.html"
)


class _MixedPrecision:
    """What ``accelerate(amp=True)`` switches on, for one train function."""

    def __init__(self, owner: object, is_enabled: bool) -> None:
        self.owner = owner
        self.is_enabled = is_enabled
        device_type = get_device().type
        # float16 loses small gradients, so they are scaled; the CPU's bfloat16 has float32's range.
        self.dtype = torch.float16 if device_type == "cuda" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device_type, enabled=is_enabled and self.dtype is torch.float16)


# Belongs to the context that called `accelerate`, so that one run does not inherit the other's.
_mixed_precision: _MixedPrecision | None = None


def _current() -> _MixedPrecision | None:
    found = _mixed_precision
    return found if found is not None and found.owner is current_context() else None


def accelerate(amp: bool = False) -> None:
    """Switch mixed precision on for the models and optimizers that are prepared afterwards.

    Deprecated: native torch says the same in two lines and works in any order.

    Args:
        amp: Whether ``prepare_model`` runs the forward pass in float16 (GPU) or bfloat16 (CPU).

    Raises:
        RuntimeError: Called a second time in the same train function.
    """
    global _mixed_precision
    warn_deprecated(f"train.torch.accelerate is deprecated; {_ADVICE}")
    if not isinstance(amp, bool):
        raise ConfigTypeError(f"accelerate: amp must be True or False, got a {type(amp).__name__}")
    if _current() is not None:
        raise RuntimeError("train.torch.accelerate was called already; call it once, before the other helpers")
    _mixed_precision = _MixedPrecision(current_context(), amp)


class _AutocastForward:
    """The forward pass of one model, in mixed precision."""

    def __init__(self, forward: Any, device_type: str, dtype: torch.dtype) -> None:
        self._forward, self._device_type, self._dtype = forward, device_type, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            return self._forward(*args, **kwargs)


def autocast_forward(model: nn.Module, device: torch.device) -> None:
    """Make ``model`` run in mixed precision if ``accelerate(amp=True)`` was called."""
    mixed = _current()
    if mixed is None or not mixed.is_enabled or isinstance(model.__dict__.get("forward"), _AutocastForward):
        return
    # On the instance: the class, the attributes and the keys of the state dict stay the user's.
    model.__dict__["forward"] = _AutocastForward(model.forward, device.type, mixed.dtype)


def plain_forward(model: nn.Module) -> nn.Module:
    """``model``, or a shallow copy of it without mixed precision: that one can be pickled."""
    if not isinstance(model.__dict__.get("forward"), _AutocastForward):
        return model
    clone = object.__new__(type(model))
    clone.__dict__.update(model.__dict__)
    del clone.__dict__["forward"]
    return clone


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make ``optimizer.step()`` undo the scaling of gradients; returns the same object.

    So schedulers, ``zero_grad(set_to_none=...)`` and ``state_dict`` work as ever. Without
    ``accelerate(amp=True)``, or where gradients are not scaled (CPU), nothing changes.
    Deprecated, see :func:`accelerate`.

    Raises:
        ConfigTypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
    """
    warn_deprecated(f"train.torch.prepare_optimizer is deprecated; {_ADVICE}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigTypeError(f"prepare_optimizer needs a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    mixed = _current()
    if mixed is None or not mixed.scaler.is_enabled() or "step" in optimizer.__dict__:
        return optimizer
    scaler, original = mixed.scaler, optimizer.step
    is_inside = False

    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        # The scaler calls step() of the optimizer it is given, which is this function again.
        if is_inside:
            return original(*args, **kwargs)
        is_inside = True
        try:
            result = scaler.step(optimizer, *args, **kwargs)
        finally:
            is_inside = False
        scaler.update()
        return result

    # A bound method, because LR schedulers look for its __func__.
    optimizer.__dict__["step"] = types.MethodType(step, optimizer)
    return optimizer


def backward(tensor: torch.Tensor) -> None:
    """``tensor.backward()``, with the gradients scaled if ``accelerate(amp=True)`` asks for it.

    Deprecated, see :func:`accelerate`.

    Args:
        tensor: The loss, shape ``()``.
    """
    warn_deprecated(f"train.torch.backward is deprecated; {_ADVICE}")
    mixed = _current()
    loss = tensor if mixed is None else mixed.scaler.scale(tensor)
    loss.backward()
