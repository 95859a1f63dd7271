"""From an exception in a worker to the error that ``fit()`` raises.

A worker captures its exception as text and, where possible, as a pickle; only the driver
opens the pickle, so the controller never needs the user's modules.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ..errors import (
    DOCUMENT,
    HangError,
    PreemptionError,
    TrainError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerStartError,
)
from .decide import order_by_cause
from .hang import frames_of_main_thread, is_collective

if TYPE_CHECKING:
    from ..result import Result

__all__ = [
    "WorkerFailure",
    "build_error",
    "capture",
    "culprit_first",
    "describe",
    "died",
    "ended",
    "format_ranks",
    "hung",
    "restore_exception",
]

_LIBRARY_DIR = str(Path(__file__).resolve().parent.parent)
# Where Ray calls a method of an actor.
_RAY_DIRS = tuple(os.path.join(os.sep, "ray", *parts) for parts in (("_private",), ("util", "tracing")))
# Frames in which the user has no part.
_NOT_THE_USERS = (
    _LIBRARY_DIR + os.sep,
    *_RAY_DIRS,
    os.sep + "site-packages" + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen ",
)
_MAX_TEXT_LINES = 16
_MAX_METRICS_CHARS = 200
_MAX_CAUSES = 20
_MAX_CAUSE_CHARS = 2_000
_MAX_LINE_CHARS = 500


@attrs.frozen(kw_only=True)
class WorkerFailure:
    """How one worker failed.

    Attributes:
        world_rank: The rank; -1 when ranks were not assigned yet.
        node_ip: Address of its node.
        type_name: Class name of the exception.
        message: ``str`` of the exception.
        causes: Class name and text of what the exception was raised from, or while handling which.
        text: The traceback, the user's frames only.
        pickled: The exception object, or None when it cannot be pickled.
        failed_at: Seconds since the epoch, by the worker's clock.
        has_died: The process is gone; there is no exception of the user's.
        has_hung: Nothing moved any more; ``text`` holds the stacks of all ranks.
        has_ended: Nothing has failed: ``message`` says why the attempt was ended.
        step: The step of the start-up that failed; empty for the train function itself.
    """

    world_rank: int
    node_ip: str
    type_name: str
    message: str
    text: str
    causes: tuple[tuple[str, str], ...] = ()
    pickled: bytes | None = None
    failed_at: float = 0.0
    has_died: bool = False
    has_hung: bool = False
    has_ended: bool = False
    step: str = ""


def capture(error: BaseException, *, world_rank: int, node_ip: str, step: str = "") -> WorkerFailure:
    """Describe an exception that was caught in a worker."""
    return WorkerFailure(
        world_rank=world_rank,
        node_ip=node_ip,
        type_name=type(error).__name__,
        message=_safe_str(error),
        causes=_causes(error),
        text=user_traceback(error),
        pickled=_pickle(error),
        failed_at=time.time(),
        step=step,
    )


def _causes(error: BaseException) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    seen = {id(error)}
    # What was being handled too, even behind "from None": it is still what had happened first.
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen and len(found) < _MAX_CAUSES:
        seen.add(id(cause))
        found.append((type(cause).__name__, _safe_str(cause)[:_MAX_CAUSE_CHARS]))
        cause = cause.__cause__ or cause.__context__
    return tuple(found)


def died(world_rank: int, node_ip: str, detail: str, *, step: str = "", stack: str = "") -> WorkerFailure:
    """Describe the death of a worker process; ``stack`` is what it has written while it crashed."""
    lines = [f"the process of rank {world_rank} died: {detail}" if world_rank >= 0 else f"the process died: {detail}"]
    if stack:
        lines += ["  " + line for line in _user_lines(stack)]
    return WorkerFailure(
        world_rank=world_rank,
        node_ip=node_ip,
        type_name="WorkerDiedError",
        message=detail,
        text="\n".join(lines),
        failed_at=time.time(),
        has_died=True,
        step=step,
    )


def ended(world_rank: int, node_ip: str, why: str, *, is_preempted: bool) -> WorkerFailure:
    """Describe the end of an attempt in which nothing has failed."""
    text = f"preempted: {why}" if is_preempted else why
    return WorkerFailure(
        world_rank=world_rank,
        node_ip=node_ip,
        type_name="WorkerDiedError",
        message=text,
        text=text,
        failed_at=time.time(),
        has_died=True,
        has_ended=True,
    )


def hung(world_rank: int, node_ip: str, silent_s: float, stacks: Mapping[int, str]) -> WorkerFailure:
    """Describe a run in which nothing moves.

    Args:
        world_rank: The rank that stopped moving first.
        node_ip: Address of its node.
        silent_s: Seconds since any rank moved.
        stacks: World rank → where its threads stand.
    """
    lines = [f"nothing has moved for {silent_s:.0f} s; rank {world_rank} stopped first:"]
    for rank in [world_rank, *sorted(set(stacks) - {world_rank})]:
        lines.append(f"rank {rank}:")
        lines += ["  " + line for line in _user_lines(stacks[rank])]
    return WorkerFailure(
        world_rank=world_rank,
        node_ip=node_ip,
        type_name="HangError",
        message=f"nothing has moved for {silent_s:.0f} s",
        text="\n".join(lines),
        failed_at=time.time(),
        has_hung=True,
    )


def _user_lines(stack: str, limit: int = 5) -> list[str]:
    """Where the main thread stands: the user's innermost frames, and the one it is in, the latest call last."""
    frames = frames_of_main_thread(stack)
    if not frames:
        return [line.strip() for line in stack.splitlines() if line.strip()][:limit] or ["(no stack)"]
    kept = [frame for frame in frames if not any(folder in frame for folder in _NOT_THE_USERS)] or frames
    # The outermost of a collective has its name; else what it is in says most.
    last = next(filter(is_collective, reversed(frames)), frames[0])
    return [*reversed(kept[:limit]), *([] if kept[0] == last else [last])]


