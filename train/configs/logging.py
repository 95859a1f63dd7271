"""``LoggingConfig``: how much the library says."""

from __future__ import annotations

import logging
from typing import Any

import attrs

from ..errors import ConfigError, ConfigTypeError
from ._config import Config
from ._options import shown, with_option_hints

__all__ = ["LoggingConfig"]


def _to_level_name(value: str) -> str:
    if not isinstance(value, str):
        return value
    number = logging.getLevelName(value.upper())
    # Back and forth, so that "warn" is stored as "WARNING".
    return logging.getLevelName(number) if isinstance(number, int) else value


@with_option_hints()
@attrs.frozen(kw_only=True, repr=False)
class LoggingConfig(Config):
    """What the library itself writes to its logger, ``ray_lite``; other loggers are left alone.

    Raises:
        ConfigTypeError: ``log_level`` is not a string.
        ConfigError: No level of that name is registered with ``logging``.
    """

    log_level: str = attrs.field(default="INFO", converter=_to_level_name)
    """The name of a ``logging`` level, in any case: messages below it are not shown."""

    @log_level.validator
    def _check_level(self, attribute: attrs.Attribute[Any], value: object) -> None:
        message = (
            "LoggingConfig.log_level must be the name of a logging level such as 'DEBUG', 'INFO', 'WARNING' or "
            f"'ERROR', got {shown(value)}"
        )
        if not isinstance(value, str):
            raise ConfigTypeError(message)
        if not isinstance(logging.getLevelName(value), int):
            raise ConfigError(message)
