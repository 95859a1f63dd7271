"""Train a small convolutional network on handwritten digits, on two workers.

    make digits
    make digits ARGS="--name mine --epochs 5"    # and again with more epochs: it goes on where it stopped
    make digits ARGS="--num-workers 0"           # in this process, where breakpoint() works

The data are the 1,797 scans of 8 x 8 pixels that scikit-learn ships (UCI, "Optical Recognition of
Handwritten Digits"), so nothing is downloaded. Four in five are trained on, the rest is the test set.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_lite import train
from ray_lite.train import CheckpointConfig, RunConfig, ScalingConfig

STATE_FILE = "state.pt"


class DigitNet(nn.Module):
    """Two convolutions and two dense layers, 143,026 weights: images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 120),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(120, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


def digit_sets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set, the same on every rank for the same seed.

    Returns:
        1,437 and 360 pairs of a float32 image in ``[0, 1]``, shape ``(1, 8, 8)``, and its int64 digit.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(digits.target).long()
    train_rows, test_rows = train_test_split(
        range(len(labels)), test_size=0.2, random_state=seed, stratify=digits.target
    )
    return (
        TensorDataset(images[train_rows], labels[train_rows]),
        TensorDataset(images[test_rows], labels[test_rows]),
    )


@torch.inference_mode()
def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that the model names right, in ``[0, 1]``."""
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def train_digits(config: dict[str, Any]) -> None:
    """What each worker runs.

    Args:
        config: ``epochs`` to have trained at the end, those of earlier calls included; ``batch_size``, the images
            per step of all workers together; ``lr``, the learning rate of the first epoch; ``seed``.
    """
    context = train.get_context()
    device = train.torch.get_device()
    torch.manual_seed(config["seed"])

    net = DigitNet().to(device)
    first_epoch, saved = 0, None
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:  # the newest one of this run: an earlier call, or the attempt before a failure
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, STATE_FILE), map_location=device, weights_only=True)
        net.load_state_dict(saved["model"])
        first_epoch = saved["epoch"] + 1

    model = train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])

    train_set, test_set = digit_sets(config["seed"])
    batch_size = max(1, config["batch_size"] // context.get_world_size())
    # Each rank gets its own share of the images, in a new order each epoch.
    loader = train.torch.prepare_data_loader(DataLoader(train_set, batch_size=batch_size, shuffle=True))
    test_images, test_labels = (tensor.to(device) for tensor in test_set.tensors)

    for epoch in range(first_epoch, config["epochs"]):
        started = time.perf_counter()
        # Smaller steps as it goes on; worked out from the epoch alone, so a resumed run has the same ones.
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * 0.9**epoch
        model.train()
        # Added up on the device: reading a number back after each step would wait for it.
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()

        # The ranks hold equal weights, so each could test; `net` is the module without DDP around it, which
        # is why one rank can do it alone and why no name in the file begins with "module.".
        metrics = {"epoch": epoch, "loss": loss_sum.item() / len(loader)}
        if context.get_world_rank() != 0:
            train.report(metrics)
            continue
        metrics["accuracy"] = accuracy_of(net, test_images, test_labels)
        metrics["seconds"] = time.perf_counter() - started
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(folder, STATE_FILE))
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))
        print(
            f"epoch {epoch + 1:3d}  loss {metrics['loss']:.4f}  "
            f"accuracy {metrics['accuracy']:.2%}  {metrics['seconds']:.2f} s",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    """Train as the command line says, then say where the run lies and how good it is."""
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's handwritten digits.")
    parser.add_argument("--num-workers", type=int, default=2, help="processes; 0 trains in this one (default: 2)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the images, in all (default: 15)")
    parser.add_argument("--name", help="name of the run; one that exists already is resumed (default: a new name)")
    parser.add_argument("--storage-path", help="folder or URI that holds the runs (default: ~/ray_results)")
    args = parser.parse_args(argv)

    run_config = RunConfig(
        name=args.name,
        storage_path=args.storage_path,
        checkpoint_config=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="accuracy"),
    )
    result = train.torch.TorchTrainer(
        train_digits,
        train_loop_config={"epochs": args.epochs, "batch_size": 64, "lr": 4e-3, "seed": 0},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=run_config,
    ).fit()

    # From the checkpoints, not from this call's last report: a run that had all its epochs already made none.
    metrics = [metrics for _, metrics in result.best_checkpoints]
    if not metrics:
        parser.exit(1, f"nothing was trained: --epochs {args.epochs}\n")
    last, best = max(metrics, key=lambda m: m["epoch"]), max(metrics, key=lambda m: m["accuracy"])
    print(f"run       {result.path}")
    print(f"accuracy  {last['accuracy']:.2%} after epoch {last['epoch'] + 1}, best {best['accuracy']:.2%}")
    print(f"go on     --name {run_config.name} --epochs {last['epoch'] + 11}")


if __name__ == "__main__":
    main()
