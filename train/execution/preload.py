"""Imported by every idle worker of an embedded cluster: what a run will need, ahead of time.

Ray imports this module when such a process starts (``preload_python_modules``). The
controller's process is told apart by its role and skips the framework, which it never uses.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["CONTROLLER_ENV", "MODULES_VARIABLE", "ROLE_VARIABLE"]

ROLE_VARIABLE = "RAY_LITE_ROLE"
"""Environment variable: ``controller`` in the process of a controller, unset elsewhere."""

MODULES_VARIABLE = "RAY_LITE_PRELOAD"
"""Environment variable: modules to import, separated by commas."""

CONTROLLER_ENV = {ROLE_VARIABLE: "controller"}


def preload() -> None:
    """Import the modules that the environment names."""
    if os.environ.get(ROLE_VARIABLE) == "controller":
        importlib.import_module("ray_lite.train.execution.controller")
        return
    for name in filter(None, os.environ.get(MODULES_VARIABLE, "").split(",")):
        importlib.import_module(name)


if MODULES_VARIABLE in os.environ:
    preload()
