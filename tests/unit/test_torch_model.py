"""Models: wrapped when there is something to keep in sync, and their bare selves when saved."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_workers import ProcessWorkers, make_context

from ray_lite.train.context.current import set_context
from ray_lite.train.errors import ConfigError, ConfigTypeError, RayLiteDeprecationWarning
from ray_lite.train.torch import TorchBackend, TorchConfig, prepare_model, unwrap_model


@pytest.fixture(autouse=True)
def _no_context_afterwards():
    yield
    set_context(None)


@pytest.fixture(scope="module")
def two_workers():
    with ProcessWorkers(2) as workers:
        config = TorchConfig(timeout_s=30)
        TorchBackend().on_start(workers, config)
        yield workers
        TorchBackend().on_shutdown(workers, config)


def train_one_step(wrap):
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    bare = nn.Linear(2, 1)
    # Made before: the parameters must stay the same objects.
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = prepare_model(bare, **wrap)
    assert prepare_model(model, **wrap) is model
    rank = torch.distributed.get_rank()
    model(torch.full((4, 2), float(rank))).sum().backward()
    optimizer.step()
    assert unwrap_model(model) is bare
    return type(model), {name: value.tolist() for name, value in unwrap_model(model).state_dict().items()}


def test_two_workers_train_one_model(two_workers):
    (kind, first), (_, second) = two_workers.execute(train_one_step, {})
    assert kind is DistributedDataParallel
    assert first == second


def test_keys_do_not_depend_on_the_number_of_workers(two_workers):
    """Case 91: a checkpoint of two workers loads with one, and into the bare model."""
    _, state = two_workers.execute(train_one_step, {})[0]
    alone = prepare_model(nn.Linear(2, 1))
    assert type(alone) is nn.Linear
    assert state.keys() == unwrap_model(alone).state_dict().keys() == nn.Linear(2, 1).state_dict().keys()
    unwrap_model(alone).load_state_dict({name: torch.tensor(value) for name, value in state.items()})


def test_without_a_strategy_nothing_is_wrapped(two_workers):
    (kind, first), (_, second) = two_workers.execute(train_one_step, {"parallel_strategy": None})
    assert kind is nn.Linear
    assert first != second


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


def wrap_special_models():
    kinds = [
        type(prepare_model(model)).__name__
        for model in (nn.Linear(2, 2).requires_grad_(False), nn.ReLU(), nn.BatchNorm1d(2))
    ]
    model = prepare_model(Branches(), parallel_strategy_kwargs={"find_unused_parameters": True, "device_ids": None})
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    return kinds


def test_a_model_with_nothing_to_train_is_not_wrapped(two_workers):
    """Case 92: DDP refuses it."""
    assert two_workers.execute(wrap_special_models) == [["Linear", "ReLU", "DistributedDataParallel"]] * 2


def wrap_fsdp():
    model = prepare_model(nn.Linear(4, 4), parallel_strategy="fsdp")
    return type(model).__name__, type(unwrap_model(model)).__name__


def test_fsdp_is_kept_on_by_unwrap(two_workers):
    """Only FSDP can put its parameters together. Without a GPU, torch's own error says what is missing."""
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="FSDP needs a non-CPU accelerator device"):
            two_workers.execute(wrap_fsdp)
        return
    assert two_workers.execute(wrap_fsdp) == [("FullyShardedDataParallel", "FullyShardedDataParallel")] * 2


def test_compiled_models_are_unwrapped_too():
    bare = nn.Linear(2, 1)
    assert unwrap_model(torch.compile(bare, backend="eager")) is bare
    assert unwrap_model(nn.DataParallel(bare)) is bare


def test_several_workers_without_a_process_group_are_an_error():
    set_context(make_context(0, 2))
    with pytest.raises(RuntimeError, match="there are 2 workers but no torch process group; train with TorchTrainer"):
        prepare_model(nn.Linear(2, 1))


def test_outside_a_train_function_it_is_one_worker():
    model = nn.Linear(2, 1)
    assert prepare_model(model) is model


def test_a_device_may_be_named():
    assert prepare_model(nn.Linear(2, 1), torch.device("meta")).weight.device.type == "meta"
    assert prepare_model(nn.Linear(2, 1, device="meta"), False).weight.device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("not a model",), ConfigTypeError, r"needs a torch\.nn\.Module, got a str"),
        ((nn.Linear,), ConfigTypeError, "pass an object of the class, not the class"),
        ((nn.ReLU(), "cuda"), ConfigTypeError, "move_to_device must be True, False or a torch.device, got 'cuda'"),
        ((nn.ReLU(), True, "nonsense"), ConfigError, "must be 'ddp', 'fsdp' or None, got 'nonsense'"),
        ((nn.ReLU(), True, "ddp", [1]), ConfigTypeError, "parallel_strategy_kwargs must be a dict or None, got a list"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        prepare_model(*arguments)


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(prepare_model, wrap_ddp=False),
        functools.partial(prepare_model, ddp_kwargs={}),
        lambda model: prepare_model(model, True, False),
    ],
)
def test_old_names_work_with_a_warning(call):
    with pytest.warns(RayLiteDeprecationWarning, match="parallel_strategy") as seen:
        call(nn.Linear(2, 1))
    assert len(seen) == 1


@pytest.mark.parametrize("new", [{"parallel_strategy": None}, {"parallel_strategy_kwargs": {}}])
def test_old_and_new_names_together_are_refused(new):
    with pytest.raises(ConfigError, match="pass only the new ones"):
        prepare_model(nn.Linear(2, 1), wrap_ddp=True, **new)
