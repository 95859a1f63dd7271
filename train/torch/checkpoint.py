"""``TorchCheckpoint``: a model in a checkpoint, in one file."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigTypeError, LegacyAPIError
from ..storage.checkpoint import Checkpoint
from .amp import plain_forward
from .model import unwrap_model

__all__ = ["TorchCheckpoint"]

_FILE = "model.pt"
_PREFIX = "module."


class TorchCheckpoint(Checkpoint):
    """A checkpoint that holds a model as ``model.pt``.

    A convenience of older code; ``torch.save`` and ``Checkpoint.from_directory`` say the same.
    To read the model of any checkpoint: ``TorchCheckpoint.from_checkpoint(c).get_model(model)``.
    """

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> TorchCheckpoint:
        """The same checkpoint, with :meth:`get_model`."""
        same = cls.__new__(cls)
        # All of it: the path alone would lose the storage options.
        same.__dict__.update(checkpoint.__dict__)
        return same

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: None = None) -> TorchCheckpoint:
        """A checkpoint of a state dict, in a new temporary folder that is left to the caller.

        The ``module.`` in front of the keys of a DDP model is taken away.

        Raises:
            ConfigTypeError: ``state_dict`` is no mapping.
            LegacyAPIError: A preprocessor was passed.
        """
        _refuse_preprocessor(preprocessor)
        if not isinstance(state_dict, Mapping):
            raise ConfigTypeError(
                f"TorchCheckpoint.from_state_dict needs a state dict, got a {type(state_dict).__name__}; "
                "for a whole model use from_model"
            )
        return cls._saved(_bare_keys(state_dict))

    @classmethod
    def from_model(cls, model: nn.Module, *, preprocessor: None = None) -> TorchCheckpoint:
        """A checkpoint of a whole model, pickled, in a new temporary folder that is left to the caller.

        DDP's wrapper is taken off. A pickle runs code when it is read, and breaks when the
        model's class moves: prefer :meth:`from_state_dict`.

        Raises:
            ConfigTypeError: ``model`` is no ``nn.Module``.
            LegacyAPIError: A preprocessor was passed.
        """
        _refuse_preprocessor(preprocessor)
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"TorchCheckpoint.from_model needs a torch.nn.Module, got a {type(model).__name__}")
        return cls._saved(plain_forward(unwrap_model(model)))

    @classmethod
    def _saved(cls, content: Any) -> TorchCheckpoint:
        folder = tempfile.mkdtemp(prefix="torch_checkpoint_")
        torch.save(content, os.path.join(folder, _FILE))
        return cls(folder)

    def get_model(self, model: nn.Module | None = None, *, weights_only: bool = True) -> nn.Module:
        """The model, on the CPU whatever device it was saved on.

        Args:
            model: Takes the state dict, in place; wrapped by ``prepare_model`` or not. Needed
                unless the checkpoint holds a whole model.
            weights_only: True reads tensors and plain values only. False also unpickles whole
                models, which runs code from the file: only for files you trust.

        Returns:
            ``model``, or the whole model that was saved.

        Raises:
            CheckpointError: There is no ``model.pt``, it cannot be read, or it holds a whole
                model and ``weights_only`` is True.
            ConfigTypeError: A state dict, and no model to put it into.
        """
        with self.as_directory() as folder:
            path = os.path.join(folder, _FILE)
            if not os.path.exists(path):
                raise CheckpointError(
                    f"{self.path} holds no {_FILE}, so it was not made by TorchCheckpoint; "
                    "read its files with as_directory()"
                )
            content = _load(path, self.path, weights_only)
        if isinstance(content, nn.Module):
            if model is not None:
                warnings.warn(
                    f"{self.path} holds a whole model; the model passed to get_model is not used",
                    UserWarning,
                    stacklevel=2,
                )
            return content
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(
                f"{self.path} holds a state dict: pass the model that takes it, get_model(model), "
                f"not {'nothing' if model is None else type(model).__name__}"
            )
        unwrap_model(model).load_state_dict(_bare_keys(content))
        return model


def _load(path: str, shown_path: str, weights_only: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not weights_only:
            return torch.load(path, map_location="cpu", weights_only=False)
        raise CheckpointError(
            f"{shown_path}: {_FILE} holds more than tensors and plain values, such as a whole model. Reading it runs "
            "code from the file; if you trust it, call get_model(weights_only=False)"
        ) from error


def _bare_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    if state_dict and all(key.startswith(_PREFIX) for key in state_dict):
        return {key[len(_PREFIX) :]: value for key, value in state_dict.items()}
    return dict(state_dict)


def _refuse_preprocessor(preprocessor: object) -> None:
    if preprocessor is not None:
        raise LegacyAPIError(
            "TorchCheckpoint(preprocessor=...) is not supported. Instead: keep what describes it in the metadata, "
            "checkpoint.update_metadata({...})"
        )
