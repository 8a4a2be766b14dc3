"""DelimitedParser: a parser of answers of text, thoughts, and calls that begin with a delimiter."""

from __future__ import annotations

import re

from nanoengine.features.tool_calls.delimiters import Delimiters, past_space
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, FUNCTION, THINK, bare_delimiters
from nanoengine.features.tool_calls.json_calls import ArgsCalls, CallReader, ItemCall, JsonCalls, Outcome
from nanoengine.features.tool_calls.python_calls import PythonCalls
from nanoengine.features.tool_calls.stream_parser import AnswerRules, Reasoning, StreamParser, Text
from nanoengine.features.tool_calls.values import Kinds
from nanoengine.features.tool_calls.xml_calls import XmlCalls

READERS: dict[str, type[JsonCalls]] = {"args": ArgsCalls, "python": PythonCalls}
"""By the shape of a format; of others: JsonCalls."""


class DelimitedParser(StreamParser):
    """Parser of an answer whose calls follow delimiters."""

    def __init__(self, rules: AnswerRules):
        self._format = format = rules.format
        begins = () if format is None else (*format.begins, *bare_delimiters(format, rules.names)) or ["{"]
        self._begins, self._kinds = frozenset(begins), Kinds()
        super().__init__(rules, is_bare="{" not in self._begins)
        self._delimiters = Delimiters((*self._begins, *rules.dropped))
        self._thought_ends = Delimiters([END_OF_THOUGHT, *rules.thought_calls])
        # The calls of a list are read one by one, except in Python syntax, unless a grammar requires JSON.
        self._is_list = format is not None and (format.shape == "list" or (rules.is_forced and format.is_list))
        self._start_text = ""  # the start delimiter of the current call
        self._reader: CallReader | None = None
        self._read_rest = self._read_text
        self._state = self._read_start if rules.thinks or rules.is_thinking else self._read_single_call
        if rules.is_thinking:
            self._kind, self._is_fresh = Reasoning, True

    def _read_start(self, is_last: bool) -> bool:
        """Skip <think>, which some models write although the prompt ends with it."""
        self._emit_text(self._consume(past_space(self._text, self._at)))
        begun = self._text[self._at : self._at + len(THINK)]
        if begun == THINK:
            self._at += len(THINK)
            return self._switch(Reasoning, self._read_thought)
        if not is_last and THINK.startswith(begun):
            return False
        self._state = self._read_thought if self._kind is Reasoning else self._read_single_call
        return True

    def _read_thought(self, is_last: bool) -> bool:
        match = self._read_to(self._thought_ends, is_last)
        if match is None:
            return False
        if match[0] == END_OF_THOUGHT:
            return self._switch(Text, self._read_single_call)
        self._at, self._call_text, self._state = match.start(), [], self._read_doubtful
        return True

    def _read_doubtful(self, is_last: bool) -> bool:
        """Read a call in a thought: it counts if no end of the thought follows, which some models omit."""
        end = self._text.find(END_OF_THOUGHT, self._at)
        if end < 0 and not is_last:
            self._call_text.append(self._consume(max(self._at, len(self._text) - len(END_OF_THOUGHT) + 1)))
            return False
        before = "".join(self._call_text)
        end += len(before) - self._at if end >= 0 else 0
        self._text, self._at = before + self._text[self._at :], 0
        if end >= 0 or self._is_cut:
            self._emit_text(self._consume(end if end >= 0 else len(self._text)))
            self._state = self._read_thought
            return end >= 0
        match, _ = self._thought_ends.find(self._text, self._at, is_last)
        assert match is not None
        self._at = match.end()
        return self._begin_call(match)

    def _read_text(self, is_last: bool) -> bool:
        match = self._read_to(self._delimiters, is_last)
        if match is None:
            return False
        return self._begin_call(match) if match[0] in self._begins else True

    def _begin_call(self, match: re.Match[str]) -> bool:
        self._start_text, self._call_text, self._reader = match[0], [], self._new_reader()
        if match[0] == "{" or match[0].startswith(FUNCTION):  # the call has no delimiter
            self._start_text, self._at = "", match.start()
        self._state = self._read_call
        return True

    def _read_to(self, delimiters: Delimiters, is_last: bool) -> re.Match[str] | None:
        """Emit the text before the next delimiter, and skip the delimiter; None: there is no delimiter yet."""
        match, free = delimiters.find(self._text, self._at, is_last and not self._is_cut)
        self._emit_text(self._consume(free))
        if match is not None:
            self._at = match.end()
        return match

    def _new_reader(self) -> CallReader:
        assert self._format is not None
        names = self._rules.names
        if self._format.shape == "xml":
            return XmlCalls(names, self._rules.schemas, self._kinds)
        return ItemCall(names) if self._is_list else READERS.get(self._format.shape, JsonCalls)(names)

    def _read_call(self, is_last: bool) -> bool:
        assert self._reader is not None
        outcome = self._scan(self._reader, self._text, is_last, is_doubtful=self._kind is Reasoning)
        if outcome is Outcome.MORE:
            return False
        if outcome is Outcome.WHOLE:
            self._call_text, self._state, self._kind = [], self._read_end, Text
            if Text not in self._emitted:  # white space around calls is text only between texts
                self._space, self._is_fresh = [], True
            return True
        self._state = self._read_text if self._kind is Text else self._read_thought
        if self._is_cut and self._kind is Text:
            self._consume(len(self._text))
        else:
            self._emit_text(self._start_text + "".join(self._call_text))
        return True

    def _read_end(self, is_last: bool) -> bool:
        """Read the end delimiter behind a call, if it is there."""
        assert self._format is not None
        end, between = self._format.end, "]" if self._is_list else self._format.between
        space = self._consume(past_space(self._text, self._at, between))
        self._call_text += filter(str.isspace, space)
        begun = self._text[self._at : self._at + len(end)]
        if not is_last and (self._at == len(self._text) or (begun != end and end.startswith(begun))):
            return False
        if self._is_list and self._text[self._at : self._at + 1] == ",":
            self._start_text, self._reader, self._state = "", self._new_reader(), self._read_call
            return True
        if end and begun == end:
            self._at += len(end)
        elif not self._is_fresh:
            self._space += self._call_text
        self._state = self._read_text
        return True
