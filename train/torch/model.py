"""Models: on the right device, in sync with the other workers, and back out of the wrapping."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..configs._deprecation import warn_deprecated
from ..errors import ConfigError, ConfigTypeError
from .amp import autocast_forward
from .device import get_device
from .ranks import rank_and_world_size

__all__ = ["prepare_model", "unwrap_model"]

logger = logging.getLogger(__name__)


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    *,
    wrap_ddp: bool | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device, and keep it in sync with those of the other workers.

    With one worker the model comes back unwrapped, so reach the bare model with
    :func:`unwrap_model`, never with ``.module``: the same line then works for any number of
    workers, and the keys of its state dict do not depend on it.

    A model without parameters to train (a frozen teacher, a metric) is moved but not wrapped:
    there are no gradients to average, and DDP refuses it. A model that is wrapped already
    comes back as it is.

    Args:
        model: The model. It is moved in place; on the CPU its parameters stay the same
            objects, so an optimizer made before still works.
        move_to_device: Whether to move it, or the device to move it to. With False, it stays
            where it is, also when its parts are on several devices.
        parallel_strategy: ``"ddp"`` (every worker holds the whole model), ``"fsdp"`` (each
            holds a part of the parameters), or None for no wrapping.
        parallel_strategy_kwargs: Passed to ``DistributedDataParallel`` or
            ``FullyShardedDataParallel``; they win over what is chosen here.
        wrap_ddp: Deprecated: ``parallel_strategy="ddp"`` or None.
        ddp_kwargs: Deprecated: ``parallel_strategy_kwargs``.

    Raises:
        ConfigTypeError: ``model`` is no ``nn.Module``, or an argument has the wrong type.
        ConfigError: An unknown strategy, or old and new arguments together.
        RuntimeError: Several workers, but no process group.

    Source:
        ``torch.nn.parallel.DistributedDataParallel`` and ``torch.distributed.fsdp``.
    """
    if not isinstance(model, nn.Module):
        hint = "; pass an object of the class, not the class" if isinstance(model, type) else ""
        raise ConfigTypeError(f"prepare_model needs a torch.nn.Module, got a {type(model).__name__}{hint}")
    if not isinstance(move_to_device, (bool, torch.device)):
        raise ConfigTypeError(
            f"prepare_model: move_to_device must be True, False or a torch.device, got {move_to_device!r}"
        )
    strategy, options = _strategy(parallel_strategy, parallel_strategy_kwargs, wrap_ddp, ddp_kwargs)
    if _is_wrapped(model):
        return model
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device is not False:
        model = model.to(device)
    autocast_forward(model, device)
    _, world_size = rank_and_world_size()
    if world_size == 1 or strategy is None:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        logger.info("%s has no parameters to train; it is not wrapped", type(model).__name__)
        return model
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"prepare_model: there are {world_size} workers but no torch process group; train with TorchTrainer, pass "
            "backend_config=TorchConfig() to DataParallelTrainer, or call prepare_model with parallel_strategy=None"
        )
    if strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, **options)
    return DistributedDataParallel(model, **{**_device_ids(model), **options})


def _strategy(
    strategy: object, options: object, wrap_ddp: object, ddp_kwargs: object
) -> tuple[str | None, Mapping[str, Any]]:
    if isinstance(strategy, bool):
        # The third argument was `wrap_ddp` once, and may come without its name.
        warn_deprecated(
            "prepare_model(..., wrap_ddp) is deprecated; use prepare_model(..., parallel_strategy='ddp') or None"
        )
        strategy = "ddp" if strategy else None
    if wrap_ddp is not None or ddp_kwargs is not None:
        if strategy != "ddp" or options is not None:
            raise ConfigError(
                "prepare_model: wrap_ddp and ddp_kwargs are the old names of parallel_strategy and "
                "parallel_strategy_kwargs; pass only the new ones"
            )
        warn_deprecated(
            "prepare_model(wrap_ddp, ddp_kwargs) is deprecated; "
            "use prepare_model(parallel_strategy, parallel_strategy_kwargs)"
        )
        strategy, options = (None if wrap_ddp is False else "ddp"), ddp_kwargs
    if strategy not in ("ddp", "fsdp", None):
        raise ConfigError(f"prepare_model: parallel_strategy must be 'ddp', 'fsdp' or None, got {strategy!r}")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigTypeError(
            f"prepare_model: parallel_strategy_kwargs must be a dict or None, got a {type(options).__name__}"
        )
    return strategy, options or {}


def _device_ids(model: nn.Module) -> dict[str, Any]:
    # From where the model is, not from where it should be: a model left on the CPU, or spread
    # over several devices, must be given none.
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type != "cpu":
        return {"device_ids": [device], "output_device": device}
    return {}


def _is_fsdp(model: nn.Module) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def _is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, (DistributedDataParallel, DataParallel)) or _is_fsdp(model)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model as it was before ``prepare_model`` and ``torch.compile``.

    Save ``unwrap_model(model).state_dict()``: its keys are those of the bare model for any
    number of workers, so a checkpoint of two workers loads with one, and into the bare model.

    A model under FSDP stays as it is: only FSDP itself can put the parts of its parameters
    together, and its state dict has the keys of the bare model already.

    Args:
        model: Any module, wrapped or not.
    """
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            # Where torch.compile keeps the module; its own name for it.
            model = inner
        else:
            return model
