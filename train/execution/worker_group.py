"""The actors of a run, the room they stand in, and those that wait to take a place."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..configs.scaling import ScalingConfig
from ..context.identity import WorkerIdentity
from ..errors import ResourcesError, TrainError, explained
from . import placement
from .control import Process
from .failures import format_ranks
from .holders import room_name, room_prefix
from .ranks import WorkerFacts, assign_ranks
from .worker import Worker

_CREATION_S = 0.5

__all__ = ["BackendWorkers", "Room", "WorkerGroup", "check_room", "of_rank", "rank_of", "remove_rooms"]


class Room:
    """A placement group with one bundle per worker; kept over restarts.

    A group that is made right after another was removed takes about a second, because the
    resources come back late; so there is one for the whole run, as long as its size fits.
    """

    def __init__(self, config: ScalingConfig, num_workers: int, run_id: str, run_name: str) -> None:
        # The name lets the driver find it when this process is gone, and tells others who wait whose it is.
        options: dict[str, Any] = {"name": room_name(run_id, secrets.token_hex(4), run_name)}
        selectors = placement.bundle_selectors(config, num_workers)
        if selectors is not None:
            options["bundle_label_selector"] = selectors
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

    def nodes(self) -> list[str]:
        """Ray's id of the node of each bundle, by index; empty for workers that need no room."""
        if self.group is None:
            return []
        bundles = ray.util.placement_group_table(self.group).get("bundles_to_node_id", {})
        return [bundles[index] for index in sorted(bundles)]

    def remove(self) -> None:
        """Give the room back."""
        if self.group is not None:
            _remove(self.group)
            self.group = None


