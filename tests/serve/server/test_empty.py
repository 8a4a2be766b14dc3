"""What is null or empty means what leaving it out means, in every place of every request, before a template sees it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from nanoengine.serve.server.bodies.fields import EMPTY_IS_A_VALUE
from tests.serve.server.bodies import CALL, DOORS, FUNCTION, positions
from tests.serve.server.parrot import build, save_tokenizer
from tests.serve.server.running import Server

ASKING = (
    "{{ tools is defined and tools is not none }}{{ tools is none or tools | length > 0 }}{{ documents is none }}"
    "{{ reasoning_effort is defined }}{{ enable_thinking is defined }}"
    "{% for message in messages %}{{ message | dictsort | tojson }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)
"""A template that tells of all that it is given."""

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/tokenize")
FORCED = ("tool_choice", "response_format", "text", "format", "output_config", "model")
VALUES = ("parameters", "input_schema", "arguments", "input", "function", *EMPTY_IS_A_VALUE)
"""What stands in them says what it says, nothing too."""

LIMITS = ("stream", "options", "num_predict", "max_tokens", "max_output_tokens")
"""Without them answers are long, or stream."""

ALONE = ("id", "created", "created_at", "usage", "tools")
"""What no two answers have in common, or repeats the request."""

NUM_DRAWN = 40
"""Places for a path."""

ABSENT = "the place of a field that is left out"

OTHERS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        ({"role": "assistant", "content": "b"}, "tool_calls"),
        ({"role": "assistant", "content": "b"}, "refusal"),
        ({"role": "assistant", "content": "b"}, "annotations"),
        ({"role": "assistant"}, "content"),
        ({"role": "tool", "tool_call_id": "call_now"}, "content"),
        ({"role": "assistant", "tool_calls": [CALL]}, "content"),
    ],
    "/v1/messages": [({"role": "assistant", "content": [{"type": "text", "text": "b"}]}, "id")],
    "/api/chat": [({"role": "assistant"}, name) for name in ("content", "thinking", "tool_calls", "images")],
}
"""Messages, and what may be empty in them."""


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tokenizer(tmp_path_factory.mktemp("asking"), ASKING)
    with closing(Server(build(folder, max_model_len=4096), "demo")) as server:
        yield server


def opaque(value: Any, name: str = "") -> Any:
    """A body in which the tables whose keys are the client's own have no fields."""
    if isinstance(value, dict):
        if name in VALUES:
            return msgspec.Raw(json.dumps(value).encode())
        return {key: opaque(inner, key) for key, inner in value.items()}
    return [opaque(inner) for inner in value] if isinstance(value, list) else value


def plain(body: Any) -> Any:
    """A body as JSON has it, without the fields that are ABSENT."""
    text = msgspec.json.encode(body)
    return json.loads(text, object_hook=lambda table: {key: own for key, own in table.items() if own != ABSENT})


def pairs(path: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """A body without some field, and with nothing in it."""
    kind, given = DOORS[path]
    base = opaque({name: own for name, own in given.items() if name not in FORCED})
    if path.startswith("/api/"):
        base |= {"model": "demo", "stream": False}
    for message, name in OTHERS.get(path, ()):
        base["messages"].append({name: None} | message)
    for name, usual, replaced in positions(kind, base):
        if name and name not in LIMITS and not name.isdigit():
            fits = (list, dict) if usual is None else (type(usual),)
            empty = [None, *(own for own in ([], {}) if name not in VALUES and type(own) in fits)]
            yield plain(replaced(ABSENT)), [plain(replaced(own)) for own in empty]


def told(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status, and the prompt with all of the answer but what no two answers have in common."""
    prompts = []
    tokenizer = server.serving.tokenizer
    render = type(tokenizer).render_chat
    with pytest.MonkeyPatch.context() as patch:

        def rendered(*args: Any, **kwargs: Any) -> str:
            prompts.append(render(tokenizer, *args, **kwargs))
            return prompts[-1]

        patch.setattr(tokenizer, "render_chat", rendered)
        answer = server.post(path, body)
    told = {key: own for key, own in answer.json.items() if key not in ALONE and not key.endswith("_duration")}
    return answer.status, "".join(prompts[-1:]) + re.sub(r"\w+_[0-9a-f]{32}\w*", "", json.dumps(told))


@pytest.mark.parametrize("path", PATHS)
def test_null_and_empty_are_absent(asking: Server, path: str) -> None:
    wrong = []
    drawn = list(pairs(path))
    for absent, empty in random.Random(path).sample(drawn, min(NUM_DRAWN, len(drawn))):
        status, text = told(asking, path, absent)
        for body in empty:
            own_status, own_text = told(asking, path, body)
            is_of_another_type = own_status == 400 and "Expected `" in own_text and body is not empty[0]
            if not is_of_another_type and (own_status != status or (status == 200 and own_text != text)):
                wrong.append(f"{json.dumps(body)}: {own_status} {own_text[:600]}, not {status} {text[:600]}")
    assert wrong == [], "\n".join(wrong)


def test_nothing_is_told_of_no_tools(asking: Server) -> None:
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert told(asking, path, body | {"tools": [FUNCTION]})[1].startswith("TrueTrue")
    tools: Any
    for tools in (None, []):
        assert told(asking, path, body | {"tools": tools, "tool_choice": "none"})[1].startswith("FalseTrue")
