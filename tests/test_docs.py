"""README.md and the pages of docs/ name nothing that is not there: files, links, headings, classes and functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("nanoengine", "tests", "benchmarks", "examples")
FILES = [*ROOT.glob("*.*"), *(path for own in FOLDERS for path in (ROOT / own).rglob("*.*"))]
PATHS = "".join(f"/{path.relative_to(ROOT)}\n" for path in FILES)
FILE = re.compile(r"(?<![\w*./-])(?!llama.cpp)[a-z_][\w/]*\.(?:py|cpp|h|sh)\b")
FOLDER = re.compile(r"`([a-z_]+(?:/[a-z_]+)*)/`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def headings(page: Path) -> set[str]:
    """As GitHub names them in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", own.lower()).replace(" ", "-") for own in found}


@every_page
def test_files_and_folders_are_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in FILE.findall(text) if f"/{name}\n" not in PATHS] == []
    assert [name for name in FOLDER.findall(text) if f"/{name}/" not in PATHS] == []


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, heading in (link.partition("#") for link in LINK.findall(page.read_text()) if ":" not in link):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not heading or heading in headings(there), f"{target}#{heading}"


def test_classes_and_functions_are_there() -> None:
    known = set(
        re.findall(r"\w+", "\n".join(own.read_text() for own in FILES if own.suffix in (".py", ".cpp", ".h", ".mjs")))
    )
    known |= {f"{own}_total" for own in known}  # counters of metrics
    for page in PAGES:
        parts = {own for name in NAME.findall(page.read_text()) for own in name.split(".")}
        assert {part for part in parts if re.search(r"[a-z][A-Z]|[a-z]_", part)} - known == set(), page.name
