"""SIGKILL of rank 1 of 2, at rest → first line of rank 0's train function in the next attempt (``max_failures=1``).

The floor waits for the dead actor's call to fail, kills the other one and starts two new
plain actors, which import torch and make a gloo group.
"""

from __future__ import annotations

from _harness import Measure
from _on_clusters import FLOOR, measure_on_clusters

if __name__ == "__main__":
    measure_on_clusters(
        "recovery",
        __doc__ or "",
        [Measure(key="restart", text="SIGKILL → first line", budget=1.5, against=FLOOR)],
        runs=5,
    )