def user_traceback(error: BaseException) -> str:
    """The traceback without this library's own frames, causes included.

    The frames above the train function are the library's; they only hide the line that
    the user can change.
    """
    try:
        summary = traceback.TracebackException.from_exception(error, compact=True)
    # Exotic exceptions (a broken __str__, a self-made __cause__ property) must still be named.
    except Exception:  # noqa: BLE001
        return f"{type(error).__name__}: {_safe_str(error)}"
    seen: set[int] = set()
    part: traceback.TracebackException | None = summary
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        kept = [frame for frame in part.stack if not _is_library_frame(frame.filename)]
        if kept:
            part.stack = traceback.StackSummary.from_list(kept)
        cause = part.__cause__ or part.__context__
        if cause is not None and isinstance(error, TrainError) and all(map(_is_internal, cause.stack)):
            # What the library has caught and put into words of its own would stand before the user's line.
            part.__cause__ = part.__context__ = cause = None
        part = cause
    return _printable("".join(summary.format())).rstrip()


def _is_internal(frame: traceback.FrameSummary) -> bool:
    return any(folder in frame.filename for folder in _NOT_THE_USERS)


def _printable(text: str) -> str:
    """Text that every terminal and file takes: no lone surrogates, no control characters but line ends and tabs."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def restore_exception(failure: WorkerFailure) -> BaseException:
    """The worker's exception object; a ``TrainError`` that quotes it where it could not be sent."""
    if failure.has_died:
        return WorkerDiedError(failure.world_rank, failure.node_ip, failure.message)
    if failure.has_hung:
        return HangError(failure.world_rank, failure.node_ip, failure.text)
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)
        # Its class may be missing here, or its constructor may refuse what pickle hands it. Not Ctrl-C.
        except (Exception, SystemExit, GeneratorExit):  # noqa: BLE001
            error = None
        if isinstance(error, BaseException):
            if hasattr(error, "add_note"):
                error.add_note(f"raised by rank {failure.world_rank} on {failure.node_ip}:\n{failure.text}")
            return error
    if failure.step:
        return WorkerStartError(failure.step, f"{failure.type_name}: {failure.message}")
    return TrainError(
        f"{failure.type_name}: {failure.message} (the exception object could not be sent to this process)"
    )


def build_error(
    failures: Sequence[WorkerFailure],
    *,
    attempt: int,
    reason: str,
    run_path: str,
    result: Result | None,
    is_preemption: bool = False,
) -> WorkerGroupError | PreemptionError:
    """The error for ``fit()`` to raise, with the user's exception as its ``__cause__``.

    Args:
        failures: The failed workers of the last attempt, at least one.
        attempt: Number of that attempt.
        reason: Why there is no further one.
        run_path: Where the run lies.
        result: What was saved.
        is_preemption: Nodes were taken away, rather than that something failed.
    """
    by_rank = {failure.world_rank: failure for failure in failures}
    order = culprit_first(list(by_rank.values()))
    exceptions = {rank: restore_exception(by_rank[rank]) for rank in order}
    text = _message([by_rank[rank] for rank in order], attempt=attempt, reason=reason, run_path=run_path, result=result)
    error: WorkerGroupError | PreemptionError
    error = PreemptionError(text, None, False, result) if is_preemption else WorkerGroupError(text, exceptions, result)
    error.__cause__ = exceptions[order[0]]
    return error


