"""What an answer says: every way to cut its text gives the same, and what is no call is text."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.features.tool_calls import json_calls, python_calls, xml_calls
from nanoengine.features.tool_calls.answer_parser import Call, CallPiece, Event, Reasoning, Text, answer_parser
from nanoengine.features.tool_calls.call_emitter import without_incomplete_calls
from nanoengine.features.tool_calls.formats import FORMATS, PLAIN
from tests.drawn import FAST

INF = float("inf")
BY_NAME = {own.name: own for own in (*FORMATS, PLAIN)}
NAMES = ("weather", "now")
STRINGS = {"additionalProperties": {"type": "string"}}
TOKYO = {"city": 'Tokyo "}]</tool_call>\\'}
CALL, NOW = '{"name": "weather", "arguments": {"city": "A"}}', '{"name": "now"}'
IN_XML = "<tool_call><function=now>"


def written(name: str, *calls: tuple[str, Any]) -> str:
    """Calls as a model of a format writes them."""
    key = BY_NAME[name].arguments
    objects = [json.dumps({"name": own, key: arguments}) for own, arguments in calls]
    as_list = "[" + ", ".join(objects) + "]"
    return {
        "harmony": "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{own} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
            for own, arguments in calls
        ),
        "mistral_args": "".join(f"[TOOL_CALLS]{own}[ARGS]{json.dumps(arguments)}" for own, arguments in calls),
        "mistral": "[TOOL_CALLS]" + as_list,
        "phi": "<|tool_call|>" + as_list + "<|/tool_call|>",
        "granite": "<|tool_call|> " + as_list,
        "functools": "functools" + as_list,
        "lfm2": "<|tool_call_start|>" + as_list + "<|tool_call_end|>",
        "qwen3_coder": "\n".join(f"<tool_call>\n{in_xml(*own)}\n</tool_call>" for own in calls),
        "hermes": "\n".join(f"<tool_call>\n{own}\n</tool_call>" for own in objects),
        "llama3": "; ".join(objects),
        "json": "\n".join(objects),
    }[name]


def in_xml(tool: str, arguments: dict[str, Any]) -> str:
    values = {key: own if isinstance(own, str) else json.dumps(own) for key, own in arguments.items()}
    pairs = "".join(f"<parameter={key}>\n{own}\n</parameter>\n" for key, own in values.items())
    return f"<function={tool}>\n{pairs}</function>"


def read(name: str | None, *pieces: str, **options: Any) -> list[Event]:
    """What it says, as `joined` has it."""
    parser = answer_parser(None if name is None else BY_NAME[name], options.pop("names", NAMES), **options)
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


def joined(events: list[Event]) -> list[Event]:
    """Events with text that follows text joined, and pieces of a call, too."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text | Reasoning) and isinstance(last, type(event)):
            found[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallPiece) and event.name is None:
            assert isinstance(last, CallPiece)
            found[-1] = CallPiece(event.index, last.name, last.arguments + event.arguments)
        else:
            found.append(event)
    return found


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    """The whole calls. Each follows its pieces, which say the same; a call that broke has pieces alone."""
    events = joined(events)
    begun = [event for event in events if isinstance(event, CallPiece)]
    assert [own.index for own in begun] == list(range(len(begun)))
    found = [(before, own) for before, own in pairwise([None, *events]) if isinstance(own, Call)]
    assert all(before == CallPiece(own.index, own.name, own.arguments) for before, own in found)
    return [(own.name, json.loads(own.arguments)) for _, own in found]


def without_pieces(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, CallPiece)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


# ---- each format


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "calls", [[("weather", TOKYO)], [("now", {})], [("weather", TOKYO), ("now", {}), ("weather", {"a": [{}, -1.5e3]})]]
)
def test_calls_are_read(name: str, calls: list[tuple[str, Any]]) -> None:
    assert calls_of(read(name, written(name, *calls))) == calls
    assert text_of(read(name, written(name, *calls))) == ""


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_a_forced_answer_ends_with_a_call_that_repeats_another(name: str) -> None:
    said = [("weather", TOKYO), ("weather", {"city": "Rome"}), ("now", {}), ("weather", TOKYO)]
    text = written(name, *said, ("weather", {"city": "Oslo"}))
    parser, ends = (answer_parser(BY_NAME[name], NAMES, is_forced=True) for _ in range(2))
    reasons = [ends.end(letter) for letter in text]
    end = 1 + reasons.index("repeated call")
    assert "Oslo" not in text[:end]
    assert reasons.count("repeated call") == 1, "at its end, and not behind it"
    assert text[:end].count("Tokyo") == 2
    events = [event for letter in text[:end] for event in parser.push(letter)]
    assert calls_of([*events, *parser.finish()]) == said[:3]
    assert len(joined(events)) == 6, "three calls and their pieces: the last was not begun"
    assert text_of(events) == ""
    for options, told in (({"is_forced": True}, said[:3]), ({}, [*said, ("weather", {"city": "Oslo"})])):
        assert calls_of(read(name, text, **options)) == told


