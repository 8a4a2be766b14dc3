"""What people write with packages that make agents, and with llm's program."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import agents
import llm.cli
import llm.default_plugins.openai_models as llm_openai
from checks import (
    ASKED,
    CALLS_ONCE,
    EXAMPLE,
    MESSAGES,
    MODEL,
    OPTIONS,
    QUESTION,
    SAID,
    SHORT,
    URL,
    Answer,
    Made,
    Person,
    check,
    is_weather,
    weather,
)
from click.testing import CliRunner
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

# ---- pydantic-ai

PYDANTIC_AI = "pydantic-ai-slim"
FAIR: Any = {"max_tokens": 400, "seed": 1}
STILL: Any = {"max_tokens": 60, "temperature": 0}
HISTORY: list[ModelMessage] = [
    ModelRequest([UserPromptPart(EXAMPLE[0]["content"])]),
    ModelResponse([ToolCallPart("weather", {"city": "Oslo"}, "call_1")]),
    ModelRequest([ToolReturnPart("weather", "snowy", "call_1")]),
    ModelResponse([TextPart(EXAMPLE[3]["content"])]),
]


def pydantic_ai(output: Any = str, settings: Any = FAIR, **options: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    return Agent(model, output_type=output, model_settings=settings, retries=0, **options)


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
    assert made.cities == ["Rome"]


@check(PYDANTIC_AI, "an agent with a strict function tool and a `ToolOutput`, which must call")
def pydantic_ai_both() -> None:
    made = Made()
    agent = pydantic_ai(ToolOutput(Answer, name="answer"), {**FAIR, "tool_choice": ["answer"]})
    agent.tool_plain(made.weather)
    assert isinstance(agent.run_sync(QUESTION).output, Answer)
    assert not made.cities


# ---- langchain

LANGCHAIN = "langchain-openai"


def langchain(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, api_key="none", max_retries=0, **{**OPTIONS, **options})  # type: ignore[arg-type]


@check(LANGCHAIN, "`with_structured_output`: `json_schema`, whole and streamed")
def langchain_json_schema() -> None:
    model = langchain().with_structured_output(Person, method="json_schema")
    assert isinstance(model.invoke("A person."), Person)
    assert isinstance([*model.stream("A person.")][-1], Person)


@check(LANGCHAIN, "`with_structured_output`: a bare schema")
def langchain_raw_schema() -> None:
    schema = {**Answer.model_json_schema(), "title": "Answer"}
    assert Answer.model_validate(langchain().with_structured_output(schema, method="json_schema").invoke("A city."))


@check(LANGCHAIN, "`with_structured_output`: `function_calling`, strict and not, whole and streamed")
def langchain_function_calling() -> None:
    for strict in (True, False, None):
        model = langchain().with_structured_output(Person, method="function_calling", strict=strict)
        assert isinstance(model.invoke("A person."), Person)
        assert isinstance([*model.stream("A person.")][-1], Person)


@check(LANGCHAIN, "`with_structured_output`: `json_mode`")
def langchain_json_mode() -> None:
    model = langchain(**SHORT).with_structured_output(None, method="json_mode")
    example = [("user", "A city, as JSON."), ("assistant", '{"city": "Oslo"}'), ("user", "Another city, as JSON.")]
    assert isinstance(model.invoke(example), dict)


@check(LANGCHAIN, '`bind_tools`: `tool_choice="any"` and by name, whole and streamed')
def bind_tools() -> None:
    for choice in ("any", "weather"):
        model = langchain().bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        whole, streamed = model.invoke(QUESTION), None
        for piece in model.stream(QUESTION):
            streamed = piece if streamed is None else streamed + piece
        for message in (whole, streamed):
            [call] = message.tool_calls
            assert is_weather(call["name"], json.dumps(call["args"]))


@check(LANGCHAIN, "`OpenAIEmbeddings`: documents, a query")
def langchain_embeddings() -> None:
    own = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key="none", check_embedding_ctx_length=False)
    documents = own.embed_documents(["a stack", "a queue"])
    assert own.embed_query("a queue") == documents[1] != documents[0]


@check("langchain", "`create_agent` with a tool: call, result, answer (grammar), whole and streamed")
def langchain_agent() -> None:
    made = Made()
    agent = create_agent(langchain(**SHORT, extra_body=CALLS_ONCE), tools=[made.weather])
    assert agent.invoke({"messages": ASKED})["messages"][-1].content == SAID
    *_, last = agent.stream({"messages": ASKED}, stream_mode="values")
    assert last["messages"][-1].content == SAID
    assert made.cities == ["Rome", "Rome"]


@check("langchain", "`create_agent` with `response_format`: `ProviderStrategy`, `ToolStrategy`")
def langchain_agent_formats() -> None:
    for strategy in (ProviderStrategy(Person), ToolStrategy(Person)):
        model = langchain(model_kwargs={"parallel_tool_calls": False})
        agent = create_agent(model, tools=[], response_format=strategy)
        assert isinstance(agent.invoke({"messages": MESSAGES})["structured_response"], Person)


# ---- openai-agents

AGENTS = "openai-agents"
ITEMS: Any = [
    EXAMPLE[0],
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "snowy"},
    EXAMPLE[3],
    {"role": "user", "content": QUESTION},
]


def agents_agent(settings: dict[str, Any], **options: Any) -> agents.Agent[Any]:
    model = agents.OpenAIChatCompletionsModel(
        model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    )
    return agents.Agent(name="clerk", model=model, model_settings=agents.ModelSettings(**settings), **options)


@check(AGENTS, "`output_type`")
def agents_output() -> None:
    agent = agents_agent({"max_tokens": 400}, output_type=Person)
    assert isinstance(agents.Runner.run_sync(agent, "A person, please.").final_output, Person)


@check(AGENTS, "`function_tool` (strict), which must be called first; then text, as the model has it")
def agents_required() -> None:
    made = Made()
    tool = agents.function_tool(made.weather)
    agent = agents_agent({"max_tokens": 60, "temperature": 0, "tool_choice": "required"}, tools=[tool])
    agent.model_settings.parallel_tool_calls = False
    found = agents.Runner.run_sync(agent, ITEMS)
    assert made.cities == ["Rome"]
    assert isinstance(found.final_output, str)


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
    assert made.cities == ["Rome", "Rome"]


# ---- llm


def run_llm(*words: str) -> str:
    entry = f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {URL}\n  supports_schema: true\n  supports_tools: true\n"
    with open(os.path.join(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml"), "w") as file:
        file.write(entry)
    found = CliRunner().invoke(llm.cli.cli, ["-m", MODEL, *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


@check("llm", "`llm --schema`, streamed and not")
def llm_schema() -> None:
    schema = json.dumps(Person.model_json_schema())
    for words in ([], ["--no-stream"]):
        Person.model_validate_json(
            run_llm("A person.", "--schema", schema, "-o", "max_tokens", "400", "-o", "seed", "1", *words)
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
