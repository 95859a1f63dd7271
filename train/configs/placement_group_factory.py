"""What a run reserves on a cluster, as a value that can be compared, sent and built later."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError, ConfigTypeError
from ._options import choice, real, shown, whole

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["PLACEMENT_STRATEGIES", "PlacementGroupFactory", "check_labels", "check_resources"]

PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

# Ray's own names are case-sensitive; anything else is a custom resource that, when no node
# has it, is waited for without end. So what only looks like Ray's names is refused.
_RAY_NAMES = ("CPU", "GPU", "TPU", "memory", "object_store_memory")
_LOOK_ALIKES = {name.lower(): name for name in _RAY_NAMES} | {
    variant: name
    for name in ("CPU", "GPU", "TPU")
    for variant in (f"{name.lower()}s", f"num_{name.lower()}", f"num_{name.lower()}s")
}
_SMALLEST_AMOUNT = 0.0001


def check_resources(name: str, value: object) -> dict[str, float]:
    """A checked copy of a resource request; whole amounts are stored as int, others as float.

    Args:
        name: The option, for messages: ``"ScalingConfig.resources_per_worker"``.
        value: Resource name → amount >= 0. ``memory`` is in bytes.

    Raises:
        ConfigTypeError: ``value`` is no mapping, a key no string, or an amount no number.
        ConfigError: An amount is negative, not finite, or one that Ray cannot count; or a
            name differs from one of Ray's only in its spelling.

    Source:
        Ray counts resources in steps of 0.0001 and GPUs above one as whole.
    """
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f'{name} must be a dict like {{"CPU": 2}}, got {shown(value)}')
    return {_check_name(name, key): _check_amount(name, key, amount) for key, amount in value.items()}


def _check_name(name: str, key: object) -> str:
    if not isinstance(key, str):
        raise ConfigTypeError(f"{name} must have resource names (strings) as keys, got {shown(key)}")
    if not key.strip():
        raise ConfigError(f"{name} must have non-empty resource names as keys, got {key!r}")
    ray_name = _LOOK_ALIKES.get(key.strip().lower())
    if ray_name is not None and key != ray_name:
        raise ConfigError(
            f"{name} must use Ray's own names ({', '.join(_RAY_NAMES)}) or custom ones, got {key!r}; write {ray_name!r}"
        )
    return key


def _check_amount(name: str, key: str, amount: object) -> float:
    at = f"{name}[{key!r}]"
    plain: object = whole(amount)
    if not isinstance(plain, int):
        plain = real(plain)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise ConfigTypeError(f"{at} must be a number >= 0, got {shown(amount)}")
    if isinstance(plain, float):
        if not math.isfinite(plain):
            raise ConfigError(f"{at} must be a finite number >= 0, got {shown(amount)}")
        if plain.is_integer():
            plain = int(plain)
    if plain < 0:
        raise ConfigError(f"{at} must be a number >= 0, got {shown(amount)}")
    # Ray keeps amounts in a signed 64-bit count of its smallest step.
    if plain > sys.maxsize * _SMALLEST_AMOUNT:
        raise ConfigError(f"{at} must be at most {sys.maxsize * _SMALLEST_AMOUNT:.3g}, got {shown(amount)}")
    if 0 < plain < _SMALLEST_AMOUNT:
        raise ConfigError(f"{at} must be 0 or at least {_SMALLEST_AMOUNT}, Ray's smallest step, got {shown(amount)}")
    if key == "GPU" and plain > 1 and not isinstance(plain, int):
        raise ConfigError(f"{at} must be a whole number or at most 1, got {shown(amount)}")
    return plain


def check_labels(name: str, value: object) -> dict[str, str]:
    """A checked copy of a label selector: node label → wanted value, both strings."""
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{name} must be a dict of node labels, got {shown(value)}")
    for key, label in value.items():
        if not isinstance(key, str) or not isinstance(label, str):
            raise ConfigTypeError(f"{name} must map strings to strings, got {shown(key)}: {shown(label)}")
    return dict(value)


def _to_bundles(value: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], ...]:
    name = "PlacementGroupFactory.bundles"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigTypeError(f'{name} must be a list of dicts like [{{"CPU": 1}}], got {shown(value)}')
    if not value:
        raise ConfigError(f"{name} must hold at least the head bundle, which may be {{}}, got []")
    bundles = (check_resources(f"{name}[{index}]", bundle) for index, bundle in enumerate(value))
    return tuple({key: amount for key, amount in bundle.items() if amount} for bundle in bundles)


def _to_selectors(value: Sequence[Mapping[str, str]] | None) -> tuple[dict[str, str], ...] | None:
    if value is None:
        return None
    name = "PlacementGroupFactory.bundle_label_selector"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigTypeError(f"{name} must be a list of dicts, one per bundle, or None, got {shown(value)}")
    return tuple(check_labels(f"{name}[{index}]", selector) for index, selector in enumerate(value))


def _key(dicts: tuple[dict[str, Any], ...] | None) -> tuple[tuple[tuple[str, Any], ...], ...] | None:
    return None if dicts is None else tuple(tuple(sorted(item.items())) for item in dicts)


@attrs.frozen(repr=False)
class PlacementGroupFactory:
    """The bundles of a run: first the head's (what the trainer itself takes), then one per worker.

    Amounts of zero do not count, in comparisons neither. A head that asks for nothing is no bundle at all,
    because Ray reserves none that is empty. A run makes its own placement group; this is for
    programs that reserve resources themselves.

    Raises:
        ConfigTypeError: ``bundles`` is not a list of dicts from names to numbers.
        ConfigError: No bundle, an unknown strategy, or as many selectors as there are no bundles.

    Source:
        ``ray.tune.PlacementGroupFactory``.
    """

    _given: tuple[dict[str, float], ...] = attrs.field(alias="bundles", converter=_to_bundles, eq=_key)
    strategy: str = attrs.field(default="PACK", validator=choice(*PLACEMENT_STRATEGIES))
    """How bundles are spread over nodes: one of ``PLACEMENT_STRATEGIES``."""
    bundle_label_selector: tuple[dict[str, str], ...] | None = attrs.field(
        default=None, converter=_to_selectors, eq=_key
    )
    """Node labels that each bundle insists on, the head's included; None for no wishes."""

    @bundle_label_selector.validator
    def _check_selectors(self, attribute: attrs.Attribute[Any], value: tuple[dict[str, str], ...] | None) -> None:
        if value is not None and len(value) != len(self._given):
            raise ConfigError(
                f"PlacementGroupFactory.bundle_label_selector must have one dict per bundle ({len(self._given)}, "
                f"the head's included), got {len(value)}"
            )

    @property
    def head_bundle_is_empty(self) -> bool:
        """Whether the head asks for nothing, so that ``bundles`` holds the workers' only."""
        return not self._given[0]

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Copies of the bundles to reserve: the head's, unless it is empty, and one per worker."""
        return [dict(bundle) for bundle in self._given[self.head_bundle_is_empty :]]

    @property
    def head_bundle(self) -> dict[str, float]:
        """A copy of what the trainer itself takes; ``{}`` for nothing."""
        return dict(self._given[0])

    @property
    def worker_bundles(self) -> list[dict[str, float]]:
        """Copies of the workers' bundles, in rank order."""
        return [dict(bundle) for bundle in self._given[1:]]

    @property
    def head_cpus(self) -> float:
        """CPUs of the head bundle."""
        return self._given[0].get("CPU", 0)

    @property
    def required_resources(self) -> dict[str, float]:
        """The sum over all bundles."""
        total: dict[str, float] = {}
        for bundle in self._given:
            for key, amount in bundle.items():
                total[key] = total.get(key, 0) + amount
        return total

    def to_placement_group(self) -> PlacementGroup:
        """Ask the connected Ray cluster for exactly ``bundles``; does not wait until they are there.

        Raises:
            ConfigError: Nothing to reserve, or a worker that asks for nothing: Ray has no empty bundles.
        """
        bundles = self.bundles
        if not bundles or not all(bundles):
            raise ConfigError(f"{self!r} has an empty bundle, which Ray cannot reserve; give each worker a resource")
        from ray.util.placement_group import placement_group

        labels: dict[str, Any] = {}
        if self.bundle_label_selector is not None:
            # Passed only when wanted: not every Ray that we allow has this argument.
            workers = self.bundle_label_selector[self.head_bundle_is_empty :]
            labels["bundle_label_selector"] = [dict(item) for item in workers]
        group: PlacementGroup = placement_group(bundles, strategy=self.strategy, **labels)
        return group

    def __repr__(self) -> str:
        labels = "" if self.bundle_label_selector is None else f", bundle_label_selector={self.bundle_label_selector}"
        return f"PlacementGroupFactory({list(self._given)}, strategy={self.strategy!r}{labels})"
