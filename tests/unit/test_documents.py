"""What the documents promise can be checked: their links, and the commands they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_inside_the_project_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if target and not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_make_commands_in_the_documents_exist(document):
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = re.findall(r"`(?:[A-Z_]+=\S+ )?make ([a-z][\w-]*)", document.read_text(encoding="utf-8"))
    assert set(named) <= known


def test_the_changelog_has_a_section_for_this_version():
    source = (ROOT / "ray_lite" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


SYMPTOMS = re.findall(
    r"^## `(.+)`$", (ROOT / "docs" / "why_did_my_run_stop.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_quotes_a_message_that_exists(symptom):
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "train").rglob("*.py")))
    # A message that stands in several literals, one behind the other.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    # What stands between the values of this example: numbers, names in quotes, who and when.
    parts = [
        part.strip()
        for part in re.split(r"(?:rank |process )?[\d.]+|'\w+'|\.\.\.| of \w+ on | during |: rank", symptom)
    ]
    longest = max(parts, key=len)
    assert len(longest) >= 8
    assert longest in source, f"no message says {longest!r}"


def test_every_error_and_warning_that_is_explained_names_a_page_that_exists():
    from ray_lite.train.errors import DOCUMENT, explained

    assert (ROOT / DOCUMENT).is_file()
    assert explained("what").endswith(f"(explained in {DOCUMENT})")
