"""Chats with tools through an `AsyncLLMEngine`: what a program does that has an event loop and no server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.models.tools.chats import Answer, Chats, answer_of
from nanoengine.models.tools.parser import Event
from nanoengine.serve.aio.async_llm_engine import AsyncLLMEngine
from tests.models.tools.test_chats import NAMED, TOOLS, USER
from tests.models.tools.test_grammar import NOW

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1500, "num_kv_blocks": 400}
PARAMS = SamplingParams(max_tokens=250, temperature=1.0, seed=4, n=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[AsyncLLMEngine, Chats]]:
    engine = AsyncLLMEngine.from_model("demo", **OPTIONS)
    yield engine, Chats(engine.built.tokenizer)
    engine.close()


async def ask(engine: AsyncLLMEngine, chats: Chats, tools: Any, choice: Any) -> list[Answer]:
    """What each completion says, read as it comes."""
    prompt = chats.prompt([USER], tools, choice, parallel=False)
    parsers = [prompt.parser() for _ in range(PARAMS.n)]
    events: list[list[Event]] = [[] for _ in parsers]
    token_ids = chats.tokenizer.encode(prompt.text, add_special_tokens=False)
    async for delta in engine.generate(token_ids, prompt.params(PARAMS)):
        parser = parsers[delta.index]
        events[delta.index] += parser.push(delta.text)
        if delta.finish_reason is not None:
            events[delta.index] += parser.finish()
    return [answer_of(own) for own in events]


def test_calls_come_as_from_a_blocking_engine(engine: tuple[AsyncLLMEngine, Chats]) -> None:
    asked = [(TOOLS, "required"), (TOOLS, NAMED), (TOOLS, "auto"), ([NOW], "auto")]

    async def together() -> list[list[Answer]]:
        return await asyncio.gather(*(ask(*engine, *own) for own in asked))

    answers = asyncio.run(together())
    for answer in (*answers[0], *answers[1]):
        [call] = answer.calls
        assert json.loads(call.arguments).keys() == ({"city"} if call.name == "weather" else set())
        assert answer.text == ""
    with LLM(use_tqdm=False, **OPTIONS) as llm:
        for own, (tools, choice) in zip(answers, asked, strict=True):
            options: dict[str, Any] = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
            [output] = llm.chat([USER], PARAMS, use_tqdm=False, **options)
            assert llm.chats.read(output, tools, choice) == own
