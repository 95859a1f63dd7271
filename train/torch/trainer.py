"""``TorchTrainer``: a ``DataParallelTrainer`` whose workers form a torch process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..configs import DataConfig, RunConfig, ScalingConfig
from ..configs._options import expect_config
from ..storage.checkpoint import Checkpoint
from ..trainer import DataParallelTrainer
from .config import TorchConfig

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """Runs a PyTorch training function on N workers.

    The workers form a ``torch.distributed`` process group before the function starts, also if
    there is only one, and have the environment variables that torchrun sets. In the function,
    ``train.torch.prepare_model`` and ``prepare_data_loader`` do what several workers need.

    With ``num_workers=0`` the function runs in this process, without a process group.

    Args:
        train_loop_per_worker: The train function, see ``DataParallelTrainer`` for this and the rest.
        train_loop_config: Passed to the train function.
        torch_config: Backend, rendezvous and timeout of the process group.
        scaling_config: How many workers, and with which resources.
        run_config: Name, storage, checkpoints, failures, callbacks.
        datasets: Name → data, for ``train.get_dataset_shard(name)``.
        dataset_config: Which of them are split over the workers, and how.
        metadata: For ``get_context().get_metadata()``; JSON-able values.
        resume_from_checkpoint: What the first attempt starts from while the run has no
            checkpoint of its own.

    Raises:
        ConfigError: An argument is of the wrong type or can never work. Nothing has started.
    """

    # A subclass, because trainers are told apart by isinstance and their names in messages;
    # it adds one setting and overrides nothing.
    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=expect_config("TorchTrainer(torch_config)", torch_config, TorchConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )
