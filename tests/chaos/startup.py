"""Workers that are killed while they start: at each step, and at random moments. Runs on the workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import attrs
from helpers import first_time

from ray_lite import train
from ray_lite.train.execution.backend import Backend, BackendConfig

__all__ = ["STEPS", "FragileConfig", "FragileFunction"]

STEPS = ("import", "open", "on_start", "on_training_start")
"""The library's own steps in which a worker is killed."""


def die_once(scratch: str, step: str) -> None:
    if first_time(Path(scratch), f"die-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)


@attrs.frozen(kw_only=True)
class FragileConfig(BackendConfig):
    """A backend with one step that kills a worker, once."""

    scratch: str
    step: str
    victim: int

    @property
    def backend_cls(self) -> type[Backend]:
        return FragileBackend

    @property
    def preload_modules(self) -> tuple[str, ...]:
        return ("dies_on_import",) if self.step == "import" else ()


class FragileBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: FragileConfig) -> None:
        self._maybe_die("on_start", worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: FragileConfig) -> None:
        self._maybe_die("on_training_start", worker_group, backend_config)

    def _maybe_die(self, step: str, worker_group: Any, config: FragileConfig) -> None:
        if config.step == step:
            worker_group.execute_single(config.victim, die_once, config.scratch, step)


class FragileFunction:
    """A train function that may kill the worker which opens it, once."""

    def __init__(self, scratch: str, step: str) -> None:
        self._scratch, self._step = scratch, step

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self._step == "open":
            die_once(self._scratch, "open")

    def __call__(self) -> None:
        context = train.get_context()
        train.report({"attempt": context.get_attempt(), "size": context.get_world_size()})
