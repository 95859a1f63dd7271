"""The old namespace: what importing it costs, what its names are, and that each warning shows the way."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from migration_table import GUIDE, with_table

import ray_lite
from ray_lite import air, train
from ray_lite.air import session
from ray_lite.air._table import ROWS, deprecation_text
from ray_lite.train.errors import LegacyAPIError, RayLiteDeprecationWarning

MOVED = ["ScalingConfig", "RunConfig", "FailureConfig", "CheckpointConfig", "Result"]
WORKING = [old for old, row in ROWS.items() if row.works]
BROKEN = [old for old, row in ROWS.items() if not row.works]


def use(old):
    """Use an old name as a script would."""
    if old.startswith("session."):
        function = getattr(session, old.removeprefix("session."))
        return function({}) if old == "session.report" else function()
    if not old.startswith("Checkpoint."):
        return getattr(air, old)()
    name = old.removeprefix("Checkpoint.")
    if name == "uri":
        return air.Checkpoint("/tmp").uri
    owner = air.Checkpoint if name.startswith("from_") else air.Checkpoint("/nowhere")
    arguments = {"from_dict": [{}], "from_uri": ["/tmp"], "from_object_ref": [None], "to_uri": ["/nowhere/else"]}
    arguments |= {"from_bytes": [b"\x80"], "set_preprocessor": [None]}
    return getattr(owner, name)(*arguments.get(name, []))


def use_and_survive(old):
    # Some have nothing to work on here and raise after the warning. Their line is ours, since we make the call.
    with contextlib.suppress(train.TrainError):
        use(old)


def find(new):
    """The object that a dotted name means; a method is looked up on its class."""
    found = ray_lite
    for part in new.replace("get_context()", "TrainContext").split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("old", WORKING)
@pytest.mark.filterwarnings("ignore:session")
def test_an_old_name_warns_at_the_users_line_and_names_one_that_exists(old):
    assert find(ROWS[old].new) is not None
    new = f"use `ray_lite.{ROWS[old].new}`"
    with pytest.warns(RayLiteDeprecationWarning, match=re.escape(new)) as caught:
        use_and_survive(old)
    (warning,) = [warning for warning in caught if warning.category is RayLiteDeprecationWarning]
    assert str(warning.message) == deprecation_text(old)
    assert warning.filename == __file__
    assert issubclass(warning.category, DeprecationWarning)


@pytest.mark.parametrize("old", BROKEN)
def test_an_old_name_that_cannot_work_raises_and_says_what_to_do(old):
    assert find(ROWS[old].new) is not None
    with pytest.raises(
        LegacyAPIError, match=re.escape(f"`ray_lite.air.{old}` is not supported by ray_lite. Instead: ")
    ):
        use(old)


def test_the_table_has_every_public_name():
    names = {f"session.{name}" for name in session.__all__} | {*air.__all__} - {"session", "Checkpoint"}
    assert names == {old for old in ROWS if not old.startswith("Checkpoint.")}
    for old in ROWS:
        if old.startswith("Checkpoint."):
            assert old.removeprefix("Checkpoint.") in vars(air.Checkpoint)


def test_the_table_in_the_guide_is_up_to_date():
    """If not: python tests/compat/migration_table.py"""
    text = GUIDE.read_text(encoding="utf-8")
    assert with_table(text) == text


@pytest.mark.filterwarnings("ignore::ray_lite.train.errors.RayLiteDeprecationWarning")
@pytest.mark.parametrize("number", [0, 1])
def test_the_scripts_in_the_guide_run(number, tmp_path, monkeypatch):
    """The old one with nothing changed but where it imports from; both with one worker, in this process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)[number]
    assert ("from ray." in script) == (number == 0)
    script = script.replace("from ray.", "from ray_lite.").replace("num_workers=2", "num_workers=0")
    exec(compile(script, "guide.py", "exec"), {"__name__": "guide"})
    (run_folder,) = (tmp_path / "ray_results").iterdir()
    checkpoint = train.Result.from_path(run_folder).checkpoint
    with checkpoint.as_directory() as folder:
        assert '"epoch"' in "".join(file.read_text() for file in Path(folder).glob("*.json"))


@pytest.mark.filterwarnings("ignore::ray_lite.train.errors.RayLiteDeprecationWarning")
@pytest.mark.parametrize("name", MOVED)
def test_a_moved_class_is_the_same_object(name):
    from ray_lite.air import config, result

    new = getattr(train, name)
    assert getattr(air, name) is new
    assert getattr(result if name == "Result" else config, name) is new


def test_a_from_import_warns_once_though_python_asks_twice():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ray_lite.air import RunConfig, ScalingConfig
    line = test_a_from_import_warns_once_though_python_asks_twice.__code__.co_firstlineno + 3
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line), (__file__, line)]
    assert (RunConfig, ScalingConfig) == (train.RunConfig, train.ScalingConfig)


def test_a_missing_name_is_an_attribute_error():
    assert not hasattr(air, "Predictor")
    for module in (air, air.config, air.result):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


def test_where_warnings_are_errors_the_line_fails_every_time():
    for _ in range(2):
        with pytest.raises(RayLiteDeprecationWarning, match=r"train\.ScalingConfig"):
            _ = air.ScalingConfig


def run(code, *options):
    """A fresh interpreter, without the filters of pytest."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )


def test_importing_is_light_and_without_effects():
    done = run(
        """
        import warnings, sys, json
        before = list(warnings.filters)
        import ray_lite.air
        from ray_lite.air import session, config, result
        assert warnings.filters == before
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
        """,
        "-W",
        "error",
    )
    assert set(json.loads(done.stdout)) & {"ray", "torch", "numpy", "fsspec", "pandas", "attrs", "attr"} == set()
    assert done.stderr == ""


USE_IN_A_MODULE = """
    import types
    module = types.ModuleType("library")
    source = "from ray_lite import air\\nconfig = air.FailureConfig"
    exec(compile(source, "library.py", "exec"), module.__dict__)
"""


def test_python_shows_the_warning_also_outside_main():
    """Python hides DeprecationWarning there, and old code is seldom in the script itself."""
    done = run(USE_IN_A_MODULE)
    assert "library.py:2: RayLiteDeprecationWarning: `ray_lite.air.FailureConfig` is deprecated" in done.stderr


@pytest.mark.parametrize(
    "choice",
    [
        "warnings.simplefilter('ignore')",
        "warnings.filterwarnings('ignore', category=DeprecationWarning)",
        "warnings.filterwarnings('ignore', module='library')",
        "warnings.filterwarnings('ignore', message='.*is deprecated; use')",
    ],
)
def test_a_filter_of_the_users_own_counts_for_more(choice):
    done = run(f"import warnings\n{choice}\n{textwrap.dedent(USE_IN_A_MODULE)}")
    assert done.stderr == ""


def test_options_of_the_interpreter_count_for_more():
    assert run(USE_IN_A_MODULE, "-W", "ignore").stderr == ""
