"""Names are the field's words (docs/architecture.md, "Glossary"): none is vague, and no two classes have one name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanoengine"

VAGUE = {
    "own",
    "found",
    "told",
    "asked",
    "given",
    "kept",
    "taken",
    "place",
    "places",
    "placed",
    "together",
    "meet",
    "walk",
    "weigh",
}
"""They stand where a noun of the field could: result, match, slot, index, position, input, buffer, barrier, fused ..."""

OF_OTHERS = {"ModuleNotFoundError", "FileNotFoundError", "PackageNotFoundError", "ModelNotFound", "in_place", "walk"}
"""Names of Python's and of users', and the field's own."""

PAIRS = {"Attention": "the interface of core, and a layer of models"}
"""Classes of one name, with the reason."""


def names() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME:
                yield path, token.string
    for path in sorted([*PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.cpp")]):
        code = re.sub(r'//[^\n]*|"[^"\n]*"', "", path.read_text(encoding="utf-8"))
        for name in re.findall(r"[A-Za-z_]\w*", code):
            yield path, name


def test_names_have_no_vague_words() -> None:
    vague = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, name in names()
        if name not in OF_OTHERS and VAGUE & {word.lower() for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name)}
    }
    assert not vague, sorted(vague)


def test_no_two_classes_have_one_name() -> None:
    classes = defaultdict[str, list[str]](list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1 and name not in PAIRS} == {}