@pytest.mark.parametrize("name", ["mistral", "phi", "granite", "functools", "lfm2"])
def test_calls_of_a_forced_list_are_told_when_each_is_whole(name: str) -> None:
    parser = answer_parser(BY_NAME[name], NAMES, is_forced=True)
    events = parser.push(written(name, ("weather", TOKYO), ("now", {}))[: -len("now") - len(BY_NAME[name].end) - 20])
    assert calls_of([*events, *parser.finish(is_cut=True)]) == [("weather", TOKYO)]


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_text_around_calls_is_told(name: str) -> None:
    events = read(name, "I look.\n" + written(name, ("weather", TOKYO)) + "\nThat was it.\n")
    assert [type(event) for event in without_pieces(events)] == [Text, Call, Text]
    assert text_of(events) == "I look.\n\nThat was it."


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_of_unknown_tools_are_text(name: str) -> None:
    text = written(name, ("sudo", {"a": 1}))
    events = read(name, text)
    assert calls_of(events) == []
    assert ("sudo" if name == "qwen3_coder" else '{"a": 1}') in text_of(events)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_broken_calls_are_text(name: str) -> None:
    whole = written(name, ("weather", {"city": "A"}), ("now", {"b": "B"}))
    for end in range(len(whole)):
        events = read(name, whole[:end], names=("weather", "now"))
        assert len(calls_of(events)) <= 2
        if not calls_of(events):
            assert text_of(events) == whole[:end]
    wrong = [("</", "<"), (">", " "), ("<", "< ")] if name == "qwen3_coder" else [('"', "'"), (":", ": x"), ("}", "]")]
    for broken in (whole.replace(*own) for own in wrong):
        assert (text_of(read(name, broken)), calls_of(read(name, broken))) == (broken, [])


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"lfm2"}))
def test_a_call_is_begun_with_its_name_and_told_as_it_comes(name: str) -> None:
    text = written(name, ("weather", {"city": "Rome", "day": "to\nday"}))
    parser = answer_parser(BY_NAME[name], NAMES, schemas={"weather": STRINGS})
    told = [[own for own in parser.push(letter) if isinstance(own, CallPiece)] for letter in text]
    begun = next(own for own in told if own)
    assert begun[0].name == "weather"
    assert told.index(begun) < text.index("city")
    for place in (text.index("Rome") + 3, text.rindex("day") + 1):
        assert any(told[place - 3 : place + 3]), (text[:place], told)


@pytest.mark.parametrize(
    ("name", "broken", "begun"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "A", oh no}}</tool_call>', '{"city": "A", '),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\x"}}</tool_call>', '{"city": "\\x"}'),
        ("mistral_args", '[TOOL_CALLS]weather[ARGS]{"city" 5}', '{"city" 5}'),
        ("granite", '<tool_call>[{"name": "weather", "arguments": {"city": <}]', '{"city": '),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>A</parameter>B", '{"city": "A"'),
    ],
)
def test_a_call_that_breaks_is_text_though_it_was_begun(name: str, broken: str, begun: str) -> None:
    """A stream cannot take its pieces back. A whole answer is without them."""
    after = f"[TOOL_CALLS]{CALL}" if name == "mistral_args" else written(name, ("now", {}))
    events = read(name, broken + after)
    assert events[:2] == [CallPiece(0, "weather", begun), Text(broken)]
    [told, call] = events[2:]
    assert told == CallPiece(1, call.name, call.arguments) if isinstance(call, Call) else None
    assert without_incomplete_calls(events) == events[1:]


def test_what_is_no_call_in_a_list_is_text() -> None:
    assert without_pieces(read("granite", f"<|tool_call|>[{CALL}, {NOW}, {{1}}]")) == [
        Call(0, "weather", '{"city": "A"}'),
        Call(1, "now", "{}"),
        Text(", {1}]"),
    ]


