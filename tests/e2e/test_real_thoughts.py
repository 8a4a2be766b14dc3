"""Real models under a template that thinks: they were taught no marks of thoughts, and write them as letters, or never."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.models.fetch import DOWNLOADS, models_folder
from tests.scripted import TEMPLATES

FILES = {name: DOWNLOADS[name].path for name in ("smollm2", "gemma-3-270m")}
FILES["qwen2.5-coder"] = models_folder() / "qwen2.5-coder-0.5b-instruct.q4.gguf"
"""Qwen2.5-Coder-0.5B-Instruct is fetched by nobody; whoever has its file puts it there."""

USER = [{"role": "user", "content": "Count from 1 to 90, in words and in digits."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


@pytest.fixture(scope="module", params=FILES)
def thinker(request: Any) -> Iterator[LLM]:
    file = FILES[request.param]
    if not file.is_file():
        pytest.skip(f"{request.param} is not here")
    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 500, "max_model_len": 1024, "use_tqdm": False}
    with LLM(str(file), chat_template=TEMPLATES["qwen3-thinking"], **options) as llm:
        yield llm


def ask(llm: LLM, budget: int | None = 12, tools: Any = None, choice: Any = None, **params: Any) -> Any:
    own = SamplingParams(**{"temperature": 0, "max_tokens": 60, "thinking_budget": budget, **params})
    [output] = llm.chat(USER, own, tools=tools, tool_choice=choice, use_tqdm=False)
    [answer] = llm.chats.read(output, tools, choice)
    return answer


def test_what_is_asked_of_the_answer_is_asked_behind_the_thought(thinker: LLM) -> None:
    plain = ask(thinker)
    assert plain.reasoning
    assert plain.text
    assert len(thinker.tokenizer.encode(plain.reasoning, add_special_tokens=False)) <= 12
    fitting = ask(thinker, structured_outputs={"json": CITY})
    assert json.loads(fitting.text)["city"] in ("Rome", "Oslo")
    assert fitting.reasoning == plain.reasoning
    stop = next(letter for letter in plain.text if letter in plain.reasoning)
    stopped = ask(thinker, stop=[stop])
    assert (stopped.reasoning, stopped.text) == (plain.reasoning, plain.text.partition(stop)[0])
    called = ask(thinker, tools=[TOOL], choice={"type": "function", "function": {"name": "weather"}})
    [call] = called.calls
    assert (call.name, json.loads(call.arguments)["city"] in ("Rome", "Oslo")) == ("weather", True)
    assert called.reasoning


@pytest.mark.parametrize("budget", [0, 3])
def test_a_thought_ends_at_its_limit(thinker: LLM, budget: int) -> None:
    whole, cut = ask(thinker, budget=None), ask(thinker, budget=budget)
    assert whole.reasoning.startswith(cut.reasoning)
    assert len(thinker.tokenizer.encode(cut.reasoning, add_special_tokens=False)) <= budget
    assert cut.text
