"""``TorchTrainer`` is a ``DataParallelTrainer`` with a torch config."""

from __future__ import annotations

import inspect

import pytest

from ray_lite import train
from ray_lite.train import DataParallelTrainer
from ray_lite.train.errors import ConfigTypeError
from ray_lite.train.torch import TorchConfig, TorchTrainer


def nothing():
    return None


def test_it_needs_no_import_of_its_own():
    assert train.torch.TorchTrainer is TorchTrainer


def test_a_torch_config_is_there_by_default():
    assert TorchTrainer(nothing).backend_config == TorchConfig()
    config = TorchConfig(backend="gloo", timeout_s=5)
    assert TorchTrainer(nothing, torch_config=config).backend_config is config


@pytest.mark.parametrize("config", [{"backend": "gloo"}, "gloo", TorchConfig])
def test_torch_config_must_be_one(config):
    with pytest.raises(ConfigTypeError, match=r"TorchTrainer\(torch_config\) must be a ray_lite\.train"):
        TorchTrainer(nothing, torch_config=config)


def test_its_options_are_those_of_the_other_trainer():
    """A new option of DataParallelTrainer must not be forgotten here."""
    ours = dict(inspect.signature(TorchTrainer).parameters)
    theirs = dict(inspect.signature(DataParallelTrainer).parameters)
    assert ours.pop("torch_config").default is None
    assert theirs.pop("backend_config").default is None
    assert ours == theirs
