"""Which checkpoints to keep: functions of what is there, without a disk or a clock."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["Scored", "best_first", "score_of", "select_to_delete"]


class Scored(Protocol):
    """What retention looks at; ``CommittedCheckpoint`` is one."""

    @property
    def report_index(self) -> int:
        """Position in the run: larger is newer."""

    @property
    def attempt(self) -> int:
        """Decides between equal report indices."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What was reported with it."""

    @property
    def is_deletable(self) -> bool:
        """False: the run did not create it."""


E = TypeVar("E", bound=Scored)


def score_of(metrics: Mapping[str, Any], attribute: str | None) -> float | None:
    """The number under ``attribute``, or None when there is none that can be compared.

    ``"eval/loss"`` means the key of exactly that name, else ``metrics["eval"]["loss"]``.
    numpy scalars and 0-d tensors are numbers; NaN, booleans and strings are not.
    """
    if attribute is None:
        return None
    return _as_number(_look_up(metrics, attribute))


def best_first(checkpoints: Sequence[E], *, score_attribute: str | None = None, score_order: str = "max") -> list[E]:
    """``checkpoints`` from best to worst; without an attribute, from newest to oldest.

    One without a score is worse than any with one, in both orders; of equal ones the newer is better.
    """
    return sorted(checkpoints, key=lambda checkpoint: _rank(checkpoint, score_attribute, score_order), reverse=True)


def select_to_delete(
    checkpoints: Sequence[E],
    *,
    num_to_keep: int | None,
    score_attribute: str | None = None,
    score_order: str = "max",
) -> list[E]:
    """What to delete so that the ``num_to_keep`` best remain, and the newest in any case.

    The newest is what a restart begins from, so up to ``num_to_keep + 1`` remain. Those that
    the run did not create are neither deleted nor counted.

    Args:
        checkpoints: All that are committed, in any order.
        num_to_keep: >= 1, or None to keep all.
        score_attribute: Key of the metrics (see ``score_of``); None keeps the newest.
        score_order: ``"max"`` or ``"min"``: which scores are better.

    Returns:
        Those to delete, oldest first.
    """
    own = [checkpoint for checkpoint in checkpoints if checkpoint.is_deletable]
    if num_to_keep is None or len(own) <= num_to_keep:
        return []
    ranked = best_first(own, score_attribute=score_attribute, score_order=score_order)
    newest = max(checkpoints, key=_age)
    surplus = [checkpoint for checkpoint in ranked[max(num_to_keep, 1) :] if checkpoint is not newest]
    return sorted(surplus, key=_age)


def _age(checkpoint: Scored) -> tuple[int, int]:
    return checkpoint.report_index, checkpoint.attempt


def _rank(checkpoint: Scored, attribute: str | None, order: str) -> tuple[bool, float, tuple[int, int]]:
    score = score_of(checkpoint.metrics, attribute)
    if score is None:
        return False, 0.0, _age(checkpoint)
    return True, score if order == "max" else -score, _age(checkpoint)


def _look_up(metrics: Any, attribute: str) -> Any:
    if not isinstance(metrics, Mapping):
        return None
    if attribute in metrics:
        return metrics[attribute]
    # Keys may themselves hold slashes, so every place to split is tried.
    position = attribute.find("/")
    while position >= 0:
        found = _look_up(metrics.get(attribute[:position]), attribute[position + 1 :])
        if found is not None:
            return found
        position = attribute.find("/", position + 1)
    return None


def _as_number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    # numpy.bool_ is no numbers.Real, bool is.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        # An integer beyond the range of floats.
        return math.inf if str(value)[0] != "-" else -math.inf
    return None if math.isnan(number) else number
