"""The site of docs/: it builds without a warning, and a browser that shows it asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?([^"'\s>]+)|<link[^>]*\shref=["']?([^"'\s>]+)|url\(["']?([^"')]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_it(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.with_suffix(".md")) for page in pages}


def test_names_have_their_docstrings(site: Path) -> None:
    page = (site / "reference/python.html").read_text()
    for name in ("nanoengine.llm.LLM.generate", "nanoengine.features.sampling.params.SamplingParams"):
        assert f'id="{name}"' in page, name
    assert "temperature" in page


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    texts = [path.read_text() for kind in ("*.html", "*.css") for path in site.rglob(kind)]
    loaded = {"".join(found) for text in texts for found in LOADED.findall(text)}
    assert len(loaded) > 3
    assert [own for own in loaded if re.match(r"(\w+:)?//", own)] == []


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks of Python, one after the other, with the assertions in them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    exec("".join(blocks), {})
    assert re.search(r"^{(?=.*'name': ')(?=.*'age': \d).*}$", capsys.readouterr().out, re.MULTILINE)


def test_links_out_of_the_folder_become_names(site: Path) -> None:
    assert "examples/quickstart.py</code>" in (site / "install.html").read_text()
    assert 'href="../architecture.html"' in (site / "reference/core.html").read_text()
