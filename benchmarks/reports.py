"""``report()`` of five floats without a checkpoint, called without a pause on 2 workers at once.

``to disk`` is from rank 0's first call to the moment its last report is in the history on
disk. The floor makes JSON of the same values and appends it to a file. Ray Train makes 4 reports where the
others make 20,000, because each takes 2 s; it keeps no history of reports without a checkpoint.
"""

from __future__ import annotations

from _harness import Measure
from _on_clusters import measure_on_clusters

if __name__ == "__main__":
    measure_on_clusters(
        "reports",
        __doc__ or "",
        [
            Measure(key="p50", text="`report()`, p50", unit="µs", budget=50.0),
            Measure(key="p99", text="`report()`, p99", unit="µs"),
            Measure(key="most", text="`report()`, slowest", unit="ms"),
            Measure(key="calls_per_s", text="calls per worker", unit="per s", is_rate=True),
            Measure(key="to_disk_per_s", text="to disk, per worker", unit="per s", budget=10_000.0, is_rate=True),
            Measure(key="end", text="last report returned → `fit()` returned", budget=0.3),
        ],
        runs=3,
        ours={"num_reports": 20_000},
        peer={"num_reports": 4},
    )
