"""A pytest plugin: leaves out the tests that exclusions.txt names for a suite, and counts passed, failed and excluded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("exclusions.txt")


def patterns(suite: str) -> list[re.Pattern[str]]:
    """What exclusions.txt excludes of a suite. A `*` stands for anything; parameters in brackets may be left out."""
    found = []
    for line in LIST.read_text().splitlines():
        if line.startswith(f"{suite}::"):
            name = line.split(maxsplit=1)[0].removeprefix(f"{suite}::")
            found.append(re.compile(re.escape(name).replace(r"\*", ".*") + r"(\[.*\])?"))
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", required=True, help="name of the suite in exclusions.txt")
    parser.addoption("--suite-root", default="", help="what its test ids begin with, and exclusions.txt leaves out")
    parser.addoption("--counts", required=True, help="file that a line with the counts is added to")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    excluded = patterns(config.getoption("--suite"))
    root = config.getoption("--suite-root")
    left_out = [item for item in items if any(p.fullmatch(item.nodeid.removeprefix(root)) for p in excluded)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    line = (
        f"{config.getoption('--suite')}: {len(stats.get('passed', []))} passed, {failed} failed, "
        f"{len(stats.get('deselected', []))} excluded, {len(stats.get('skipped', []))} skipped by themselves"
    )
    terminalreporter.write_line(line)
    with Path(config.getoption("--counts")).open("a") as counts:
        counts.write(line + "\n")
