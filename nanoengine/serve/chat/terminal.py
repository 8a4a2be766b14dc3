"""The chat in a terminal: read a line, do what it asks for, draw the answer."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console

from nanoengine.errors import NanoEngineError
from nanoengine.serve.chat.commands import Reply, reply
from nanoengine.serve.chat.keyboard import line_editor, silent
from nanoengine.serve.chat.markdown import printable
from nanoengine.serve.chat.screen import Screen
from nanoengine.serve.chat.session import ChatError, Session

LEAVING = "Ctrl-C again, Ctrl-D or /bye leaves."


class Terminal:
    """Talks with a user until they leave."""

    def __init__(self, session: Session):
        self.session = session
        self.console = Console(highlight=False)
        self.screen = Screen(self.console)
        self.editor = line_editor()
        self._may_leave = False  # the last key was Ctrl-C

    def run(self) -> None:
        """Talk until the user leaves."""
        self._say("Type a message. /help lists commands, /bye leaves.")
        try:
            while (line := self._read()) is not None and self._does(line):
                pass
        except KeyboardInterrupt:  # a second one, while the first was dealt with
            self.console.show_cursor()
            self.console.print()

    def _read(self) -> str | None:
        """A line; empty after Ctrl-C; None: the user leaves."""
        try:
            line: str = self.editor.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if self.editor.default_buffer.text:  # it cleared a line
                return ""
            if self._may_leave:
                return None
            self._may_leave = True
            self._say(LEAVING)
            return ""
        if line.strip():
            self._may_leave = False
        return line

    def _does(self, line: str) -> bool:
        """Whether the chat goes on."""
        if not line.strip():
            return True
        done, num_answers, num_left_out = Reply(), len(self.session.stats), self.session.num_left_out
        try:
            with silent():
                done = reply(self.session, line)
                if (count := self.session.num_left_out) > num_left_out:
                    self._say(
                        f"The context is full: the model no longer reads the first {count} messages. /reset begins anew."
                    )
                if done.answer is not None:
                    with closing(done.answer):
                        self.screen.draw(done.answer)
        except KeyboardInterrupt:
            self._may_leave = True
            self._say(f"stopped. {LEAVING}")
        except (ChatError, NanoEngineError) as error:
            self.console.print(printable(str(error)), style="red", markup=False)
            return True
        if len(self.session.stats) > num_answers:
            self._say(str(self.session.stats[-1]))
        if done.words:
            self._say(printable(done.words))
        return not done.is_over

    def _say(self, words: str) -> None:
        self.console.print(words, style="dim", markup=False)
