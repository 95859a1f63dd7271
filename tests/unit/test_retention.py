"""Which checkpoints are kept."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.storage.retention import best_first, score_of, select_to_delete


@attrs.frozen
class Kept:
    report_index: int
    metrics: dict
    attempt: int = 1
    is_deletable: bool = True


def run(scores, **options):
    """Indices that are left when each report is followed by retention; ``...`` stands for no score."""
    kept = []
    for index, score in enumerate(scores):
        kept.append(Kept(index, {} if score is ... else {"s": score}))
        gone = select_to_delete(kept, **options)
        kept = [checkpoint for checkpoint in kept if checkpoint not in gone]
    return [checkpoint.report_index for checkpoint in kept]


def best(scores, order="max"):
    return best_first(
        [Kept(index, {} if score is ... else {"s": score}) for index, score in enumerate(scores)],
        score_attribute="s",
        score_order=order,
    )[0].report_index


def test_without_a_score_the_newest_are_kept():
    assert run([...] * 5, num_to_keep=2) == [3, 4]
    assert run([...] * 5, num_to_keep=None) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("order", "expected"), [("max", 2), ("min", 1)])
def test_nan_is_worse_than_any_number_in_both_orders(order, expected):
    """Case 13."""
    scores = [math.nan, 0.3, 0.9, math.nan, 0.5]
    assert best(scores, order) == expected
    assert expected in run(scores, num_to_keep=2, score_attribute="s", score_order=order)


def test_all_nan_falls_back_to_the_newest():
    assert run([math.nan] * 4, num_to_keep=2, score_attribute="s") == [2, 3]
    assert best([math.nan] * 4) == 3


@pytest.mark.parametrize("odd", [..., None, "0.3", True, [1], {"x": 1}])
def test_what_is_no_number_is_worst_in_both_orders(odd):
    """Case 14."""
    assert run([0.5, odd, 0.2, odd, 0.9], num_to_keep=2, score_attribute="s", score_order="min") == [0, 2, 4]
    assert best([0.5, odd, -1.0], "max") == 0
    assert best([0.5, odd, -1.0], "min") == 2


def test_the_newest_is_kept_on_top_of_the_best():
    """Case 15: a restart begins from it, even if it is the worst."""
    assert run([0.9, 0.1, 0.2], num_to_keep=1, score_attribute="s") == [0, 2]


def test_equal_scores_keep_the_newer():
    assert run([1, 1, 1, 0], num_to_keep=1, score_attribute="s") == [2, 3]


def test_infinities_are_numbers():
    assert best([1.0, math.inf, 2.0]) == 1
    assert best([1.0, -math.inf, 2.0], "min") == 1
    assert best([1.0, 10**400]) == 1
    assert best([1.0, -(10**400)], "min") == 1


def test_numpy_scalars_and_0d_arrays_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert score_of({"s": numpy.float32(0.5)}, "s") == 0.5
    assert score_of({"s": numpy.int64(3)}, "s") == 3.0
    assert score_of({"s": numpy.array(2.0)}, "s") == 2.0
    assert score_of({"s": numpy.float32("nan")}, "s") is None
    assert score_of({"s": numpy.bool_(True)}, "s") is None
    assert score_of({"s": numpy.array([2.0])}, "s") is None


def test_keys_are_taken_literally_first_and_then_as_a_path():
    assert score_of({"eval/loss": 1.0, "eval": {"loss": 2.0}}, "eval/loss") == 1.0
    assert score_of({"eval": {"loss": 2.0}}, "eval/loss") == 2.0
    assert score_of({"a/b": {"c": 3.0}}, "a/b/c") == 3.0
    assert score_of({"a": {"b/c": 4.0}}, "a/b/c") == 4.0
    assert score_of({"a": 1.0}, "a/b") is None
    assert score_of({"a": 1.0}, None) is None


def test_what_the_run_did_not_create_is_neither_deleted_nor_counted():
    """Case 16."""
    foreign = Kept(0, {}, is_deletable=False)
    own = [Kept(1, {}), Kept(2, {})]
    assert select_to_delete([foreign, *own], num_to_keep=1) == [own[0]]
    assert select_to_delete([foreign], num_to_keep=1) == []


_SCORES = st.lists(
    st.one_of(st.floats(), st.integers(-5, 5), st.just(...), st.none(), st.text(max_size=2), st.booleans()), max_size=12
)


@given(_SCORES, st.integers(1, 4), st.sampled_from(["max", "min"]), st.booleans())
def test_newest_and_best_always_survive_and_the_count_is_bounded(scores, num_to_keep, order, is_scored):
    attribute = "s" if is_scored else None
    checkpoints = [Kept(index, {} if score is ... else {"s": score}) for index, score in enumerate(scores)]
    gone = select_to_delete(checkpoints, num_to_keep=num_to_keep, score_attribute=attribute, score_order=order)
    kept = [checkpoint for checkpoint in checkpoints if checkpoint not in gone]
    assert len(kept) in (min(len(scores), num_to_keep), min(len(scores), num_to_keep + 1))
    if checkpoints:
        assert checkpoints[-1] in kept
        assert best_first(checkpoints, score_attribute=attribute, score_order=order)[0] in kept
    # Whoever goes is no better than any that stays, the newest apart.
    ranked = best_first(checkpoints, score_attribute=attribute, score_order=order)
    for checkpoint in gone:
        assert all(ranked.index(other) < ranked.index(checkpoint) for other in kept if other is not checkpoints[-1])
    # A second look deletes nothing more.
    assert select_to_delete(kept, num_to_keep=num_to_keep, score_attribute=attribute, score_order=order) in (
        [],
        [checkpoint for checkpoint in kept if checkpoint in gone],
    )


@given(_SCORES, st.sampled_from(["max", "min"]))
def test_the_order_of_the_input_does_not_matter(scores, order):
    checkpoints = [Kept(index, {} if score is ... else {"s": score}) for index, score in enumerate(scores)]
    options = {"num_to_keep": 2, "score_attribute": "s", "score_order": order}
    assert select_to_delete(checkpoints, **options) == select_to_delete(checkpoints[::-1], **options)
