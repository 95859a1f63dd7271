"""Numbers over the ranks: what they are, and that they find their way into the history."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite import train
from ray_lite.train import ConfigError, RunConfig
from ray_lite.train.configs import CheckpointConfig
from ray_lite.train.context.records import encode_report
from ray_lite.train.execution.aggregate import over_ranks
from ray_lite.train.execution.ledger import Ledger
from ray_lite.train.storage.history import read_rows
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore

ALL = ("mean", "min", "max")


def line(index: int = 0, **metrics) -> bytes:
    return encode_report(index, 1.0, json.dumps(metrics))


@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_the_mean_lies_between_the_least_and_the_greatest(values):
    found = over_ranks([line(x=value) for value in values], ALL)
    assert found["x/min"] == min(values)
    assert found["x/max"] == max(values)
    slack = 1e-12 * max(map(abs, values))
    assert found["x/min"] - slack <= found["x/mean"] <= found["x/max"] + slack


@given(values=st.lists(st.floats(), min_size=1, max_size=10), order=st.randoms())
def test_the_order_of_the_ranks_does_not_matter_and_nan_is_never_lost(values, order):
    shuffled = values[:]
    order.shuffle(shuffled)
    found, again = over_ranks([line(x=v) for v in values], ALL), over_ranks([line(x=v) for v in shuffled], ALL)
    assert json.dumps(found) == json.dumps(again)
    assert not any(map(math.isnan, values)) or all(math.isnan(value) for value in found.values())


def test_what_is_no_number_is_left_out_and_nested_numbers_have_a_path():
    lines = [line(a=1, ok=True, name="x", none=None, list=[1], val={"loss": 2}), line(a=3), line(b=10**400)]
    assert over_ranks(lines, ("mean",)) == {"a/mean": 2.0, "val/loss/mean": 2.0, "b/mean": math.inf}
    assert over_ranks([], ALL) == {}


def test_rows_over_ranks_join_the_row_of_their_report_and_attempt():
    def more(index: int, **values: float) -> bytes:
        return json.dumps({"i": index, "a": values}).encode()

    first = b"\n".join([line(0, x=1), line(1, x=2), more(0, m=10), more(1, m=20), line(2, x=3), more(7, m=1)])
    # The second attempt begins at report 1; a row of the first that comes late is not counted for it.
    second = b"\n".join([more(1, m=99), line(1, x=4), more(1, m=40)])
    rows = read_rows([(1, first), (2, second)])
    assert [(row.report_index, row.metrics["x"], row.over_ranks) for row in rows] == [
        (0, 1, {"m": 10}),
        (1, 4, {"m": 40}),
    ]


def test_the_history_has_them_behind_rank_0s_own_rows(tmp_path):
    store = RunStore(StorageRoot(str(tmp_path)), "run")
    ledger = Ledger(
        store,
        run_id="r",
        checkpoint_config=CheckpointConfig(),
        config_record={},
        start_checkpoint=None,
        resume="auto",
        wants_reports=False,
        metrics_over_ranks=("mean", "max"),
    )
    ledger.open()
    ledger.begin_attempt(2)
    ledger.add(1, [line(0, loss=3), line(1, loss=5), line(2, loss=7)])
    ledger.add(0, [line(0, loss=1), line(1, loss=1)])
    ledger.rank_finished(0)
    ledger.rank_finished(1)
    # Report 2 is of rank 1 alone, and the history is rank 0's.
    assert ledger.end_attempt() == []
    ledger.close("finished")
    result = train.Result.from_path(store.path)
    assert result.metrics_history == [
        {"loss": 1, "loss/mean": 2.0, "loss/max": 3.0},
        {"loss": 1, "loss/mean": 3.0, "loss/max": 5.0},
    ]
    pytest.importorskip("pandas")
    assert list(result.metrics_dataframe.columns) == ["loss", "loss/mean", "loss/max"]


def test_the_option_checks_itself():
    assert RunConfig(metrics_over_ranks=["mean", "mean", "max"]).metrics_over_ranks == ("mean", "max")
    assert RunConfig(metrics_over_ranks="min").metrics_over_ranks == ("min",)
    config = RunConfig(metrics_over_ranks=["min"])
    assert RunConfig.from_dict(config.to_dict()) == config
    for bad in (["median"], 3, {"mean": 1}, [["mean"]]):
        with pytest.raises(ConfigError, match=r"metrics_over_ranks must be a list of mean, min, max, got"):
            RunConfig(metrics_over_ranks=bad)
