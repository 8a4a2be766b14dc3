"""The chat in a real terminal: a process of its own on a pseudo-terminal, with a model that repeats what it is given."""

from __future__ import annotations

import os
import pty
import re
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.forks import IS_LINUX, Forked
from tests.serve.chat.toys import HANG
from tests.serve.server.parrot import save_tokenizer

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="the chat is a fork of a process that has imported torch")
MOST = 120.0
"""Seconds that a test waits for what never comes."""

PROMPT, SENT = "⌨>>>", "⏎"
"""What `User` makes of the codes by which an editor says that it takes a paste as one, and that it no longer edits."""

ENTER, CTRL_C, CTRL_D, UP = "\r", "\x03", "\x04", "\x1b[A"
CODES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\[[0-9;?]*$|$)|\r")


class User:
    """Types, and reads what is on the screen."""

    def __init__(self, folder: Path, *arguments: str):
        self.terminal, other = pty.openpty()
        variables = {"XDG_CACHE_HOME": str(folder), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = Forked(
            ["-m", "tests.serve.chat.talk", str(folder / "parrot"), *arguments],
            streams=(other, other, other),
            environment=os.environ | variables,
            own_session=True,
        )
        os.close(other)
        self.raw, self.num_read = b"", 0

    def reads(self, text: str) -> str:
        """What appears until a text is there, codes left out."""
        end = monotonic() + MOST  # of all: an answer that hangs is drawn again and again
        while text not in (screen := self._screen()):
            left = max(end - monotonic(), 0)
            assert select.select([self.terminal], [], [], left)[0], f"no {text!r} behind {screen[-2000:]!r}"
            try:
                self.raw += os.read(self.terminal, 1 << 16)
            except OSError:  # Linux' way of saying that it is closed
                raise AssertionError(f"it has ended, without {text!r}: {screen[-2000:]!r}") from None
        self.num_read += screen.index(text) + len(text)
        return screen.partition(text)[0]

    def _screen(self) -> str:
        """All that was not read yet."""
        text = self.raw.decode(errors="ignore").replace("\x1b[?2004h", "⌨").replace("\x1b[?2004l", "⏎")
        return CODES.sub("", text)[self.num_read :]

    def types(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def says(self, text: str) -> str:
        """What comes of a line, up to the next prompt."""
        self.types(text + ENTER)
        self.reads(SENT)
        return self.reads(PROMPT)

    def status(self) -> int:
        """What the process ends with; nobody types any more."""
        while True:  # or what it still writes would hold it up
            try:
                if not os.read(self.terminal, 1 << 16):
                    break
            except OSError:
                break
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        os.close(self.terminal)


NewUser = Callable[..., User]


@pytest.fixture
def new_user(tmp_path: Path) -> Iterator[NewUser]:
    """In front of a prompt."""
    made: list[User] = []
    save_tokenizer(tmp_path / "parrot")

    def new(*arguments: str) -> User:
        made.append(User(tmp_path, *arguments))
        made[-1].reads(PROMPT)
        return made[-1]

    yield new
    for user in made:
        user.close()


def test_a_chat(new_user: NewUser, tmp_path: Path) -> None:
    """An empty line, a paste, commands, an answer stopped in the middle, history, and the end by Ctrl-D."""
    user = new_user("--system", "Be brief")
    user.says("")

    user.types("\x1b[200~one\ntwo\nthree\x1b[201~")
    user.reads("three")
    user.types(ENTER)
    shown = user.reads("prompt tokens were cached")
    assert re.search(r"\d+ tok/s, \d+ ms to the first token, \d+ of \d+ $", shown), shown
    user.reads(PROMPT)
    assert "system Be brief user one two three" in " ".join(shown.split()), shown

    assert "forgotten" in user.says("/reset")
    for line in ('"""', "four"):
        user.types(line + ENTER)
        user.reads("...")
    assert "user four five" in " ".join(user.says('five"""').split())

    assert "did you mean /reset?" in user.says("/rest")
    assert "/system TEXT" in user.says("?")
    assert "forgotten" in user.says("/reset")

    user.types(f"a message that will {HANG}" + ENTER)
    user.reads(SENT)
    user.reads("Be brief")  # in the answer
    user.types("unheard")
    user.types(CTRL_C)
    shown = user.reads("stopped.") + user.reads(PROMPT)
    assert "unheard" not in shown
    assert "prompt tokens were cached" in shown
    user.says("/reset")

    user.says("again")
    assert "assistant user user again" in " ".join(user.says(UP).split()), "it is asked once more"
    user.types(CTRL_D)
    assert user.status() == 0
    assert stat.S_IMODE((tmp_path / "nanoengine" / "chat_history").stat().st_mode) == 0o600


def test_ctrl_c_twice_leaves_in_the_middle_of_an_answer(new_user: NewUser) -> None:
    user = new_user()
    user.types(HANG + " for a long while" + ENTER)
    user.reads(SENT)
    user.reads("user")
    user.types(CTRL_C)
    user.reads("stopped. Ctrl-C again")
    user.reads(PROMPT)
    user.types(CTRL_C)
    assert user.status() == 0


def test_ctrl_c_at_a_prompt_clears_a_line_then_says_how_to_leave_then_leaves(new_user: NewUser) -> None:
    user = new_user()
    user.types("words")
    user.reads("words")
    user.types(CTRL_C)
    assert "Ctrl-C again" not in user.reads(PROMPT)
    user.types(CTRL_C)
    user.reads("Ctrl-C again, Ctrl-D or /bye leaves.")
    user.reads(PROMPT)
    assert "user hello" in " ".join(user.says("hello").split()), "it is forgotten that the user may leave"
    user.types(CTRL_C)
    user.reads("Ctrl-C again")
    user.reads(PROMPT)
    user.types(CTRL_C)
    assert user.status() == 0
