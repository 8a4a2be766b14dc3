"""Harmony: an answer of messages, each with a header of channel and recipient (https://github.com/openai/harmony)."""

from __future__ import annotations

import re
from dataclasses import replace

from nanoengine.features.tool_calls.delimiters import Delimiters, past_space
from nanoengine.features.tool_calls.formats import HARMONY_DELIMITERS
from nanoengine.features.tool_calls.json_calls import Arguments, Outcome
from nanoengine.features.tool_calls.stream_parser import AnswerRules, Reasoning, StreamParser, Text

HEADS = ("<|channel|>", "<|start|>", "<|message|>", "to=")
BODY = "<|message|>"
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
MAX_HEAD_CHARS = 1000

FINAL, NO_THOUGHT = "final", "(?:final|commentary)"
"""Expressions of channels that are of the answer: without tools, and with them."""
ANALYSIS_BEGUN = r"<\|channel\|>analysis[^<]*<\|message\|>"
END_OF_ANALYSIS = "<|end|><|start|>assistant<|channel|>final<|message|>"


def message_begun(channel: str) -> str:
    """An expression of the head of a message."""
    return rf"<\|channel\|>{channel}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"


class Harmony(StreamParser):
    """Parser of an answer of messages."""

    def __init__(self, rules: AnswerRules):
        super().__init__(replace(rules, dropped=(), is_forced=False))
        self.names = rules.names
        self._delimiters = Delimiters(HARMONY_DELIMITERS)
        self._reader = Arguments("")  # of the current call
        self._state, self._read_rest = self._read_head, self._read_body

    def _read_head(self, is_last: bool) -> bool:
        self._emit_text(self._consume(past_space(self._text, self._at)))
        begun = self._text[self._at : self._at + max(map(len, HEADS))]
        if not begun.startswith(HEADS):
            if not is_last and any(head.startswith(begun) for head in HEADS):
                return False
            self._state = self._read_body if self._emitted else self._read_single_call
            return True
        max_end = self._at + MAX_HEAD_CHARS + len(BODY)
        end = self._text.find(BODY, self._at, max_end)
        if end < 0:
            if len(self._text) >= max_end:  # text, not a header
                self._emit_text(self._consume(self._at + 1))
                self._state = self._read_body
                return True
            if is_last:
                self._consume(len(self._text))
                self._space.clear()
            return False
        head = self._consume(end)
        self._at += len(BODY)
        if (recipient := RECIPIENT.search(head)) is not None:
            self._reader, self._call_text = Arguments(recipient[1]), []
            return self._switch(Text, self._read_call if recipient[1] in self.names else self._read_body)
        return self._switch(Reasoning if "<|channel|>analysis" in head else Text, self._read_body)

    def _read_body(self, is_last: bool) -> bool:
        match, free = self._delimiters.find(self._text, self._at, is_last and not self._is_cut)
        self._emit_text(self._consume(free))
        if match is None:
            return False
        if match[0] not in HEADS:
            self._at = match.end()
        return self._switch(Text, self._read_head)

    def _read_call(self, is_last: bool) -> bool:
        match, free = self._delimiters.find(self._text, self._at, is_last and not self._is_cut)
        if match is not None and not "".join([*self._call_text, self._text[self._at : free]]).strip():
            self._emit_calls(lambda _: [(self._reader.tool, "{}")], "")
            self._state = self._read_body
            return True
        outcome = self._scan(self._reader, self._text[:free], is_last or match is not None)
        if outcome is Outcome.MORE:
            return False
        self._state = self._read_body
        if outcome is Outcome.TEXT and not (is_last and self._is_cut):
            self._emit_text("".join(self._call_text))
        return True
