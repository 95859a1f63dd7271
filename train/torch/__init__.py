"""``ray_lite.train.torch``: PyTorch on the workers of a run.

::

    def train_func(config):
        model = train.torch.prepare_model(Net())
        loader = train.torch.prepare_data_loader(DataLoader(dataset, batch_size=64, shuffle=True))
        ...

Every name loads on first use. The trainer and its settings need no torch in the driver's
process; the helpers for the train function import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .amp import accelerate, backward, prepare_optimizer
    from .backend import TorchBackend
    from .checkpoint import TorchCheckpoint
    from .config import TorchConfig
    from .data_loader import prepare_data_loader
    from .device import get_device, get_devices
    from .model import prepare_model, unwrap_model
    from .reproducibility import enable_reproducibility
    from .trainer import TorchTrainer

# Where each public name lives, relative to this package.
_HOMES = {
    "TorchTrainer": "trainer",
    "TorchConfig": "config",
    "TorchBackend": "backend",
    "TorchCheckpoint": "checkpoint",
    "prepare_model": "model",
    "unwrap_model": "model",
    "prepare_data_loader": "data_loader",
    "get_device": "device",
    "get_devices": "device",
    "enable_reproducibility": "reproducibility",
    "accelerate": "amp",
    "prepare_optimizer": "amp",
    "backward": "amp",
}

__all__ = [
    "TorchBackend",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "unwrap_model",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ModuleNotFoundError(
            f"train.torch.{name} needs PyTorch, which is not installed: pip install ray-lite-train[torch]",
            name=error.name,
        ) from error
    value = getattr(module, name)
    # Tracebacks, reprs and docs give the name that users import.
    value.__module__ = __name__
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
