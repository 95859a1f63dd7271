"""Checkpoints on a local disk, one worker: how long the train function stands still.

The files are written before the clock starts and are in memory. The floor for SYNC is ``cp -r`` of
the same folder to the same disk, as a process of its own. ``commit`` is the time between two manifests when reports of
one small file follow each other without a pause: the median around the 10th and around the 3,000th.
Ray Train makes only the first row: with 2 s per report its 3,000 commits would take two hours.
"""

from __future__ import annotations

from _harness import Measure
from _on_clusters import FLOOR, measure_on_clusters

if __name__ == "__main__":
    measure_on_clusters(
        "checkpoint",
        __doc__ or "",
        [
            Measure(key="sync", text="512 MiB, SYNC", budget=1.1, against=FLOOR),
            Measure(key="async", text="512 MiB, ASYNC, folder handed over", unit="ms", budget=20.0),
            Measure(key="staged", text="1 GiB, staged", unit="ms", budget=20.0),
            Measure(key="early", text="commit, 10th", unit="ms"),
            Measure(key="late", text="commit, 3,000th", unit="ms"),
            Measure(key="growth", text="3,000th ÷ 10th", unit="", budget=1.5),
        ],
        runs=3,
        ours={"num_commits": 3_010},
        peer={},
    )
