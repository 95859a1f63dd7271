"""The session functions of Ray AIR do what their successors do, and say once what those are called."""

from __future__ import annotations

import inspect
import warnings

import pytest

from ray_lite import train
from ray_lite.air import Checkpoint, session
from ray_lite.train.context import current
from ray_lite.train.errors import DatasetNotFoundError, LegacyAPIError, RayLiteDeprecationWarning

OLD_WARNINGS = "ignore::ray_lite.train.errors.RayLiteDeprecationWarning"

# What Ray 2.2 to 2.9 gave outside a session; it gave 0 as the local world size, which nothing can be divided by.
OUTSIDE = {
    "report": None,
    "get_checkpoint": None,
    "get_dataset_shard": None,
    "get_world_size": 1,
    "get_world_rank": 0,
    "get_local_rank": 0,
    "get_local_world_size": 1,
    "get_node_rank": 0,
    "get_trial_name": None,
    "get_trial_id": None,
    "get_trial_resources": None,
    "get_trial_dir": None,
    "get_experiment_name": None,
}
OF_CONTEXT = [name for name in OUTSIDE if name not in ("report", "get_checkpoint", "get_dataset_shard")]


def call(name):
    function = getattr(session, name)
    return function({"loss": 1.0}) if name == "report" else function()


def test_all_thirteen_functions_are_there():
    assert sorted(session.__all__) == sorted(OUTSIDE)
    assert len(session.__all__) == 13


def test_each_docstring_names_its_own_quantity():
    """Ray AIR documented two of them with the text of a third."""
    texts = [inspect.getdoc(getattr(session, name)) for name in OUTSIDE]
    assert all(texts)
    assert len(set(texts)) == 13


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_functions_of_the_context_forward_to_it(fit):
    def train_func():
        context = train.get_context()
        return {name: (call(name), getattr(context, name)()) for name in OF_CONTEXT}

    for name, (old, new) in fit(train_func).return_value.items():
        assert old == new, name


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_a_script_of_old_gets_its_metrics_checkpoint_and_data(fit):
    def train_loop_per_worker(config):
        start = session.get_checkpoint()
        assert start is None
        rows = session.get_dataset_shard("train")
        session.report({"a": sum(rows)}, checkpoint=Checkpoint.from_dict({"x": config["x"]}))
        assert session.get_checkpoint().to_dict() == {"x": 7}
        session.report({"a": 2})

    result = fit(train_loop_per_worker, train_loop_config={"x": 7}, datasets={"train": [1, 2, 3]})
    assert result.metrics == {"a": 2}
    assert result.metrics_history == [{"a": 6}, {"a": 2}]
    assert Checkpoint.from_checkpoint(result.checkpoint).to_dict() == {"x": 7}


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_a_dict_checkpoint_can_be_resumed_from(fit, tmp_path):
    def train_func():
        return session.get_checkpoint().to_dict()

    given = fit(train_func, resume_from_checkpoint=Checkpoint.from_dict({"epoch": 3}))
    assert given.return_value == {"epoch": 3}

    def save():
        session.report({}, checkpoint=Checkpoint.from_dict({"epoch": 4}))

    fit(save)
    assert fit(train_func).return_value == {"epoch": 4}


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_the_name_of_the_only_dataset_may_be_left_out(fit):
    assert fit(session.get_dataset_shard, datasets={"rows": [1, 2]}).return_value == [1, 2]


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_without_a_name_several_datasets_are_listed(fit):
    def train_func():
        with pytest.raises(LegacyAPIError, match="pass one of 'train', 'valid'"):
            session.get_dataset_shard()

    fit(train_func, datasets={"train": [1], "valid": [2]})


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_an_unknown_dataset_raises_and_lists_the_known_ones(fit):
    """Ray AIR gave None, which failed later and elsewhere."""

    def train_func():
        with pytest.raises(DatasetNotFoundError, match=r"'vaild'.*'valid'"):
            session.get_dataset_shard("vaild")

    fit(train_func, datasets={"valid": [2]})


@pytest.mark.filterwarnings(OLD_WARNINGS)
@pytest.mark.parametrize("name", [None, "train"])
def test_a_trainer_without_datasets_gives_none_with_one_warning(fit, name):
    def train_func():
        with pytest.warns(UserWarning, match="was given no datasets") as caught:
            assert session.get_dataset_shard(name) is None
        assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]
        assert session.get_dataset_shard(name) is None

    fit(train_func)


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_the_metrics_must_be_a_dict(fit):
    def train_func():
        with pytest.raises(TypeError, match="takes a dict of metrics, got float"):
            session.report(0.5)

    fit(train_func)


class OtherRank(train.TrainContext):
    """The context of a worker that is not the first: what it reports is kept here."""

    def __init__(self):
        self.reports = []

    def get_world_rank(self):
        return 1

    def report(self, metrics, checkpoint=None):
        self.reports.append((metrics, checkpoint))

    def get_checkpoint(self):
        return None


@pytest.fixture
def other_rank():
    context = OtherRank()
    current.set_context(context)
    yield context
    current.set_context(None)


def test_of_dicts_only_that_of_rank_0_is_stored(other_rank, tmp_path):
    """Every rank of an old script passes one, and they need not be equal: two different files of one name conflict."""
    session.report({"a": 1}, checkpoint=Checkpoint.from_dict({"rank": 1}))
    assert other_rank.reports == [({"a": 1}, None)]
    assert session.get_checkpoint().to_dict() == {"rank": 1}

    folder = Checkpoint.from_directory(tmp_path)
    session.report({"a": 2}, checkpoint=folder)
    assert other_rank.reports[1] == ({"a": 2}, folder)
    assert session.get_checkpoint() is None


def test_other_ranks_do_not_warn(other_rank):
    """Warnings are errors here: one of these lines would fail."""
    assert session.get_world_rank() == 1
    Checkpoint.from_dict({}).to_dict()


def test_a_line_in_a_loop_warns_once_and_names_the_new_call(fit):
    def train_func():
        for step in range(3):
            session.report({"step": step})
        session.get_world_rank()
        session.get_world_rank()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(train_func)
    found = [(str(warning.message), warning.lineno, warning.filename) for warning in caught]
    first = train_func.__code__.co_firstlineno
    assert [(lineno - first, filename) for _, lineno, filename in found] == [(n, __file__) for n in (2, 3, 4)]
    assert all(warning.category is RayLiteDeprecationWarning for warning in caught)
    assert found[0][0].startswith("`ray_lite.air.session.report` is deprecated; use `ray_lite.train.report`.")
    assert found[1][0] == (
        "`ray_lite.air.session.get_world_rank` is deprecated; use `ray_lite.train.get_context().get_world_rank`."
    )


@pytest.mark.filterwarnings(OLD_WARNINGS)
@pytest.mark.parametrize(("name", "default"), OUTSIDE.items())
def test_outside_a_train_function_each_warns_once_and_gives_its_default(name, default):
    with pytest.warns(UserWarning, match=rf"session\.{name}\(\) was called where no train function runs") as caught:
        assert call(name) == default
    assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]
    # A second warning would be an error.
    assert call(name) == default


@pytest.mark.filterwarnings(OLD_WARNINGS)
def test_nothing_of_a_run_is_left_behind(fit):
    assert fit(session.get_trial_id).return_value is not None
    with pytest.warns(UserWarning, match="no train function runs"):
        assert session.get_trial_id() is None
