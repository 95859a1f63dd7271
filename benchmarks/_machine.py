"""What the numbers were measured on: hardware, load and versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["machine", "peer_python"]

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("ray", "torch", "ray-lite-train")
_PROBE = (
    "import importlib.metadata as m, json, platform, sys\n"
    "out = {'Python': platform.python_version()}\n"
    "for name in sys.argv[1:]:\n"
    "    try: out[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(out))\n"
)


def machine(pythons: Mapping[str, str]) -> dict[str, str]:
    """Lines for the head of a table.

    Args:
        pythons: Name → interpreter.

    Returns:
        What → text: date, hardware, load before the first turn, commit, and versions of each interpreter.
    """
    header = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": f"{_processor()}, {os.cpu_count()} logical CPUs, {_memory_gib():.0f} GiB, {platform.platform()}",
        "load before": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "commit": _commit(),
    }
    for name, python in pythons.items():
        header[name] = ", ".join(f"{package} {version}" for package, version in _versions(python).items())
    return header


def peer_python(option: str | None) -> str | None:
    """The interpreter that has Ray Train.

    Args:
        option: ``--peer-python``.

    Returns:
        Its path; None, after a message that says how to get it, when there is none.

    Environment:
        ``BENCH_PEER_PYTHON``, where the option is not given.
    """
    given = option or os.environ.get("BENCH_PEER_PYTHON")
    path = Path(given) if given else _ROOT / ".venv-peer" / "bin" / "python"
    if path.exists():
        # Not resolved: the link is what makes it that environment's interpreter.
        return str(path.absolute())
    print(
        f"The column of Ray Train is missing, because there is no {path}. `make bench-peer` makes .venv-peer; "
        "--peer-python PATH or BENCH_PEER_PYTHON name another interpreter that has ray[train].\n"
    )
    return None


def _versions(python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", _PROBE, *_PACKAGES], capture_output=True, text=True, check=True, cwd="/", timeout=60
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, timeout=30
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
