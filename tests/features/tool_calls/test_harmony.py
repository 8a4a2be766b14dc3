"""Messages of gpt-oss."""

from __future__ import annotations

import re

import pytest

from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.tool_calls.answer_parser import Call, Reasoning, Text
from tests.features.tool_calls.test_grammar import WRONG, walk
from tests.features.tool_calls.test_parser import calls_of, read, without_pieces, written


@pytest.mark.parametrize("size", [950, 990, 1000, 1001, 5000])
def test_a_head_of_harmony_has_an_end(size: int) -> None:
    """Otherwise it would be read again with each piece; beyond it is text, however it is cut."""
    text = f"<|channel|>{'a' * (size - 11)}<|message|>Yes."
    whole = read("harmony", text)
    assert whole == read("harmony", *text)
    assert (whole == [Text("Yes.")]) == (size <= 1000)
    assert "".join(event.text for event in whole if isinstance(event, Text)).endswith("Yes.")


def test_the_channels_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text += f"<|start|>assistant{written('harmony', ('now', {}))}"
    assert without_pieces(read("harmony", text)) == [Reasoning("Hm."), Text("I look."), Call(0, "now", "{}")]
    assert read("harmony", "<|channel|>final<|message|>Yes.\n") == [Text("Yes.\n")]
    assert read("harmony", "<|channel|>ana") == []


def test_two_messages_of_a_kind_are_two_lines() -> None:
    start = "<|end|><|start|>assistant"
    text = f"<|channel|>commentary<|message|>I look.{start}<|channel|>final<|message|>It rains.{start}"
    assert read("harmony", text) == [Text("I look.\nIt rains.")]
    text = f"<|channel|>analysis<|message|>Hm.{start}{written('harmony', ('now', {}))}{start}"
    events = read("harmony", f"{text}<|channel|>analysis<|message|>So.{start}<|channel|>final<|message|>Yes.")
    assert without_pieces(events) == [Reasoning("Hm."), Call(0, "now", "{}"), Reasoning("\nSo."), Text("Yes.")]


@pytest.mark.parametrize("kind", ["analysis", "commentary", "final"])
@pytest.mark.parametrize("is_written_out", [True, False])
def test_no_message_of_harmony_holds_another(grammars: Grammars, kind: str, is_written_out: bool) -> None:
    heads = [("<|channel|>", False), (kind, True), ("<|message|>", False)]
    wrong = [(mark, is_written_out) for mark in re.split("(<[^>]*>)", written("harmony", WRONG)) if mark]
    for before in ("<|call|>", "<|start|>", "<|return|>", "Hm."):
        text = walk(grammars, "harmony", [*heads, (before, is_written_out), *wrong], thinks=False, is_thinking=False)
        assert calls_of(read("harmony", text)) == []