def remove_rooms(run_id: str) -> None:
    """Give back what a controller that died has left; Ray keeps it until the driver's end."""
    for group_id, info in ray.util.placement_group_table().items():
        if info["name"].startswith(room_prefix(run_id)) and info["state"] != "REMOVED":
            _remove(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group, but not in the middle of its creation.

    Ray (2.60) then forgets to give back bundles whose commit was under way, and the cluster is
    that much smaller until it ends. A group for which there is no room yet has none.
    """
    # Ray raises a plain Exception for a group that is gone already.
    with contextlib.suppress(Exception):
        group.wait(_CREATION_S)
    remove_placement_group(group)


@attrs.define
class _Member:
    """One place of the group: who stands in it, and what is known of it."""

    actor: Any
    facts: WorkerFacts | None = None
    identity: WorkerIdentity | None = None


@attrs.frozen
class _Standby:
    """A worker without a place.

    Attributes:
        described: Its first call, which imports the framework.
        node_id: Where it is; None where the room lies on no node.
    """

    actor: Any
    described: Any
    node_id: str | None


class WorkerGroup:
    """One worker per bundle of the room.

    Args:
        config: Resources of a worker.
        room: Where they are placed.
        runtime_env: Runtime environment of the actors, or None.
        preload_modules: What a worker imports as soon as it is up.
        num_standby: Workers that wait without a place.
    """

    def __init__(
        self,
        config: ScalingConfig,
        room: Room,
        runtime_env: Mapping[str, Any] | None,
        preload_modules: Sequence[str],
        num_standby: int = 0,
    ) -> None:
        self._config, self._room = config, room
        self._runtime_env = dict(runtime_env or {})
        self._preload_modules = list(preload_modules)
        self._num_standby = num_standby
        self._places: list[_Member | None] = [None] * room.num_workers
        self._by_rank: list[_Member] = []
        self._standbys: list[_Standby] = []
        self._first_calls: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # The first group is made by the driver and handed to the controller; the calls stay with the caller.
        return {**self.__dict__, "_first_calls": []}

    @property
    def room(self) -> Room:
        """Where the workers are placed."""
        return self._room

    def __len__(self) -> int:
        return len(self._by_rank)

    @property
    def identities(self) -> list[WorkerIdentity]:
        """Who holds which rank, by world rank; empty before ``assign``."""
        return [member.identity for member in self._by_rank if member.identity is not None]

    def process(self, world_rank: int) -> Process:
        """The process of a worker, on its node."""
        facts = self._by_rank[world_rank].facts
        assert facts is not None
        return Process(facts.pid, facts.started)

    def fill(self) -> None:
        """Start an actor in each empty place; one that stands by takes it at once."""
        for index, place in enumerate(self._places):
            if place is None:
                self._places[index] = _Member(self._take_standby(index) or self._start(index))

    def begin_imports(self) -> None:
        """Let the processes import what they need as soon as they are up, before anybody asks them."""
        members = [member for member in self._places if member is not None]
        self._first_calls = [member.actor.describe.remote(self._preload_modules) for member in members]

    async def assign(self) -> None:
        """Wait until all processes are up, then order them by world rank."""
        members = [member for member in self._places if member is not None]
        new = [member for member in members if member.facts is None]
        found = await asyncio.gather(*[member.actor.describe.remote(self._preload_modules) for member in new])
        for member, facts in zip(new, found, strict=True):
            member.facts = attrs.evolve(facts, resources=dict(self._config.worker_resources))
        ranked = assign_ranks([member.facts for member in members if member.facts is not None])
        for index, identity in ranked:
            members[index].identity = identity
        self._by_rank = [members[index] for index, _ in ranked]

    def call(self, world_rank: int, method: str, *args: Any, num_returns: int = 1) -> Any:
        """Start a method of one worker; returns its reference, or references."""
        handle = getattr(self._by_rank[world_rank].actor, method)
        return handle.options(num_returns=num_returns).remote(*args)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method on all workers at once."""
        return list(await asyncio.gather(*[self.call(rank, method, *args) for rank in range(len(self))]))

    def kill(self, *, keep: Iterable[int] = ()) -> None:
        """End all processes now, but for the ranks in ``keep``; their places are empty then."""
        kept = {id(self._by_rank[rank]) for rank in keep}
        for index, member in enumerate(self._places):
            if member is not None and id(member) not in kept:
                ray.kill(member.actor, no_restart=True)
                self._places[index] = None

    def raise_standbys(self) -> None:
        """Start the workers that stand by, when some are missing; returns at once."""
        if len(self._standbys) >= self._num_standby:
            return
        # On the nodes of the room, one after the other: a standby can only stand in on its own node.
        nodes = list(dict.fromkeys(self._room.nodes()))
        for index in range(len(self._standbys), self._num_standby):
            options = self._common()
            node_id = nodes[index % len(nodes)] if nodes else None
            if node_id is not None:
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
            # No CPU of its own: it will work on the room of the one that it replaces.
            actor = _worker_class().options(num_cpus=0, max_restarts=0, **options).remote()
            # The call imports the framework; its reference is kept so that nobody waits for it.
            self._standbys.append(_Standby(actor, actor.describe.remote(self._preload_modules), node_id))

    def _take_standby(self, index: int) -> Any:
        """One that stands by on the node of a place; None when there is none."""
        if not self._standbys:
            return None
        nodes = self._room.nodes()
        for standby in self._standbys:
            if not nodes or standby.node_id == nodes[index]:
                self._standbys.remove(standby)
                return standby.actor
        return None

    def close(self) -> None:
        """End everything, those that stand by too."""
        self.kill()
        for standby in self._standbys:
            ray.kill(standby.actor, no_restart=True)
        self._standbys.clear()

    def _start(self, index: int) -> Any:
        resources = dict(self._config.worker_resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            **self._common(),
        }
        memory = resources.pop("memory", 0)
        if memory:
            options["memory"] = memory
        if resources:
            options["resources"] = resources
        if self._room.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._room.group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
            )
        return _worker_class().options(**options).remote()

    def _common(self) -> dict[str, Any]:
        return {"runtime_env": self._runtime_env} if self._runtime_env else {}


