"""``TorchConfig``: how the workers of a run find each other through ``torch.distributed``."""

from __future__ import annotations

import difflib
import math
import sys
from typing import Any

import attrs

from ..configs._options import choice, shown, to_float, with_option_hints
from ..errors import ConfigError, ConfigTypeError
from ..execution.backend import Backend, BackendConfig

__all__ = ["TorchConfig"]

# torch's own, and those of vendors' plug-ins that can be named before the plug-in is imported.
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "ccl", "hccl", "cncl", "mccl", "eccl", "smddp", "xla", "tpu_dist")


def _check_backend(_: Any, __: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigTypeError(f"TorchConfig.backend must be a string or None, got {shown(value)}")
    for part in value.split(","):
        # "cpu:gloo,cuda:nccl" gives one backend per kind of device.
        device, colon, name = part.rpartition(":")
        if colon and not device.strip():
            raise ConfigError(f'TorchConfig.backend must be "backend" or "device:backend,...", got {shown(value)}')
        known = {*_BACKENDS, *_registered_backends()}
        if name.strip() not in known:
            close = difflib.get_close_matches(name.strip().lower(), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; a plug-in's backend is known once it is imported"
            raise ConfigError(
                f"TorchConfig.backend must be None (nccl with GPUs, else gloo), one of {', '.join(sorted(known))}, "
                f'or "cpu:gloo,cuda:nccl", got {shown(value)}{hint}'
            )


def _registered_backends() -> list[str]:
    # torch is asked only where it is loaded anyway: a driver needs none.
    distributed = sys.modules.get("torch.distributed")
    registry = getattr(distributed, "Backend", None)
    return [str(name) for name in getattr(registry, "backend_list", ())]


def _check_timeout(_: Any, __: attrs.Attribute[Any], value: object) -> None:
    message = f"TorchConfig.timeout_s must be a finite number of seconds > 0, got {shown(value)}"
    if not isinstance(value, float):
        raise ConfigTypeError(message + "; write timedelta.total_seconds()" * hasattr(value, "total_seconds"))
    # Written so that NaN fails too.
    if not 0 < value < math.inf:
        raise ConfigError(message)


@with_option_hints()
@attrs.frozen(kw_only=True)
class TorchConfig(BackendConfig):
    """How the workers form a ``torch.distributed`` process group.

    The group is made for one worker too, before the train function starts, and is destroyed
    on every rank after it. The port is chosen by the kernel on rank 0's node and stays bound
    from then on, so runs on one machine never clash.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A value that is not allowed.
    """

    backend: str | None = attrs.field(default=None, validator=_check_backend)
    """None: ``"nccl"`` when the workers have GPUs, else ``"gloo"``. Otherwise a backend of torch
    (``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"`` ...)."""
    init_method: str = attrs.field(default="env", validator=choice("env", "tcp"))
    """``"env"`` also sets ``MASTER_ADDR`` and ``MASTER_PORT``, for libraries that read them;
    ``"tcp"`` leaves them alone."""
    timeout_s: float = attrs.field(default=1800.0, converter=to_float, validator=_check_timeout)
    """Seconds, > 0, that a collective waits for a rank before it raises."""

    @property
    def backend_cls(self) -> type[Backend]:
        """``TorchBackend``."""
        from .backend import TorchBackend

        return TorchBackend

    @property
    def preload_modules(self) -> tuple[str, ...]:
        """torch takes a second to import: long before the workers need it is the best time."""
        return ("torch", "torch.distributed")

    def resolve(self, use_gpu: bool) -> str:
        """The backend that is used: the one asked for, else ``"nccl"`` with GPUs and ``"gloo"`` without."""
        return self.backend or ("nccl" if use_gpu else "gloo")
