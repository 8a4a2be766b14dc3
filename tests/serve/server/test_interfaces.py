"""The interfaces for conversations say the same of the same turns, tools and options, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server.conftest import MakeServer
from tests.serve.server.interface import Call, Interface, Result, Thought, joined
from tests.serve.server.interfaces import INTERFACES, Chat
from tests.serve.server.parrot import POISON
from tests.serve.server.running import Server, until
from tests.serve.server.weather import PLACE, ROME, TIME

BOTH = {"tools": ("weather", "now")}
IN_ROME, NOW = Call("weather", {"city": "Rome"}), Call("now", {})
BARE = '{"name": "weather", "arguments": {"city": "Rome"}}'
FENCED = f"```json\n{BARE}\n```"
INFINITE = '<tool_call>{"name": "now", "arguments": {"x": -1e999}}</tool_call>'
AGAIN = ROME + TIME + ROME + "<tool_call>" * 20

# What is asked (a text is the only turn), the parts that are said, and why it ends. Behind tools, the template writes " Told."
CASES: dict[str, tuple[Any, dict[str, Any], list[Any], str]] = {
    "text": ("Hello.", {}, ["Hello."], "stop"),
    "system": ([("system", "a"), ("user", "b")], {}, ["ab"], "stop"),
    "parts": ([("system", "Be short. "), ("user", "Hel", "lo.")], {}, ["Be short. Hel\nlo."], "stop"),
    "assistant": ([("user", "a"), ("assistant", "b"), ("user", "c")], {}, ["abc"], "stop"),
    "cut off": ("Hello.", {"max_tokens": 3}, ["Hel"], "length"),
    "stop": ("Hello.", {"stop": ["lo"]}, ["Hel"], "stop string"),
    "text and call": (f"I look.\n{ROME}\n", BOTH, ["I look.", IN_ROME, "Told."], "calls"),
    "two calls": (ROME + TIME, BOTH, [IN_ROME, NOW, "Told."], "calls"),
    "one call at most": (ROME + TIME, BOTH | {"parallel": False}, [IN_ROME, "Told."], "calls"),
    "no call wanted": (TIME, BOTH | {"choice": "none"}, [f"{TIME} Told."], "stop"),
    "no such tool": (ROME.replace("weather", "sudo"), BOTH, [ROME.replace("weather", "sudo") + " Told."], "stop"),
    "broken call": (ROME.replace(":", "="), BOTH, [ROME.replace(":", "=") + " Told."], "stop"),
    "begun call": ("<tool_call>{", BOTH, ["<tool_call>{ Told."], "stop"),
    "cut off call": (ROME, BOTH | {"max_tokens": 30}, [], "length"),
    "text and cut off call": ("Well. " + ROME, BOTH | {"max_tokens": 30}, ["Well. "], "length"),
    "call without mark": (BARE, BOTH | {"max_tokens": len(BARE)}, [IN_ROME], "length"),
    "fenced call without mark": (FENCED, BOTH | {"max_tokens": len(FENCED)}, [IN_ROME], "length"),
    "JSON in a text": (BARE, BOTH, [f"{BARE} Told."], "stop"),
    "JSON and no call wanted": (BARE, BOTH | {"max_tokens": len(BARE), "choice": "none"}, [BARE], "length"),
    "thought": ("<think>Hm.</think>Yes.", {}, [Thought("Hm."), "Yes."], "stop"),
    "thought of a call": (
        f"<think>\nRome, {ROME}?\n</think>\n\n{TIME}", BOTH, [Thought(f"Rome, {ROME}?"), NOW, "Told."], "calls"
    ),
    "any number": (INFINITE, BOTH, [Call("now", {"x": float("-inf")}), "Told."], "calls"),
    "repeated calls": (ROME + TIME + ROME, BOTH, [IN_ROME, NOW, IN_ROME, "Told."], "calls"),
    "repeated call that was forced": (AGAIN, BOTH | {"choice": "required"}, [IN_ROME, NOW], "calls"),
    "call and result": (
        [("user", "Rome? "), ("assistant", "I look.", IN_ROME), ("tool", Result("weather", "Sunny.")), ("user", "And?")],
        {}, ["Rome? I look.Sunny.And?"], "stop",
    ),
    "call and result, without a text": (
        [("user", "Rome? "), ("assistant", IN_ROME, NOW), ("tool", Result("weather", "Sunny."), Result("now", "Noon."))],
        BOTH, ["Rome? Sunny.Noon. Told."], "stop",
    ),
}  # fmt: skip


def of_all(*fields: str) -> Any:
    """The interfaces by which all these fields can be asked."""
    return [pytest.param(own, id=type(own).__name__) for own in INTERFACES if not own.lacks & set(fields)]


@pytest.mark.parametrize(
    ("interface", "case"),
    [(own.values[0], name) for name, (_, asked, _, _) in CASES.items() for own in of_all(name, *asked)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_the_model_says(hermes: Server, interface: Interface, case: str) -> None:
    turns, asked, parts, reason = CASES[case]
    said = interface.ask(hermes, [("user", turns)] if isinstance(turns, str) else turns, **asked)
    assert said.parts == (parts if interface.has_blocks else joined(parts))
    assert said.reason == interface.reasons.get(reason, reason.partition(" ")[0])
    assert said.usage[1] > 0


@pytest.mark.parametrize("interface", of_all("choice"))
@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"weather", "now"}), ("weather", {"weather"}), ("now", {"now"})]
)
def test_a_call_is_forced(demo: Server, interface: Interface, choice: str, names: set[str]) -> None:
    asked = BOTH | {"choice": choice, "parallel": False, "max_tokens": 200, "temperature": 0}
    drawn = [{"seed": 5, "temperature": 1}] if isinstance(interface, Chat) else []
    for more in [{}, *drawn]:
        [call], reason, _ = interface.ask(demo, [("user", "Rome?")], **asked | more)
        assert call.name in names
        assert call.arguments in ([{"city": "Rome"}, {"city": "Oslo"}] if call.name == "weather" else [{}])
        assert reason == interface.reasons["calls"]


@pytest.mark.parametrize("interface", of_all("schema"))
def test_the_text_fits_a_schema(demo: Server, interface: Interface) -> None:
    asked = {"schema": PLACE, "temperature": 0, "max_tokens": 400, "model": "demo"}
    [text], _, _ = interface.ask(demo, [("user", "Rome?")], **asked)
    assert json.loads(text)["city"] in ("Rome", "Oslo")


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (("user", "x"), {"model": "other"}, "other"),
    (("user", "x"), {"unknown": 1}, "unknown"),
    (("user", "x"), {"temperature": -1}, "temperature"),
    (("robot", "x"), {}, "role"),
    (("tool", Result("weather", "x")), {}, "result of a tool"),
    (("user", "x"), {"choice": "required"}, "tools"),
    (("user", "x"), {"choice": "weather", "tools": ["now"]}, "weather"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interface", of_all())
def test_what_cannot_be_is_refused_in_the_shape_of_each(hermes: Server, interface: Interface, stream: bool) -> None:
    for turn, asked, named in REFUSED:
        if not interface.lacks & asked.keys():
            answer = hermes.post(interface.path, interface.body([turn], **asked) | {"stream": stream})
            assert answer.status == (404 if "model" in asked else 400), (asked, answer.body)
            assert named in interface.error(answer), (asked, answer.body)


# ---- answers that are cut short

STATUSES = {"timeout": 504, "failure": 500, "abort": 503}
ERRORS: dict[str, list[Any]] = {
    "Chat": [504, 500, None],  # OpenAI's older interfaces call it the finish reason "abort"
    "Messages": ["timeout_error", "api_error", "overloaded_error"],
    "Responses": ["server_error"] * 3,
    "Ollama": [["error"]] * 3,
}
REASONS = {"timeout": "request_timeout", "failure": "the step broke", "abort": "abort_requests"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", STATUSES)
@pytest.mark.parametrize("interface", of_all())
def test_an_answer_that_is_cut_short_is_told_as_such(
    make_server: MakeServer,
    hermes_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    interface: Interface,
    way: str,
    stream: bool,
) -> None:
    """By its status, or by an error at the end of the stream; at the end of its time, however long the step that runs takes.
    Silent streams have pings.
    """
    if isinstance(interface, Chat) and way == "abort":
        return
    monkeypatch.setattr("nanoengine.serve.server.apis.event_stream.PING_SECONDS", 0.01)
    timeout = 0.3 if way == "timeout" else None
    server = make_server({"folder": hermes_folder}, request_timeout=timeout, admin_key="root")
    server.gate.shut()
    body = interface.body([("user", POISON if way == "failure" else "abcdef")], model="parrot") | {"stream": stream}
    future = server.later(server.post, interface.path, body)
    if way == "timeout":
        assert future.result()
        until(lambda: not len(server.serving.jobs))
    elif way == "abort":
        server.gate.let(2)
        until(lambda: server.gate.num_steps == 2)
        assert server.post("/abort_requests", {}, {"authorization": "Bearer root"}).json["aborted"] == 1
    server.gate.open()
    answer = future.result()
    if stream:
        assert interface.last_error(answer) == ERRORS[type(interface).__name__][[*STATUSES].index(way)]
        assert REASONS[way].encode() in answer.body
        assert way != "timeout" or 2 * interface.ping in answer.body
    else:
        assert answer.status == STATUSES[way]
        assert REASONS[way] in interface.error(answer)
    server.check_idle()
