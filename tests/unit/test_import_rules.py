"""Who may import whom inside ``ray_lite.train``, and what importing it may load.

Imports under ``if TYPE_CHECKING`` do not count: they never run. Those inside functions do count; they
put off the cost of a module, not the knowledge of it.
"""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train"

# Each entry may import itself and those above it, never one below.
LAYERS = (
    ("errors",),
    ("storage",),
    ("configs",),
    ("data",),
    ("callback", "result"),
    ("context",),
    ("execution",),
    ("trainer",),
    ("torch",),
    ("callbacks", "collective", "testing"),
    ("cli", "web"),
)
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}

HEAVY = ("ray", "torch", "numpy", "fsspec", "pandas")


def module_name(file: Path, package: Path = TRAIN, name: str = "ray_lite.train") -> str:
    """``train/storage/uri.py`` -> ``ray_lite.train.storage.uri``; a package goes by its own name."""
    parts = [name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(TRAIN.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from import_nodes(child)


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The dotted name of each thing imported; ``from .a import b`` gives ``<here>.a.b``."""
    for node in import_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            here = parts[: len(parts) - node.level + is_package]
            base = ".".join([*here, base] if base else here)
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(module: str) -> set[str]:
    """Modules of ``ray_lite.train`` that a file imports, the public face ``ray_lite.train`` itself included."""
    file = MODULES[module]
    found = set()
    for name in imported_names(file.read_text(encoding="utf-8"), module, file.name == "__init__.py"):
        candidate = name
        while candidate and candidate not in MODULES:
            candidate = candidate.rpartition(".")[0]
        if candidate and candidate != module:
            found.add(candidate)
    return found


def top_of(module: str) -> str:
    """``ray_lite.train.storage.uri`` -> ``storage``."""
    return module.split(".")[2]


INNER = [module for module in MODULES if module != "ray_lite.train"]


def test_the_reader_of_imports_sees_every_form_of_import():
    source = "\n".join(
        [
            "import os, a.b",
            "from . import sibling",
            "from ..up import thing",
            "def f():",
            "    from .late import x",
            "if TYPE_CHECKING:",
            "    from .unseen import y",
        ]
    )
    assert list(imported_names(source, "p.q.mod", is_package=False)) == [
        "os",
        "a.b",
        "p.q.sibling",
        "p.up.thing",
        "p.q.late.x",
    ]
    assert list(imported_names("from .a import b", "p.q", is_package=True)) == ["p.q.a.b"]


def test_every_file_and_folder_of_train_has_a_layer():
    """A new one is placed on purpose: add it to LAYERS above those that use it."""
    assert {top_of(module) for module in INNER} <= set(LAYER_OF)


@pytest.mark.parametrize("module", INNER)
def test_imports_point_one_way(module):
    layer = LAYER_OF[top_of(module)]
    wrong = sorted(
        name
        for name in imports_of(module) - {"ray_lite.train"}
        if top_of(name) != top_of(module) and LAYER_OF[top_of(name)] >= layer
    )
    assert wrong == [], f"{module} imports from its own layer or a later one"


@pytest.mark.parametrize("module", INNER)
def test_no_file_imports_the_public_face(module):
    """The face loads everything, so whoever imports it depends on everything; name the file that is meant."""
    assert "ray_lite.train" not in imports_of(module)


def test_no_circle_between_files():
    graph = {module: imports_of(module) for module in INNER}
    # prepare() raises CycleError, whose text lists the files of the circle.
    graphlib.TopologicalSorter(graph).prepare()


def test_nothing_in_train_imports_the_old_session_api():
    users = [
        module
        for module, file in MODULES.items()
        for name in imported_names(file.read_text(encoding="utf-8"), module, file.name == "__init__.py")
        if name == "ray_lite.air" or name.startswith("ray_lite.air.")
    ]
    assert users == []


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after one statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "statement",
    [
        "import ray_lite",
        "from ray_lite import train",
        "import ray_lite.train.errors",
    ],
)
def test_importing_loads_nothing_heavy(statement):
    """A script that only asks for --help, or a notebook's first cell, must not wait for ray or torch."""
    assert loaded_by(statement) & set(HEAVY) == set()


def test_naming_the_torch_half_does_not_load_torch():
    assert "torch" not in loaded_by("from ray_lite import train; train.torch")


def test_importing_changes_nothing_in_the_process():
    """No signal handler, logger, environment variable, folder or patched print comes from an import."""
    code = """
import builtins, logging, os, signal, sys, threading
def state():
    return (
        dict(os.environ), os.getcwd(), builtins.print, sys.excepthook, threading.excepthook, threading.active_count(),
        [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("ray_lite").handlers[:],
    )
before = state()
import ray_lite
from ray_lite import train
for name in dir(train):
    getattr(train, name)
assert state() == before, (before, state())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TorchTrainer", "it is ray_lite.train.torch.TorchTrainer"),
        ("repotr", "did you mean 'report'"),
        ("ScalingConfg", "did you mean 'ScalingConfig'"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_the_one_that_is(name, hint):
    from ray_lite import train

    with pytest.raises(AttributeError, match=hint):
        getattr(train, name)
    assert not hasattr(train, "_nothing")
