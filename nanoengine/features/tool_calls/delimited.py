"""Marked: reads answers of text, thoughts, and calls that begin with a mark."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from nanoengine.features.tool_calls.delimiters import Marks, past_space
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, FUNCTION, THINK, ToolFormat, bare_marks
from nanoengine.features.tool_calls.json_calls import ArgsCalls, CallReader, ItemCall, JsonCalls, Outcome
from nanoengine.features.tool_calls.python_calls import PythonCalls
from nanoengine.features.tool_calls.stream_parser import Reading, Reasoning, Text
from nanoengine.features.tool_calls.values import Kinds
from nanoengine.features.tool_calls.xml_calls import XmlCalls

READERS: dict[str, type[JsonCalls]] = {"args": ArgsCalls, "python": PythonCalls}
"""By the shape of a format; of others: JsonCalls."""


class Marked(Reading):
    """Reads an answer whose calls stand behind marks.

    Args: see `answer_parser`.
    """

    def __init__(
        self,
        format: ToolFormat | None,
        names: Collection[str] | None,
        schemas: Mapping[str, Any],
        most: int | None,
        thinks: bool,
        is_thinking: bool,
        dropped: Collection[str],
        whole: Collection[str],
        is_forced: bool,
        thought_calls: Collection[str],
    ):
        begins = () if format is None else (*format.begins, *bare_marks(format, names or ())) or ["{"]
        self._begins = frozenset(begins)
        super().__init__(most, whole, dropped, is_bare="{" not in self._begins, is_forced=is_forced)
        self.format, self.names, self.schemas, self._kinds = format, names, schemas, Kinds()
        self._marks = Marks((*self._begins, *dropped))
        self._ends_of_thought = Marks([END_OF_THOUGHT, *thought_calls])
        # Its calls are read one by one. What Python writes is read as a whole, where no grammar asks for JSON.
        self._is_list = format is not None and (format.shape == "list" or (is_forced and format.is_list))
        self._mark = ""  # of the call that is read
        self._reader: CallReader | None = None
        self._read_rest = self._read_text
        self._state = self._read_start if thinks or is_thinking else self._read_whole
        if is_thinking:
            self._kind, self._is_fresh = Reasoning, True

    def _read_start(self, is_last: bool) -> bool:
        """Some models write <think> though the prompt ends with it."""
        self._say(self._read(past_space(self._text, self._at)))
        begun = self._text[self._at : self._at + len(THINK)]
        if begun == THINK:
            self._at += len(THINK)
            return self._switch(Reasoning, self._read_thought)
        if not is_last and THINK.startswith(begun):
            return False
        self._state = self._read_thought if self._kind is Reasoning else self._read_whole
        return True

    def _read_thought(self, is_last: bool) -> bool:
        mark = self._read_to(self._ends_of_thought, is_last)
        if mark is None:
            return False
        if mark[0] == END_OF_THOUGHT:
            return self._switch(Text, self._read_whole)
        self._at, self._held, self._state = mark.start(), [], self._read_doubtful
        return True

    def _read_doubtful(self, is_last: bool) -> bool:
        """A call in a thought is one if the thought does not end behind it: some models forget its end."""
        end = self._text.find(END_OF_THOUGHT, self._at)
        if end < 0 and not is_last:
            self._held.append(self._read(max(self._at, len(self._text) - len(END_OF_THOUGHT) + 1)))
            return False
        before = "".join(self._held)
        end += len(before) - self._at if end >= 0 else 0
        self._text, self._at = before + self._text[self._at :], 0
        if end >= 0 or self._is_cut:
            self._say(self._read(end if end >= 0 else len(self._text)))
            self._state = self._read_thought
            return end >= 0
        mark, _ = self._ends_of_thought.find(self._text, self._at, is_last)
        assert mark is not None
        self._at = mark.end()
        return self._begin_call(mark)

    def _read_text(self, is_last: bool) -> bool:
        mark = self._read_to(self._marks, is_last)
        if mark is None:
            return False
        return self._begin_call(mark) if mark[0] in self._begins else True

    def _begin_call(self, mark: re.Match[str]) -> bool:
        self._mark, self._held, self._reader = mark[0], [], self._new_reader()
        if mark[0] == "{" or mark[0].startswith(FUNCTION):  # no mark, but the call itself
            self._mark, self._at = "", mark.start()
        self._state = self._read_call
        return True

    def _read_to(self, marks: Marks, is_last: bool) -> re.Match[str] | None:
        """Add the text before the next mark to the events, and go behind the mark; None: there is no mark yet."""
        mark, free = marks.find(self._text, self._at, is_last and not self._is_cut)
        self._say(self._read(free))
        if mark is not None:
            self._at = mark.end()
        return mark

    def _new_reader(self) -> CallReader:
        assert self.format is not None
        if self.format.shape == "xml":
            return XmlCalls(self.names, self.schemas, self._kinds)
        if self._is_list:
            return ItemCall(self.names)
        return READERS.get(self.format.shape, JsonCalls)(self.names)

    def _read_call(self, is_last: bool) -> bool:
        assert self._reader is not None
        outcome = self._scan(self._reader, self._text, is_last, is_doubtful=self._kind is Reasoning)
        if outcome is Outcome.MORE:
            return False
        if outcome is Outcome.WHOLE:
            self._held, self._state, self._kind = [], self._read_end, Text
            if Text not in self._told:  # white space around calls is of the text if there is text on both sides
                self._space, self._is_fresh = [], True
            return True
        self._state = self._read_text if self._kind is Text else self._read_thought
        if self._is_cut and self._kind is Text:
            self._read(len(self._text))
        else:
            self._say(self._mark + "".join(self._held))
        return True

    def _read_end(self, is_last: bool) -> bool:
        """Read behind a call, where the end mark may be."""
        assert self.format is not None
        end, between = self.format.end, "]" if self._is_list else self.format.between
        space = self._read(past_space(self._text, self._at, between))
        self._held += filter(str.isspace, space)
        begun = self._text[self._at : self._at + len(end)]
        if not is_last and (self._at == len(self._text) or (begun != end and end.startswith(begun))):
            return False
        if self._is_list and self._text[self._at : self._at + 1] == ",":
            self._mark, self._reader, self._state = "", self._new_reader(), self._read_call
            return True
        if end and begun == end:
            self._at += len(end)
        elif not self._is_fresh:
            self._space += self._held
        self._state = self._read_text
        return True
