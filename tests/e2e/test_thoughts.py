"""What a request asks of the answer is asked of the answer, whatever the model thinks before it, and a thought has a limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.features.thought import ThoughtReader
from tests.scripted import Script, folder_of, scripted_llm

USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
THOUGHT = 'Hm, stop: {"b": 2}. I think so.'
"""It holds what each of the requests below ends an answer with, and what no grammar of theirs allows."""


class Model(NamedTuple):
    """How a model writes thoughts.

    Args:
        before, behind: marks around a thought that the model writes.
        kwargs: of the template.
    """

    before: str
    behind: str
    kwargs: dict[str, Any] | None = None


MODELS = {
    "qwen3": Model("<think>", "\n</think>"),
    "qwen3-thinking": Model("", "\n</think>"),
    "qwen3.5": Model("", "\n</think>"),
    "deepseek": Model("", "\n</think>", {"thinking": True}),
    "harmony": Model("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guesses": {"speculation": "ngram"},
    "two steps in flight": {"async_scheduling": True},
}


@pytest.fixture(
    scope="module",
    params=[(own, way) for own in MODELS for way in WAYS if way == "plain" or own in ("qwen3", "harmony")],
    ids="-".join,
)
def scripted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, LLM, Script]]:
    name, way = request.param
    llm, script = scripted_llm(folder_of(tmp_path_factory.mktemp(name), name), **WAYS[way])
    with llm:
        yield MODELS[name], llm, script


def ask(scripted: tuple[Model, LLM, Script], answer: str, thought: str = THOUGHT, **params: Any) -> tuple[Any, ...]:
    """Thought and text of what a model says, and why it ended."""
    model, llm, script = scripted
    script.text = model.before + thought + model.behind + answer
    own = SamplingParams(**{"temperature": 0, "max_tokens": 300, **params})
    [output] = llm.chat(USER, own, chat_template_kwargs=model.kwargs, use_tqdm=False)
    thought = llm.chats.prompt(USER, template_kwargs=model.kwargs).thought
    assert thought is not None
    for completion in output.outputs:
        reader = ThoughtReader(thought, llm.tokenizer.decode)
        reader.read(completion.token_ids)
        start = len(completion.token_ids) if reader.answer_start is None else reader.answer_start
        assert thought.count(completion.token_ids, llm.tokenizer.decode) == start
    said = {(read.reasoning, read.text) for read in llm.chats.read(output)}
    [(reasoning, text)] = said  # all completions say the same
    return reasoning, text, output.outputs[0].finish_reason, output.outputs[0].stop_reason


@pytest.mark.parametrize(
    ("outputs", "answer", "expected"),
    [
        ({"json": SCHEMA}, 'Sure: {"a": 1, "b": 2}', '{"a": 1}'),
        ({"json_object": True}, 'Sure: {"b": 1}', '{"b": 1}'),
        ({"regex": "[0-9]{3}"}, "123 it is.", "123"),
        ({"choice": ["yes", "no"]}, "no doubt", "no"),
    ],
    ids=str,
)
def test_a_grammar_holds_behind_a_free_thought(scripted: Any, outputs: Any, answer: str, expected: str) -> None:
    assert ask(scripted, answer, structured_outputs=outputs, n=2) == (THOUGHT, expected, "stop", None)


def test_stops_are_of_the_answer(scripted: Any) -> None:
    [brace] = scripted[1].tokenizer.encode("{", add_special_tokens=False)
    answer = "I think that the stop {here} is right"
    assert ask(scripted, answer, stop=["stop"]) == (THOUGHT, "I think that the ", "stop", "stop")
    assert ask(scripted, answer, stop=["think"]) == (THOUGHT, "I ", "stop", "think")
    assert ask(scripted, answer, stop_token_ids=[brace]) == (THOUGHT, "I think that the stop ", "stop", brace)


def test_an_answer_has_its_least_length_and_its_tokens(scripted: Any) -> None:
    encode = scripted[1].tokenizer.encode
    [brace] = encode("{", add_special_tokens=False)
    reasoning, text, *_ = ask(scripted, "Hi", min_tokens=20)
    assert reasoning.startswith(THOUGHT)
    assert len(text) + len(reasoning) - len(THOUGHT) >= 20 - 12  # marks that the model begins anew are no text
    assert ask(scripted, "a{b", stop_token_ids=[brace], logit_bias={brace: -100})[0] == THOUGHT
    reasoning, text, *_ = ask(scripted, "Hi", allowed_token_ids=encode("ABC", add_special_tokens=False), max_tokens=120)
    assert (reasoning, set(text) <= set("ABC"), bool(text)) == (THOUGHT, True, True)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_at_its_limit(scripted: Any, budget: int) -> None:
    expected = THOUGHT[:budget].strip()
    reasoning, text, reason, _ = ask(scripted, "The answer", thinking_budget=budget, n=2)
    text = text.removeprefix("</think>")  # the script goes on behind the line's end
    assert (reasoning, text, reason) == (expected, "The answer", "stop")
    outputs = {"json": SCHEMA}
    assert ask(scripted, '{"a": 5}', thinking_budget=budget, structured_outputs=outputs)[:2] == (expected, '{"a": 5}')
    assert ask(scripted, "The answer", thinking_budget=len(THOUGHT) + 9)[:2] == (THOUGHT, "The answer")


def test_a_hybrid_may_answer_at_once_and_does_not_think_where_the_prompt_has_closed_the_thought(tmp_path: Path) -> None:
    llm, script = scripted_llm(folder_of(tmp_path, "qwen3"))
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs={"json": SCHEMA})
    with llm:
        for said, kwargs in (('{"a": 3}', None), ('<think>\nHm\n</think>{"a": 3}', {"enable_thinking": False})):
            script.text = said
            [output] = llm.chat(USER, params, chat_template_kwargs=kwargs, use_tqdm=False)
            assert output.outputs[0].text == '{"a": 3}'


def test_a_text_with_a_form_does_not_end_in_its_thought(tmp_path: Path) -> None:
    """Where the model would end, it says something else, until the limit of its thought."""
    llm, script = scripted_llm(folder_of(tmp_path, "qwen3-thinking"))
    script.text = "Hm"
    params = SamplingParams(temperature=0, max_tokens=90, thinking_budget=20, structured_outputs={"choice": ["yes"]})
    with llm:
        [output] = llm.chat(USER, params, use_tqdm=False)
        assert [own.text for own in llm.chats.read(output)] == ["yes"]


@pytest.mark.parametrize("way", ["preempted", "chunks"])
def test_thoughts_survive_preemption(tmp_path: Path, way: str) -> None:
    options = {"num_kv_blocks": 24, "max_model_len": 300} if way == "preempted" else {"long_prefill_token_threshold": 3}
    llm, script = scripted_llm(folder_of(tmp_path, "qwen3-thinking"), **options)
    script.text = f'{THOUGHT}\n</think>\n\nNow {{"a": 1}} stop'
    asks: list[dict[str, Any]] = [
        {"stop": ["stop"]},
        {"structured_outputs": {"json": SCHEMA}},
        {"thinking_budget": 9},
    ] * 3
    params = [SamplingParams(temperature=0, max_tokens=150, min_tokens=3, **own) for own in asks]
    with llm:
        outputs = llm.chat([USER] * len(params), params, use_tqdm=False)
        assert (llm.engine.scheduler.num_preemptions > 0) == (way == "preempted")
        said = [(own.reasoning, own.text) for output in outputs for own in llm.chats.read(output)]
    whole = 'Now {"a": 1} stop'
    assert said == [(THOUGHT, 'Now {"a": 1} '), (THOUGHT, '{"a": 1}'), (THOUGHT[:9].strip(), whole)] * 3
