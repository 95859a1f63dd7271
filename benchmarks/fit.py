"""``fit()`` of a train function that does nothing, 2 torch workers, on a cluster that runs already.

Ours and the floor (two plain actors that import torch and make a gloo group, ready to begin)
share one cluster, Ray Train has its own; both are plain ``ray.init(num_cpus=4)``. Before each turn the
cluster has all its CPUs free again. ``first line`` is from the call of ``fit()`` to the first line of rank 0's
train function, ``end`` from the last line of the last rank's to the return of ``fit()``.
"""

from __future__ import annotations

from _harness import Measure
from _on_clusters import FLOOR, measure_on_clusters

if __name__ == "__main__":
    measure_on_clusters(
        "fit",
        __doc__ or "",
        [
            Measure(key="total", text="`fit()`", budget=1.3, against=FLOOR),
            Measure(key="first_line", text="first line"),
            Measure(key="end", text="end", budget=0.3),
        ],
        runs=5,
    )
