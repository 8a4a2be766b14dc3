"""README.md and docs/ name nothing that is not there (files, links, headings, names of code), and their Python runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.features.lora.written import linear_layers, write_adapter

ROOT = Path(__file__).parents[1]
FOLDERS = ("nanoengine", "tests", "benchmarks", "conformance", "examples")
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


BLOCKS = [
    pytest.param(page, number, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if page.stem != "tutorial" and "import OpenAI" not in block and "scale.ray" not in block
]
"""The tutorial's blocks follow each other (test_site.py); the others want a server (test_openai_client.py) and Ray."""

MODEL = re.compile(r'"(Qwen/[^"]+|org/name-AWQ|model\.Q4_K_M\.gguf)"')
BEFORE = {
    "quantization-0": "from nanoengine import LLM",
    "server-1": """
from nanoengine import LLM, SamplingParams
from nanoengine.models.fill_in_middle import FillTokens
llm, before, behind = LLM("demo"), "def ", "return 1"
fill_tokens = lambda tokenizer: FillTokens("<", ">", "=", "", (0,))  # this model has none
""",
    "speculation-0": "from nanoengine import LLM, SamplingParams; prompts = ['a b a b', 'c']",
    "tools-1": """
from nanoengine import AsyncLLMEngine, SamplingParams
from nanoengine.features.tool_calls.chats import Chats
parameters = {"type": "object", "properties": {}, "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "How is it in Rome?"}]
engine = AsyncLLMEngine.from_model("demo", use_tqdm=False)
""",
}
"""What a page tells in words before the block of that number."""


@pytest.mark.parametrize(("page", "number", "block"), BLOCKS)
def test_python_on_a_page_runs(
    page: Path, number: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bundled model in place of those that it names, and an adapter of that."""
    if "adapters/poet" in block:
        write_adapter(tmp_path / "adapters" / "poet", linear_layers(ROOT / "nanoengine" / "demo"))
    monkeypatch.chdir(tmp_path)
    lines = BEFORE.get(f"{page.stem}-{number}", "") + "\n" + MODEL.sub('"demo"', block)
    code = compile(lines, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
    for own in ("llm", "engine"):
        if own in names:
            names[own].close()
