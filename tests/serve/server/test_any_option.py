"""Any text in any option of the command line, and any value in a file of options: an engine's and a server's options, or an error
that says what is wrong, soon."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from nanoengine.builder import read_config
from nanoengine.errors import InvalidConfig, NanoEngineError
from nanoengine.serve.arguments import Parser
from nanoengine.serve.command import add_arguments, configs, named_plugins
from tests.outside import VALUES

TEXTS = [own for own in VALUES if isinstance(own, str)] + ["-1", "1e400", "9" * 5000, "2GiB", '{"a": 1}', "\udcff", " "]
TABLES = ["1", "-1", "9" * 19, "1e400", "nan", "true", "1979-05-27", "[]", "[1]", '["x", ""]', "{}", "{a = {b = 1}}"]
TABLES += [json.dumps(own) for own in TEXTS if own.isprintable()] + [f"{'[' * 300}{']' * 300}", "[" * 20_000]
WAYS: dict[str, tuple[list[str], Callable[[Path, str, str], list[str]]]] = {
    "a line": (TEXTS, lambda _, option, text: [f"--{option}={text}"]),
    "a file": (TABLES, lambda file, option, text: file.write_text(f"{option} = {text}") and ["--config", str(file)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_any_value_is_taken_or_named(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser, found = Parser(prog="serve"), []
    add_arguments(parser)
    texts, arguments = WAYS[way]
    files = (tmp_path / f"{number}.toml" for number in itertools.count())  # to write over one waits for the disk
    names = [action.option_strings[0][2:] for action in parser._actions if action.option_strings and action.nargs != 0]
    assert len(names) > 70
    for name in names:
        for text in random.Random(name).sample(texts, 8):
            try:
                line = arguments(next(files), name, text)
                named_plugins(line)
                options, _ = configs(parser.parse_args(["demo", *line]))
                read_config("demo", options)
            except NanoEngineError as error:
                found += [name] * (len(str(error)) > 2100)
            except SystemExit as end:
                said = capsys.readouterr().err
                if end.code != 2 or len(said) > 700:
                    found.append(f"{name} = {text[:40]!r}: {end.code}, {said[:100]}")
            except Exception as error:
                found.append(f"{name} = {text[:40]!r}: {type(error).__name__}: {str(error)[:80]}")
    assert found == []


def test_a_file_of_any_length_is_read_or_refused_soon(tmp_path: Path) -> None:
    file, start = tmp_path / "own.toml", time.monotonic()
    for text in ("a." * 10_000 + "a = 1", "a." * 500_000 + "a = 1", "a = " + "[" * 30_000, "a = {" * 6000):
        file.write_text(text)
        with suppress(InvalidConfig):
            named_plugins(["--config", str(file)])
    assert time.monotonic() - start < 60
