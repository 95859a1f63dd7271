"""How every config class checks itself: converters, validators, and hints for wrong names.

A converter only brings a value that means the same into its one stored form
(``numpy.int64(2)`` → ``2``) and passes on what it does not understand; the validator then
refuses it, with a message that names class and field, what is allowed and what came.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

import attrs

from ..errors import ConfigError, ConfigTypeError

__all__ = [
    "Validator",
    "boolean",
    "choice",
    "expect_config",
    "instance_of_config",
    "integer",
    "no_option_named",
    "number",
    "shown",
    "text",
    "to_bool",
    "to_float",
    "to_float_or_none",
    "to_int",
    "to_int_or_none",
    "where",
    "with_option_hints",
]

C = TypeVar("C")
# What attrs calls with (instance, attribute, value).
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 8


def type_name(kind: type) -> str:
    """``kind`` as a user would import it; builtins without their module."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def shown(value: object) -> str:
    """``value`` for a message: a bounded repr and its type, also when its ``__repr__`` fails."""
    if value is None:
        return "None"
    return f"{_SHORT.repr(value)} ({type_name(type(value))})"


def where(instance: object, attribute: attrs.Attribute[Any]) -> str:
    """``ScalingConfig.num_workers``: how messages name an option."""
    return f"{type(instance).__name__}.{attribute.name}"


def whole(value: Any) -> Any:
    """``value`` as an int where its type is a kind of integer other than bool, else unchanged."""
    # operator.index also takes numpy's integers, and refuses floats and numpy's booleans.
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def real(value: Any) -> Any:
    """``value`` as a float where its type is a kind of real number other than bool, else unchanged."""
    # numpy registers its integers and floats as Real, but not its booleans.
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _is_numpy_bool(value: object) -> bool:
    # By name, because numpy must not be imported for this: "bool_" in numpy 1, "bool" in 2.
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool_", "bool")


def to_int(value: SupportsIndex) -> int:
    """Converter of a whole number."""
    return cast(int, whole(value))


def to_int_or_none(value: SupportsIndex | None) -> int | None:
    """Converter of a whole number or None."""
    return cast("int | None", whole(value))


def to_float(value: SupportsFloat) -> float:
    """Converter of a real number."""
    return cast(float, real(value))


def to_float_or_none(value: SupportsFloat | None) -> float | None:
    """Converter of a real number or None."""
    return cast("float | None", real(value))


def to_bool(value: bool) -> bool:
    """Converter of a truth value; takes numpy's booleans, not 0 and 1."""
    return bool(value) if _is_numpy_bool(value) else value


def integer(*, minimum: int, optional: bool = False, hint: str = "") -> Validator:
    """A validator of whole numbers ``>= minimum`` (or None, if ``optional``); ``hint`` ends the message."""
    allowed = f"an integer >= {minimum}" + (" or None" if optional else "")

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        message = f"{where(instance, attribute)} must be {allowed}, got {shown(value)}{hint and '; ' + hint}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigTypeError(message)
        if value < minimum:
            raise ConfigError(message)

    return check


def number(*, minimum: float, optional: bool = False, unit: str = "seconds", hint: str = "") -> Validator:
    """A validator of finite numbers ``>= minimum`` (or None, if ``optional``)."""
    allowed = f"a finite number of {unit} >= {minimum:g}" + (" or None" if optional else "")

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        message = f"{where(instance, attribute)} must be {allowed}, got {shown(value)}{hint and '; ' + hint}"
        if not isinstance(value, float):
            raise ConfigTypeError(message)
        # Written so that NaN fails too.
        if not (minimum <= value < math.inf):
            raise ConfigError(message)

    return check


def boolean(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator of True and False; 0, 1 and "no" are refused, since "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{where(instance, attribute)} must be True or False, got {shown(value)}")


def choice(*choices: str) -> Validator:
    """A validator of one of a few strings, spelt exactly; the message gives the nearest."""
    allowed = " or ".join((", ".join(map(repr, choices[:-1])), repr(choices[-1]))) if choices[1:] else repr(choices[0])

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        message = f"{where(instance, attribute)} must be {allowed}, got {shown(value)}"
        if not isinstance(value, str):
            raise ConfigTypeError(message)
        if value not in choices:
            raise ConfigError(message + _did_you_mean(value, choices))

    return check


def text(*, optional: bool = False) -> Validator:
    """A validator of non-empty strings (or None, if ``optional``)."""
    allowed = "a non-empty string" + (" or None" if optional else "")

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        message = f"{where(instance, attribute)} must be {allowed}, got {shown(value)}"
        if not isinstance(value, str):
            raise ConfigTypeError(message)
        if not value.strip():
            raise ConfigError(message)

    return check


def expect_config(name: str, value: object, kind: type[C]) -> C:
    """``value``, which must be a ``kind``; None gives ``kind()``.

    Args:
        name: The option or argument, for the message: ``"TorchTrainer(scaling_config)"``.
        value: What the user passed.
        kind: The config class that belongs there.

    Raises:
        ConfigTypeError: ``value`` is something else. A dict, the class itself, and a class
            of the same name from Ray get their own advice.
    """
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    wanted = kind.__name__
    if isinstance(value, Mapping):
        arguments = ", ".join(f"{key}=..." for key in list(value)[:4])
        # The values stay out of the message: a dict may hold storage options.
        raise ConfigTypeError(
            f"{name} must be a ray_lite.train.{wanted}, got a {type_name(type(value))}; write {wanted}({arguments})"
        )
    if value is kind:
        raise ConfigTypeError(f"{name} must be a ray_lite.train.{wanted} object, got the class; write {wanted}()")
    came = type_name(type(value))
    if type(value).__name__ == wanted:
        raise ConfigTypeError(
            f"{name} must be a ray_lite.train.{wanted}, got {came} of another library; "
            f"import {wanted} from ray_lite.train, its options have the same names"
        )
    raise ConfigTypeError(f"{name} must be a ray_lite.train.{wanted}, got an object of type {came}")


def instance_of_config(kind: type[C]) -> Validator:
    """A validator of nested configs, see :func:`expect_config`."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        expect_config(where(instance, attribute), value, kind)

    return check


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    import difflib  # only needed on the way to an error

    # Ranked without case, so that "num_Workers" and "MAX" find their way.
    lowered = {item.lower(): item for item in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def no_option_named(class_name: str, name: str, known: tuple[str, ...]) -> ConfigTypeError:
    """The error for an unknown option: the nearest known one, and all there are."""
    hint = _did_you_mean(name, known) or "."
    return ConfigTypeError(f"{class_name} has no option {name!r}{hint} Its options: {', '.join(known)}")


def with_option_hints(
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[type[C]], type[C]]:
    """A class decorator, outside ``attrs.frozen``: wrong names are answered with the nearest option.

    Args:
        prepare: Called with the keywords of each construction before anything else. It
            takes out those that older APIs had, and warns, translates or refuses. So they
            are no fields: ``attrs.evolve`` and ``to_dict`` never meet them.
    """

    def decorate(cls: type[C]) -> type[C]:
        original = cls.__init__
        known = tuple(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def __init__(self: Any, /, *args: Any, **options: Any) -> None:
            if args:
                raise ConfigTypeError(
                    f"{cls.__name__} takes its options by name only, got {len(args)} without; "
                    f"write {cls.__name__}({known[0]}=...)"
                )
            if prepare is not None:
                prepare(options)
            for name in options:
                if name not in known:
                    raise no_option_named(cls.__name__, name, known)
            original(self, **options)

        cls.__init__ = __init__  # type: ignore[assignment]  # the same signature, through functools.wraps
        return cls

    return decorate
