"""A whole training script with this library; its argument is the storage path."""

import sys

from ray_lite import train
from ray_lite.train import RunConfig, ScalingConfig


def train_func():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    train.report({"total": total.item()})


if __name__ == "__main__":
    result = train.torch.TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
    print("total", result.metrics["total"])
