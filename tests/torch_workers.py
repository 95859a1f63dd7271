"""Real processes that stand in for Ray's workers: each has a context and does what it is told.

They fork from a server that has torch loaded, so a group starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, cast

from ray_lite.train.configs import ScalingConfig
from ray_lite.train.context.current import set_context
from ray_lite.train.context.identity import RunIdentity, WorkerIdentity
from ray_lite.train.context.train_context import TrainContext

# A rank that does not answer within this time has failed the test.
ANSWER_TIMEOUT_S = 60.0


def make_context(
    world_rank: int = 0,
    world_size: int = 1,
    *,
    node_rank: int = 0,
    gpu_ids: tuple[str, ...] = (),
    resources: Mapping[str, float] | None = None,
) -> TrainContext:
    """The context of one of ``world_size`` workers on one node. It cannot report: it has no storage."""
    return TrainContext(
        worker=WorkerIdentity(
            world_rank=world_rank,
            world_size=world_size,
            local_rank=world_rank,
            local_world_size=world_size,
            node_rank=node_rank,
            resources=resources or {"CPU": 1.0},
            gpu_ids=gpu_ids,
        ),
        run=RunIdentity(name="run", path="/nowhere", run_id="0" * 32, attempt=1),
        scaling_config=ScalingConfig(num_workers=world_size),
        store=cast(Any, None),
        reporter=cast(Any, None),
        shards={},
    )


def _serve(connection: Connection, world_rank: int, world_size: int, env: Mapping[str, str]) -> None:
    os.environ.update(env)
    set_context(make_context(world_rank, world_size))
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(*args, **kwargs)))
        except BaseException as error:  # noqa: BLE001  # goes to the test, whatever it is
            connection.send((False, error))


class ProcessWorkers:
    """A group of worker processes with the interface that a ``Backend`` gets.

    Args:
        world_size: How many.
        env: Environment variables that the processes start with.
    """

    def __init__(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["torch", "torch.distributed", "torch.utils.data", __name__])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_serve, args=(theirs, rank, world_size, dict(env or {})), daemon=False)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._processes)

    def kill(self) -> None:
        """End all processes now."""
        for process in self._processes:
            process.kill()

    def __enter__(self) -> ProcessWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def send(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``fn`` on one worker."""
        self._connections[rank].send((fn, args, kwargs))

    def receive(self, rank: int) -> Any:
        """What the function gave: ``(result, None)``, or ``(None, exception)``."""
        if not self._connections[rank].poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"rank {rank} did not answer")
        is_fine, result = self._connections[rank].recv()
        return (result, None) if is_fine else (None, result)

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn`` on all workers at once and wait; the first error is raised."""
        for rank in range(len(self)):
            self.send(rank, fn, *args, **kwargs)
        answers = [self.receive(rank) for rank in range(len(self))]
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Not needed by the backends tested here, and without Ray there are no references."""
        raise NotImplementedError

    def execute_single(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` on one worker and wait."""
        self.send(world_rank, fn, *args, **kwargs)
        result, error = self.receive(world_rank)
        if error is not None:
            raise error
        return result

    def execute_single_async(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``execute_async``."""
        raise NotImplementedError
