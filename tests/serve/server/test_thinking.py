"""Models that think, by every interface: wishes to think, limits of thoughts, what is asked of answers, messages that go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoengine.features.tool_calls.thinking_switch import thinking_values
from tests.scripted import Script, folder_of, scripted_engine
from tests.serve.server.interface import Call, Interface, Said, Thought, joined
from tests.serve.server.interfaces import CHAT, INTERFACES, MESSAGES, OLLAMA, each_way
from tests.serve.server.running import Server

each_talk = pytest.mark.parametrize("talk", INTERFACES, ids=lambda own: type(own).__name__)
USER = ("user", "Hello")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
Serve = Callable[[str], tuple[Server, Script]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Servers of the scripted model, one for each template."""
    servers: dict[str, tuple[Server, Script]] = {}

    def find(name: str) -> tuple[Server, Script]:
        if name not in servers:
            built, script = scripted_engine(folder_of(tmp_path_factory.mktemp(name), name))
            servers[name] = Server(built, "scripted"), script
        return servers[name]

    yield find
    for server, _ in servers.values():
        server.close()


def says(said: Said, *parts: Any) -> bool:
    """Whether these are the parts of an answer. White space does not count."""
    return joined(said.parts) == joined(parts)


@pytest.mark.parametrize(("talk", "name"), each_way(["qwen3", "qwen3.5", "harmony"]))
def test_what_is_asked_of_the_answer_is_not_asked_of_the_thought(serve: Serve, talk: Interface, name: str) -> None:
    server, script = serve(name)
    before, behind = {"qwen3": ("<think>", "</think>"), "qwen3.5": ("", "</think>")}.get(
        name, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
    )
    script.text = f'{before}Hm, stop. {{"b": 1}}{behind}{{"a": 1}} stop here'
    thought = Thought('Hm, stop. {"b": 1}')
    assert says(talk.ask(server, [USER], schema=SCHEMA, max_tokens=200, model="scripted"), thought, '{"a": 1}')
    if "stop" not in talk.lacks:
        said = talk.ask(server, [USER], stop=["stop"], max_tokens=200, model="scripted")
        assert says(said, thought, '{"a": 1}')


LIMITS: dict[str, list[dict[str, Any]]] = {
    "Chat": [
        {"thinking_budget": 5},
        {"thinking_token_budget": 5},
        {"reasoning": {"max_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
    ],
    "Messages": [{"thinking": {"type": "enabled", "budget_tokens": 5}}],
    "Responses": [{"reasoning": {"max_tokens": 5}}],
}


@pytest.mark.parametrize("talk", INTERFACES[:3], ids=lambda own: type(own).__name__)
def test_a_thought_ends_at_its_limit_and_is_counted(serve: Serve, talk: Interface) -> None:
    server, script = serve("qwen3.5")
    script.text = "Hm, that is long.</think>\n\nYes"
    for own in LIMITS[type(talk).__name__]:
        body = talk.body([USER], max_tokens=100, model="scripted") | own
        assert says(talk.said(server, body), Thought("Hm, t"), "Yes")
        usage = server.post(talk.path, body).json["usage"]
        details = usage.get("output_tokens_details") or usage["completion_tokens_details"]
        assert details == {"reasoning_tokens": 7}  # the thought, a line's end, and the mark


WISHES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "Chat": (
        [
            {"reasoning_effort": "none"},
            {"reasoning": {"effort": "none"}},
            {"reasoning": {"enabled": False}},
            {"thinking": {"type": "disabled"}},
            {"enable_thinking": False},
            {"thinking_budget": 0},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"thinking": False}},
        ],
        [{"reasoning_effort": "high"}, {"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"thinking": True}}],
    ),
    "Messages": (
        [{"thinking": {"type": "disabled"}}],
        [{"thinking": {"type": "adaptive"}}, {"output_config": {"effort": "high"}}],
    ),
    "Responses": ([{"reasoning": {"effort": "none"}}], [{"reasoning": {"effort": "high"}}]),
    "Ollama": ([{"think": False}], [{"think": True}, {"think": "high"}]),
}


@each_talk
def test_one_wish_has_every_name(serve: Serve, talk: Interface) -> None:
    """The scripted model repeats the end of its prompt: what the template has made of the wish."""
    ends = {"qwen3.5": ("<think>\n\n</think>\n\n", "<think>\n"), "deepseek": ("</think>", "<think>")}
    for name, (off, on) in ends.items():
        server, script = serve(name)
        prompts: list[str] = []
        script.text = lambda prompt, prompts=prompts: prompts.append(prompt) or "Hm</think>Yes"  # type: ignore[misc]
        for wishes, end in zip(WISHES[type(talk).__name__], (off, on), strict=True):
            for own in wishes:
                prompts.clear()
                answer = server.post(
                    talk.path, talk.body([USER], max_tokens=20, model="scripted") | own | {"stream": False}
                )
                assert answer.status == 200, answer.body
                assert prompts[0].endswith(f"assistant\n{end}"), (name, own, prompts[0])


def test_what_a_name_says_stays() -> None:
    assert thinking_values({"enable_thinking": True, "reasoning_effort": "none"})["enable_thinking"] is True
    assert thinking_values({"reasoning_effort": "medium"})["reasoning_effort"] == "medium"
    assert thinking_values({"documents": []}) == {"documents": []}


BEGUN = {
    "a text": ("The answer", " is 42.", ["The answer is 42."]),
    "a thought": ("<think>Hm", ", so.</think>\n\nYes", [Thought(", so."), "Yes"]),
    "a thought that has ended": ("<think>Hm</think>\n\nYe", "s", ["s"]),
    "half a call": ('<tool_call>\n{"name": "now", "argu', 'ments": {}}\n</tool_call>', [Call("now", {})]),
    "half of its arguments": (
        '<tool_call>\n{"name": "now", "arguments": {"a": 1, "b',
        '": 2}}\n</tool_call>',
        [Call("now", {"a": 1, "b": 2})],
    ),
}


@pytest.mark.parametrize("talk", [CHAT, MESSAGES, OLLAMA], ids=lambda own: type(own).__name__)
@pytest.mark.parametrize("case", BEGUN)
def test_a_begun_message_goes_on_in_the_state_that_it_has(serve: Serve, talk: Interface, case: str) -> None:
    server, script = serve("qwen3")
    begun, rest, parts = BEGUN[case]
    script.text = rest
    continued = {"add_generation_prompt": False, "continue_final_message": True} if talk is CHAT else {}
    tools = ("now",) if "tool_call" in begun else ()
    body = talk.body([USER, ("assistant", begun)], tools=tools, max_tokens=100, model="scripted") | continued
    assert says(talk.said(server, body), *(own[len(begun) :] if case == "a text" else own for own in parts))


@each_talk
def test_a_call_in_a_thought_that_nobody_ended_is_one_if_it_is_whole(serve: Serve, talk: Interface) -> None:
    server, script = serve("qwen3-thinking")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, parts in (
        (f"Hm.\n{call}", [Thought("Hm."), Call("now", {})]),
        ("Hm, <tool_call> would do.</think>\n\nYes", [Thought("Hm, <tool_call> would do."), "Yes"]),
    ):
        script.text = text
        assert says(talk.ask(server, [USER], tools=("now",), max_tokens=200, model="scripted"), *parts)
    script.text = f"Hm.\n{call}"
    if "choice" not in talk.lacks:
        forced = talk.ask(server, [USER], tools=("now",), choice="required", max_tokens=200, model="scripted")
        assert says(forced, Thought("Hm."), Call("now", {}))
