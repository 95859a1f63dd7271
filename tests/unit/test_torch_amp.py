"""The old helpers for mixed precision, kept thin."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch_workers import make_context

from ray_lite.train.context.current import set_context
from ray_lite.train.errors import ConfigTypeError, RayLiteDeprecationWarning
from ray_lite.train.torch import TorchCheckpoint, accelerate, amp, backward, prepare_model, prepare_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::ray_lite.train.errors.RayLiteDeprecationWarning")


@pytest.fixture(autouse=True)
def in_train_function():
    set_context(make_context())
    yield
    set_context(None)
    amp._mixed_precision = None


def test_models_run_in_bfloat16_on_the_cpu():
    accelerate(amp=True)
    model = prepare_model(nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert list(model.state_dict()) == ["weight", "bias"]
    assert type(model) is nn.Linear


def test_without_amp_nothing_changes():
    accelerate()
    model = prepare_model(nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert prepare_optimizer(optimizer) is optimizer
    assert "step" not in vars(optimizer)


def test_a_model_in_mixed_precision_can_still_be_saved(tmp_path):
    accelerate(amp=True)
    model = prepare_model(nn.Linear(2, 1))
    saved = TorchCheckpoint.from_model(model).get_model(weights_only=False)
    assert saved(torch.ones(1, 2)).dtype == torch.float32


def test_gradients_are_scaled_and_the_optimizer_undoes_it():
    """The same object comes back, so schedulers and ``zero_grad(set_to_none)`` work as ever."""
    accelerate(amp=True)
    mixed = amp._mixed_precision
    # float16 is for GPUs; the scaler works on the CPU as well.
    mixed.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = prepare_optimizer(torch.optim.SGD([weight], lr=0.5))
    assert prepare_optimizer(optimizer) is optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward((2 * weight).sum())
    assert weight.grad.item() == 16.0
    optimizer.step()
    scheduler.step()
    assert weight.item() == 0.0
    assert mixed.scaler.get_scale() == 16.0
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None
    # A step with infinite gradients is skipped.
    backward((weight * float("inf")).sum())
    optimizer.step()
    assert weight.item() == 0.0


def test_each_train_function_decides_anew():
    """The process may be used for the next attempt, or be the driver's in local mode."""
    accelerate(amp=True)
    with pytest.raises(RuntimeError, match="accelerate was called already"):
        accelerate()
    set_context(make_context())
    assert prepare_model(nn.Linear(2, 1))(torch.ones(1, 2)).dtype == torch.float32
    accelerate(amp=True)


@pytest.mark.filterwarnings("error")
def test_each_helper_names_the_native_way():
    loss = nn.Linear(1, 1)(torch.ones(1, 1)).sum()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for call in (accelerate, lambda: prepare_optimizer(optimizer), lambda: backward(loss)):
        with pytest.warns(RayLiteDeprecationWarning, match=r"use torch\.autocast and torch\.amp\.GradScaler") as seen:
            call()
        assert seen[0].filename == __file__


def test_wrong_types_are_refused():
    with pytest.raises(ConfigTypeError, match="amp must be True or False, got a str"):
        accelerate("yes")
    with pytest.raises(ConfigTypeError, match=r"needs a torch\.optim\.Optimizer, got a str"):
        prepare_optimizer("sgd")


def test_plain_forward_shares_the_parameters():
    accelerate(amp=True)
    model = prepare_model(nn.Linear(2, 1))
    plain = amp.plain_forward(model)
    assert plain.weight is model.weight
    pickle.dumps(plain)
