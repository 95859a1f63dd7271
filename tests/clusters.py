"""One small cluster for the tests that need one, and proof that each of them leaves nothing on it.

The fixtures are shared by ``cluster/`` and ``chaos/``, whose ``conftest.py`` import them from here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from ray_lite import train
from ray_lite.train import RunConfig, ScalingConfig
from ray_lite.train.context.journal import journal_root

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Workers import the helpers of the tests; they inherit this process's environment.
_HERE = Path(__file__).resolve().parent
_FOLDERS = [str(_HERE), str(_HERE / "cluster"), str(_HERE / "chaos")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([*_FOLDERS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

NUM_CPUS = 4

__all__ = ["cluster", "fit", "living_actors", "no_leaks", "placement_groups", "scratch", "start_cluster"]


def start_cluster() -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        logging_level="ERROR",
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Four logical CPUs on this machine, for the whole session."""
    import ray

    # Each folder that imports this fixture has one of its own, as pytest sees it.
    if ray.is_initialized():
        yield
        return
    start_cluster()
    yield
    ray.shutdown()


def living_actors() -> list[str]:
    from ray._private.state import actors

    return [info["ActorClassName"] for info in actors().values() if info["State"] != "DEAD"]


def placement_groups() -> list[str]:
    import ray

    return [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def journals() -> list[Path]:
    root = journal_root()
    return list(root.iterdir()) if root.exists() else []


def environment_now() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


@pytest.fixture
def no_leaks(cluster: None) -> Iterator[None]:
    """After the test: no actor, no placement group, no thread, no handler, no variable that was not there before."""
    threads = set(threading.enumerate())
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    environment = environment_now()
    old_journals = set(journals())
    yield
    wait_until(lambda: not living_actors(), f"no actors are left: {living_actors()}")
    wait_until(lambda: not placement_groups(), f"no placement groups are left: {placement_groups()}")
    wait_until(lambda: not set(journals()) - old_journals, "no journals are left")
    wait_until(
        lambda: not [t for t in threading.enumerate() if t not in threads and not t.name.startswith("ray_")],
        f"no threads are left: {set(threading.enumerate()) - threads}",
    )
    assert [signal.getsignal(number) for number in _SIGNALS] == handlers
    assert environment_now() == environment


@pytest.fixture
def fit(no_leaks: None, tmp_path: Path) -> Callable[..., train.Result]:
    """``fit(fn, n=2, cfg=None, ds=None, cc=None, fc=None, **run_config)``."""

    def fit(
        fn: Callable[..., Any],
        n: int = 2,
        cfg: dict[str, Any] | None = None,
        ds: dict[str, Any] | None = None,
        cc: train.CheckpointConfig | None = None,
        fc: train.FailureConfig | None = None,
        trainer: type = train.DataParallelTrainer,
        scaling: ScalingConfig | None = None,
        trainer_options: dict[str, Any] | None = None,
        **run_options: Any,
    ) -> train.Result:
        run_options.setdefault("storage_path", tmp_path / "storage")
        return trainer(
            fn,
            train_loop_config=cfg,
            datasets=ds,
            scaling_config=scaling or ScalingConfig(num_workers=n),
            run_config=RunConfig(checkpoint_config=cc, failure_config=fc, **run_options),
            **(trainer_options or {}),
        ).fit()

    return fit


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder that driver and workers share, for what a train function notes down."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path
