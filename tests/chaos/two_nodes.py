"""A run on two raylets, of which one is removed: the script of ``test_lost_nodes.py``. Prints JSON lines."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from helpers import folder_with, note, notes, read
from waiting import wait_until

from ray_lite import train
from ray_lite.train import FailureConfig, RunConfig, ScalingConfig


def train_until_told(config: dict[str, Any]) -> None:
    """Steps with checkpoints; the first attempt goes on until its node is lost."""
    import ray

    context = train.get_context()
    checkpoint = train.get_checkpoint()
    start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
    row = [context.get_attempt(), context.get_world_rank(), context.get_world_size(), context.get_node_rank(), start]
    note(config["scratch"], "starts", [*row, ray.get_runtime_context().get_node_id()])
    pause = threading.Event()
    i = start
    while context.get_attempt() == 1 or i < start + 3:
        with folder_with(i=str(i)) as new:
            train.report({"i": i, "start": start}, checkpoint=new if context.get_world_rank() == 0 else None)
        note(config["scratch"], f"reported-{context.get_attempt()}-{context.get_world_rank()}", i)
        i += 1
        pause.wait(0.05)


def main() -> None:
    from ray.cluster_utils import Cluster

    folder, kind = Path(sys.argv[1]), sys.argv[2]
    scratch = folder / "scratch"
    scratch.mkdir()
    # Room for one worker each, so that both nodes are needed; an elastic run goes on with one.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    import ray

    ray.init(address=cluster.address, logging_level="ERROR")
    cluster.wait_for_nodes()
    failures: list[BaseException] = []

    def remove() -> None:
        try:
            for rank in range(2):
                wait_until(lambda r=rank: len(notes(scratch, f"reported-1-{r}")) >= 5, "both ranks report", 60)
            cluster.remove_node(second, allow_graceful=False)
            if kind == "replaced":
                cluster.add_node(num_cpus=1)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=remove)
    thread.start()
    result = train.DataParallelTrainer(
        train_until_told,
        train_loop_config={"scratch": str(scratch)},
        scaling_config=ScalingConfig(num_workers=(1, 2) if kind == "elastic" else 2, placement_strategy="SPREAD"),
        # Not one failure is allowed: the loss of a node is none.
        run_config=RunConfig(storage_path=folder / "runs", name="x", failure_config=FailureConfig(max_failures=0)),
    ).fit()
    thread.join()
    assert not failures
    print(json.dumps({"metrics": result.metrics, "starts": notes(scratch, "starts"), "num_nodes": 2}), flush=True)
    from clusters import living_actors, placement_groups

    wait_until(lambda: not living_actors() and not placement_groups(), "everything is given back")
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main()
