"""What all configs share: a repr and a plain form that show no secret."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from ..errors import ConfigTypeError
from ._options import shown, type_name

__all__ = ["MASK", "Config", "as_plain", "mask_secrets"]

ConfigT = TypeVar("ConfigT", bound="Config")

MASK = "***"


class Config:
    """What all configs share: a plain form for the run record, the web page and diffs."""

    __slots__ = ()
    # Options that have no plain form, or may hold secrets.
    _left_out: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values that ``json.dumps`` takes, without secrets.

        Options that hold objects or secrets are left out; each class says which.
        """
        fields = attrs.fields(type(self))  # type: ignore[arg-type]  # every subclass is an attrs class
        return {f.name: as_plain(getattr(self, f.name)) for f in fields if f.name not in self._left_out}

    def __repr__(self) -> str:
        """The options that differ from their defaults; never a secret."""
        parts = []
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]  # as above
            value = getattr(self, field.name)
            default = field.default
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, for all that mypy knows
                default = default.factory()
            if field.repr is not False and not (type(value) is type(default) and value == default):
                parts.append(f"{field.name}={field.repr(value) if callable(field.repr) else repr(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def from_dict(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """The config that ``to_dict`` described; options that are missing get their defaults.

        Raises:
            ConfigTypeError: ``values`` is not a mapping with option names as keys.
            ConfigError: A value is not allowed.
        """
        if not isinstance(values, Mapping):
            raise ConfigTypeError(
                f"{cls.__name__}.from_dict needs a dict of options, got an object of type {type_name(type(values))}"
            )
        for name in values:
            if not isinstance(name, str):
                raise ConfigTypeError(f"{cls.__name__}.from_dict needs option names as keys, got {shown(name)}")
        return cls(**values)


def as_plain(value: Any) -> Any:
    """``value`` as JSON has it: configs, mappings and sequences by their contents, other objects by their type."""
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # Without its contents, which may hold anything.
    return f"<{type_name(type(value))}>"


def mask_secrets(value: Any) -> Any:
    """A copy of ``value`` for people to read: passwords and queries in URLs become ``***``."""
    if isinstance(value, Mapping):
        return {key: mask_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item) for item in value]
    if isinstance(value, str):
        masked = re.sub(r"(://)[^/@\s]*@", rf"\1{MASK}@", value)
        return re.sub(r"(://[^\s?]*\?)\S*", rf"\1{MASK}", masked)
    return value
