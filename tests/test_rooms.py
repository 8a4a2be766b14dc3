"""The rooms of the house: imports go downwards only, and neither files nor folders import each other in a circle.

Imports for types alone count, and those inside of functions; modules that are loaded by name, where they are installed, do not.
"""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core", "kernels", "models", "features", "serve", "scale", "demo")
BESIDE = ("errors", "sizes", "cgroups", "ram", "depth", "caches", "progress", "log", "interrupts", "plugins")
BESIDE += ("prompts", "child_process", "options")
"""Files that every room but the core may import."""

ORDER = ("core", *BESIDE, "kernels", "models", "features", "builder", "llm", "serve", "scale")
"""Who stands further to the right may import who stands further to the left."""

DOORS = {"nanoengine", "nanoengine.__main__"}

Graph = dict[str, set[str]]


def imports_of(path: Path, names: set[str]) -> set[str]:
    """The modules that a file imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {own.name for own in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            full = {f"{node.module}.{own.name}" for own in node.names}
            found |= full & names or {str(node.module)}
    return found & names


@cache
def modules() -> Graph:
    """Every module of the package -> those that it imports. The doors `nanoengine` and `python -m nanoengine` have no imports
    here: they name what all rooms offer.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "nanoengine").rglob("*.py")
    }
    return {name: imports_of(path, set(paths)) - {name} for name, path in paths.items() if name not in DOORS}


def within(graph: Graph, folder: str) -> Graph:
    """What is in a folder, in which another folder counts as one file."""
    found: Graph = {}
    inside = {name: name[len(folder) + 1 :].split(".")[0] for name in graph if name.startswith(f"{folder}.")}
    for name, own in inside.items():
        found.setdefault(own, set()).update({inside[other] for other in graph[name] if other in inside} - {own})
    return found


def without_types_of_the_core() -> Graph:
    """The core's seams name the scheduler that asks them, and a capability the start-up that it is part of, as types."""
    graph, core = modules(), "nanoengine.core"
    types = {f"{core}.seams": f"{core}.scheduler", f"{core}.capability": f"{core}.startup"}
    return graph | {name: graph[name] - {imported} for name, imported in types.items()}


def check_order(graph: Graph, what: str) -> None:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of {what}: {' -> '.join(error.args[1])}")


def test_every_file_and_folder_is_in_a_room() -> None:
    found = {path.stem for path in (ROOT / "nanoengine").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__init__", "__main__", "__pycache__", "py"} == {*ORDER, *ROOMS}


def test_imports_go_downwards() -> None:
    graph = modules()
    assert [name for name in graph if name.startswith("nanoengine.core.") and graph[name] & DOORS] == []
    for room, imported in within(graph, "nanoengine").items():
        if room == "demo":
            assert not imported
            continue
        above = {own for own in imported if ORDER.index(own) > ORDER.index(room)}
        assert not above, f"{room} imports {sorted(above)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    check_order(without_types_of_the_core(), "files")


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph = without_types_of_the_core()
    for folder in sorted({name.rpartition(".")[0] for name in graph}):
        check_order(within(graph, folder), f"files and folders in {folder}")


def test_the_picture_of_the_house_names_its_rooms() -> None:
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    assert [room for room in ROOMS if f"{room}/" not in picture] == []
    graph = modules()
    for room in ("models", "features", "serve", "scale"):
        folders = {
            name.split(".")[2] for name in graph if name.startswith(f"nanoengine.{room}.") and name.count(".") > 2
        }
        assert [own for own in sorted(folders) if own not in picture] == []