@functools.cache
def _worker_class() -> Any:
    """The actor class; Ray would pickle it anew for each one that is made."""
    return ray.remote(Worker)


def check_room(config: ScalingConfig) -> None:
    """See that the workers can fit on this cluster when all else is idle.

    Raises:
        ResourcesError: They never can, and nobody adds nodes.
    """
    if config.resources_timeout_s is not None or _has_autoscaler():
        return
    nodes = [node for node in ray.nodes() if node["Alive"]]
    least = config.min_workers
    if not placement.can_ever_fit(
        config.worker_resources,
        least,
        config.placement_strategy,
        [node["Resources"] for node in nodes],
        label_selector=config.label_selector,
        node_labels=[node.get("Labels", {}) for node in nodes],
    ):
        total, free = ray.cluster_resources(), ray.available_resources()
        raise ResourcesError(explained(placement.infeasible_message(config, least, total, free)))


def _has_autoscaler() -> bool:
    """Whether nodes may be added by themselves."""
    from ray._private.state import state

    try:
        config = state.get_cluster_config()
    # Not there on every version of Ray; then nobody is known to add nodes.
    except (AttributeError, RayError, RuntimeError):
        return False
    return config is not None and len(getattr(config, "node_group_configs", ())) > 0


class BackendWorkers:
    """The workers as a backend sees them: blocking calls, made from a thread of the controller.

    Args:
        group: The started workers.
        loop: The controller's event loop, which does the waiting.
        timeout_s: Limit for each waiting call.
        ranks: World ranks to work on; all by default.
    """

    def __init__(
        self,
        group: WorkerGroup,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._group, self._loop, self._timeout_s = group, loop, timeout_s
        self._ranks = list(range(len(group))) if ranks is None else list(ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn`` on all workers at once and wait; the first error is raised."""
        return self._wait_for(dict(zip(self._ranks, self.execute_async(fn, *args, **kwargs), strict=True)))

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``fn`` on all workers; returns Ray object references."""
        return [self.execute_single_async(rank, fn, *args, **kwargs) for rank in range(len(self))]

    def execute_single(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` on one worker and wait."""
        call = self.execute_single_async(world_rank, fn, *args, **kwargs)
        return self._wait_for({self._ranks[world_rank]: call})[0]

    def execute_single_async(self, world_rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start ``fn`` on one worker; returns a Ray object reference."""
        return self._group.call(self._ranks[world_rank], "execute", fn, args, kwargs)

    def _wait_for(self, references: Mapping[int, Any]) -> list[Any]:
        """Wait for the calls of these ranks; the first error is raised."""

        async def gather() -> list[Any]:
            calls = {rank: asyncio.ensure_future(of_rank(rank, call)) for rank, call in references.items()}
            await asyncio.wait(calls.values(), timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            late = []
            for rank, call in calls.items():
                if not call.done():
                    call.cancel()
                    late.append(rank)
                elif error := call.exception():
                    raise error
            if late:
                raise TrainError(
                    f"{format_ranks(late)} did not come back from a call of the backend within {self._timeout_s:g} s"
                )
            return [call.result() for call in calls.values()]

        # Not ray.get(): in an async actor it would warn, from whichever thread it is called.
        return asyncio.run_coroutine_threadsafe(gather(), self._loop).result()


async def of_rank(world_rank: int, call: Any) -> Any:
    """Wait for a call of one worker; an error of Ray's then knows its ``world_rank``."""
    try:
        return await call
    except RayError as error:
        error.world_rank = world_rank  # type: ignore[attr-defined]  # for rank_of
        raise


def rank_of(error: BaseException) -> int:
    """The rank that ``of_rank`` has noted on an error; -1 when it is not known."""
    rank = getattr(error, "world_rank", -1)
    return rank if isinstance(rank, int) else -1
