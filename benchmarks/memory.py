"""Processes beside the driver and the two ranks while a run goes on, and their memory, 2 torch workers.

Looked up by rank 0 two seconds after both are up: the raylet's other children that have work. ``resident`` counts
memory that is shared with other processes (Ray's libraries) in full, ``own share`` divides it among those that share
it. The floor is one actor that does nothing.
"""

from __future__ import annotations

from _harness import Measure
from _on_clusters import measure_on_clusters

if __name__ == "__main__":
    measure_on_clusters(
        "memory",
        __doc__ or "",
        [
            Measure(key="num", text="processes", unit="", budget=1),
            Measure(key="rss", text="resident (MB)", unit="", budget=120),
            Measure(key="pss", text="own share (MB)", unit=""),
        ],
        runs=2,
    )
