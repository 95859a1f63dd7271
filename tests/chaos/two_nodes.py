"""A run on two raylets, of which one is removed: the script of ``test_lost_nodes.py``. Prints JSON lines."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from helpers import folder_with, note, notes, read
from processes import say
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
    # Ray takes a node for dead after five missed health checks, here of half a second.
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1)
    import ray

    ray.init(address=cluster.address, logging_level="ERROR")
    cluster.wait_for_nodes()
    results: list[train.Result | BaseException] = []

    def fit() -> None:
        try:
            results.append(trainer.fit())
        except BaseException as error:
            results.append(error)
            raise

    trainer = train.DataParallelTrainer(
        train_until_told,
        train_loop_config={"scratch": str(scratch)},
        scaling_config=ScalingConfig(num_workers=(1, 2) if kind == "elastic" else 2, placement_strategy="SPREAD"),
        # Not one failure is allowed: the loss of a node is none.
        run_config=RunConfig(storage_path=folder / "runs", name="x", failure_config=FailureConfig(max_failures=0)),
    )
    thread = threading.Thread(target=fit)
    thread.start()
    for rank in range(2):
        wait_until(lambda r=rank: len(notes(scratch, f"reported-1-{r}")) >= 5, "both ranks report", 60)
    cluster.remove_node(second, allow_graceful=kind == "elastic")
    if kind == "replaced":
        cluster.add_node(num_cpus=1)
    thread.join()
    (result,) = results
    assert isinstance(result, train.Result)
    say(metrics=result.metrics, starts=notes(scratch, "starts"))
    from clusters import living_actors, placement_groups

    wait_until(lambda: not living_actors() and not placement_groups(), "everything is given back")
    ray.shutdown()
    cluster.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
