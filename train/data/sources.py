"""The datasets of a trainer: checked when it is built, loaded once per ``fit()``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..configs.data import DataConfig
from ..errors import ConfigError, ConfigTypeError
from .kinds import Kind, NotADatasetError, classify, count_rows

__all__ = ["DataSource", "check_datasets"]


@attrs.frozen(eq=False)
class DataSource:
    """One dataset of a trainer.

    Attributes:
        name: Its key in ``datasets``.
        is_split: Whether each worker gets a part of it, or all of it.
        remainder: ``DataConfig.remainder``.
    """

    name: str
    is_split: bool
    remainder: str
    _value: Any = attrs.field(repr=False)
    _execution_options: Any = attrs.field(default=None, repr=False)
    _is_locality_wanted: bool = attrs.field(default=True, repr=False)

    def load(self) -> DataSource:
        """This source with its data present: calls the user's function if one was passed, once per call.

        Raises:
            ConfigTypeError: The function returned something that is no dataset.
        """
        kind = _classify(repr(self.name), self._value)
        if kind is not Kind.FACTORY:
            return self
        value = self._value()
        subject = f"{self.name!r} (what its function returned)"
        if _classify(subject, value) is Kind.FACTORY:
            raise ConfigTypeError(f"dataset {subject} is a function again; return the data itself")
        return attrs.evolve(self, value=value)

    @property
    def splits_itself(self) -> bool:
        """Whether the workers get :meth:`parts`; of a function that was passed, known once it is loaded."""
        return self.is_split and _classify(repr(self.name), self._value) is Kind.SPLITS_ITSELF

    def payload(self) -> Any:
        """The data that every worker needs, to be shipped once; ``make_shard`` takes each worker's part of it there."""
        return self.load()._value

    def parts(self, world_size: int, *, node_ids: Sequence[str] | None = None) -> list[Any] | None:
        """One object per rank, from a dataset that splits itself; None for the others.

        To be called for each worker group: parts are made for one world size, and those of Ray Data
        wait at the start of an epoch until all of them have arrived, counting the dead.

        Ray Data's equal split drops the rows that do not divide, also with ``remainder="wrap"``:
        a stream has no first rows left to wrap round to. ``"uneven"`` asks it for all rows.

        Args:
            world_size: Workers in the group, >= 1.
            node_ids: The node of each rank, so that Ray Data can send it blocks that are there.

        Raises:
            ConfigError: ``split`` gave another number of parts.
        """
        source = self.load()
        if not source.splits_itself:
            return None
        value = source._value
        is_equal = self.remainder != "uneven"
        if hasattr(value, "streaming_split"):
            hints = list(node_ids) if node_ids and self._is_locality_wanted else None
            stream = self._with_execution_options(value)
            parts = list(stream.streaming_split(world_size, equal=is_equal, locality_hints=hints))
        elif _takes(value.split, "equal"):
            parts = list(value.split(world_size, equal=is_equal))
        else:
            parts = list(value.split(world_size))
        if len(parts) != world_size:
            raise ConfigError(f"dataset {self.name!r}: split({world_size}) gave {len(parts)} parts")
        return parts

    def _with_execution_options(self, dataset: Any) -> Any:
        options = self._execution_options
        if isinstance(options, Mapping):
            options = options.get(self.name)
        if options is None:
            return dataset
        # On a copy: the user's own dataset keeps the options it has.
        dataset = dataset.copy(dataset)
        dataset.context.execution_options = copy.deepcopy(options)
        return dataset


def check_datasets(datasets: Mapping[str, Any] | None, config: DataConfig | None) -> dict[str, DataSource]:
    """The sources behind a trainer's ``datasets``; nothing is loaded or copied.

    A dataset is a list or tuple, a numpy array, torch tensor, pandas DataFrame or pyarrow Table, a
    dict of equal-length arrays or lists, a torch dataset, anything else with ``len()`` and
    ``[i]`` or that can be iterated over again, an object with ``streaming_split`` or ``split``
    (Ray Data), or a function without arguments that makes one of these.

    Args:
        datasets: Name → dataset, or None.
        config: Which of them are split, and how; None for the defaults.

    Raises:
        ConfigTypeError: An argument has the wrong type, or a value cannot serve as a dataset
            (a one-shot iterator, a set, a dict of columns of different lengths ...).
        ConfigError: ``datasets_to_split`` names a dataset that is not there.
    """
    if config is not None and not isinstance(config, DataConfig):
        raise ConfigTypeError(
            f"dataset_config must be a ray_lite.train.DataConfig or None, got a {type(config).__name__}"
        )
    config = config or DataConfig()
    if datasets is None:
        datasets = {}
    if not isinstance(datasets, Mapping):
        raise ConfigTypeError(
            f"datasets must be a dict of names to datasets, got a {type(datasets).__name__}; "
            'write datasets={"train": ...}'
        )
    to_split = config.datasets_to_split
    if to_split != "all":
        _check_names(to_split, datasets)
    sources = {}
    for name, value in datasets.items():
        if not isinstance(name, str) or not name:
            raise ConfigTypeError(f"the keys of datasets must be non-empty strings, got {name!r}")
        kind = _classify(repr(name), value)
        if kind is Kind.FACTORY:
            _check_factory(name, value)
        sources[name] = DataSource(
            name,
            to_split == "all" or name in to_split,
            config.remainder,
            value,
            config.execution_options,
            config.enable_shard_locality,
        )
    return sources


def _check_names(names: Sequence[str], datasets: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in datasets]
    if unknown:
        known = f"the trainer's datasets are {', '.join(map(repr, datasets))}" if datasets else "the trainer has none"
        raise ConfigError(
            f"DataConfig.datasets_to_split names {', '.join(map(repr, unknown))}, which is not in datasets; {known}"
        )


def _classify(subject: str, value: Any) -> Kind:
    try:
        kind = classify(value)
        count_rows(value, kind)
    except NotADatasetError as error:
        raise ConfigTypeError(f"dataset {subject} {error}") from None
    return kind


def _check_factory(name: str, function: Any) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions written in C hide theirs; the call will tell.
        return
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigTypeError(
            f"dataset {name!r} is a function that needs arguments ({', '.join(needed)}); it is called without any: "
            "pass a lambda or functools.partial that fills them in"
        )


def _takes(function: Any, argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
