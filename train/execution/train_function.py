"""The user's train function: checked and pickled on the driver, opened and called in a worker."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..context.train_context import TrainContext
from ..errors import ConfigTypeError, TrainFunctionError

__all__ = ["TrainFunction", "check_train_function", "open_train_function", "pickle_train_function"]

_WARN_BYTES = 100 << 20


@attrs.frozen
class TrainFunction:
    """A train function and how to call it.

    Attributes:
        function: The user's callable.
        config: ``train_loop_config``, or None.
        takes_config: It has a parameter for the config.
        context_parameter: Name of the parameter annotated with ``TrainContext``, or None.
        config_parameter: Name under which the config is passed, or None to pass it by position.
    """

    function: Callable[..., Any]
    config: Mapping[str, Any] | None
    takes_config: bool
    context_parameter: str | None
    config_parameter: str | None

    def __call__(self, context: TrainContext) -> Any:
        """Call it, with the arguments that it has parameters for."""
        kwargs: dict[str, Any] = {}
        args: list[Any] = []
        config = {} if self.config is None else self.config
        if self.config_parameter is not None:
            kwargs[self.config_parameter] = config
        elif self.takes_config:
            args.append(config)
        if self.context_parameter is not None:
            kwargs[self.context_parameter] = context
        return self.function(*args, **kwargs)


def check_train_function(function: Any, config: Any) -> TrainFunction:
    """See how a train function wants to be called.

    It may take nothing, or the config, and a parameter annotated with ``TrainContext``,
    whatever its name. A single parameter without that annotation is always the config.

    Raises:
        TrainFunctionError: It is not callable, or wants other arguments.
        ConfigTypeError: ``train_loop_config`` is not a mapping.
    """
    if not callable(function):
        hint = (
            "; pass the function itself, without calling it"
            if function is None or not isinstance(function, (str, bytes))
            else "; pass the function, not its name"
        )
        raise TrainFunctionError(f"train_loop_per_worker must be a function, got {type(function).__name__}{hint}")
    if inspect.isclass(function):
        raise TrainFunctionError(
            f"train_loop_per_worker must be a function, got the class {_name(function)}, which would only be "
            "constructed; pass a function that constructs it and trains"
        )
    if config is not None and not isinstance(config, Mapping):
        raise ConfigTypeError(f"train_loop_config must be a dict, got {type(config).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        kind = "generator" if inspect.isgeneratorfunction(function) else "coroutine"
        raise TrainFunctionError(
            f"{_name(function)} is a {kind} function, which would never run; use a plain function"
            + (" and asyncio.run() inside it" if kind == "coroutine" else "")
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # Some builtins have no signature; they take nothing of ours.
        return TrainFunction(function, config, False, None, None)
    parameters = list(signature.parameters.values())
    context_parameter = _context_parameter(function, parameters)
    others = [p for p in parameters if p.name != context_parameter]
    positional = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword_required = [p for p in others if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) + len(keyword_required) > 1:
        names = ", ".join(p.name for p in [*required, *keyword_required])
        raise TrainFunctionError(
            f"{_name(function)} needs {len(required) + len(keyword_required)} arguments ({names}); a train function "
            "takes nothing or the config, and the context if it is annotated: "
            "def train_func(config, ctx: train.TrainContext)"
        )
    if keyword_required:
        return TrainFunction(function, config, True, context_parameter, keyword_required[0].name)
    # As in Ray Train, a parameter with a default is only filled when a config was given.
    takes_config = bool(required) or (
        config is not None and any(p.kind in (*_POSITIONAL, p.VAR_POSITIONAL) for p in others)
    )
    if context_parameter is not None and takes_config and required:
        # By name, because the context may stand in front of the config.
        parameter = required[0]
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            return TrainFunction(function, config, True, context_parameter, parameter.name)
    return TrainFunction(function, config, takes_config, context_parameter, None)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def pickle_train_function(train_function: TrainFunction) -> bytes:
    """The function and its config as bytes, with whatever they capture.

    Raises:
        TrainFunctionError: Something in it cannot be pickled; the text names the variable.
    """
    import ray.cloudpickle as cloudpickle

    try:
        data: bytes = cloudpickle.dumps(train_function)
    # Pickling runs code of the user's, which may raise anything.
    except Exception as error:
        raise TrainFunctionError(_blame(train_function, error)) from error
    return data


def open_train_function(data: bytes) -> TrainFunction:
    """The inverse of ``pickle_train_function``, in a worker."""
    train_function: TrainFunction = pickle.loads(data)
    return train_function


def size_warning(num_bytes: int) -> str | None:
    """A warning when what the function captures is large, else None."""
    if num_bytes < _WARN_BYTES:
        return None
    return (
        f"the train function and its config are {num_bytes / 2**20:.0f} MiB with what they capture; each worker "
        "gets a copy. Pass large data as datasets={...}, or load it inside the function"
    )


def _context_parameter(function: Any, parameters: list[inspect.Parameter]) -> str | None:
    try:
        hints = inspect.get_annotations(_plain_function(function), eval_str=True)
    # Annotations may name things that only a type checker imports; then compare by name.
    except Exception:  # noqa: BLE001
        hints = {}
    for parameter in parameters:
        annotation = hints.get(parameter.name, parameter.annotation)
        if annotation is TrainContext:
            return parameter.name
        if isinstance(annotation, str) and annotation.strip("'\"").rpartition(".")[2] == "TrainContext":
            return parameter.name
    return None


def _plain_function(function: Any) -> Any:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function
    return type(function).__call__


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _blame(train_function: TrainFunction, error: Exception) -> str:
    """Find the captured variable that cannot be pickled."""
    import ray.cloudpickle as cloudpickle

    def fails(value: Any) -> bool:
        try:
            cloudpickle.dumps(value)
        # The same code as above may raise here, in any way.
        except Exception:  # noqa: BLE001
            return True
        return False

    function = train_function.function
    advice = "create it inside the train function instead"
    for key, value in (train_function.config or {}).items():
        if fails(value):
            return f"train_loop_config[{key!r}] ({type(value).__name__}) cannot be pickled: {error}; {advice}"
    plain = function
    while hasattr(plain, "func"):
        plain = plain.func
    owner = getattr(plain, "__self__", None)
    if owner is not None and fails(owner):
        bad = [name for name, value in vars(owner).items() if fails(value)] if hasattr(owner, "__dict__") else []
        detail = f" (attribute {', '.join(bad)})" if bad else ""
        return (
            f"{_name(function)} is bound to a {type(owner).__name__} that cannot be pickled{detail}: {error}; {advice}"
        )
    code = inspect.unwrap(plain) if callable(plain) else plain
    if inspect.ismethod(code):
        code = code.__func__
    if inspect.isfunction(code):
        variables = inspect.getclosurevars(code)
        for kind, values in (("captures", variables.nonlocals), ("uses the global", variables.globals)):
            for name, value in values.items():
                if not inspect.ismodule(value) and fails(value):
                    what = f"{kind} {name!r} ({type(value).__name__})"
                    return f"{_name(function)} {what}, which cannot be pickled: {error}; {advice}"
    return f"{_name(function)} cannot be pickled: {error}"
