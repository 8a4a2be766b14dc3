"""Commands of a chat: lines that begin with a slash, which are not for the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from difflib import get_close_matches
from typing import NamedTuple

from nanoengine.serve.chat.answer import AnswerPiece
from nanoengine.serve.chat.session import SETTINGS, ChatError, Session

QUOTED = re.compile(r'(/\w+\s+)?"""((?:(?!""").)*)(""")?', re.DOTALL)
"""A text of several lines, as users of Ollama write it: a message, or the argument of a command. Its end may be missing."""


class Reply(NamedTuple):
    """The result of a line: words for the user, an answer of the model, or the end of the chat."""

    words: str = ""
    answer: Generator[AnswerPiece, None, None] | None = None
    is_over: bool = False


class Command(NamedTuple):
    """Its argument and its effect in words, and its function."""

    takes: str
    does: str
    run: Callable[[Session, str], Reply]


def is_open(text: str) -> bool:
    """Whether a text in triple quotes has no end yet."""
    quoted = QUOTED.fullmatch(text.strip())
    return quoted is not None and not quoted[3]


def reply(session: Session, line: str) -> Reply:
    """Run a line, or a text in triple quotes. Raises ChatError, or NanoEngineError as `Session.ask`."""
    if quoted := QUOTED.fullmatch(line.strip()):
        text = quoted[2].strip()
        line = (quoted[1] or " ") + text  # the blank: whatever it begins with, it is a message
        if not text:
            return Reply()
    if line.strip() == "?":
        return COMMANDS["/help"].run(session, "")
    if not line.startswith("/"):
        return Reply(answer=session.ask(line.strip()))
    name, *rest = line.split(maxsplit=1)
    name = OTHER_NAMES.get(name, name)
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
        raise ChatError(f"there is no command {name}; {hint} A blank before the slash makes it a message.")
    return COMMANDS[name].run(session, rest[0].strip() if rest else "")


def _help(_: Session, __: str) -> Reply:
    rows = [f"  {f'{name} {command.takes}':<18} {command.does}" for name, command in COMMANDS.items()]
    return Reply("\n".join([*rows, *KEYS]))


def _set(session: Session, text: str) -> Reply:
    name, _, value = text.partition(" ")
    if not name:
        return Reply("\n".join(f"  {name:<18} {getattr(session.params, name)!r}" for name in SETTINGS))
    if not value:
        raise ChatError(f"/set {name} needs a value, or default")
    session.set(name, value.strip())
    return Reply(f"{name} is {getattr(session.params, name)!r}")


def _show(session: Session, _: str) -> Reply:
    name, models = session.llm.built.config.model, session.llm.built.models
    return Reply(
        f"  model              {name}: {models.model_config.architecture}, {models.num_parameters / 1e6:,.0f} M parameters\n"
        f"  context            {session.llm.engine.max_model_len} tokens\n"
        f"{_set(session, '').words}\n"
        f"  system message     {session.system or 'none'}"
    )


def _system(session: Session, text: str) -> Reply:
    if not text:
        return Reply(f"the system message is: {session.system}" if session.system else "there is no system message")
    session.system = text
    return Reply("the system message is set")


def _retry(session: Session, _: str) -> Reply:
    return Reply(answer=session.retry())


def _reset(session: Session, _: str) -> Reply:
    session.reset()
    return Reply("the conversation is forgotten" + ("; the system message stays" if session.system else ""))


def _bye(_: Session, __: str) -> Reply:
    return Reply(is_over=True)


COMMANDS = {
    "/help": Command("", "this list; so does ?", _help),
    "/show": Command("", "the model, its context, the settings and the system message", _show),
    "/set": Command("NAME VALUE", "a sampling parameter; /set alone lists them, the value default gives it back", _set),
    "/system": Command("TEXT", "the system message, from the next answer on", _system),
    "/retry": Command("", "another answer to the last message", _retry),
    "/reset": Command("", "forget the conversation", _reset),
    "/bye": Command("", "leave; so does Ctrl-D", _bye),
}
OTHER_NAMES = {"/?": "/help", "/clear": "/reset", "/exit": "/bye", "/quit": "/bye"}
KEYS = (
    '  """                begins and ends a message of several lines',
    "  Alt-Enter          a new line in a message; a pasted text is one message",
    "  Ctrl-C             stops the answer, or clears the line; twice: leave",
)
