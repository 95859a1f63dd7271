"""``FailureConfig``: what follows a failure."""

from __future__ import annotations

import attrs

from ..errors import ConfigError, ConfigTypeError
from ._config import Config
from ._options import (
    boolean,
    choice,
    integer,
    number,
    shown,
    to_bool,
    to_float,
    to_float_or_none,
    to_int,
    with_option_hints,
)

__all__ = ["FailureConfig"]


def _to_fail_fast(value: bool | str) -> bool | str:
    value = to_bool(value)  # type: ignore[arg-type]  # strings pass through
    # Ray AIR took it in any case.
    return value.lower() if isinstance(value, str) else value


@with_option_hints()
@attrs.frozen(kw_only=True, repr=False)
class FailureConfig(Config):
    """How often a run starts again after a failure, and how it ends when it does not.

    Restarts are counted over the whole run; a success in between does not give any back.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A value out of range, or ``fail_fast`` together with restarts.
    """

    max_failures: int = attrs.field(
        default=0, converter=to_int, validator=integer(minimum=-1, hint="-1 restarts without limit, 0 never")
    )
    """Restarts after the first attempt, >= 0, whether user code raised or a worker died; -1 for no limit."""
    fail_fast: bool | str = attrs.field(default=False, converter=_to_fail_fast)
    """True ends the run at the first failure; ``"raise"`` does too and raises the train function's
    own exception instead of a ``TrainingFailedError``. Needs ``max_failures=0``."""
    controller_failure_limit: int = attrs.field(
        default=-1, converter=to_int, validator=integer(minimum=-1, hint="-1 for no limit")
    )
    """Restarts of a controller that died, >= 0; -1 for no limit. Start-ups have a small limit of their own."""
    max_preemption_failures: int = attrs.field(
        default=-1, converter=to_int, validator=integer(minimum=-1, hint="-1 for no limit")
    )
    """Restarts after nodes were taken away, >= 0, not counted in ``max_failures``; -1 for no limit."""
    relax_collectives_on_preemption: bool = attrs.field(default=False, converter=to_bool, validator=boolean)
    """Whether ``report`` and the collectives stop waiting for ranks on nodes that are being taken away."""
    preemption_grace_s: float = attrs.field(default=0.0, converter=to_float, validator=number(minimum=0))
    """Seconds >= 0 that ranks get to finish after a preemption notice before they are stopped."""

    restart: str = attrs.field(default="process", validator=choice("process", "in_place"))
    """How workers start again: ``"process"`` in fresh processes; ``"in_place"`` uses those again whose
    train function has come to rest (within a second), which is much faster and keeps their memory:
    module globals, CUDA contexts and threads of the failed attempt are still there."""
    standby_workers: int = attrs.field(default=0, converter=to_int, validator=integer(minimum=0))
    """Extra processes, >= 0, that wait with the framework imported and take the place of lost workers;
    about 265 MB each with torch. For workers without GPUs."""
    hang_timeout_s: float | None = attrs.field(
        default=None, converter=to_float_or_none, validator=number(minimum=0.1, optional=True)
    )
    """Seconds >= 0.1 after which a run in which no rank moves counts as failed; None only warns.
    A rank moves by a report, or by ``get_context().heartbeat()``."""

    def __attrs_post_init__(self) -> None:
        message = f"FailureConfig.fail_fast must be False, True or 'raise', got {shown(self.fail_fast)}"
        if not isinstance(self.fail_fast, (bool, str)):
            raise ConfigTypeError(message)
        if isinstance(self.fail_fast, str) and self.fail_fast != "raise":
            raise ConfigError(message)
        if self.fail_fast and self.max_failures != 0:
            raise ConfigError(
                f"FailureConfig.fail_fast={self.fail_fast!r} means no restart, got max_failures={self.max_failures}; "
                "set one of the two"
            )