@pytest.mark.parametrize("name", BY_NAME)
def test_plain_text_stays_as_it_is(name: str) -> None:
    several_lines = 'Hello {you}, [1] and <b>.\nuse functools.lru_cache\n{"a": 1}\n{'
    for text in ("", " \n", several_lines, "x < 3 <tool", "to be"):
        assert text_of(read(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("granite", f"<tool_call>[{CALL}]", [("weather", {"city": "A"})]),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>[{NOW}]", [("weather", {"city": "A"}), ("now", {})]),
        ("hermes", f"<tool_call>{{oh no <tool_call>{CALL}</tool_call>", [("weather", {"city": "A"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}', [("now", {})]),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}', [("now", {"x": "\ud800"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": [1e400, -1E999]}}', [("now", {"x": [INF, -INF]})]),
        ("mistral_args", f'[TOOL_CALLS]now[ARGS]{{"x": -{"9" * 5000}}}', [("now", {"x": -INF})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": NaN}"}', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": ' + "[" * 9999 + "]" * 9999 + "}}", []),
        ("hermes", f"<tool_call>[{CALL}, 5]", []),
        ("llama3", f"Here: {CALL}\n{NOW}", [("weather", {"city": "A"}), ("now", {})]),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
        ("phi", f"<|tool_call|>{CALL}<|/tool_call|>functools[{NOW}]", [("weather", {"city": "A"}), ("now", {})]),
        ("mistral_args", f"[TOOL_CALLS] [{CALL}]", [("weather", {"city": "A"})]),
        ("mistral_args", '[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{"a": 1}', [("now", {"a": 1})]),
        ("mistral_args", '[TOOL_CALLS]now{"a": 1}Then.', [("now", {"a": 1})]),
        ("mistral_args", '[TOOL_CALLS]now[ARGS]{"a": "1\n2"}', [("now", {"a": "1\n2"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "1\n\t2"}}', [("now", {"x": "1\n\t2"})]),
        ("mistral_args", "[TOOL_CALLS]now and then, " * 50, []),
        ("qwen3_coder", "<tool_call> <function=now>\n\n</function>", [("now", {})]),
        ("qwen3_coder", f"{IN_XML}<parameter=a>1</parameter></function></tool_call>", [("now", {"a": 1})]),
        ("qwen3_coder", f"{IN_XML}<parameter=a> b <parameter=a></parameter>", []),
        (
            "qwen3_coder",
            f"{IN_XML}<parameter=a><parameter=a></parameter></function>",
            [("now", {"a": "<parameter=a>"})],
        ),
        ("qwen3_coder", "So: <function=now>\n</function>\n</tool_call> <function=then>", [("now", {})]),
        ("qwen3_coder", f"<tool_call>{CALL}</tool_call>", []),
        ("qwen3_coder", f"{IN_XML}</function></tool_call>", [("now", {})]),
        (
            "qwen3_coder",
            f"<tool_call>{' ' * 9}<function=now> <parameter=a> 1</parameter>\n\n</function></tool_call>",
            [("now", {"a": 1})],
        ),
        ("qwen3_coder", f"{IN_XML}<parameter=a></function></tool_call>", []),
        ("qwen3_coder", f"<tool_call><function={'now and then ' * 100}{IN_XML}</function>", [("now", {})]),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [("now", {})]),
        ("harmony", ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}', [("now", {"a": 1})]),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>foo", []),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>", []),
    ],
)
def test_what_models_write_beside_their_format(name: str, text: str, calls: list[Any]) -> None:
    assert calls_of(read(name, text)) == calls


def test_of_two_marks_that_begin_alike_the_longer_is_found() -> None:
    """Special tokens of a tokenizer may begin so."""
    assert read("hermes", "a<|x|>b", dropped=("<|x", "<|x|>")) == [Text("ab")]


def test_no_more_calls_than_asked_for_are_told() -> None:
    text = written("hermes", ("now", {}), ("weather", TOKYO))
    assert calls_of(read("hermes", text, max_calls=1)) == [("now", {})]


# ---- however it comes


PARTS = r"""<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] [CALL_ID] functools <|tool_call|> <|/tool_call|>
    <|channel|>analysis <|message|> <|end|> <|start|> <|call|> <function=now> <parameter=a> </parameter> </function>
    Text now é [ ] { } ; " \ """
PIECES = [
    *(*PARTS.split(), "<|channel|>commentary to=functions.now", "\n", " ", ", ", ": ", CALL, NOW),
    *(written(name, ("weather", TOKYO), ("now", {})) for name in BY_NAME),
]


@FAST
@given(st.data())
def test_every_way_to_cut_a_text_says_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([None, *BY_NAME]))
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=8)))
    options: dict[str, Any] = data.draw(
        st.sampled_from(
            [{}, {"thinks": True}, {"is_thinking": True}, {"dropped": ["<|end|>", "<|e"]}, {"max_calls": 1}]
        )
    )
    options |= data.draw(st.sampled_from([{}, {"schemas": {"now": {"properties": {"a": {"type": "array"}}}}}]))
    whole = read(name, text, **options)
    assert all(isinstance(arguments, dict) for _, arguments in calls_of(whole))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    assert read(name, *(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)), **options) == whole
    assert read(name, *text, **options) == whole


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_text_is_told_as_soon_as_it_can_be_no_call(name: str) -> None:
    parser = answer_parser(BY_NAME[name], NAMES)
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(", you") == [Text(", you")]


HELD = 1100
"""Characters that may be looked at again with each piece: the head of a message of harmony has most."""


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_long_answer_costs_grows_with_its_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is looked at with the few characters before it, not with all of a call that has begun."""
    looked = []
    for place, pattern in ((json_calls, "ENDS_A_STRING"), (json_calls, "OUTSIDE"), (python_calls, "OUTSIDE")):
        own = getattr(place, pattern)

        def search(text: str, at: int, own: Any = own) -> Any:
            match = own.search(text, at)
            looked.append((len(text) if match is None else match.end()) - at)
            return match

        monkeypatch.setattr(place, pattern, SimpleNamespace(search=search))
    size = 4000
    call = written(name, ("weather", {"city": "a" * size, "list": [["]"] * size]}))
    bare = json.dumps({"name": "weather", "arguments": {"city": "a" * size}})
    texts = [call, call[: size // 2], " " * size + call, call[:30] + " " * size, "<think>" + call, "x" * size]
    if name == "hermes":
        texts += [bare, bare[:-1], "{" + " " * size + bare[1:], bare + " " * size]
    for text in texts:
        looked.clear()
        parser = answer_parser(BY_NAME[name], NAMES, thinks=True, whole=NAMES)
        most = 0
        for character in text:
            parser.push(character)
            most = max(most, parser.num_held)
        parser.finish()
        assert most <= HELD
        assert sum(looked) <= 2 * len(text)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_text_of_nothing_but_marks_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that never become whole are not read again from each mark in them."""
    scanned = []
    for reader in (json_calls.JsonCalls, xml_calls.XmlCalls):
        own = reader.scan

        def scan(self: Any, text: str, start: int, is_last: bool, own: Any = own) -> Any:
            outcome, end = own(self, text, start, is_last)
            scanned.append(end - start)
            return outcome, end

        monkeypatch.setattr(reader, "scan", scan)
    begin = written(name, ("weather", {"city": "A"}))[:40]
    read(name, begin * 1000)
    assert sum(scanned) <= 2 * len(begin) * 1000


def test_a_call_is_told_as_soon_as_it_is_whole() -> None:
    parser = answer_parser(BY_NAME["hermes"], NAMES)
    assert parser.push(f"<tool_call>\n{CALL}")[-1] == Call(0, "weather", '{"city": "A"}')
    assert parser.push("\n</tool_call>") == parser.finish() == []


@pytest.mark.parametrize("name", BY_NAME)
def test_an_answer_that_is_cut_off_has_no_marks_in_its_text(name: str) -> None:
    """Wherever it is cut, in a call or in its mark: what was begun is not told, and what was whole is."""
    call = written(name, ("weather", {"city": "A"}))
    for end in range(1, len(call)):
        parser = answer_parser(BY_NAME[name], NAMES)
        events = [*parser.push("Hi. " + call[:end]), *parser.finish(is_cut=True)]
        text = "".join(event.text for event in events if isinstance(event, Text | Reasoning))
        assert text.strip() == "Hi." or any(isinstance(event, Call) for event in events), (call[:end], text)
        assert not any(mark in text for mark in BY_NAME[name].delimiters), text