def culprit_first(failures: Sequence[WorkerFailure]) -> list[int]:
    """The world ranks of failed workers, the likely cause first (``order_by_cause``)."""
    return order_by_cause([(f.world_rank, f.type_name, f.message, f.failed_at, f.has_died, f.causes) for f in failures])


def describe(failures: Sequence[WorkerFailure]) -> str:
    """One line that names the likely culprit, for logs."""
    culprit = culprit_first(failures)[0]
    first = next(f for f in failures if f.world_rank == culprit)
    where = f" during {first.step}" if first.step else ""
    who = format_ranks([first.world_rank]) + _at(first.node_ip)
    if first.has_ended:
        return first.message
    if first.has_died:
        return f"the process of {who} died{where}: {_clip(first.message)}"
    if first.has_hung:
        return f"{who} hangs: {first.message}"
    return f"{who} raised {first.type_name}{where}: {_clip(first.message)}"


def _message(
    failures: Sequence[WorkerFailure], *, attempt: int, reason: str, run_path: str, result: Result | None
) -> str:
    first = failures[0]
    same: list[WorkerFailure] = []
    others: list[WorkerFailure] = []
    for f in failures:
        is_same = (f.type_name, f.message, f.has_died) == (first.type_name, first.message, first.has_died)
        (same if is_same else others).append(f)
    ranks = format_ranks([f.world_rank for f in same])
    where = f" during {first.step}" if first.step else ""
    how = "was taken away" if first.has_ended else "died" if first.has_died else "hangs" if first.has_hung else "failed"
    lines = [f"training failed: {ranks}{_at(first.node_ip)} {how}{where}."]
    text = first.text.splitlines()
    if len(text) > _MAX_TEXT_LINES:
        half = _MAX_TEXT_LINES // 2
        text = [*text[:half], f"  ... {len(text) - 2 * half} lines left out ...", *text[-half:]]
    lines += ["  " + _clip(line, _MAX_LINE_CHARS) for line in text]
    if _is_timeout_of_a_collective(first.text):
        lines.append(
            "a collective waited longer than the timeout of the process group: another rank is slow, or does not "
            "take part; TorchConfig(timeout_s=...) sets the limit."
        )
    if others:
        kinds = dict.fromkeys((f.type_name, _clip(f.message, 120)) for f in others)
        for type_name, message in list(kinds)[:2]:
            group = [f.world_rank for f in others if (f.type_name, _clip(f.message, 120)) == (type_name, message)]
            lines.append(f"afterwards {format_ranks(group)}: {type_name}: {message}")
        if len(kinds) > 2:
            lines.append(f"and {len(kinds) - 2} more kinds of errors; see .worker_failures")
    lines.append(f"attempt {attempt}: {reason}.")
    if result is not None and result.metrics:
        lines.append(f"last metrics: {_clip(_printable(str(result.metrics)), _MAX_METRICS_CHARS)}")
    again = f"running it again with name={os.path.basename(run_path)!r}"
    if result is not None and result.checkpoint is not None:
        where_from = f"resumes from its newest checkpoint, {os.path.basename(result.checkpoint.path)}"
    else:
        where_from = "starts from the beginning: no checkpoint was committed"
    lines.append(f"the run lies in {run_path}; {again} {where_from}.")
    lines.append(f"{DOCUMENT} explains this message and what to do.")
    return "\n".join(lines)


def _at(node_ip: str) -> str:
    return "" if node_ip == "?" else f" on {node_ip}"


def _is_timeout_of_a_collective(text: str) -> bool:
    """Whether torch gave up waiting in a collective.

    Source:
        The texts of gloo ("Timed out waiting ...") and of NCCL's watchdog (torch 2.13).
    """
    lowered = text.lower()
    return "timed out waiting" in lowered or ("watchdog" in lowered and "timeout" in lowered)


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    if ordered == [-1]:
        return "a worker"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)


def _is_library_frame(filename: str) -> bool:
    return filename.startswith(_LIBRARY_DIR + os.sep)


def _clip(text: str, limit: int = 300) -> str:
    line = " ".join(text.split("\n")[:3]) if limit <= 300 else text
    return line if len(line) <= limit else line[:limit] + "..."


def _safe_str(error: BaseException) -> str:
    try:
        return _printable(str(error))
    # The exception's own __str__ may be broken.
    except Exception:  # noqa: BLE001
        return "<its str() failed>"


def _pickle(error: BaseException) -> bytes | None:
    import ray.cloudpickle as cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        # A pickle that cannot be opened here will not open on the driver either.
        pickle.loads(pickled)
    # Exceptions may hold anything (locks, sockets, generators), and their own code may raise anything.
    except BaseException:  # noqa: BLE001
        return None
    return pickled
