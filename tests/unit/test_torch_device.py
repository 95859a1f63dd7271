"""The device of a worker is a position among the visible GPUs, never the local rank."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch_workers import make_context

from ray_lite.train.context.current import set_context
from ray_lite.train.torch import get_device, get_devices
from ray_lite.train.torch.visible_devices import device_indices, shared_visible_devices, visible_devices_variable

LONG = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-1111aaaa-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("assigned", "visible", "indices"),
    [
        (["3"], "3", [0]),
        (["3"], "0,1,2,3", [3]),
        (["1", "2"], "2,1", [1, 0]),
        (["1", "2"], " 2, 1 ", [1, 0]),
        (["10", "2"], "0,1,10,2", [2, 3]),
        (["3"], None, [3]),
        ([LONG], f"{OTHER},{LONG}", [1]),
        ([LONG], "GPU-1111,GPU-8932", [1]),
        ([MIG], MIG, [0]),
        (["3"], LONG, [0]),
        (["0", "1"], f"{LONG},{OTHER}", [0, 1]),
    ],
)
def test_index_is_the_position_of_the_assigned_id(assigned, visible, indices):
    """Case 73."""
    assert device_indices(assigned, visible) == indices


@pytest.mark.parametrize(
    ("assigned", "visible"),
    [(["3"], "0,1"), (["3"], ""), ([LONG], None), (["3"], f"{LONG},{OTHER}"), ([LONG], "GPU-89,GPU-8932f")],
)
def test_an_id_that_is_not_visible_is_an_error_with_both_lists(assigned, visible):
    with pytest.raises(ValueError, match=f"GPUs assigned are {assigned[0]}"):
        device_indices(assigned, visible)


@pytest.mark.parametrize(
    ("env", "is_rocm", "name"),
    [
        ({}, False, "CUDA_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0"}, False, "CUDA_VISIBLE_DEVICES"),
        ({}, True, "HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True, "CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, True, "ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, True, "HIP_VISIBLE_DEVICES"),
    ],
)
def test_the_variable_is_the_one_of_the_vendor(env, is_rocm, name):
    assert visible_devices_variable(env, is_rocm=is_rocm) == name


@pytest.mark.parametrize(
    ("ids_of_ranks", "visible", "shared"),
    [
        ([["10"], ["2"]], "2", "2,10"),
        ([["0", "1"], ["2", "3"]], "0,1", "0,1,2,3"),
        ([["0"], ["0"]], "0", "0"),
        ([[LONG], [OTHER]], LONG, f"{LONG},{OTHER}"),
        ([["0"], ["1"]], None, None),
        ([["0"], ["1"]], "0,1,2,3", None),
    ],
)
def test_workers_of_a_node_see_each_others_gpus_in_numerical_order(ids_of_ranks, visible, shared):
    assert shared_visible_devices(ids_of_ranks, visible) == shared


@pytest.fixture
def in_context():
    yield lambda **options: set_context(make_context(**options))
    set_context(None)


@pytest.fixture
def four_gpus(monkeypatch):
    """No GPU is needed to know its number, but torch must say that there are some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_without_gpus_it_is_the_cpu_also_on_a_machine_that_has_some(in_context, four_gpus):
    in_context(resources={"CPU": 1.0})
    assert get_devices() == [torch.device("cpu")]


def test_devices_come_in_the_order_of_the_assigned_ids(in_context, four_gpus):
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    in_context(resources={"GPU": 2.0}, gpu_ids=("1", "2"))
    assert get_devices() == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert get_device() == torch.device("cuda:1")


def test_half_a_gpu_is_a_gpu(in_context, four_gpus):
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "3")
    in_context(world_rank=1, world_size=2, resources={"GPU": 0.5}, gpu_ids=("3",))
    assert get_device() == torch.device("cuda:0")


def test_local_mode_uses_the_current_gpu(in_context, four_gpus):
    in_context(resources={"GPU": 1.0})
    assert get_device() == torch.device("cuda:2")


def test_outside_a_train_function_it_is_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_devices() == [torch.device("cpu")]


def test_a_gpu_that_torch_cannot_use_is_an_error(in_context, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    in_context(resources={"GPU": 1.0}, gpu_ids=("3",))
    with pytest.raises(RuntimeError, match=r"this worker has GPU 3, but torch .* finds no usable CUDA device"):
        get_device()


def test_a_changed_variable_is_named(in_context, four_gpus):
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    in_context(resources={"GPU": 1.0}, gpu_ids=("3",))
    with pytest.raises(RuntimeError, match=r"the visible ones are 0,1 .*was CUDA_VISIBLE_DEVICES changed"):
        get_device()
