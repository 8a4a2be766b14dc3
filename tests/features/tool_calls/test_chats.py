"""Conversations with tools: what models are told, and what `LLM.chat` says, by the demo model with templates of its own."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams
from nanoengine.features.tool_calls.chats import Chats
from nanoengine.features.tool_calls.prompt import Answer
from nanoengine.models.fetch import DOWNLOADS
from nanoengine.models.names import DEMO
from nanoengine.models.tokenizer import HFTokenizer
from tests.features.tool_calls.conftest import NOW, WEATHER
from tests.features.tool_calls.test_parser import BY_NAME

USER = {"role": "user", "content": "How is it in Rome?"}
SHORT = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": WEATHER["function"] | {"parameters": SHORT | {"additionalProperties": False}}},
    NOW,
]
"""The demo model would not end a text by itself in time."""

NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "Sunny"},
]
BASE = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.content }}\n{% endfor %}"


def template_of(name: str) -> str:
    """One that shows a format by its signs."""
    return "{#" + "".join(BY_NAME[name].signs[:1]) + "#}" + BASE


def folder_with(folder: Path, template: str) -> Path:
    """The demo model, with another chat template."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(use_tqdm=False, dtype="float32", device="cpu", max_model_len=1500, num_kv_blocks=400) as own:
        yield own


@pytest.fixture(params=["harmony", "qwen3_coder", "demo"])
def chats(request: pytest.FixtureRequest, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chats:
    """Those of the demo model in formats of each kind: its own template knows of no tools."""
    if request.param != "demo":
        monkeypatch.setattr(llm, "chats", Chats(HFTokenizer(folder_with(tmp_path, template_of(request.param)))))
        assert llm.chats.prompt([USER], TOOLS).format == BY_NAME[request.param]
    return llm.chats


def answers(llm: LLM, choice: Any, tools: Any = TOOLS, max_tokens: int = 250, **options: Any) -> list[Answer]:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=4, n=2)
    [output] = llm.chat([USER], params, tools=tools, tool_choice=choice, use_tqdm=False, **options)
    return llm.chats.read(output, tools, choice)


# ---- what the demo model says


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_is_called_in_formats_of_each_kind(llm: LLM, chats: Chats, choice: Any) -> None:
    for answer in answers(llm, choice, parallel_tool_calls=False):
        assert answer.text == ""
        if chats.prompt([USER], TOOLS).format is not BY_NAME["harmony"]:  # there it may first think as long as it likes
            [call] = answer.calls
            arguments = json.loads(call.arguments)
            assert call.name == "weather" or choice == "required"
            assert arguments.keys() == ({"city"} if call.name == "weather" else set())


def test_text_may_be_said_in_formats_of_each_kind(llm: LLM, chats: Chats) -> None:
    for choice, tools in (("auto", TOOLS), ("none", TOOLS), ("auto", [NOW])):  # with and without a tool that is strict
        texts = [answer.text for answer in answers(llm, choice, tools, max_tokens=60)]
        assert all(texts) or chats.prompt([USER], TOOLS).format is BY_NAME["harmony"]


def test_answers_come_in_the_order_of_conversations(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=6)]
    outputs = llm.chat([[USER], [USER, *HISTORY[1:], USER]], params, tools=[NOW], use_tqdm=False)
    assert [len(own.outputs[0].token_ids) for own in outputs] == [5, 6]
    assert "Sunny" in llm.tokenizer.decode(outputs[1].prompt_token_ids)


