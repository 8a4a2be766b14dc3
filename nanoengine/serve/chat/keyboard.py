"""The keyboard: a line editor with history, and a terminal without echo while an answer is drawn."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings

from nanoengine.models.fetch import models_folder
from nanoengine.serve.chat.commands import COMMANDS, is_open

BRACKETED_PASTE = "\033[?2004h"


def history_file() -> Path:
    """The file with the messages of earlier chats, which only its user may read."""
    path = models_folder().parent / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    return path


def line_editor() -> PromptSession[str]:
    """The editor for messages. A paste of several lines is one message; Enter sends it, unless its triple quotes are open."""
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession(
        ">>> ",
        history=FileHistory(str(history_file())),
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        key_bindings=keys,
        prompt_continuation="... ",
    )


@contextmanager
def silent() -> Iterator[None]:
    """Keys are stored for the next prompt and not shown meanwhile, a paste as one; Ctrl-C still interrupts."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    changed = termios.tcgetattr(terminal)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    changed[0] &= ~termios.ICRNL  # Enter stays Enter
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
        sys.stdout.write(BRACKETED_PASTE)
        sys.stdout.flush()
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
