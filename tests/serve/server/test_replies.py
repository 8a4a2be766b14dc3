"""What all interfaces with turns have in common."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.serve.server.apis.conversation import merge_system_messages
from tests.serve.server.interface import Interface
from tests.serve.server.interfaces import INTERFACES
from tests.serve.server.running import Server


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ("ua", ["u:1", "a:2"]),
        ("su", ["s:1", "u:2"]),
        ("sdu", ["s:12", "u:3"]),
        ("dus", ["s:1", "u:23"]),
        ("us", ["u:12"]),
        ("uass", ["u:1", "a:2", "u:34"]),
        ("uatsu", ["u:1", "a:2", "t:3", "u:4", "u:5"]),
    ],
)
def test_the_system_speaks_once_and_first(given: str, turns: list[str]) -> None:
    roles = {"u": "user", "a": "assistant", "s": "system", "d": "developer", "t": "tool"}
    messages = [turn(roles[own], str(number)) for number, own in enumerate(given, 1)]
    found = []
    for message in merge_system_messages(messages):
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        found.append(f"{message['role'][0]}:{text}")
    assert found == turns


def test_a_bill_is_no_part_of_the_prompt(hermes: Server) -> None:
    """Claude Code's first block differs from request to request: what follows would never be in the prefix cache."""
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i}"} for i in range(2)]
    body = {"messages": [turn("user", "b")], "max_tokens": 9}
    answers = [hermes.post("/v1/messages", {**body, "system": [own, {"type": "text", "text": "a"}]}) for own in blocks]
    assert [answer.json["content"][0]["text"] for answer in answers] == ["ab", "ab"]


@pytest.mark.parametrize("interface", INTERFACES[1:])
def test_more_tokens_than_the_model_has_are_as_many_as_it_has(hermes: Server, interface: Interface) -> None:
    """Clients send what some other model can do."""
    assert interface.ask(hermes, [("user", "b")], max_tokens=1 << 20).parts == ["b"]
