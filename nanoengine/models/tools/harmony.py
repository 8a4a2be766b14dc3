"""Harmony: messages, each with a head that says what it is (https://github.com/openai/harmony)."""

from __future__ import annotations

import re
from collections.abc import Collection

from nanoengine.models.tools.calls import arguments_of
from nanoengine.models.tools.formats import HARMONY_MARKS
from nanoengine.models.tools.marks import Marks, past_space
from nanoengine.models.tools.reading import Reading, Reasoning, Text

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


class Harmony(Reading):
    """An answer of messages. Args: see `answer_parser`."""

    def __init__(self, names: Collection[str] | None, most: int | None, whole: Collection[str]):
        super().__init__(most, whole)
        self.names = names
        self._marks = Marks(HARMONY_MARKS)
        self._name = ""  # the name of the called tool
        self._held: list[str] = []  # the text of its arguments
        self._state, self._read_rest = self._read_head, self._read_body

    def _read_head(self, is_last: bool) -> bool:
        self._say(self._read(past_space(self._text, self._at)))
        begun = self._text[self._at : self._at + max(map(len, HEADS))]
        if not begun.startswith(HEADS):
            if not is_last and any(head.startswith(begun) for head in HEADS):
                return False
            self._state = self._read_body if self._told else self._read_whole
            return True
        most = self._at + MAX_HEAD_CHARS + len(BODY)
        end = self._text.find(BODY, self._at, most)
        if end < 0:
            if len(self._text) >= most:  # it is no head, but text
                self._say(self._read(self._at + 1))
                self._state = self._read_body
                return True
            if is_last:
                self._read(len(self._text))
                self._space.clear()
            return False
        head = self._read(end)
        self._at += len(BODY)
        if (recipient := RECIPIENT.search(head)) is not None:
            self._name, self._held = recipient[1], []
            return self._switch(Text, self._read_call)
        return self._switch(Reasoning if "<|channel|>analysis" in head else Text, self._read_body)

    def _read_body(self, is_last: bool) -> bool:
        mark, free = self._marks.find(self._text, self._at, is_last and not self._is_cut)
        self._say(self._read(free))
        return mark is not None and self._next_message(mark)

    def _read_call(self, is_last: bool) -> bool:
        mark, free = self._marks.find(self._text, self._at, is_last and not self._is_cut)
        self._held.append(self._read(free))
        if mark is None and not is_last:
            return False
        text, self._held = "".join(self._held), []
        is_cut_off = mark is None and not text.strip()  # in front of the arguments
        is_told = not is_cut_off and self._tell(lambda text: arguments_of(self._name, text, self.names), text)
        if not is_told and not self._is_cut:
            self._say(text)
        return mark is not None and self._next_message(mark)

    def _next_message(self, mark: re.Match[str]) -> bool:
        if mark[0] not in HEADS:
            self._at = mark.end()
        return self._switch(Text, self._read_head)
