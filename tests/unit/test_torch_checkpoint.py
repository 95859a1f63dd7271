"""``TorchCheckpoint``: a model in one file, read on the CPU and without running its code."""

from __future__ import annotations

import os
import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from ray_lite.train import Checkpoint
from ray_lite.train.errors import CheckpointError, ConfigTypeError, LegacyAPIError
from ray_lite.train.torch import TorchCheckpoint


def weights(model):
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_comes_back_into_the_bare_model(prefix):
    model = nn.Linear(2, 1)
    saved = TorchCheckpoint.from_state_dict({prefix + name: value for name, value in model.state_dict().items()})
    assert isinstance(saved, Checkpoint)
    fresh = nn.Linear(2, 1)
    assert saved.get_model(fresh) is fresh
    assert weights(fresh) == weights(model)


def test_saving_leaves_the_users_dict_alone():
    state = {"module.weight": torch.ones(1, 2), "module.bias": torch.ones(1)}
    TorchCheckpoint.from_state_dict(state)
    assert list(state) == ["module.weight", "module.bias"]


def test_any_checkpoint_can_be_read(tmp_path):
    model = nn.Linear(2, 1)
    folder = tmp_path / "reported"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.pt")
    reported = Checkpoint.from_directory(folder)
    read = TorchCheckpoint.from_checkpoint(reported)
    assert read.path == reported.path
    assert weights(read.get_model(nn.Linear(2, 1))) == weights(model)


def test_a_whole_model_needs_an_explicit_yes():
    """Reading it runs code from the file."""
    model = nn.Linear(2, 1)
    saved = TorchCheckpoint.from_model(nn.DataParallel(model))
    with pytest.raises(CheckpointError, match=r"Reading it runs code .* get_model\(weights_only=False\)"):
        saved.get_model()
    whole = saved.get_model(weights_only=False)
    assert type(whole) is nn.Linear
    assert weights(whole) == weights(model)
    with pytest.warns(UserWarning, match="the model passed to get_model is not used"):
        saved.get_model(nn.Linear(2, 1), weights_only=False)


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("trap_was_sprung",))


def test_a_file_that_would_run_code_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    torch.save({"weight": Trap()}, tmp_path / "folder" / "model.pt")
    with pytest.raises(CheckpointError):
        TorchCheckpoint(tmp_path / "folder").get_model(nn.Linear(2, 1))
    assert not (tmp_path / "trap_was_sprung").exists()


def test_tensors_of_a_gpu_are_read_on_the_cpu(tmp_path, monkeypatch):
    """Case 95: the driver has no GPU. Storages are tagged "cuda:0" here as they are there."""
    (tmp_path / "folder").mkdir()
    model = nn.Linear(2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(model.state_dict(), tmp_path / "folder" / "model.pt")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "folder" / "model.pt", weights_only=True)
    assert weights(TorchCheckpoint(tmp_path / "folder").get_model(nn.Linear(2, 1))) == weights(model)


def test_what_cannot_be_read_says_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no model\.pt, so it was not made by TorchCheckpoint"):
        TorchCheckpoint(tmp_path / "empty").get_model()
    saved = TorchCheckpoint.from_state_dict(nn.Linear(2, 1).state_dict())
    with pytest.raises(ConfigTypeError, match=r"holds a state dict: pass the model that takes it, get_model\(model\)"):
        saved.get_model()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TorchCheckpoint.from_state_dict(nn.Linear(2, 1)), ConfigTypeError, "for a whole model use from_model"),
        (lambda: TorchCheckpoint.from_model({}), ConfigTypeError, r"needs a torch\.nn\.Module, got a dict"),
        (lambda: TorchCheckpoint.from_model(nn.ReLU(), preprocessor=1), LegacyAPIError, "update_metadata"),
        (lambda: TorchCheckpoint.from_state_dict({}, preprocessor=1), LegacyAPIError, "not supported"),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_it_travels():
    saved = TorchCheckpoint.from_state_dict(nn.Linear(2, 1).state_dict())
    assert pickle.loads(pickle.dumps(saved)) == saved
