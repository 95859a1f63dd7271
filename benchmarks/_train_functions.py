"""Train functions that know no framework, so that all sides run the same lines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "beside_the_ranks",
    "die_once",
    "look_around",
    "metrics",
    "note",
    "processes_of_the_run",
    "read_notes",
    "stamp",
    "time_reports",
    "time_small",
    "time_sync",
    "write_files",
    "write_small",
]


# What each node of Ray has, run or no run.
_OF_EVERY_NODE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def note(folder: str, name: str, **values: Any) -> None:
    Path(folder, name).write_text(json.dumps(values))


def read_notes(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """What ``note`` has left, in the order of the file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def stamp(config: dict[str, Any]) -> None:
    """Nothing, with the time of the first and of the last line."""
    first = time.time()
    name = f"stamp-{rank()}"
    note(config["folder"], name, first=first, last=time.time())


def processes_of_the_run() -> list[dict[str, Any]]:
    """Pid, and memory in MB, of this process and of each other one that the raylet has given work to."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            title = (entry / "cmdline").read_text().partition("\0")[0]
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            rows = [line.split() for line in (entry / "smaps_rollup").read_text().splitlines()[1:]]
        except OSError:
            continue
        if parent == os.getppid() and title.startswith("ray::") and not title.startswith(_OF_EVERY_NODE):
            kib = {row[0].rstrip(":"): int(row[1]) for row in rows}
            found.append({"pid": int(entry.name), "rss": kib["Rss"] / 1_024, "pss": kib["Pss"] / 1_024})
    return found


def look_around(config: dict[str, Any]) -> None:
    """Once both ranks are up, rank 0 notes which processes there are beside the two."""
    folder, me = Path(config["folder"]), rank()
    note(config["folder"], f"pid-{me}", pid=os.getpid())
    while len(list(folder.glob("pid-*"))) < 2:
        time.sleep(0.01)
    if me == 0:
        # Whatever else starts late has started by then.
        time.sleep(2.0)
        note(config["folder"], "processes", found=processes_of_the_run())
    while not (folder / "processes").exists():
        time.sleep(0.01)


def beside_the_ranks(folder: Path) -> dict[str, float]:
    """What ``look_around`` has noted, summed up."""
    (seen,) = read_notes(folder, "processes")
    ranks = {found["pid"] for found in read_notes(folder, "pid-*")}
    others = [process for process in seen["found"] if process["pid"] not in ranks]
    return {"num": len(others), "rss": sum(p["rss"] for p in others), "pss": sum(p["pss"] for p in others)}


def die_once(config: dict[str, Any]) -> None:
    """In the first attempt rank 1 kills itself when both are at rest; in the second, only the time is noted."""
    now, folder, me = time.time(), Path(config["folder"]), rank()
    if (folder / "killed").exists():
        note(config["folder"], f"second-{me}", first=now)
        return
    note(config["folder"], f"up-{me}")
    while len(list(folder.glob("up-*"))) < 2:
        time.sleep(0.01)
    time.sleep(1.0)
    if me == 1:
        note(config["folder"], "killed", at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600.0)


def metrics(index: int) -> dict[str, float]:
    """Five floats, as a training step has them."""
    return {
        "loss": 1.0 / (index + 1),
        "accuracy": index * 1e-5,
        "learning_rate": 3e-4,
        "grad_norm": 0.5 + index * 1e-6,
        "step_time": 0.0123,
    }


def time_reports(report: Callable[[dict[str, float]], None], config: dict[str, Any], name: str) -> None:
    """Call ``report`` ``config["num_reports"]`` times, timing each call."""
    clock, times_ns = time.perf_counter_ns, []
    prepared = [metrics(index) for index in range(config["num_reports"])]
    began = time.time()
    for values in prepared:
        before = clock()
        report(values)
        times_ns.append(clock() - before)
    ended = time.time()
    times_ns.sort()
    note(
        config["folder"],
        name,
        began=began,
        ended=ended,
        p50=times_ns[len(times_ns) // 2] / 1e9,
        p99=times_ns[min(len(times_ns) - 1, len(times_ns) * 99 // 100)] / 1e9,
        most=times_ns[-1] / 1e9,
    )


def write_files(folder: Path, size_mib: int, num_files: int = 4) -> None:
    """A folder of random bytes, as a framework would leave it before it reports."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        with open(folder / f"part-{number}.bin", "wb") as file:
            for _ in range(size_mib // num_files):
                file.write(os.urandom(1 << 20))


def time_sync(report: Any, from_directory: Any, folder: Path) -> float:
    """Seconds that one report of 512 MiB takes."""
    write_files(folder, 512)
    checkpoint = from_directory(str(folder))
    began = time.perf_counter()
    report({}, checkpoint=checkpoint)
    return time.perf_counter() - began


def time_small(report: Any, from_directory: Any, folder: Path) -> float:
    """Seconds that one report of 200 small files takes."""
    write_small(folder)
    checkpoint = from_directory(str(folder))
    began = time.perf_counter()
    report({}, checkpoint=checkpoint)
    return time.perf_counter() - began


def write_small(folder: Path) -> None:
    """200 files of 10 kB, as a sharded model leaves them."""
    folder.mkdir(parents=True)
    for number in range(200):
        (folder / f"shard-{number:03}.bin").write_bytes(os.urandom(10_000))
