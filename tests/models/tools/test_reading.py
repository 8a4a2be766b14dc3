"""White space around what is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoengine.models.tools.reading import Event, Reading, Reasoning, Text
from tests.drawn import FAST


class Twice(Reading):
    """A thought up to a bar, and text."""

    def __init__(self) -> None:
        super().__init__(None)
        self._kind, self._state = Reasoning, self._read_thought

    def _read_thought(self, is_last: bool) -> bool:
        thought, bar, _ = self._text[self._at :].partition("|")
        self._say(self._read(self._at + len(thought)))
        self._at += len(bar)
        return self._switch(Text, self._read_text) if bar else False

    def _read_text(self, is_last: bool) -> bool:
        self._say(self._read(len(self._text)))
        return False


@FAST
@given(st.text(" \na|", max_size=12))
def test_white_space_between_two_kinds_is_of_neither(text: str) -> None:
    reading = Twice()
    events: list[Event] = [event for character in text for event in reading.push(character)]
    events += reading.finish()
    assert all(isinstance(event, Text | Reasoning) for event in events)
    said = {kind: "".join(own.text for own in events if isinstance(own, kind)) for kind in (Text, Reasoning)}
    thought, bar, rest = text.partition("|")
    assert said[Reasoning] == thought.rstrip()
    assert said[Text] == rest.lstrip() if bar else said[Text] == ""
    assert reading.num_held == 0
