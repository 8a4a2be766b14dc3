"""SingleCallAnswer: an answer that is one call and nothing else: a JSON object, bare or in a Markdown fence.

Small models write calls in this form, whatever format their chat template shows.
"""

from __future__ import annotations

from collections.abc import Collection

from nanoengine.features.tool_calls.json_calls import JsonEnd, NameAndArguments, Outcome, read_call
from nanoengine.features.tool_calls.json_text import loads

FENCE = "```"
FENCES = (FENCE, FENCE + "json", FENCE + "tool_call")
KEYS = ("arguments", "parameters", "function", "type")
"""First keys of the object of a call, beside its name."""


class SingleCallAnswer:
    """Incremental reader of an answer that may be a single call.

    Args:
        names: of the tools.
        is_bare: the object may have no fence.
        dropped: texts of special tokens to remove.
    """

    def __init__(self, names: Collection[str], is_bare: bool, dropped: Collection[str]):
        self._names, self._dropped = names, [_without_space(token) for token in dropped]
        begins = (*(f'"name":"{_without_space(name)}"' for name in names), *(f'"{key}":' for key in KEYS))
        self._heads = [f"{fence}{{{begin}" for fence in (("",) if is_bare else ()) + FENCES for begin in begins]
        self._pieces: list[str] = []
        self._head = self._tail = ""  # the text up to the first key, and behind the object, without white space
        self._end: JsonEnd | None = None
        self._object = ""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._pieces)

    def push(self, text: str) -> bool:
        """Read more of the answer; False: it is not a single call."""
        self._pieces.append(text)
        if self._end is None:
            self._head += _without_space(text)
            if not any(map(self._head.startswith, self._heads)):
                return any(head.startswith(self._head) for head in self._heads)
            text, self._end = self.text, JsonEnd()
            text = text[text.index("{") :]
        if not self._object:
            outcome, end = self._end.scan(text, 0)
            if outcome is not Outcome.WHOLE:
                return outcome is Outcome.MORE
            whole = self.text
            self._object, text = whole[whole.index("{") : len(whole) - len(text) + end], text[end:]
        self._tail += _without_space(text)
        for token in self._dropped:
            self._tail = self._tail.replace(token, "")
        return any((self._fence + token).startswith(self._tail) for token in ("", *self._dropped))

    @property
    def _fence(self) -> str:
        return FENCE if self._head.startswith(FENCE) else ""

    def calls(self) -> list[NameAndArguments] | None:
        """The call in a list; None: the answer is not a single call. Raises as `CallReader.calls`."""
        if not self._object or self._tail != self._fence:
            return None
        value = loads(self._object)
        call = value if "name" in value else value.get("function")
        if not isinstance(call, dict) or not call.keys() & {"arguments", "parameters"}:
            return None
        result = read_call(call, self._names)
        return None if result is None else [result]


def _without_space(text: str) -> str:
    return "".join(text.split())
