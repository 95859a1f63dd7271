"""Whatever the others say after it, the rank that failed first is named first, and why."""

from __future__ import annotations

import random
from typing import Any

import pytest
from linked import CAUSES, Case, cases, train_gloo, train_linked

from ray_lite.train import Callback, FailureConfig, HangError, WorkerDiedError, WorkerGroupError
from ray_lite.train.torch import TorchTrainer

NAMES = {"raise": "OurError", "key error": "KeyError", "exit": "SystemExit", "interrupt": "KeyboardInterrupt"}
HANG_TIMEOUT_S = 2.0


def hangs(case: Case) -> bool:
    return CAUSES[case.how] == "hangs"


def check_exception(case: Case, exception: BaseException | None) -> None:
    if case.how in NAMES:
        assert type(exception).__name__ == NAMES[case.how]
    else:
        assert isinstance(exception, HangError if hangs(case) else WorkerDiedError)


def check_error(fit, world_size: int, case: Case, fn=train_linked, **options: Any) -> None:
    """A run of one attempt: what ``fit()`` raises names the culprit."""
    with pytest.raises(WorkerGroupError) as caught:
        fit(
            fn,
            n=world_size,
            cfg={"cases": [tuple(case)]},
            fc=FailureConfig(hang_timeout_s=HANG_TIMEOUT_S if hangs(case) else None),
            **options,
        )
    error = caught.value
    text = str(error)
    assert f": rank {case.victim} on " in text.splitlines()[0], text
    # The user's line, or that the process died or hangs, before anything that others say.
    assert CAUSES[case.how] in text.partition("afterwards")[0], text
    assert next(iter(error.worker_failures)) == case.victim
    check_exception(case, error.__cause__)
    assert len(text.splitlines()) <= 25


class Failures(Callback):
    """Notes what each attempt has failed with."""

    def __init__(self) -> None:
        self.found: list[dict[int, BaseException]] = []

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, BaseException]) -> None:
        self.found.append(worker_exceptions)


def count_culprits(fit, caplog, rng: random.Random, world_size: int, count: int, restart: str, **options: Any) -> int:
    """A run with one fault after the other: the line about each restart, and the callbacks, name the culprit."""
    planned = cases(rng, world_size, count)
    failures = Failures()
    caplog.clear()
    fit(
        options.pop("fn", train_linked),
        n=world_size,
        cfg={"cases": [tuple(case) for case in planned]},
        fc=FailureConfig(max_failures=count, hang_timeout_s=HANG_TIMEOUT_S, restart=restart),
        callbacks=[failures],
        **options,
    )
    lines = [line for line in caplog.messages if " ended, restarting (" in line]
    assert len(lines) == len(failures.found) == count
    for number, (case, line, found) in enumerate(zip(planned, lines, failures.found, strict=True), start=1):
        assert line.startswith(f"attempt {number} ended, restarting (failure {number} (max_failures={count})): ")
        what = line.partition("): ")[2]
        assert what.startswith((f"rank {case.victim} on ", f"the process of rank {case.victim} on ")), line
        expected = CAUSES[case.how]
        assert expected in what or expected.partition(":")[0] in what, line
        assert next(iter(found)) == case.victim
        check_exception(case, found[case.victim])
    return count


@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_the_true_rank_is_named_first(fit, how):
    rng = random.Random(how)
    check_error(fit, 3, Case(rng.randrange(3), how, rng.randrange(4)))


def test_the_true_rank_is_named_first_before_what_gloo_says(fit):
    check_error(fit, 2, Case(1, "raise", 2), train_gloo, trainer=TorchTrainer)


@pytest.mark.parametrize("restart", ["in_place", "process"])
def test_the_true_rank_is_named_at_each_restart(fit, caplog, restart):
    assert count_culprits(fit, caplog, random.Random(restart), 2, 4, restart) == 4


@pytest.mark.proof
def test_the_true_rank_is_named_first_in_100_of_100(fit, caplog):
    rng = random.Random(3)
    counted = count_culprits(fit, caplog, rng, 2, 30, "process")
    counted += count_culprits(fit, caplog, rng, 3, 26, "in_place")
    counted += count_culprits(fit, caplog, rng, 4, 26, "in_place")
    for how in CAUSES:
        check_error(fit, 3, Case(rng.randrange(3), how, rng.randrange(4)))
        counted += 1
    for how in ("raise", "key error", "kill", "abort", "segfault", "exit", "_exit", "interrupt"):
        check_error(fit, 2, Case(rng.randrange(2), how, rng.randrange(4)), train_gloo, trainer=TorchTrainer)
        counted += 1
    assert counted == 100
