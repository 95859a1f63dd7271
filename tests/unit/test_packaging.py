"""What a user gets from ``pip install``: a wheel built from these sources, looked at from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each source folder, and the name under which it installs.
SOURCES = {"ray_lite": "ray_lite", "train": "ray_lite/train", "air": "ray_lite/air"}


def source_files() -> dict[str, Path]:
    """Path inside the wheel -> source file, for everything that should be in it."""
    return {
        f"{installed}/{file.relative_to(ROOT / folder).as_posix()}": file
        for folder, installed in SOURCES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that the checkout stays as it was, and with nothing downloaded."""
    source = tmp_path_factory.mktemp("source")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel):
    """A package missing from pyproject.toml works in an editable install and is gone from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert shipped == set(source_files())


def test_every_folder_with_code_is_a_package():
    folders = {file.parent for name, file in source_files().items() if name.endswith(".py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", SOURCES.values())
def test_type_checkers_may_trust_the_installed_package(wheel, package):
    with zipfile.ZipFile(wheel) as archive:
        assert f"{package}/py.typed" in archive.namelist()


def test_the_core_needs_ray_attrs_and_fsspec_only(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in required) == ["attrs", "fsspec", "ray"]


def test_the_extras_are_those_that_the_documents_name(metadata):
    assert sorted(metadata.get_all("Provides-Extra")) == sorted(
        ["torch", "s3", "gcs", "azure", "sftp", "client", "tune", "data", "examples", "dev", "servers"]
    )


def test_the_license_goes_with_the_wheel(wheel, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    """From a folder away from the checkout, with the checkout's own editable install out of the way."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; "
        "sys.meta_path = [f for f in sys.meta_path if not getattr(f, '__module__', '').startswith('__editable__')]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); "
        "import ray_lite; from ray_lite import air, train; import ray_lite.train.errors as errors; "
        "print(ray_lite.__version__, *(m.__file__ for m in (ray_lite, air, train, errors)), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    version, *files = done.stdout.split("\n")[:-1]
    assert version == wheel.name.split("-")[1]
    assert [Path(file).is_relative_to(tmp_path) for file in files] == [True] * 4


def test_the_constraints_pin_exact_versions_and_name_no_place(metadata):
    """A pin with a host or a local version in it would only install where it was made."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    for pin in pins:
        name, _, version = pin.split(";")[0].partition("==")
        assert name.strip(), pin
        assert version.strip(), pin
        assert not set(version) & set("+*/@"), pin
    named = {pin.partition("==")[0].strip() for pin in pins}
    assert {"ray", "torch", "attrs", "fsspec"} <= named
    assert not {"pip", "setuptools", "wheel"} & named
