"""``TorchConfig`` checks itself, and needs no torch for it."""

from __future__ import annotations

import datetime
import pickle
import subprocess
import sys

import attrs
import pytest

from ray_lite.train.errors import ConfigError, ConfigTypeError
from ray_lite.train.torch import TorchConfig


def test_defaults_are_ray_trains():
    config = TorchConfig()
    assert (config.backend, config.init_method, config.timeout_s) == (None, "env", 1800.0)


@pytest.mark.parametrize(
    ("backend", "use_gpu", "resolved"),
    [(None, True, "nccl"), (None, False, "gloo"), ("gloo", True, "gloo"), ("cpu:gloo,cuda:nccl", True, None)],
)
def test_backend_is_chosen_by_the_config(backend, use_gpu, resolved):
    assert TorchConfig(backend=backend).resolve(use_gpu) == (resolved or backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "glooo"}, r"TorchConfig\.backend must be .*got 'glooo'.*did you mean 'gloo'\?"),
        ({"backend": "cuda:nccl,cpu:glo"}, "did you mean 'gloo'"),
        ({"backend": ":gloo"}, '"backend" or "device:backend,..."'),
        ({"backend": ""}, "TorchConfig.backend must be None"),
        ({"init_method": "foo"}, r"TorchConfig\.init_method must be 'env' or 'tcp', got 'foo'"),
        ({"init_method": "tcp://10.0.0.1:29500"}, "must be 'env' or 'tcp'"),
        ({"timeout_s": 0}, r"TorchConfig\.timeout_s must be a finite number of seconds > 0, got 0"),
        ({"timeout_s": -1}, "seconds > 0, got -1"),
        ({"timeout_s": float("nan")}, "seconds > 0, got nan"),
        ({"timeout_s": float("inf")}, "seconds > 0, got inf"),
    ],
)
def test_values_no_run_could_use_are_refused_when_built(options, message):
    with pytest.raises(ConfigError, match=message):
        TorchConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": 3}, "backend must be a string or None, got 3"),
        ({"timeout_s": "60"}, "timeout_s must be"),
        ({"timeout_s": True}, "timeout_s must be"),
        ({"timeout_s": datetime.timedelta(minutes=1)}, r"write timedelta\.total_seconds\(\)"),
        ({"timeout": 60}, "TorchConfig has no option 'timeout'; did you mean 'timeout_s'"),
    ],
)
def test_wrong_types_and_names_are_refused_when_built(options, message):
    with pytest.raises(ConfigTypeError, match=message):
        TorchConfig(**options)


def test_a_plugins_backend_is_known_once_it_is_registered():
    dist = pytest.importorskip("torch.distributed")
    with pytest.raises(ConfigError, match="once it is imported"):
        TorchConfig(backend="zebra")
    dist.Backend.register_backend("zebra", lambda *_: None, devices=["cpu"])
    try:
        assert TorchConfig(backend="zebra").backend == "zebra"
    finally:
        dist.Backend.backend_list.remove("zebra")


def test_configs_are_values():
    config = TorchConfig(backend="gloo", timeout_s=5)
    assert pickle.loads(pickle.dumps(config)) == config
    assert attrs.evolve(config, timeout_s=6) == TorchConfig(backend="gloo", timeout_s=6.0)
    assert config.to_dict() == {"backend": "gloo", "init_method": "env", "timeout_s": 5.0}
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.timeout_s = 1


def test_the_driver_and_the_controller_need_no_torch():
    """They build the config and run the backend's hooks; importing torch would cost them a second each."""
    code = """
import sys
from ray_lite import train
from ray_lite.train.torch import TorchConfig, TorchBackend
config = TorchConfig()
assert config.backend_cls is TorchBackend, config.backend_cls
assert config.preload_modules[0] == "torch"
assert train.torch.TorchConfig.__module__ == "ray_lite.train.torch"
print([name for name in ("torch", "ray", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_without_torch_the_message_says_how_to_get_it():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from ray_lite import train
train.torch.TorchConfig()
try:
    train.torch.prepare_model
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == (
        "train.torch.prepare_model needs PyTorch, which is not installed: pip install ray-lite-train[torch]"
    )
