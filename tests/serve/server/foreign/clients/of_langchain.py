"""What people write with langchain, by OpenAI's interfaces and Ollama's."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from typing import Any

import ollama
import openai
from checks import (
    ASKED,
    BASE,
    CALLS_ONCE,
    IMAGE,
    KEY,
    MESSAGES,
    MODEL,
    OPTIONS,
    QUESTION,
    SAID,
    SHORT,
    TOO_LONG,
    TURNS,
    URL,
    Answer,
    Made,
    Person,
    check,
    is_weather,
    refuses,
    says,
    weather,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ROLES: dict[str, Any] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
LOOP = asyncio.Runner()  # one for all: langchain keeps its connections
SPOKEN = [ROLES[own["role"]](own["content"]) for own in TURNS]

# ---- langchain

LANGCHAIN = "langchain-openai"


def langchain(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"base_url": URL, "api_key": KEY, "max_retries": 0, **OPTIONS, **options})


def added(pieces: Any) -> Any:
    """The message that the pieces of a stream are."""
    return functools.reduce(operator.add, pieces)


def chats(model: Any) -> None:
    whole, streamed = model.invoke(SPOKEN), added(model.stream(SPOKEN))
    assert streamed.text == whole.text == model.batch([SPOKEN])[0].text
    for own in (whole, streamed):
        assert own.usage_metadata["output_tokens"] > 0

    async def ask() -> list[str]:
        return [(await model.ainvoke(SPOKEN)).text, added([own async for own in model.astream(SPOKEN)]).text]

    assert LOOP.run(ask()) == [whole.text] * 2
    says(whole.text, "Ada")


def answered(model: Any) -> None:
    """A forced call, its result, an answer."""
    call = model.bind_tools([weather], tool_choice="any").invoke(QUESTION)
    assert all(is_weather(own["name"], json.dumps(own["args"])) for own in call.tool_calls)
    assert call.tool_calls
    results = [ToolMessage("sunny", tool_call_id=own["id"]) for own in call.tool_calls]
    answer = model.bind_tools([weather]).invoke([HumanMessage(QUESTION), call, *results])
    says(answer.text or str(answer.tool_calls), "sunny")


@check(LANGCHAIN, "a chat, whole, streamed, in batches, asynchronous, with usage")
def langchain_chat() -> None:
    chats(langchain(**SHORT, stream_usage=True))


@check(LANGCHAIN, "... by `use_responses_api`")
def langchain_responses() -> None:
    chats(langchain(model=MODEL, max_tokens=40, temperature=0, seed=None, use_responses_api=True))


@check(LANGCHAIN, "a call that must be, its result, an answer")
def langchain_answered() -> None:
    answered(langchain(**SHORT | {"max_tokens": 200}))


@check(LANGCHAIN, "... by `use_responses_api`")
def langchain_responses_answered() -> None:
    answered(langchain(model=MODEL, max_tokens=200, temperature=0, seed=None, use_responses_api=True))


@check(LANGCHAIN, "`stop`, `n`, `logprobs`")
def langchain_options() -> None:
    assert "4" not in langchain(**SHORT).invoke("Count from 1 to 9.", stop=["4"]).content
    found = langchain(**{**OPTIONS, "max_tokens": 5}, n=2).generate([[HumanMessage("Hello.")]])
    assert len(found.generations[0]) == 2
    assert langchain(**SHORT, logprobs=True).invoke("Hello.").response_metadata["logprobs"]["content"]


for feature, kind, word, fields, asked in (
    ("another model", openai.NotFoundError, "gpt-9", {"model": "gpt-9"}, QUESTION),
    ("too long a prompt", ContextOverflowError, "", {}, TOO_LONG),
    ("an image", openai.BadRequestError, "image", {}, [HumanMessage(IMAGE[0]["content"])]),
    ("a wrong key", openai.AuthenticationError, "key", {"api_key": "x"}, QUESTION),
    ("a timeout", openai.APITimeoutError, "", {"timeout": 0.4, "max_tokens": 2000}, "Write a long story."),
):
    refuses(LANGCHAIN, feature, kind, word)(
        lambda fields=fields, asked=asked: langchain(**{**SHORT, **fields}).invoke(asked)
    )
refuses(LANGCHAIN, "too long a prompt by `use_responses_api`", ContextOverflowError)(
    lambda: langchain(seed=None, use_responses_api=True).invoke(TOO_LONG)
)


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
        for message in (model.invoke(QUESTION), added(model.stream(QUESTION))):
            [call] = message.tool_calls
            assert is_weather(call["name"], json.dumps(call["args"]))


@check(LANGCHAIN, "`OpenAIEmbeddings`: documents, a query")
def langchain_embeddings() -> None:
    own = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
    documents = own.embed_documents(["a stack", "a queue"])
    assert own.embed_query("a queue") == documents[1] != documents[0]


@check("langchain", "`create_agent` with a tool: call, result, answer (grammar), whole and streamed")
def langchain_agent() -> None:
    made = Made()
    agent = create_agent(langchain(**SHORT, extra_body=CALLS_ONCE), tools=[made.weather])
    assert agent.invoke({"messages": ASKED})["messages"][-1].content == SAID
    *_, last = agent.stream({"messages": ASKED}, stream_mode="values")
    assert last["messages"][-1].content == SAID
    says("".join(made.cities) or "no call", "RomeRome")


@check("langchain", "`create_agent` with `response_format`: `ProviderStrategy`, `ToolStrategy`")
def langchain_agent_formats() -> None:
    for strategy in (ProviderStrategy(Person), ToolStrategy(Person)):
        model = langchain(model_kwargs={"parallel_tool_calls": False})
        agent = create_agent(model, tools=[], response_format=strategy)
        assert isinstance(agent.invoke({"messages": MESSAGES})["structured_response"], Person)


# ---- langchain-ollama: the key is in the environment

OLLAMA = "langchain-ollama"


def of_ollama(**options: Any) -> ChatOllama:
    return ChatOllama(**{"base_url": BASE, "model": MODEL, "num_predict": 200, "temperature": 0, **options})


@check(OLLAMA, "`ChatOllama`: a chat, whole, streamed, in batches, asynchronous, with usage")
def ollama_chat() -> None:
    chats(of_ollama(validate_model_on_init=True))


@check(OLLAMA, "`OllamaLLM`, whole and streamed")
def ollama_llm() -> None:
    own = OllamaLLM(base_url=BASE, model=MODEL, num_predict=20, temperature=0)
    text = own.invoke("The capital of France is")
    assert "".join(own.stream("The capital of France is")) == text
    says(text, "Paris")


@check(OLLAMA, "`with_structured_output`: `json_schema`, whole and streamed; `json_mode`")
def ollama_structured() -> None:
    own = of_ollama().with_structured_output(Person, method="json_schema")
    assert isinstance(own.invoke("A person."), Person)
    assert isinstance([*own.stream("A person.")][-1], Person)
    found = of_ollama().with_structured_output(None, method="json_mode").invoke("The city of Rome, as JSON.")
    says(str(found), "Rome")


@check(OLLAMA, "`with_structured_output`: `function_calling`, as the model likes")
def ollama_function_calling() -> None:
    own = of_ollama().with_structured_output(Answer, method="function_calling", include_raw=True)
    found: Any = own.invoke("Rome, please.")
    says("Answer" if isinstance(found["parsed"], Answer) else str(found["raw"].content), "Answer")


@check(OLLAMA, "`bind_tools`, as the model likes; what a call returned, and an answer")
def ollama_tools() -> None:
    own = of_ollama(num_predict=40).bind_tools([weather])
    call = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "call_1"}])
    found: Any = own.invoke([HumanMessage(QUESTION), call, ToolMessage("sunny", tool_call_id="call_1")])
    assert added(own.stream(QUESTION)).content == own.invoke(QUESTION).content
    says(found.content or str(found.tool_calls), "sunny")


@check(OLLAMA, "`OllamaEmbeddings`: documents, a query")
def ollama_embeddings() -> None:
    own = OllamaEmbeddings(base_url=BASE, model=MODEL)
    documents = own.embed_documents(["a stack", "a queue"])
    assert own.embed_query("a queue") == documents[1] != documents[0]


for feature, word, fields, asked in (
    ("another model", "404", {"model": "gpt-9"}, QUESTION),
    ("too long a prompt", "maximum context length", {}, TOO_LONG),
    ("an image", "image", {}, [HumanMessage(IMAGE[0]["content"])]),
    ("a wrong key", "key", {"client_kwargs": {"headers": {"Authorization": "Bearer x"}}}, QUESTION),
):
    refuses(OLLAMA, feature, ollama.ResponseError, word)(
        lambda fields=fields, asked=asked: of_ollama(**fields).invoke(asked)
    )
