"""Whatever the others say after it, the rank that failed first is named first, and why."""

from __future__ import annotations

import random

import pytest
from linked import CAUSES, Case, cases, train_gloo, train_linked

from ray_lite.train import FailureConfig, HangError, WorkerDiedError, WorkerGroupError
from ray_lite.train.torch import TorchTrainer

NAMES = {"raise": "OurError", "key error": "KeyError", "exit": "SystemExit", "interrupt": "KeyboardInterrupt"}


def check_culprit(fit, case: Case, fn=train_linked, **options) -> None:
    hangs = case.how in ("hang", "stop")
    with pytest.raises(WorkerGroupError) as caught:
        fit(
            fn,
            n=case.world_size,
            cfg={"case": tuple(case)},
            fc=FailureConfig(hang_timeout_s=2 if hangs else None),
            **options,
        )
    error = caught.value
    text = str(error)
    first = text.splitlines()[0]
    assert f": rank {case.victim} on " in first, text
    # The user's line, or that the process died or hangs, before anything that others say.
    assert CAUSES[case.how] in text.partition("afterwards")[0], text
    assert next(iter(error.worker_failures)) == case.victim
    cause = error.__cause__
    if case.how in NAMES:
        assert type(cause).__name__ == NAMES[case.how]
    else:
        assert isinstance(cause, HangError if hangs else WorkerDiedError)
    assert len(text.splitlines()) <= 25


def count_culprits(fit, rng: random.Random, *, num_plain: int, num_gloo: int) -> int:
    for case in cases(rng, num_plain):
        check_culprit(fit, case)
    for case in [case for case in cases(rng, 4 * num_gloo) if case.how in ("raise", "kill", "abort", "exit")][
        :num_gloo
    ]:
        check_culprit(fit, case._replace(world_size=2, victim=case.victim % 2), train_gloo, trainer=TorchTrainer)
    return num_plain + num_gloo


@pytest.mark.parametrize("how", ["raise", "kill", "abort", "exit", "stop"])
def test_the_true_rank_is_named_first(fit, how):
    rng = random.Random(how)
    (case,) = cases(rng, 1)
    check_culprit(fit, case._replace(how=how))


def test_the_true_rank_is_named_first_before_what_gloo_says(fit):
    check_culprit(fit, Case(2, 1, "raise", 2), train_gloo, trainer=TorchTrainer)


@pytest.mark.proof
def test_the_true_rank_is_named_first_in_100_of_100(fit):
    assert count_culprits(fit, random.Random(3), num_plain=92, num_gloo=8) == 100
