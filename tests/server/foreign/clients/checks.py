"""What each client is asked to do with the server at $SERVER_URL, and a table of what came of it.

Usage: launch.py smollm2 -- PYTHON checks.py TABLE MODULE..., where TABLE is a file that rows are added to, and a MODULE holds the
checks of some clients (of_openai, of_agents, of_others). The model is small, and need not be clever: it is made to answer in the
form that was asked for, and the client's own checks say whether it is. Where it must decide by itself whether to call a tool
(`tool_choice: "auto"`), it has seen an example and can say one of two things (`CALLS_ONCE`): a loop of calls comes to an end.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

URL = os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1"
MODEL = "smollm2"
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "seed": 1, "temperature": 0.7}
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 0}
MESSAGES: list[Any] = [{"role": "user", "content": "A person, please."}]
os.environ.update(
    OPENAI_API_KEY="none",
    OPENAI_BASE_URL=URL,
    LLM_USER_PATH=tempfile.mkdtemp(),
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    LANGSMITH_TRACING="false",
    DO_NOT_TRACK="1",
)


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
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS_ONCE: dict[str, Any] = {"structured_outputs": {"choice": [CALL, SAID]}}
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


class Check(NamedTuple):
    client: str
    feature: str
    run: Callable[[], None]


CHECKS: list[Check] = []


def check(client: str, feature: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a check of a client, which is called as its package is."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        CHECKS.append(Check(client, feature, run))
        return run

    return register


def outcome(run: Callable[[], None]) -> str:
    """What came of it: "passed", or what went wrong and where."""
    try:
        run()
    except BaseException as error:  # SystemExit, too: a program of a client may end so
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:500].replace("|", "/")
        return f"FAILED, {type(error).__name__}: {text} ({os.path.basename(place.filename)}:{place.lineno})"
    return "passed"


def main(table: str, names: list[str]) -> int:
    for name in names:
        importlib.import_module(name)
    is_ok = True
    for client, feature, run in CHECKS:
        result = outcome(run)
        is_ok &= result == "passed"
        row = f"| {client} {version(client)} | {feature} | {result} |"
        print(row, flush=True)
        with open(table, "a") as file:
            file.write(row + "\n")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.modules["checks"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1], sys.argv[2:]))
