"""``from ray_lite import train`` in a fresh interpreter, beside ``from ray import train``.

Time of the import statement alone, and how many modules it brought; bytecode and page cache are warm.
Ours loads each name when it is first used, so the second pair of rows also names what a script names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from _harness import OURS, PEER, Measure, Side, arguments, compare
from _machine import peer_python

_PROBE = """
import json, sys, time
before = set(sys.modules)
began = time.perf_counter()
{statement}
seconds = time.perf_counter() - began
modules = len(set(sys.modules) - before)
train.ScalingConfig, train.RunConfig, train.Checkpoint, train.report, train.get_context
{trainer}
named_seconds = time.perf_counter() - began
named_modules = len(set(sys.modules) - before)
print(json.dumps(dict(seconds=seconds, modules=modules, named_seconds=named_seconds, named_modules=named_modules)))
"""


def main() -> None:
    options = arguments(__doc__ or "", runs=11, sides=[OURS, PEER])
    peer = peer_python(options.peer_python) if PEER in options.only else None

    def statement(python: str, text: str, trainer: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            code = _PROBE.format(statement=text, trainer=trainer)
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-2_000:])
            values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return values

        return run

    ours = statement(sys.executable, "from ray_lite import train", "train.torch.TorchTrainer")
    sides = [Side(name=OURS, measure=ours)]
    if peer is not None:
        theirs = statement(peer, "from ray import train", "from ray.train.torch import TorchTrainer")
        sides.append(Side(name=PEER, measure=theirs))
    compare(
        "imports",
        [side for side in sides if side.name in options.only],
        [
            Measure(key="seconds", text="import", unit="ms", budget=40.0),
            Measure(key="modules", text="modules", unit=""),
            Measure(key="named_seconds", text="import, and name trainer and configs", unit="ms"),
            Measure(key="named_modules", text="modules then", unit=""),
        ],
        runs=options.runs,
        pythons={"ours": sys.executable, **({"peer": peer} if peer else {})},
    )


if __name__ == "__main__":
    main()
