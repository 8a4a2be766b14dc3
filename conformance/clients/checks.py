"""What each client is asked to do with the server at $SERVER_URL, and a table of what came of it.

Usage: launch.py MODEL -- PYTHON checks.py TABLE COUNTS. TABLE is a file that is written anew, with a row for each check of the
modules of_*.py beside this file; a line with the sums is added to COUNTS. A row says what came of a check:

- passed: the client has what its documentation promises;
- refused rightly: the server does not do this, or the request is wrong, and the client raises its own error for that;
- weak model: the form is right, what the model says is not;
- FAULT: anything else.

The model is small. Its objects and most of its calls are forced, and the client's own checks say if they have the form. Where a
loop must end under `tool_choice: "auto"`, the model has seen an example and chooses one of two texts (`CALLS_ONCE`).
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

URL = os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1"
BASE = URL.removesuffix("/v1")
MODEL = os.environ.get("MODEL", "small")
KEY = "none"
"""The server takes no other."""

OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "seed": 1, "temperature": 0.7}
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "temperature": 0}
MESSAGES: list[Any] = [{"role": "user", "content": "A person, please."}]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 90."}]
TURNS: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": "What is my name?"},
]
TOO_LONG = "one two three " * 3000
"""More tokens than --max-model-len of the run."""

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ],
    }
]
os.environ.update(OPENAI_API_KEY=KEY, OPENAI_BASE_URL=URL, OLLAMA_API_KEY=KEY)


# ---- objects


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")  # not every client says so by itself
    zip_code: Literal["1010", "1020"]
    floor: Annotated[int, Field(ge=0, le=99)] | None


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    is_adult: bool
    color: Color
    address: Address
    friends: Annotated[list[Address], Field(max_length=2)]


class Answer(BaseModel):
    """So short that a small model gets it right where it is only told of the schema."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


# ---- tools


class weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = "How is the weather in Rome?"
SAID = "It is sunny in Rome."
CALLS_ONCE: dict[str, Any] = {
    "structured_outputs": {
        "choice": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', SAID]
    }
}
"""What the model can say: it decides which."""

EXAMPLE_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
EXAMPLE: list[Any] = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "snowy"},
    {"role": "assistant", "content": "It is snowy in Oslo."},
]
ASKED = [*EXAMPLE, {"role": "user", "content": QUESTION}]


class Made:
    """The calls that were made of a function."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def weather(self, city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        assert city in ("Rome", "Oslo")
        self.cities.append(city)
        return "sunny"


def is_weather(name: str, arguments: str) -> bool:
    """Whether it is a call of the tool, as its schema has it."""
    return name == "weather" and weather.model_validate_json(arguments).city in ("Rome", "Oslo")


# ---- the table


class WeakModel(Exception):
    """The interface answered rightly, the model did not."""


def says(text: str | None, *words: str) -> None:
    """A text is there; it should have one of the words.

    Raises:
        AssertionError: there is none.
        WeakModel: it has none of them.
    """
    assert text, "no text"
    if not any(word.lower() in text.lower() for word in words):
        raise WeakModel(f"{text[:60]!r} has none of {words}")


def refusal(kind: type[BaseException], ask: Callable[[], Any], *words: str) -> BaseException:
    """The error that something is refused with, which has these words. A check that returns it was refused rightly."""
    try:
        found = ask()
    except kind as error:
        told = f"{error} {getattr(error, 'body', '')}".lower()
        missing = [word for word in words if word.lower() not in told]
        assert not missing, f"{missing} not in {told}"
        return error
    raise AssertionError(f"it is taken: {str(found)[:200]}")


def are_likely(chosen: list[float], top: list[list[float]]) -> None:
    """Whether log probabilities are those of the likeliest tokens: of the tokens that were chosen at temperature 0, and of the
    likeliest ones at the same positions. No sum of probabilities is above 1, and somewhere the model is sure.

    Raises:
        AssertionError: they are not.
    """
    assert chosen == [max(own) for own in top]
    sums = [sum(map(math.exp, own)) for own in top]
    assert 0.9 < max(sums) < 1.001, sums


class Check(NamedTuple):
    """One of a client.

    Args:
        client: as its package is called.
        feature: of the client.
        run: raises AssertionError if it is not there.
        catches: kinds of spoiled answers that it must notice (see spoiler.py).
    """

    client: str
    feature: str
    run: Callable[[], object]
    catches: tuple[str, ...] = ()


CHECKS: list[Check] = []


def check(client: str, feature: str, *catches: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Registers a check. Arguments as for `Check`."""

    def register(run: Callable[[], object]) -> Callable[[], object]:
        CHECKS.append(Check(client, feature, run, catches))
        return run

    return register


def refuses(client: str, feature: str, kind: type[BaseException], *words: str) -> Callable[[Callable[[], Any]], None]:
    """Registers what a client asks for, to be refused with an error of a kind that has these words."""
    return lambda ask: CHECKS.append(Check(client, feature, lambda: refusal(kind, ask, *words)))


def outcome(run: Callable[[], object]) -> tuple[str, str]:
    """What came of it, and where it went wrong."""
    try:
        found = run()
    except WeakModel as error:
        return "weak model", str(error)
    except BaseException as error:  # SystemExit, too
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "FAULT",
            f"{type(error).__name__}: {str(error)[:500]} ({os.path.basename(place.filename)}:{place.lineno})",
        )
    return "refused rightly" if isinstance(found, BaseException) else "passed", ""


def on_one_line(text: str) -> str:
    """For a cell of a table."""
    return " ".join(text.split()).replace("|", "/")


def load() -> None:
    """Register the checks of all clients."""
    for path in sorted(Path(__file__).parent.glob("of_*.py")):
        importlib.import_module(path.stem)


def main(table: Path, counts: Path) -> None:
    load()
    only = os.environ.get("ONLY", "")  # a part of a client's name or a feature, to try some by hand
    sums: dict[str, Counter[str]] = {}
    rows = ["| client | what it does | result |", "| --- | --- | --- |"]
    for client, feature, run, _ in CHECKS:
        if only in f"{client}: {feature}":
            kind, why = outcome(run)
            sums.setdefault(f"{client} {version(client)}", Counter())[kind] += 1
            rows.append(f"| {client} | {feature} | {kind} {on_one_line(why)} |")
            print(rows[-1], flush=True)
            table.write_text("\n".join(rows) + "\n")
    faults = sum(own["FAULT"] for own in sums.values())
    told = "; ".join(f"{name}: {dict(own)}" for name, own in sums.items())
    with counts.open("a") as file:
        file.write(
            f"clients: {sum(map(Counter.total, sums.values())) - faults} passed, {faults} failed, 0 excluded ({told})\n"
        )


if __name__ == "__main__":
    sys.modules["checks"] = sys.modules["__main__"]
    main(*map(Path, sys.argv[1:]))
