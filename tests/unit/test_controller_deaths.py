"""How often a controller may die, and how long the next one waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.controller_deaths import ControllerDeaths

HISTORIES = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30)


def deaths(history):
    found = ControllerDeaths()
    for has_started, has_committed in history:
        found = found.one_more(has_started=has_started, has_committed=has_committed)
    return found


@given(history=HISTORIES, limit=st.integers(0, 30))
def test_the_limit_is_the_number_of_restarts(history, limit):
    found = deaths([(True, committed) for _, committed in history])
    assert found.may_restart(limit) == (len(history) <= limit)
    assert found.may_restart(-1)


@given(history=HISTORIES)
def test_three_deaths_in_a_row_before_any_worker_started_end_the_run(history):
    found = deaths([*history, (True, False), (False, False), (False, False)])
    assert found.may_restart(-1)
    assert not found.one_more(has_started=False, has_committed=False).may_restart(-1)


@given(history=HISTORIES)
def test_the_wait_grows_while_nothing_is_gained_and_is_gone_after_a_checkpoint(history):
    found = deaths([*history, (True, True)])
    waits = []
    for _ in range(12):
        waits.append(found.delay_s)
        found = found.one_more(has_started=True, has_committed=False)
    assert waits[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert waits[-1] == 60.0
    assert found.one_more(has_started=True, has_committed=True).delay_s == 0.0