def test_a_call_that_repeats_another_ends_a_forced_answer_in_every_way(llm: LLM) -> None:
    """The end of the text is never likely, so nothing else ends it."""
    eos = llm.engine.eos_token_ids[0]
    params = [SamplingParams(max_tokens=200, seed=seed, n=2, logit_bias={eos: -100}) for seed in range(4)]
    place = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    own = {"name": "weather", "parameters": place | {"additionalProperties": False}}
    tools = [{"type": "function", "function": own}, NOW]

    def said(own: LLM, asked: list[SamplingParams] = params) -> list[Any]:
        outputs = own.chat([[USER]] * len(asked), asked, tools=tools, tool_choice="required", use_tqdm=False)
        return [completion for output in outputs for completion in output.outputs]

    expected = said(llm)
    for completion in expected:
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "repeated call")
        whole = [json.dumps(json.loads(own)) for own in re.findall(r"<tool_call>\n(.*)", completion.text)]
        assert len(set(whole)) == len(whole) - 1
        assert whole[-1] in whole[:-1], "it ends with the first that repeats another"
    assert said(llm, [dataclasses.replace(own, speculate=False) for own in params]) == expected
    packed = llm.chats.prompt([USER], tools, "required").params(params[0])
    assert pickle.loads(pickle.dumps(packed)).structured_outputs.until()("x") is None
    options: dict[str, Any] = {"use_tqdm": False, "dtype": "float32", "device": "cpu", "max_model_len": 600}
    small = {"speculation": "ngram", "num_kv_blocks": 40, "enable_prefix_caching": False, "max_num_batched_tokens": 64}
    for way in ({"async_scheduling": True}, small):
        with LLM(**options, **way) as own:
            assert said(own) == expected, way
            assert bool(own.engine.scheduler.num_preemptions) == ("num_kv_blocks" in way)


# ---- what models are told


def prompt_with(template: str, tmp_path: Path, *messages: Any, **options: Any) -> Any:
    return Chats(HFTokenizer(folder_with(tmp_path, template))).prompt(messages or (USER,), **options)


def test_a_template_that_knows_tools_tells_of_them(tmp_path: Path) -> None:
    prompt = prompt_with(BASE, tmp_path, tools=TOOLS)
    assert prompt.text == f"Tools: {json.dumps(TOOLS)}\nHow is it in Rome?\n"
    assert prompt.format is BY_NAME["json"]
    assert prompt_with(BASE, tmp_path).text == "How is it in Rome?\n"


