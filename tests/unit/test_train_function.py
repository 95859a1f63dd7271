"""How a train function may look, and what is said before any worker starts when it may not."""

from __future__ import annotations

import functools
import threading

import pytest

from ray_lite import train
from ray_lite.train import TrainContext
from ray_lite.train.errors import ConfigTypeError, TrainFunctionError
from ray_lite.train.execution.train_function import (
    check_train_function,
    open_train_function,
    pickle_train_function,
    size_warning,
)

CONTEXT = object()


def call(function, config=None):
    return check_train_function(function, config)(CONTEXT)


class Callable_:
    def __call__(self, config):
        return config

    def method(self, config):
        return config

    def with_context(self, config, ctx: TrainContext):
        return config, ctx


def test_no_arguments():
    assert call(lambda: "called", {"a": 1}) == "called"


def test_one_argument_is_the_config_whatever_its_name():
    assert call(lambda config: config, {"a": 1}) == {"a": 1}
    assert call(lambda context: context, {"a": 1}) == {"a": 1}
    assert call(lambda ctx: ctx) == {}


def test_the_context_is_found_by_annotation_whatever_its_name_and_place():
    def second(config, whatever: train.TrainContext):
        return config, whatever

    def first(whatever: train.TrainContext, config):
        return config, whatever

    def alone(whatever: train.TrainContext):
        return whatever

    def keyword(config, *, ctx: TrainContext):
        return config, ctx

    for function in (second, first, keyword):
        assert call(function, {"a": 1}) == ({"a": 1}, CONTEXT)
    assert call(alone) is CONTEXT


def test_methods_partials_and_callable_objects():
    assert call(Callable_(), {"a": 1}) == {"a": 1}
    assert call(Callable_().method, {"a": 1}) == {"a": 1}
    assert call(Callable_().with_context, {"a": 1}) == ({"a": 1}, CONTEXT)
    assert call(functools.partial(lambda a, config: (a, config), 5), {"b": 2}) == (5, {"b": 2})


def test_a_parameter_with_a_default_is_filled_only_when_there_is_a_config():
    def function(config="mine"):
        return config

    assert call(function) == "mine"
    assert call(function, {"a": 1}) == {"a": 1}


def test_keyword_only_config():
    def function(*, config):
        return config

    assert call(function, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    "bad", [lambda a, b: None, lambda a, b, c=1: None, lambda a, *, b: None], ids=["two", "two and default", "keyword"]
)
def test_too_many_arguments_are_refused_with_the_allowed_forms(bad):
    with pytest.raises(TrainFunctionError, match=r"takes nothing or the config.*ctx: train\.TrainContext"):
        check_train_function(bad, None)


@pytest.mark.parametrize("bad", [None, 3, "train_func", {"a": 1}])
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(TrainFunctionError, match="must be a function, got"):
        check_train_function(bad, None)


def test_generators_and_coroutines_would_never_run():
    def generator():
        yield 1

    async def coroutine():
        pass

    with pytest.raises(TrainFunctionError, match="generator"):
        check_train_function(generator, None)
    with pytest.raises(TrainFunctionError, match=r"asyncio\.run"):
        check_train_function(coroutine, None)


def test_a_config_that_is_no_dict_is_refused():
    with pytest.raises(ConfigTypeError, match="train_loop_config must be a dict, got list"):
        check_train_function(lambda config: None, [1])


class Holder:
    def __init__(self):
        self.lock = threading.Lock()
        self.fine = 1

    def train(self):
        return self.lock


LOCK = threading.Lock()


def test_an_unpicklable_capture_is_named():
    lock = threading.Lock()

    def captures():
        return lock

    def uses_global():
        return LOCK

    cases = [
        (captures, None, "captures 'lock' (lock)"),
        (lambda config: None, {"ok": 1, "bad": lock}, "train_loop_config['bad'] (lock)"),
        (Holder().train, None, "attribute lock"),
    ]
    for function, config, expected in cases:
        with pytest.raises(TrainFunctionError) as caught:
            pickle_train_function(check_train_function(function, config))
        assert expected in str(caught.value)
        assert "inside the train function" in str(caught.value)
    uses_global.__module__ = "__main__"  # by value, as in a script
    with pytest.raises(TrainFunctionError, match="uses the global 'LOCK'"):
        pickle_train_function(check_train_function(uses_global, None))


def test_a_function_travels_with_what_it_captures():
    offset = 5
    function = check_train_function(lambda config: config["a"] + offset, {"a": 1})
    assert open_train_function(pickle_train_function(function))(CONTEXT) == 6


def test_large_captures_are_mentioned():
    assert size_warning(1 << 20) is None
    assert "300 MiB" in (size_warning(300 << 20) or "")


def test_a_class_is_refused_since_it_would_only_be_constructed():
    class Model:
        def __init__(self, config=None):
            raise AssertionError("constructed")

    with pytest.raises(TrainFunctionError, match=r"the class .*Model.*pass a function"):
        check_train_function(Model, {})
