"""``CheckpointConfig``: which checkpoints of a run are kept."""

from __future__ import annotations

from typing import Any

import attrs

from ..errors import ConfigError
from ._config import Config
from ._deprecation import warn_deprecated
from ._options import choice, integer, shown, text, to_int_or_none, whole, with_option_hints

__all__ = ["CheckpointConfig"]

# Options of Ray AIR, with the values that asked for nothing.
_WITHOUT_EFFECT: dict[str, tuple[object, str]] = {
    "checkpoint_frequency": (0, "call train.report(metrics, checkpoint=...) as often as you want one"),
    "checkpoint_at_end": (None, "report a checkpoint as the last call of the train function"),
    "_checkpoint_keep_all_ranks": (False, "report a checkpoint from each rank whose files you want; all are kept"),
    "_checkpoint_upload_from_workers": (False, "workers always upload their own files"),
}


def _drop_old_options(options: dict[str, Any]) -> None:
    for name, (default, advice) in _WITHOUT_EFFECT.items():
        value = options.pop(name, default)
        if name == "checkpoint_frequency":
            value = whole(value)
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"CheckpointConfig.{name} must be an integer >= 0, got {shown(value)}; leave it out")
        if value is not default and value != default:
            warn_deprecated(f"CheckpointConfig({name}=...) is deprecated and has no effect; {advice}")


@with_option_hints(_drop_old_options)
@attrs.frozen(kw_only=True, repr=False)
class CheckpointConfig(Config):
    """Which checkpoints of a run stay in storage, and which one is the best.

    The newest and the best are never deleted, whatever ``num_to_keep`` says; so with
    ``num_to_keep=1`` and a best that is not the newest, two remain.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A value that is not allowed.
    """

    num_to_keep: int | None = attrs.field(
        default=None,
        converter=to_int_or_none,
        validator=integer(minimum=1, optional=True, hint="None keeps all; to keep none, report none"),
    )
    """Checkpoints to keep, >= 1; None keeps all."""
    checkpoint_score_attribute: str | None = attrs.field(default=None, validator=text(optional=True))
    """The metric that ranks checkpoints, nested ones as ``"val/loss"``; None ranks by age, the newest first."""
    checkpoint_score_order: str = attrs.field(default="max", validator=choice("max", "min"))
    """``"max"`` if a higher score is better, ``"min"`` if a lower one is."""
