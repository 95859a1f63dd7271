"""Whole scripts as fresh processes: import, local start, 2 torch workers, one all_reduce, one report, exit.

Wall time of the command. Nothing runs before and nothing is left behind; Ray Train and this
library start a local cluster of their own, torchrun starts its workers directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from _harness import OURS, PEER, Measure, Side, arguments, compare
from _machine import peer_python
from _processes import run_command, scratch

TORCH_ON_TOP = "ours, driver imports torch"
TORCHRUN = "torchrun"

_SCRIPTS = Path(__file__).resolve().parent / "whole_scripts"


def main() -> None:
    options = arguments(__doc__ or "", runs=5, sides=[OURS, TORCH_ON_TOP, TORCHRUN, PEER])
    peer = peer_python(options.peer_python) if PEER in options.only else None

    def whole(*command: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with scratch() as folder:
                filled = [part.format(storage=folder / "storage") for part in command]
                return {"whole": run_command(filled, folder, expect="total 2.0")}

        return run

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sides = [
        Side(name=OURS, measure=whole(sys.executable, str(_SCRIPTS / "ours.py"), "{storage}")),
        Side(name=TORCH_ON_TOP, measure=whole(sys.executable, str(_SCRIPTS / "ours_torch_on_top.py"), "{storage}")),
        Side(name=TORCHRUN, measure=whole(sys.executable, *torchrun, str(_SCRIPTS / "with_torchrun.py"))),
    ]
    if peer is not None:
        sides.append(Side(name=PEER, measure=whole(peer, str(_SCRIPTS / "with_ray_train.py"), "{storage}")))
    compare(
        "startup",
        [side for side in sides if side.name in options.only],
        [Measure(key="whole", text="whole script", budget=1.2, against=TORCHRUN)],
        runs=options.runs,
        pythons={"ours": sys.executable, **({"peer": peer} if peer else {})},
    )


if __name__ == "__main__":
    main()
