"""The same work with Ray Train; its argument is the storage path.

``result.metrics`` is None there when no report had a checkpoint, so rank 0 leaves the number in a file.
"""

import os
import sys

import ray.train
from ray.train.torch import TorchTrainer


def train_func(config):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    ray.train.report({"total": total.item()})
    if dist.get_rank() == 0:
        with open(config["answer"], "w") as file:
            file.write(str(total.item()))


if __name__ == "__main__":
    storage = sys.argv[1]
    answer = os.path.join(os.path.dirname(storage), "answer")
    TorchTrainer(
        train_func,
        train_loop_config={"answer": answer},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=storage),
    ).fit()
    with open(answer) as file:
        print("total", file.read())
