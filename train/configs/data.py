"""``DataConfig``: how datasets are shared out among workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from ..errors import ConfigError, ConfigTypeError
from ._config import Config
from ._options import boolean, choice, shown, to_bool, with_option_hints

__all__ = ["DataConfig"]


def _to_names(value: str | Sequence[str]) -> str | tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]  # checked below


@with_option_hints()
@attrs.frozen(kw_only=True, repr=False)
class DataConfig(Config):
    """Which datasets are split among the workers, and what becomes of the rows that are left over.

    ``to_dict`` leaves out ``execution_options``, which are objects of Ray Data.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A value that is not allowed, or a dataset named twice.
    """

    _left_out: ClassVar[frozenset[str]] = frozenset({"execution_options"})

    datasets_to_split: str | tuple[str, ...] = attrs.field(default="all", converter=_to_names)
    """``"all"``, or a list with the names of those to split; every worker gets the others whole."""
    execution_options: Any = attrs.field(default=None, hash=False)
    """Ray Data's ``ExecutionOptions``, or a dict from dataset name to them; None for its defaults."""
    enable_shard_locality: bool = attrs.field(default=True, converter=to_bool, validator=boolean)
    """Whether Ray Data prefers to hand a worker the blocks that lie on its node."""
    remainder: str = attrs.field(default="wrap", validator=choice("wrap", "drop", "uneven"))
    """Rows that do not divide by the world size: ``"wrap"`` repeats the first rows so that all
    ranks get equally many, ``"drop"`` leaves them out, ``"uneven"`` gives some ranks one row more."""

    @datasets_to_split.validator
    def _check_names(self, attribute: attrs.Attribute[Any], value: object) -> None:
        message = f'DataConfig.datasets_to_split must be "all" or a list of dataset names, got {shown(value)}'
        if isinstance(value, str):
            if value != "all":
                raise ConfigError(f"{message}; for one dataset write [{value!r}]")
            return
        if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
            raise ConfigTypeError(message)
        if len(set(value)) != len(value):
            raise ConfigError(f"{message}, with a name twice")
