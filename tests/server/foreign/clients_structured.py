"""What people write against OpenAI's structured outputs, on the server at $SERVER_URL: each client makes an object of a class.

Usage: launch.py demo -- PYTHON clients_structured.py [CLIENT...], where PYTHON has openai, instructor, pydantic-ai-slim[openai],
langchain-openai, litellm and llm. A client that is not installed is told. The model need not be clever: it is made to answer in
the form that was asked for, and the client's own checks say whether it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

URL = os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1"
MESSAGES = [{"role": "user", "content": "A person, please."}]
OPTIONS: dict[str, Any] = {"model": "demo", "max_tokens": 400, "seed": 1, "temperature": 0.7}
os.environ.update(
    OPENAI_API_KEY="none", OPENAI_BASE_URL=URL, LLM_USER_PATH=tempfile.mkdtemp(), LITELLM_LOCAL_MODEL_COST_MAP="True"
)

from pydantic import BaseModel, Field  # noqa: E402


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Address(BaseModel):
    zip_code: Literal["1010", "1020"]
    floor: int | None


class Person(BaseModel):
    is_adult: bool
    color: Color
    address: Address
    friends: Annotated[list[Address], Field(max_length=2)]


LEAF = {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"], "additionalProperties": False}
PAIR = {
    "$defs": {"leaf": LEAF, "leaf_or_nothing": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf_or_nothing"}},
    "required": ["left", "right"],
    "additionalProperties": False,
}


# ---- openai


def _openai() -> Any:
    import openai

    return openai.OpenAI()


def openai_parse() -> None:
    found = _openai().chat.completions.parse(messages=MESSAGES, response_format=Person, **OPTIONS)
    assert isinstance(found.choices[0].message.parsed, Person)


def openai_parse_n() -> None:
    found = _openai().chat.completions.parse(messages=MESSAGES, response_format=Person, n=3, **OPTIONS)
    assert all(isinstance(own.message.parsed, Person) for own in found.choices)
    assert len(found.choices) == 3


def openai_parse_stream() -> None:
    with _openai().chat.completions.stream(messages=MESSAGES, response_format=Person, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert {"content.delta", "content.done"} <= kinds


def openai_references() -> None:
    kind = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": PAIR}}
    found = _openai().chat.completions.create(messages=MESSAGES, response_format=kind, **OPTIONS)
    assert json.loads(found.choices[0].message.content)["left"]["v"] in (1, 2)


def openai_length() -> None:
    import openai

    try:
        _openai().chat.completions.parse(messages=MESSAGES, response_format=Person, **{**OPTIONS, "max_tokens": 3})
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("three tokens are no person")


def openai_logprobs() -> None:
    found = _openai().chat.completions.parse(
        messages=MESSAGES, response_format=Person, logprobs=True, top_logprobs=2, **OPTIONS
    )
    choice = found.choices[0]
    assert "".join(own.token for own in choice.logprobs.content).startswith(choice.message.content)


def openai_bad_schema() -> None:
    import openai

    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}}}
    try:
        _openai().chat.completions.create(messages=MESSAGES, response_format=kind, **OPTIONS)
    except openai.BadRequestError as error:
        message = str(error)
    else:
        message = "it was let pass"
    assert '"not"' in message, message


def openai_async() -> None:
    import openai

    async def ask() -> Any:
        async with openai.AsyncOpenAI() as client:
            ask = client.chat.completions.parse
            return await asyncio.gather(*(ask(messages=MESSAGES, response_format=Person, **OPTIONS) for _ in range(4)))

    assert all(isinstance(own.choices[0].message.parsed, Person) for own in asyncio.run(ask()))


# ---- others


def _instructor(mode: str) -> None:
    import instructor

    client = instructor.from_openai(_openai(), mode=instructor.Mode[mode])
    found = client.chat.completions.create(messages=MESSAGES, response_model=Person, max_retries=0, **OPTIONS)
    assert isinstance(found, Person)


def instructor_json_schema() -> None:
    _instructor("JSON_SCHEMA")


def pydantic_ai_native() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
    settings: Any = {"max_tokens": 400, "seed": 1}
    found = Agent(model, output_type=NativeOutput(Person), model_settings=settings).run_sync("A person, please.")
    assert isinstance(found.output, Person)


def _langchain() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=URL, api_key="none", **OPTIONS)  # type: ignore[arg-type]


def langchain_json_schema() -> None:
    assert isinstance(_langchain().with_structured_output(Person, method="json_schema").invoke("A person."), Person)


def langchain_raw_schema() -> None:
    schema = {
        "title": "Color",
        "type": "object",
        "properties": {"color": {"enum": ["red"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    assert _langchain().with_structured_output(schema, method="json_schema").invoke("A color.") == {"color": "red"}


def langchain_stream() -> None:
    pieces = list(_langchain().with_structured_output(Person, method="json_schema").stream("A person."))
    assert isinstance(pieces[-1], Person)


def litellm_pydantic() -> None:
    import litellm

    options = {**OPTIONS, "model": "hosted_vllm/demo"}
    found = litellm.completion(messages=MESSAGES, response_format=Person, api_base=URL, api_key="none", **options)
    Person.model_validate_json(found.choices[0].message.content)


def litellm_json_schema_stream() -> None:
    import litellm

    kind = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": PAIR}}
    options = {**OPTIONS, "model": "openai/demo"}
    stream = litellm.completion(
        messages=MESSAGES, response_format=kind, api_base=URL, api_key="none", stream=True, **options
    )
    assert json.loads("".join(own.choices[0].delta.content or "" for own in stream))["left"]["v"] in (1, 2)


def llm_schema() -> None:
    from llm.default_plugins.openai_models import Chat

    model = Chat("demo", key="none", model_name="demo", api_base=URL, supports_schema=True)
    found = model.prompt("A person.", schema=Person, stream=False, max_tokens=400, seed=1)
    Person.model_validate_json(found.text())


CLIENTS: tuple[Callable[[], None], ...] = (
    openai_parse,
    openai_parse_n,
    openai_parse_stream,
    openai_references,
    openai_length,
    openai_logprobs,
    openai_bad_schema,
    openai_async,
    instructor_json_schema,
    pydantic_ai_native,
    langchain_json_schema,
    langchain_raw_schema,
    langchain_stream,
    litellm_pydantic,
    litellm_json_schema_stream,
    llm_schema,
)


def main(names: list[str]) -> int:
    failed = 0
    for client in CLIENTS:
        if names and not any(client.__name__.startswith(name) for name in names):
            continue
        try:
            client()
        except ModuleNotFoundError as error:
            print(f"{client.__name__}: left out, {error}")
        except Exception as error:
            failed += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{client.__name__}: FAILED, {type(error).__name__}: {str(error)[:500]} ({place.filename}:{place.lineno})"
            )
        else:
            print(f"{client.__name__}: passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
