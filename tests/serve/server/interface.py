"""What is asked of an interface for conversations, and what is read: neutral, so one table of cases holds for all of them.

Asked are turns, tools, which of them is called, a schema, and where to stop; read is what was `Said`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from tests.serve.server.running import Answer, Server
from tests.serve.server.weather import PLACE

Table = dict[str, Any]


class Thought(str):
    """Text that the model thinks."""


class Call(NamedTuple):
    name: str
    arguments: Table


class Result(NamedTuple):
    """What the call of a tool returned."""

    name: str
    text: str


Part = str | Thought | Call | Result
Turn = tuple[Any, ...]
"""A role, and its parts."""


class Said(NamedTuple):
    """An answer: its parts in their order, why it ended, and the numbers of tokens of prompt and answer."""

    parts: list[Part]
    reason: str
    usage: tuple[int, int]


TOOLS: dict[str, Table] = {"weather": PLACE, "now": {"type": "object", "additionalProperties": False}}
VOLATILE = ("id", "call_id", "created", "created_at", "completed_at", "object", "usage", "system_fingerprint")
"""What no two answers have in common, or is compared apart."""


def of_kind(parts: Sequence[Part], kind: type) -> list[Any]:
    return [own for own in parts if type(own) is kind]


def joined(parts: Sequence[Part]) -> list[Part]:
    """As an interface without blocks has them: thoughts, texts and calls, each kind together. White space does not count."""
    thought, text = ("".join("".join(of_kind(parts, kind)).split()) for kind in (Thought, str))
    return [*([Thought(thought)] if thought else []), *([text] if text else []), *of_kind(parts, Call)]


def settled(value: Any) -> Any:
    """What an answer holds, without the fields that differ from one to the next, and those that say nothing."""
    if isinstance(value, list):
        return [settled(own) for own in value]
    if not isinstance(value, dict):
        return value
    return present(
        **{name: settled(own) for name, own in value.items() if name not in VOLATILE and "duration" not in name}
    )


def present(**fields: Any) -> Table:
    return {name: own for name, own in fields.items() if own not in (None, "", [])}


def function(name: str) -> Table:
    return {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}


def distinct(ids: list[str]) -> None:
    assert all(ids)
    assert len(set(ids)) == len(ids)


class Interface:
    """One of them."""

    path: str
    has_blocks: ClassVar[bool] = True
    lacks: ClassVar[frozenset[str]] = frozenset()  # what cannot be asked by it
    streaming: ClassVar[Table] = {"stream": True}
    ping: ClassVar[bytes] = b": ping\n\n"
    reasons: ClassVar[dict[str, str]] = {}
    """Its names for the reasons "stop", "length", "calls" and "stop string", where it has others."""

    def body(self, turns: Sequence[Turn], **asked: Any) -> Table:
        """A request for the next turn.

        Args:
            turns: of the conversation.
            asked: `model`, `tools` (names), `choice` ("auto", "none", "required", or the name of a tool), `parallel`, `schema`,
                `stop`, `max_tokens`, and parameters that have the same name in all interfaces.
        """
        names = ("model", "tools", "choice", "parallel", "schema", "stop", "max_tokens")
        fields, more = SimpleNamespace(**dict.fromkeys(names)), {}
        for name, own in asked.items():
            (vars(fields) if name in names else more)[name] = own
        fields.tools = fields.tools or ()
        return self._body(turns, fields, more)

    def _body(self, turns: Sequence[Turn], asked: Any, more: Table) -> Table:
        raise NotImplementedError

    def put_together(self, answer: Answer) -> Table:
        """The answer of a stream, as a client puts it together; it has the shape of a whole one."""
        raise NotImplementedError

    def read(self, found: Table) -> Said:
        raise NotImplementedError

    def error(self, answer: Answer) -> str:
        """The message of a refusal, which has the shape of this interface."""
        return str(answer.error["message"])

    def last_error(self, answer: Answer) -> Any:
        """What is told of the error at the end of a stream that failed."""
        raise NotImplementedError

    def ask(self, server: Server, turns: Sequence[Turn], **asked: Any) -> Said:
        return self.said(server, self.body(turns, **asked))

    def said(self, server: Server, body: Table) -> Said:
        """The answer to a request, which is the same streamed."""
        whole = server.post(self.path, body | {"stream": False})
        assert whole.status == 200, whole.body
        streamed = self.put_together(server.post(self.path, body | self.streaming))
        assert settled(streamed) == settled(whole.json)
        assert self.read(streamed) == self.read(whole.json)
        return self.read(whole.json)
