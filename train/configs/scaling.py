"""``ScalingConfig``: how many workers, and what each of them gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, cast

import attrs

from ..errors import ConfigError, ConfigTypeError
from ._config import Config
from ._options import (
    boolean,
    choice,
    number,
    shown,
    text,
    to_bool,
    to_float,
    to_float_or_none,
    where,
    whole,
    with_option_hints,
)
from .placement_group_factory import PLACEMENT_STRATEGIES, PlacementGroupFactory, check_labels, check_resources

__all__ = ["ScalingConfig"]

# What Ray's own accelerator_type option asks for: any share of a node that has the type.
_ACCELERATOR_SHARE = 0.001
_ACCELERATOR_PREFIX = "accelerator_type:"


def _to_num_workers(value: SupportsIndex | Sequence[SupportsIndex]) -> int | tuple[int, int]:
    if isinstance(value, (list, tuple)):
        return cast("tuple[int, int]", tuple(whole(item) for item in value))
    return cast(int, whole(value))


def _check_num_workers(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    message = (
        f"{where(instance, attribute)} must be an integer >= 0 (0: in this process) or (min, max) "
        f"with 1 <= min <= max, got {shown(value)}"
    )
    counts = value if isinstance(value, tuple) else (value,)
    if any(not isinstance(count, int) or isinstance(count, bool) for count in counts):
        raise ConfigTypeError(message)
    if isinstance(value, tuple):
        if len(value) != 2 or not 1 <= value[0] <= value[1]:
            raise ConfigError(message)
    elif value < 0:
        raise ConfigError(message)


def _to_worker_resources(value: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if value is None else check_resources("ScalingConfig.resources_per_worker", value)


def _to_trainer_resources(value: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if value is None else check_resources("ScalingConfig.trainer_resources", value)


def _to_label_selector(
    value: Mapping[str, str] | Sequence[Mapping[str, str]] | None,
) -> dict[str, str] | tuple[dict[str, str], ...] | None:
    name = "ScalingConfig.label_selector"
    if value is None:
        return None
    if isinstance(value, Mapping):
        return check_labels(name, value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigTypeError(
            f"{name} must be a dict of node labels, a list of one per worker or None, got {shown(value)}"
        )
    return tuple(check_labels(f"{name}[{index}]", item) for index, item in enumerate(value))


def _refuse_removed_options(options: dict[str, Any]) -> None:
    if "_max_cpu_fraction_per_node" in options:
        raise ConfigTypeError(
            "ScalingConfig(_max_cpu_fraction_per_node=...) was removed in Ray 2.7 and has no effect that could be "
            "kept; leave it out, and leave CPUs free with resources_per_worker"
        )


@with_option_hints(_refuse_removed_options)
@attrs.frozen(kw_only=True, repr=False)
class ScalingConfig(Config):
    """How many workers a run has, what each gets, and how they are placed.

    ``ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4})`` reserves 8 CPUs: two
    workers of four. The trainer itself takes nothing unless ``trainer_resources`` says so.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A value that no run could use, or two that contradict each other.
    """

    num_workers: int | tuple[int, int] = attrs.field(default=1, converter=_to_num_workers, validator=_check_num_workers)
    """Workers: n >= 1; 0 runs the train function in this process, without Ray; ``(min, max)`` is elastic."""
    use_gpu: bool = attrs.field(default=False, converter=to_bool, validator=boolean)
    """Whether each worker gets GPUs: one, unless ``resources_per_worker["GPU"]`` says how many."""
    resources_per_worker: dict[str, float] | None = attrs.field(
        default=None, converter=_to_worker_resources, hash=False
    )
    """Resource name → amount >= 0 for each worker (``memory`` in bytes). None: one GPU with
    ``use_gpu``, else one CPU. See ``worker_resources`` for what a partial dict gives."""
    placement_strategy: str = attrs.field(default="PACK", validator=choice(*PLACEMENT_STRATEGIES))
    """``"PACK"`` (few nodes) or ``"SPREAD"`` (many), if possible; ``"STRICT_..."`` insist."""
    accelerator_type: str | None = attrs.field(default=None, validator=text(optional=True))
    """The kind of accelerator a worker's node must have, as Ray names it: ``"A100"``."""
    label_selector: dict[str, str] | tuple[dict[str, str], ...] | None = attrs.field(
        default=None, converter=_to_label_selector, hash=False
    )
    """Node labels that every worker insists on, or one dict for each of ``max_workers``."""
    trainer_resources: dict[str, float] | None = attrs.field(default=None, converter=_to_trainer_resources, hash=False)
    """What the process that directs the run takes for itself; None: nothing."""
    use_tpu: bool = attrs.field(default=False, converter=to_bool, validator=boolean)
    """Must be False: TPU slices are not supported."""
    topology: str | None = attrs.field(default=None, validator=text(optional=True))
    """Must be None: TPU slices are not supported."""
    elastic_resize_monitor_interval_s: float = attrs.field(
        default=60.0, converter=to_float, validator=number(minimum=0)
    )
    """Seconds >= 0 between looks for room to grow, when ``num_workers`` is a range."""
    resources_timeout_s: float | None = attrs.field(
        default=None, converter=to_float_or_none, validator=number(minimum=0, optional=True)
    )
    """Seconds >= 0 to wait for the workers' resources before the run fails; None waits without end."""

    def __attrs_post_init__(self) -> None:
        asked = self.resources_per_worker or {}
        for name, value, only in (("use_tpu", self.use_tpu, False), ("topology", self.topology, None)):
            if value != only:
                raise ConfigError(
                    f"ScalingConfig.{name} must be {only}, since TPU slices are not supported, got {shown(value)}; ask "
                    'for TPUs as a plain resource, resources_per_worker={"TPU": n}, and set them up in a Backend'
                )
        if self.use_gpu and asked.get("GPU", 1) == 0:
            raise ConfigError(
                "ScalingConfig.use_gpu=True needs GPUs, got resources_per_worker with 'GPU': 0; "
                "leave 'GPU' out for one per worker, or set use_gpu=False"
            )
        if not self.use_gpu and asked.get("GPU", 0) > 0:
            raise ConfigError(
                f"ScalingConfig.resources_per_worker asks for 'GPU': {asked['GPU']} while use_gpu is False; "
                "set use_gpu=True"
            )
        if self.accelerator_type is not None and self.accelerator_type.startswith(_ACCELERATOR_PREFIX):
            raise ConfigError(
                f"ScalingConfig.accelerator_type must be the bare type, got {self.accelerator_type!r}; "
                f"write {self.accelerator_type[len(_ACCELERATOR_PREFIX) :]!r}"
            )
        if isinstance(self.label_selector, tuple) and len(self.label_selector) != self.max_workers:
            raise ConfigError(
                f"ScalingConfig.label_selector must be one dict, or a list of max_workers={self.max_workers} dicts, "
                f"got a list of {len(self.label_selector)}"
            )

    @property
    def min_workers(self) -> int:
        """The fewest workers the run starts with."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The most workers the run ever has."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def elasticity_enabled(self) -> bool:
        """Whether ``num_workers`` is a range, be it of one value."""
        return isinstance(self.num_workers, tuple)

    @property
    def is_local(self) -> bool:
        """Whether the train function runs in this process, without Ray."""
        return self.num_workers == 0

    @property
    def worker_resources(self) -> dict[str, float]:
        """What each worker is given: resource name → amount > 0; a new dict each time.

        Without a GPU a worker gets one CPU unless ``resources_per_worker`` names ``CPU``, so ``{}``
        and ``{"extra": 1}`` get one, ``{"CPU": 0}`` none. With ``use_gpu`` it gets one GPU
        unless ``GPU`` is named, and only those CPUs that are named: none by default,
        since GPU machines often have fewer free CPUs than workers.

        Source:
            Ray Train 2.60 and Ray AIR 2.6, which gave ``{}`` and ``{"extra": 1}`` no CPU
            although their documentation promised one.
        """
        resources = {"GPU": 1.0} if self.use_gpu else {"CPU": 1.0}
        resources.update(self.resources_per_worker or {})
        if self.accelerator_type is not None:
            resources.setdefault(_ACCELERATOR_PREFIX + self.accelerator_type, _ACCELERATOR_SHARE)
        return {key: amount for key, amount in resources.items() if amount}

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of one worker; fractions as given."""
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of one worker; fractions as given."""
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """TPUs of one worker, when asked for as a plain resource."""
        return self.worker_resources.get("TPU", 0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """The resources of one worker other than CPU and GPU; ``memory`` is among them, in bytes."""
        return {key: amount for key, amount in self.worker_resources.items() if key not in ("CPU", "GPU")}

    @property
    def total_resources(self) -> dict[str, float]:
        """The most that the run ever takes: ``max_workers`` workers and the trainer."""
        return self.as_placement_group_factory().required_resources

    def as_placement_group_factory(self) -> PlacementGroupFactory:
        """The bundles of this run: ``trainer_resources`` first, then one per worker, ``max_workers`` of them.

        For programs that reserve resources themselves; ``fit()`` needs no call of this.
        """
        selectors: list[Mapping[str, str]] | None = None
        if isinstance(self.label_selector, tuple):
            selectors = [{}, *self.label_selector]
        elif self.label_selector is not None:
            selectors = [{}, *[self.label_selector] * self.max_workers]
        return PlacementGroupFactory(
            [self.trainer_resources or {}, *[self.worker_resources] * self.max_workers],
            strategy=self.placement_strategy,
            bundle_label_selector=selectors,
        )

    @classmethod
    def from_placement_group_factory(cls, factory: PlacementGroupFactory) -> ScalingConfig:
        """The config whose ``as_placement_group_factory()`` equals ``factory``.

        Raises:
            ConfigError: The workers' bundles differ, or the head insists on node labels.
        """
        if not isinstance(factory, PlacementGroupFactory):
            raise ConfigTypeError(
                "ScalingConfig.from_placement_group_factory needs a ray_lite.train.PlacementGroupFactory, "
                f"got {shown(factory)}"
            )
        workers = factory.worker_bundles
        if any(bundle != workers[0] for bundle in workers):
            raise ConfigError(f"all workers of a ScalingConfig are alike, got bundles that differ: {factory!r}")
        resources = dict(workers[0]) if workers else {}
        types = [key for key, amount in resources.items() if _is_accelerator_share(key, amount)]
        accelerator_type = types[0][len(_ACCELERATOR_PREFIX) :] if len(types) == 1 else None
        if accelerator_type is not None:
            del resources[types[0]]
        use_gpu = "GPU" in resources
        if not use_gpu:
            resources.setdefault("CPU", 0)
        is_default = not workers or resources == ({"GPU": 1} if use_gpu else {"CPU": 1})
        return cls(
            num_workers=len(workers),
            use_gpu=use_gpu,
            resources_per_worker=None if is_default else resources,
            placement_strategy=factory.strategy,
            accelerator_type=accelerator_type,
            label_selector=_label_selector_of(factory),
            trainer_resources=factory.head_bundle or None,
        )


def _is_accelerator_share(key: str, amount: float) -> bool:
    return amount == _ACCELERATOR_SHARE and key.startswith(_ACCELERATOR_PREFIX) and key != _ACCELERATOR_PREFIX


def _label_selector_of(factory: PlacementGroupFactory) -> dict[str, str] | tuple[dict[str, str], ...] | None:
    selectors = factory.bundle_label_selector
    if selectors is None:
        return None
    if selectors[0]:
        raise ConfigError(f"a ScalingConfig has no node labels for the trainer itself, got {factory!r}")
    workers = selectors[1:]
    alike = bool(workers) and all(selector == workers[0] for selector in workers)
    return workers[0] if alike else workers