@pytest.mark.parametrize("kwargs", [{"tools": None}, {"tools": []}, {"messages": []}, {"documents": [1]}], ids=str)
def test_what_one_request_asks_the_template_for_decides_nothing_for_others(
    tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    first, fresh = (Chats(HFTokenizer(folder_with(tmp_path, BASE))) for _ in range(2))
    first.prompt([USER], TOOLS, template_kwargs=kwargs)
    assert first.prompt([USER], TOOLS).text == fresh.prompt([USER], TOOLS).text


def test_others_are_told_in_a_system_message(llm: LLM) -> None:
    prompt = llm.chats.prompt([USER], TOOLS)
    assert prompt.format is BY_NAME["hermes"]
    assert all(json.dumps(tool) in prompt.text for tool in TOOLS)
    assert "function" not in llm.chats.prompt([USER], TOOLS, "none").text
    system = {"role": "system", "content": "Be short."}
    assert "Be short." in llm.chats.prompt([system, USER], TOOLS).text
    told = llm.chats.prompt(HISTORY, TOOLS).text
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in told
    assert "Sunny" in told
    assert "Sunny" in llm.chats.prompt(HISTORY).text


def test_neither_can_be(tmp_path: Path) -> None:
    deaf = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    with pytest.raises(InvalidPrompt, match="tools are given, but the chat template knows of none"):
        prompt_with(deaf, tmp_path, tools=TOOLS)
    assert prompt_with(deaf, tmp_path).text == "How is it in Rome?"


def test_a_prompt_may_begin_a_thought(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("<think>\n\n</think>\n\n", "", "<think>", "<think>\n"):
        template = f"{BASE}{{# </think> #}}{{{{ {end!r} }}}}"
        prompt = prompt_with(template, tmp_path, tools=TOOLS, tool_choice="required")
        assert (prompt.thinks, prompt.is_thinking) == (True, end in ("<think>", "<think>\n"))
    monkeypatch.setattr(llm, "chats", Chats(HFTokenizer(tmp_path)))
    outputs = llm.chat([USER], SamplingParams(max_tokens=30, seed=2), tools=TOOLS, use_tqdm=False)
    assert llm.chats.read(outputs[0], TOOLS)[0].reasoning


# ---- special tokens


def test_marks_that_are_special_tokens_are_kept_and_others_dropped(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(folder_with(tmp_path, template_of("mistral")))
    tokenizer.fast.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    prompt = Chats(tokenizer).prompt([USER], TOOLS)
    params = prompt.params(SamplingParams())
    assert not params.skip_special_tokens
    text = 'Hi[OTHER] there[TOOL_CALLS][{"name": "now"}]'
    assert prompt.read(text).text == "Hi there"
    assert [call.name for call in prompt.read(text).calls] == ["now"]
    assert len(prompt.new_id()) == 9
    assert Chats(tokenizer).prompt([USER]).params(SamplingParams()).skip_special_tokens


def test_structured_outputs_and_forced_calls_exclude_each_other(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(InvalidSamplingParams, match="tool_choice"):
        llm.chat([USER], params, tools=[NOW], tool_choice="required", use_tqdm=False)
    [output] = llm.chat([USER], params, tools=[NOW], use_tqdm=False)
    assert output.outputs[0].text == "a"


def test_a_schema_and_forced_calls_do_not(llm: LLM) -> None:
    """It is of an answer without calls; clients send both."""
    params = SamplingParams(structured_outputs={"json": {"enum": [7]}}, max_tokens=60, temperature=0)
    prompt = llm.chats.prompt([USER], [NOW], "required", parallel=False)
    [forced] = llm.chat([USER], params, tools=[NOW], tool_choice="required", parallel_tool_calls=False, use_tqdm=False)
    assert [call.name for call in prompt.read(forced.outputs[0].text).calls] == ["now"]
    [free] = llm.chat([USER], params, tools=[NOW | {"strict": True}], use_tqdm=False)
    assert free.outputs[0].text == "7" or prompt.read(free.outputs[0].text).calls
    [text] = llm.chat([USER], params, tools=[NOW], tool_choice="none", use_tqdm=False)
    assert text.outputs[0].text == "7"


def test_a_call_is_forced_behind_the_end_of_a_thought(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(folder_with(tmp_path, f"{BASE}{{# <tool_call> </think> #}}<think>\n"))
    params = Chats(tokenizer).prompt([USER], [NOW], "required").params(SamplingParams())
    assert params.thought is not None
    assert (params.thought.begin, params.structured_outputs.with_thought) == (None, False)
    assert "rest_of_thought" not in params.structured_outputs.text


def test_a_history_that_is_too_deep_is_refused(llm: LLM) -> None:
    arguments: Any = {}
    for _ in range(100_000):
        arguments = {"a": arguments}
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}]
    with pytest.raises(InvalidPrompt, match="messages: a call"):
        llm.chat([USER, {"role": "assistant", "content": None, "tool_calls": calls}], use_tqdm=False)


QWEN = DOWNLOADS["smollm2"].path.with_name("qwen2.5-coder-0.5b-instruct.q4.gguf")


def test_qwen_calls_by_itself() -> None:
    """It writes the object alone, though its template asks for marks."""
    if not QWEN.is_file():
        pytest.skip(f"{QWEN.name} is not beside the models that `nanoengine fetch` gets")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": schema}}
    messages = [[{"role": "user", "content": own}] for own in ("How is the weather in Rome?", "Say hello.")]
    with LLM(str(QWEN), device="cpu", num_kv_blocks=200, max_model_len=512, use_tqdm=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        free = llm.chat(messages, params, tools=[weather], use_tqdm=False)
        answers = [llm.chats.read(output, [weather])[0] for output in free]
        told = [(own.text == "", [json.loads(call.arguments) for call in own.calls]) for own in answers]
        assert told == [(True, [{"city": "Rome"}]), (False, [])]
