"""What holds for every config class."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)
from ray_lite.train.configs._options import expect_config, shown
from ray_lite.train.errors import ConfigError, ConfigTypeError
from strategies import configs, run_configs

ALL = [CheckpointConfig, DataConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig]


@given(config=configs() | run_configs())
def test_a_config_survives_pickling_and_copying(config: Any) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


@given(config=configs() | run_configs())
def test_evolving_nothing_gives_an_equal_config(config: Any) -> None:
    """What is stored must be accepted again unchanged, or ``attrs.evolve`` would drift."""
    again = attrs.evolve(config)
    assert again == config
    assert hash(again) == hash(config)
    assert attrs.asdict(again, recurse=False) == attrs.asdict(config, recurse=False)


@given(config=configs())
def test_the_plain_form_survives_json_and_gives_the_config_back(config: Any) -> None:
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


@given(config=configs())
def test_repr_shows_only_what_differs_from_the_default(config: Any) -> None:
    assert repr(type(config)()).endswith("()") or isinstance(config, RunConfig)
    for field in attrs.fields(type(config)):
        default = getattr(field.default, "factory", lambda value=field.default: value)()
        assert (f"{field.name}=" in repr(config)) or getattr(config, field.name) == default


@given(config=run_configs(), secret=st.uuids().map(str))
def test_no_secret_shows(config: RunConfig, secret: str) -> None:
    secretive = attrs.evolve(
        config,
        storage_options={"key": secret, "client_kwargs": {"password": secret}},
        worker_runtime_env={
            "env_vars": {"TOKEN": secret},
            "working_dir": f"https://user:{secret}@example.com/code.zip",
            "py_modules": [f"https://example.com/code.zip?signature={secret}"],
            "pip": {"packages": ["torch"], "pip_install_options": [f"--index-url=https://{secret}@example.com/simple"]},
        },
    )
    assert secret not in repr(secretive)
    assert secret not in str(secretive)
    assert secret not in json.dumps(secretive.to_dict())
    assert "TOKEN" in repr(secretive)


@pytest.mark.parametrize("kind", ALL)
def test_a_config_cannot_be_changed(kind: Any) -> None:
    config = kind()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(config, attrs.fields(kind)[0].name, None)
    with pytest.raises((AttributeError, TypeError)):
        config.brand_new = 1


@pytest.mark.parametrize("kind", ALL)
def test_an_unknown_option_is_answered_with_all_there_are(kind: Any) -> None:
    with pytest.raises(ConfigTypeError) as caught:
        kind(qqqq=1)
    assert f"{kind.__name__} has no option 'qqqq'" in str(caught.value)
    assert all(field.name in str(caught.value) for field in attrs.fields(kind))
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_a_typo_is_answered_with_the_option_meant(kind: Any, data: st.DataObject) -> None:
    # Without a letter, use_gpu and use_tpu are equally near.
    names = [field.name for field in attrs.fields(kind) if field.name not in ("use_gpu", "use_tpu")]
    name = data.draw(st.sampled_from(names))
    position = data.draw(st.integers(1, len(name) - 1))
    typo = data.draw(st.sampled_from([name[:position] + name[position + 1 :], name.title()]))
    if typo in [field.name for field in attrs.fields(kind)]:
        return
    with pytest.raises(ConfigTypeError, match=f"did you mean '{name}'"):
        kind(**{typo: 1})
    with pytest.raises(ConfigTypeError, match=f"did you mean '{name}'"):
        kind.from_dict({typo: 1})


def test_a_typo_in_evolve_is_answered_too() -> None:
    with pytest.raises(ConfigTypeError, match="did you mean 'num_workers'"):
        attrs.evolve(ScalingConfig(), num_worker=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ALL)
def test_positional_options_are_refused_with_the_way_to_write_them(kind: Any) -> None:
    first = attrs.fields(kind)[0].name
    with pytest.raises(ConfigTypeError, match=rf"{kind.__name__} takes its options by name only.*\({first}=\.\.\.\)"):
        kind(2)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("values", [None, 3, [("a", 1)], {1: 2}])
def test_from_dict_refuses_what_is_no_dict_of_options(kind: Any, values: Any) -> None:
    with pytest.raises(ConfigTypeError, match=rf"{kind.__name__}\.from_dict needs"):
        kind.from_dict(values)


@pytest.mark.parametrize("kind", ALL)
def test_every_option_is_documented(kind: Any) -> None:
    """The string below each option is its documentation; a new option must have one."""
    import inspect

    # Not by kind.__module__, which is the public face once another test has loaded it from there.
    sources = [inspect.getsource(m) for name, m in sys.modules.items() if name.startswith("ray_lite.train.configs.")]
    (source,) = [text for text in sources if f"\nclass {kind.__name__}(" in text]
    for field in attrs.fields(kind):
        declaration = source.index(f"\n    {field.name}: ")
        following = source[declaration + 1 :].split("\n    ")
        rest = [line for line in following[1:] if not line.startswith((" ", ")"))]
        assert rest[0].startswith('"""'), f"{kind.__name__}.{field.name}"


class Lookalike:
    """Stands for a class of another library; renamed below."""


Lookalike.__name__ = Lookalike.__qualname__ = "ScalingConfig"


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({"num_workers": 2}, "write ScalingConfig(num_workers=...)"),
        (ScalingConfig, "write ScalingConfig()"),
        (Lookalike(), "of another library; import ScalingConfig from ray_lite.train"),
        (RunConfig(), "got an object of type ray_lite.train"),
        (3, "got an object of type int"),
    ],
)
def test_a_config_of_the_wrong_type_is_refused_by_name(value: Any, advice: str) -> None:
    with pytest.raises(ConfigTypeError) as caught:
        expect_config("TorchTrainer(scaling_config)", value, ScalingConfig)
    assert str(caught.value).startswith("TorchTrainer(scaling_config) must be a ray_lite.train.ScalingConfig")
    assert advice in str(caught.value)


def test_a_missing_config_is_the_default_one() -> None:
    assert expect_config("x", None, ScalingConfig) == ScalingConfig()


def test_messages_stay_short_and_survive_a_broken_repr() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    assert "Broken" in shown(Broken())
    assert len(shown("x" * 10_000)) < 200
    assert len(shown(list(range(10_000)))) < 200


def test_config_errors_are_value_errors_and_wrong_types_are_type_errors_too() -> None:
    with pytest.raises(ValueError, match=r"CheckpointConfig\.num_to_keep"):
        CheckpointConfig(num_to_keep=0)
    with pytest.raises(TypeError, match=r"CheckpointConfig\.num_to_keep"):
        CheckpointConfig(num_to_keep="2")  # type: ignore[arg-type]
    assert issubclass(ConfigTypeError, ConfigError)


def test_importing_the_configs_loads_no_heavy_module() -> None:
    code = (
        "import sys, ray_lite.train.configs\n"
        "heavy = {'ray', 'torch', 'numpy', 'fsspec', 'pandas', 'asyncio', 'difflib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
