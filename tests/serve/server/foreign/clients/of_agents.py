"""What people write with pydantic-ai, with openai-agents, and with llm's program."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable
from typing import Any

import agents
import llm.cli
import llm.default_plugins.openai_models as llm_openai
from checks import (
    BASE,
    CALLS_ONCE,
    EXAMPLE,
    KEY,
    MODEL,
    PIXEL,
    QUESTION,
    SAID,
    TOO_LONG,
    URL,
    Answer,
    Made,
    Person,
    WeakModel,
    check,
    refuses,
    says,
)
from click.testing import CliRunner
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from pydantic_ai import (
    Agent,
    BinaryContent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

# ---- pydantic-ai

PYDANTIC_AI = "pydantic-ai-slim"
FAIR: Any = {"max_tokens": 200, "seed": 1}
STILL: Any = {"max_tokens": 40, "temperature": 0}
HISTORY: list[ModelMessage] = [
    ModelRequest([UserPromptPart(EXAMPLE[0]["content"])]),
    ModelResponse([ToolCallPart("weather", {"city": "Oslo"}, "call_1")]),
    ModelRequest([ToolReturnPart("weather", "snowy", "call_1")]),
    ModelResponse([TextPart(EXAMPLE[3]["content"])]),
]


MODELS: dict[str, Callable[[str], Any]] = {
    "OpenAIChatModel": lambda name: OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=KEY)),
    "OpenAIResponsesModel": lambda name: OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=URL, api_key=KEY)),
    "AnthropicModel": lambda name: AnthropicModel(name, provider=AnthropicProvider(base_url=BASE, api_key=KEY)),
    "OllamaModel": lambda name: OllamaModel(name, provider=OllamaProvider(base_url=URL, api_key=KEY)),
}


def pydantic_ai(
    output: Any = str, settings: Any = FAIR, kind: str = "OpenAIChatModel", name: str = MODEL, **options: Any
) -> Agent[None, Any]:
    return Agent(MODELS[kind](name), output_type=output, model_settings=settings, retries=0, **options)


def of_every_model(kind: str) -> None:
    """What people write with each of its models."""

    @check(PYDANTIC_AI, f"`{kind}`: text, whole and streamed, several turns, usage")
    def text() -> None:
        agent = pydantic_ai(settings=STILL, kind=kind, instructions="You are brief.")
        first = agent.run_sync("My name is Ada.")
        again = agent.run_sync("What is my name?", message_history=first.all_messages())
        assert again.usage.output_tokens > 0

        async def ask() -> str:
            async with agent.run_stream("My name is Ada.") as run:
                return "".join([own async for own in run.stream_text(delta=True)])

        assert asyncio.run(ask()) == first.output
        says(again.output, "Ada")

    @check(PYDANTIC_AI, f"`{kind}`: a class, numbers and lists as output, by calls that end by themselves")
    def outputs() -> None:
        for output in (Answer, bool, list[Answer], Person):
            found = pydantic_ai(output, kind=kind).run_sync("A city or a person, please.").output
            assert isinstance(found, getattr(output, "__origin__", output))

    @check(PYDANTIC_AI, f"`{kind}`: a function tool beside a class as output")
    def both() -> None:
        made = Made()
        agent = pydantic_ai(Answer, {**FAIR, "temperature": 0}, kind)
        agent.tool_plain(made.weather)
        try:
            assert isinstance(agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=4)).output, Answer)
        except UsageLimitExceeded as error:
            assert made.cities
            raise WeakModel("it calls the function again and again") from error

    for feature, error, word, name, asked in (
        ("another model", ModelHTTPError, "gpt-9", "gpt-9", QUESTION),
        ("too long a prompt", ModelHTTPError, "too long", MODEL, TOO_LONG),
        ("an image", ModelHTTPError, "image", MODEL, [BinaryContent(base64.b64decode(PIXEL), media_type="image/png")]),
    ):
        refuses(PYDANTIC_AI, f"`{kind}`: {feature}", error, word)(
            lambda name=name, asked=asked: pydantic_ai(settings=STILL, kind=kind, name=name).run_sync(asked)
        )


for own in MODELS:
    of_every_model(own)


@check(PYDANTIC_AI, "`NativeOutput`")
def native() -> None:
    assert isinstance(pydantic_ai(NativeOutput(Person)).run_sync("A person, please.").output, Person)


@check(PYDANTIC_AI, "`ToolOutput`")
def tool_output() -> None:
    assert isinstance(pydantic_ai(ToolOutput(Person)).run_sync("A person, please.").output, Person)


@check(PYDANTIC_AI, "`ToolOutput` of two classes, streamed")
def tool_output_stream() -> None:
    agent = pydantic_ai([ToolOutput(Person), ToolOutput(Answer)])

    async def ask() -> Any:
        async with agent.run_stream("A person, please.") as run:
            return [own async for own in run.stream_output()][-1]

    assert isinstance(asyncio.run(ask()), Person | Answer)


@check(PYDANTIC_AI, "`PromptedOutput`")
def prompted() -> None:
    example = [ModelRequest([UserPromptPart("A city, please.")]), ModelResponse([TextPart('{"city": "Oslo"}')])]
    agent = pydantic_ai(PromptedOutput(Answer), STILL)
    found = agent.run_sync("A city, please.", message_history=example).output
    assert isinstance(found, Answer)


@check(PYDANTIC_AI, "an agent with a function tool: call, result, answer (grammar)")
def pydantic_ai_loop() -> None:
    made = Made()
    agent = pydantic_ai(settings=STILL | {"extra_body": CALLS_ONCE})
    agent.tool_plain(made.weather, strict=False)
    assert agent.run_sync(QUESTION, message_history=HISTORY).output == SAID
    says("".join(made.cities) or "no call", "Rome")


@check(PYDANTIC_AI, "an agent with a strict function tool and a `ToolOutput`, which must call")
def pydantic_ai_both() -> None:
    made = Made()
    agent = pydantic_ai(ToolOutput(Answer, name="answer"), {**FAIR, "tool_choice": ["answer"]})
    agent.tool_plain(made.weather)
    assert isinstance(agent.run_sync(QUESTION).output, Answer)
    assert not made.cities


# ---- openai-agents

AGENTS = "openai-agents"
ITEMS: Any = [
    EXAMPLE[0],
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "snowy"},
    EXAMPLE[3],
    {"role": "user", "content": QUESTION},
]


def agents_agent(
    settings: dict[str, Any], kind: Any = agents.OpenAIChatCompletionsModel, model: str = MODEL, **options: Any
) -> agents.Agent[Any]:
    own = kind(model=model, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    return agents.Agent(
        **{"name": "clerk", "model": own, "model_settings": agents.ModelSettings(**settings), **options}
    )


def of_each_kind(kind: Any) -> None:
    """What people write with the models of both interfaces of OpenAI."""
    own = f"`{kind.__name__}`"

    @check(AGENTS, f"{own}: text, whole and streamed; a session of several turns")
    def text() -> None:
        agent = agents_agent(STILL, kind, instructions="You are brief.")

        async def ask() -> Any:
            session = agents.SQLiteSession("ada")
            first = await agents.Runner.run(agent, "My name is Ada.", session=session)
            run = agents.Runner.run_streamed(agent, "My name is Ada.")
            async for _ in run.stream_events():
                pass
            assert run.final_output == first.final_output
            return await agents.Runner.run(agent, "What is my name?", session=session)

        again = asyncio.run(ask())
        says(again.final_output, "Ada")

    @check(AGENTS, f"{own}: `output_type`")
    def output() -> None:
        agent = agents_agent({"max_tokens": 200}, kind, output_type=Person)
        assert isinstance(agents.Runner.run_sync(agent, "A person, please.").final_output, Person)

    @check(AGENTS, f"{own}: `output_type` beside a strict `function_tool`: a call that fits, or the object")
    def output_and_tool() -> None:
        tool = agents.function_tool(Made().weather)
        agent = agents_agent({"max_tokens": 200, "temperature": 0}, kind, output_type=Answer, tools=[tool])
        try:
            assert isinstance(agents.Runner.run_sync(agent, QUESTION, max_turns=3).final_output, Answer)
        except agents.MaxTurnsExceeded as error:
            raise WeakModel("it calls the function again and again") from error

    @check(AGENTS, f"{own}: `function_tool` (strict), which must be called first; then an answer")
    def required() -> None:
        made = Made()
        tool = agents.function_tool(made.weather)
        agent = agents_agent({**STILL, "tool_choice": "required", "parallel_tool_calls": False}, kind, tools=[tool])
        try:
            found = agents.Runner.run_sync(agent, QUESTION)
        except agents.ModelBehaviorError as error:  # so it calls an answer that `max_output_tokens` cuts off
            assert made.cities
            raise WeakModel(str(error)) from error
        assert made.cities
        says(found.final_output, "sunny")

    @check(AGENTS, f"{own}: a handoff that must be made")
    def handoff() -> None:
        other = agents_agent(STILL, kind, name="poet")
        agent = agents_agent({**STILL, "tool_choice": "required", "parallel_tool_calls": False}, kind, handoffs=[other])
        assert agents.Runner.run_sync(agent, "A poem, please.").last_agent is other

    for feature, error, word, name, asked in (
        ("another model", NotFoundError, "gpt-9", "gpt-9", QUESTION),
        ("too long a prompt", BadRequestError, "context_length_exceeded", MODEL, TOO_LONG),
    ):
        refuses(AGENTS, f"{own}: {feature}", error, word)(
            lambda name=name, asked=asked: agents.Runner.run_sync(agents_agent(STILL, kind, name), asked)
        )


for own in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    of_each_kind(own)


@check(AGENTS, "`function_tool`: call, result, answer (grammar), whole and streamed")
def agents_loop() -> None:
    made = Made()
    tool = agents.function_tool(made.weather, strict_mode=False)
    settings = {"max_tokens": 60, "temperature": 0, "extra_body": CALLS_ONCE}
    assert agents.Runner.run_sync(agents_agent(settings, tools=[tool]), ITEMS).final_output == SAID

    async def ask() -> Any:
        run = agents.Runner.run_streamed(agents_agent(settings, tools=[tool]), ITEMS)
        kinds = [event.type async for event in run.stream_events()]
        assert "raw_response_event" in kinds
        return run.final_output

    assert asyncio.run(ask()) == SAID
    says("".join(made.cities) or "no call", "RomeRome")


# ---- llm


def run_llm(*words: str) -> str:
    names = {"model_id": MODEL, "model_name": MODEL, "api_base": URL, "api_key_name": "own"}
    entry = json.dumps([{**names, "supports_schema": True, "supports_tools": True}])  # YAML has JSON
    with open(os.path.join(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml"), "w") as file:
        file.write(entry)
    found = CliRunner().invoke(llm.cli.cli, ["-m", MODEL, "--key", KEY, *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


@check("llm", "`llm --schema`, streamed and not")
def llm_schema() -> None:
    schema = json.dumps(Person.model_json_schema())
    for words in ([], ["--no-stream"]):
        Person.model_validate_json(
            run_llm("A person.", "--schema", schema, "-o", "max_tokens", "200", "-o", "seed", "1", *words)
        )


@check("llm", "`llm --functions`: call, result, answer (the first call with `tool_choice: required` added)")
def llm_tools() -> None:
    functions = 'def weather(city: str) -> str:\n    "The weather of a city."\n    return "It is sunny in " + city\n'
    build = llm_openai._Shared.build_kwargs

    def build_first(model: Any, prompt: Any, stream: bool) -> dict[str, Any]:
        first = {} if prompt.tool_results else {"tool_choice": "required", "parallel_tool_calls": False}
        return {**build(model, prompt, stream), **first}

    llm_openai._Shared.build_kwargs = build_first
    try:
        for words in ([], ["--no-stream"]):
            options = ["--functions", functions, "--td", "-o", "temperature", "0", "-o", "max_tokens", "60", *words]
            said = run_llm(QUESTION, *options)
            assert "Tool call: weather(" in said, said
            assert "It is sunny in" in said, said
    finally:
        llm_openai._Shared.build_kwargs = build
