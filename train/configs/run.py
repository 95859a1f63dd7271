"""``RunConfig``: a run's name, its place in storage, and what happens around it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import attrs

from ..errors import ConfigError, ConfigTypeError, LegacyAPIError
from ..storage.uri import check_name, check_name_below, redact, resolve_storage_path
from ._config import MASK, Config, as_plain, mask_secrets
from ._deprecation import warn_deprecated
from ._options import choice, instance_of_config, shown, type_name, with_option_hints
from .checkpoint import CheckpointConfig
from .failure import FailureConfig
from .logging import LoggingConfig

__all__ = ["CALLBACK_HOOKS", "RunConfig"]

DEFAULT_STORAGE_PATH = "~/ray_results"

# A callback is anything with at least one of these; see ``train.Callback``.
CALLBACK_HOOKS = ("on_run_start", "after_report", "after_checkpoint", "after_exception", "on_restart", "on_run_end")

_NESTED: dict[str, type[Config]] = {
    "failure_config": FailureConfig,
    "checkpoint_config": CheckpointConfig,
    "logging_config": LoggingConfig,
}
# Options of older Ray releases, with the values that asked for nothing.
_WITHOUT_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "sync_config": ((None,), "workers write straight to storage_path"),
    "verbose": ((None,), "set the level with RunConfig(logging_config=LoggingConfig(log_level=...))"),
    "progress_reporter": ((None,), "pass an object with after_report() in RunConfig(callbacks=[...])"),
    "log_to_file": ((None, False), "redirect the output of your script, or add a logging.FileHandler"),
}


def _prepare(options: dict[str, Any]) -> None:
    if options.pop("stop", None) is not None:
        # Not a warning: training on past the point the user asked for would waste hours.
        raise LegacyAPIError(
            "RunConfig(stop=...) is not supported by ray_lite. Instead: stop inside the train function, "
            "by leaving its loop when the condition holds"
        )
    for name, (defaults, advice) in _WITHOUT_EFFECT.items():
        value = options.pop(name, None)
        if not any(value is default for default in defaults):
            warn_deprecated(f"RunConfig({name}=...) is deprecated and has no effect; {advice}")
    local_dir = options.pop("local_dir", None)
    if local_dir is not None:
        if options.get("storage_path") is not None:
            raise ConfigError(
                f"RunConfig.local_dir is the old name of storage_path, got both ({redact(str(local_dir))!r} and "
                f"{redact(str(options['storage_path']))!r}); pass storage_path only"
            )
        warn_deprecated("RunConfig(local_dir=...) is deprecated; use RunConfig(storage_path=...).")
        options["storage_path"] = local_dir
    if options.get("resume") == "must" and options.get("name") is None:
        raise ConfigError("RunConfig.resume='must' needs the name of the run to resume, got name=None")


def _type_of(value: object) -> str:
    return f"an object of type {type_name(type(value))}"


def _to_name(value: str | None) -> str:
    if value is not None:
        return check_name("RunConfig.name", value)
    # The tail keeps apart runs that start in one second; os.urandom, so that user seeds neither see nor fix it.
    return f"run_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(2).hex()}"


def _to_storage_path(value: str | os.PathLike[str] | None) -> str:
    # Resolved in __attrs_post_init__, since what a path means depends on storage_filesystem.
    return cast(str, value)


def _to_options(value: Mapping[str, Any] | None) -> dict[str, Any]:
    if value is None:
        return {}
    # Never the values in these messages: they are often secrets.
    if not isinstance(value, Mapping):
        raise ConfigTypeError(
            f"RunConfig.storage_options must be a dict of options for fsspec or None, got {_type_of(value)}"
        )
    for key in value:
        if not isinstance(key, str):
            raise ConfigTypeError(
                f"RunConfig.storage_options must have option names (strings) as keys, got {_type_of(key)}"
            )
    return dict(value)


def _to_runtime_env(value: Mapping[str, Any] | None) -> dict[str, Any]:
    name = "RunConfig.worker_runtime_env"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"{name} must be a dict, a ray.runtime_env.RuntimeEnv or None, got {_type_of(value)}")
    copy = dict(value)
    for key in copy:
        if not isinstance(key, str):
            raise ConfigTypeError(f"{name} must have strings as keys, got {shown(key)}")
    variables = copy.get("env_vars")
    if variables is None:
        return copy
    if not isinstance(variables, Mapping):
        raise ConfigTypeError(f"{name}['env_vars'] must be a dict from strings to strings, got {_type_of(variables)}")
    for key, item in variables.items():
        if not isinstance(key, str) or not isinstance(item, str):
            raise ConfigTypeError(
                f"{name}['env_vars'] must map strings to strings, got for {shown(key)} {_type_of(item)}"
            )
    copy["env_vars"] = dict(variables)
    return copy


def _without_secrets(runtime_env: dict[str, Any]) -> dict[str, Any]:
    masked = cast("dict[str, Any]", mask_secrets(runtime_env))
    if isinstance(masked.get("env_vars"), dict):
        masked["env_vars"] = dict.fromkeys(masked["env_vars"], MASK)
    return masked


def _show_runtime_env(runtime_env: dict[str, Any]) -> str:
    return repr(_without_secrets(runtime_env))


def _show_path(path: str) -> str:
    return repr(redact(path))


def _show_type(value: object) -> str:
    # A filesystem's own repr may show its options.
    return "None" if value is None else f"<{type_name(type(value))}>"


def _to_callbacks(value: Sequence[Any] | None) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ConfigTypeError(f"RunConfig.callbacks must be a list of callbacks or None, got {shown(value)}")
    return tuple(value)


def _to_functions(value: Sequence[str] | None) -> tuple[str, ...]:
    known = ("mean", "min", "max")
    found = (value,) if isinstance(value, str) else value or ()
    if not isinstance(found, (list, tuple)) or any(name not in known for name in found):
        raise ConfigError(f"RunConfig.metrics_over_ranks must be a list of {', '.join(known)}, got {shown(value)}")
    return tuple(dict.fromkeys(found))


def _to_failure(value: FailureConfig | None) -> FailureConfig:
    return FailureConfig() if value is None else value


def _to_checkpoint(value: CheckpointConfig | None) -> CheckpointConfig:
    return CheckpointConfig() if value is None else value


def _to_logging(value: LoggingConfig | None) -> LoggingConfig:
    return LoggingConfig() if value is None else value


RunConfigT = TypeVar("RunConfigT", bound="RunConfig")


@with_option_hints(_prepare)
@attrs.frozen(kw_only=True, repr=False)
class RunConfig(Config):
    """A run: what it is called, where its files lie, and what happens around training.

    Paths are resolved when this is built, on the machine and in the folder where it is
    built, so that all workers see one place.

    ``to_dict`` leaves out ``storage_filesystem``, ``storage_options`` and ``callbacks``, and
    replaces the values of ``env_vars`` and passwords in URLs by ``***``; ``from_dict`` does
    not set environment variables that were replaced.

    Raises:
        ConfigTypeError: A value of the wrong type, or an option that does not exist.
        ConfigError: A name or path that cannot be used, or options that contradict each other.
        LegacyAPIError: ``stop`` was given, which ended Ray AIR runs from outside.
    """

    _left_out: ClassVar[frozenset[str]] = frozenset({"storage_filesystem", "storage_options", "callbacks"})

    name: str = attrs.field(default=None, converter=_to_name)
    """One folder name of at most 200 bytes; the same name and path resume the run. None: ``run_<time>_<4 hex>``."""
    storage_path: str = attrs.field(default=None, converter=_to_storage_path, repr=_show_path)
    """A local path or a URI such as ``s3://bucket/runs``; the run's files go to ``<storage_path>/<name>``.
    Stored absolute and without a trailing slash. None: ``~/ray_results``."""
    storage_filesystem: Any = attrs.field(default=None, repr=_show_type, hash=False)
    """An fsspec filesystem to use instead of the one that ``storage_path`` names; the path then lies inside it."""
    storage_options: dict[str, Any] = attrs.field(factory=dict, converter=_to_options, repr=False, hash=False)
    """Options for the filesystem that ``storage_path`` names (keys, endpoints); never shown nor written to disk."""
    failure_config: FailureConfig = attrs.field(
        factory=FailureConfig, converter=_to_failure, validator=instance_of_config(FailureConfig)
    )
    """What follows a failure."""
    checkpoint_config: CheckpointConfig = attrs.field(
        factory=CheckpointConfig, converter=_to_checkpoint, validator=instance_of_config(CheckpointConfig)
    )
    """Which checkpoints are kept."""
    logging_config: LoggingConfig = attrs.field(
        factory=LoggingConfig, converter=_to_logging, validator=instance_of_config(LoggingConfig)
    )
    """How much the library says."""
    callbacks: tuple[Any, ...] = attrs.field(default=(), converter=_to_callbacks, hash=False)
    """Objects with at least one of the hooks of ``train.Callback``, called in this order."""
    worker_runtime_env: dict[str, Any] = attrs.field(
        factory=dict, converter=_to_runtime_env, repr=_show_runtime_env, hash=False
    )
    """Ray runtime environment of the workers; its ``env_vars`` go before those that the library sets."""
    resume: str = attrs.field(default="auto", validator=choice("auto", "never", "must"))
    """``"auto"`` continues the run of this name if there is one, from its newest checkpoint that is whole;
    ``"must"`` fails if it has none. ``"never"`` continues none: if there is a run of this name, it is left
    as it is, and this one is called ``<name>_2`` (``_3``, ...) and lies in a folder of its own."""

    metrics_over_ranks: tuple[str, ...] = attrs.field(default=(), converter=_to_functions)
    """What the history keeps of each number over all ranks, besides rank 0's own: of ``"mean"``, ``"min"``,
    ``"max"``; shown as ``loss/mean`` in ``Result.metrics_history``."""

    @storage_filesystem.validator
    def _check_filesystem(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        what = f"RunConfig.storage_filesystem must be an fsspec filesystem object or None, got {_show_type(value)}"
        if isinstance(value, type):
            raise ConfigTypeError(f"{what}, the class {type_name(value)}; write {value.__name__}(...)")
        if callable(getattr(value, "open_input_stream", None)):
            raise ConfigTypeError(f"{what}; wrap it: fsspec.implementations.arrow.ArrowFSWrapper(filesystem)")
        if isinstance(value, str):
            raise ConfigTypeError(f"{what}; write the protocol into storage_path: '{redact(value)}://...'")
        if not all(callable(getattr(value, name, None)) for name in ("open", "info", "find", "rm_file")):
            raise ConfigTypeError(what)

    @callbacks.validator
    def _check_callbacks(self, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
        for index, callback in enumerate(value):
            name = f"RunConfig.callbacks[{index}]"
            if isinstance(callback, type):
                raise ConfigTypeError(
                    f"{name} must be an object, got the class {type_name(callback)}; write {callback.__name__}()"
                )
            if not any(callable(getattr(callback, hook, None)) for hook in CALLBACK_HOOKS):
                raise ConfigTypeError(
                    f"{name} must be an object with at least one of the methods {', '.join(CALLBACK_HOOKS)}, "
                    f"got {_type_of(callback)}; derive it from ray_lite.train.Callback"
                )

    def __attrs_post_init__(self) -> None:
        path: str | os.PathLike[str] | None = self.storage_path
        if self.storage_filesystem is not None:
            if path is None:
                raise ConfigError(
                    "RunConfig.storage_path must say where in storage_filesystem the run lies, got None; "
                    "pass for example storage_path='bucket/runs'"
                )
            if self.storage_options:
                raise ConfigError(
                    "RunConfig.storage_options must be None together with storage_filesystem, got "
                    f"{', '.join(sorted(self.storage_options))}; give the options to the filesystem itself"
                )
        try:
            resolved = resolve_storage_path(
                DEFAULT_STORAGE_PATH if path is None else path, has_filesystem=self.storage_filesystem is not None
            )
        except ConfigError as error:
            raise type(error)(f"RunConfig.{error}") from None
        object.__setattr__(self, "storage_path", resolved)
        check_name_below("RunConfig.name", self.name, resolved, has_filesystem=self.storage_filesystem is not None)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values that ``json.dumps`` takes, without secrets; see the class."""
        plain = super().to_dict()
        plain["storage_path"] = redact(self.storage_path)
        plain["worker_runtime_env"] = as_plain(_without_secrets(self.worker_runtime_env))
        return plain

    @classmethod
    def from_dict(cls: type[RunConfigT], values: Mapping[str, Any]) -> RunConfigT:
        """The config that ``to_dict`` described; options that are missing get their defaults.

        Raises:
            ConfigTypeError: ``values`` is not a mapping with option names as keys.
            ConfigError: A value is not allowed.
        """
        if not isinstance(values, Mapping):
            return super().from_dict(values)
        options = dict(values)
        for name, kind in _NESTED.items():
            if isinstance(options.get(name), Mapping):
                options[name] = kind.from_dict(options[name])
        runtime_env = options.get("worker_runtime_env")
        if isinstance(runtime_env, Mapping) and isinstance(runtime_env.get("env_vars"), Mapping):
            known = {key: value for key, value in runtime_env["env_vars"].items() if value != MASK}
            options["worker_runtime_env"] = {**runtime_env, "env_vars": known}
        return super().from_dict(options)
