"""The actors of one attempt, and the room they stand in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..configs.scaling import ScalingConfig
from ..context.identity import WorkerIdentity
from .ranks import assign_ranks
from .worker import Worker

__all__ = ["BackendWorkers", "Room", "WorkerGroup"]


class Room:
    """A placement group with one bundle per worker; kept over restarts.

    A group that is made right after another was removed takes about a second, because the
    resources come back late; so there is one for the whole run.
    """

    def __init__(self, config: ScalingConfig, num_workers: int) -> None:
        options: dict[str, Any] = {}
        selector = config.label_selector
        if selector is not None:
            options["bundle_label_selector"] = (
                [dict(selector)] * num_workers if isinstance(selector, Mapping) else [dict(s) for s in selector]
            )
        bundle = {name: amount for name, amount in config.worker_resources.items() if amount > 0}
        # A placement group refuses empty bundles; workers that ask for nothing need no room.
        self.group: PlacementGroup | None = (
            placement_group([dict(bundle) for _ in range(num_workers)], strategy=config.placement_strategy, **options)
            if bundle
            else None
        )
        self.num_workers = num_workers

    def wait(self, timeout_s: float) -> bool:
        """Block until the room is there; False when it is not in time."""
        return self.group is None or bool(self.group.wait(timeout_s))

    def remove(self) -> None:
        """Give the room back."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None


class WorkerGroup:
    """The actors of one attempt.

    Args:
        config: Resources of a worker.
        room: Where they are placed, one per bundle.
        runtime_env: Runtime environment of the actors, or None.
    """

    def __init__(self, config: ScalingConfig, room: Room, runtime_env: Mapping[str, Any] | None) -> None:
        resources = dict(config.worker_resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        memory = resources.pop("memory", 0)
        if memory:
            options["memory"] = memory
        if resources:
            options["resources"] = resources
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        actor_class = ray.remote(Worker)
        self._resources = dict(config.worker_resources)
        self._actors: list[Any] = []
        for index in range(room.num_workers):
            if room.group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    room.group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                )
            self._actors.append(actor_class.options(**options).remote())
        self.identities: list[WorkerIdentity] = []
        self.is_alive = True

    def __len__(self) -> int:
        return len(self._actors)

    async def assign(self, preload_modules: Sequence[str]) -> None:
        """Wait until all processes are up, then order the actors by world rank."""
        facts = await asyncio.gather(*[actor.describe.remote(list(preload_modules)) for actor in self._actors])
        facts = [attrs.evolve(fact, resources=self._resources) for fact in facts]
        assigned = assign_ranks(facts)
        self._actors = [self._actors[index] for index, _ in assigned]
        self.identities = [identity for _, identity in assigned]

    def call(self, world_rank: int, method: str, *args: Any, num_returns: int = 1) -> Any:
        """Start a method of one worker; returns its reference, or references."""
        handle = getattr(self._actors[world_rank], method)
        return handle.options(num_returns=num_returns).remote(*args)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method on all workers at once."""
        return list(await asyncio.gather(*[self.call(rank, method, *args) for rank in range(len(self))]))

    def kill(self) -> None:
        """End all processes now."""
        if self.is_alive:
            self.is_alive = False
            for actor in self._actors:
                ray.kill(actor, no_restart=True)


class BackendWorkers:
    """The workers as a backend sees them: blocking calls, made from a thread of the controller.

    Args:
        group: The started workers.
        loop: The controller's event loop, which does the waiting.
        timeout_s: Limit for each waiting call.
    """

    def __init__(self, group: WorkerGroup, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._group, self._loop, self._timeout_s = group, loop, timeout_s

    def __len__(self) -> int:
        return len(self._group)

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn`` on all workers at once and wait; the first error is raised."""
        return self._wait_for(self.execute_async(fn, *args, **kwargs))

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``fn`` on all workers; returns Ray object references."""
        return [self.execute_single_async(rank, fn, *args, **kwargs) for rank in range(len(self))]

    def execute_single(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` on one worker and wait."""
        return self._wait_for([self.execute_single_async(world_rank, fn, *args, **kwargs)])[0]

    def execute_single_async(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start ``fn`` on one worker; returns a Ray object reference."""
        return self._group.call(world_rank, "execute", fn, args, kwargs)

    def _wait_for(self, references: Sequence[Any]) -> list[Any]:
        async def gather() -> list[Any]:
            return list(await asyncio.gather(*references))

        # Not ray.get(): in an async actor it would warn, from whichever thread it is called.
        return asyncio.run_coroutine_threadsafe(gather(), self._loop).result(self._timeout_s)
