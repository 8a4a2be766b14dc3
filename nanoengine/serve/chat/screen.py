"""Screen: draws an answer while it comes, as markdown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from nanoengine.serve.chat.answer import AnswerPiece
from nanoengine.serve.chat.markdown import final_length, printable

FRAMES_PER_SECOND = 15


class Screen:
    """Whole blocks are printed once; the last block, which grows, is drawn again and again by a thread of rich."""

    def __init__(self, console: Console):
        self.console = console
        self._text, self._is_thought, self._has_printed = "", False, False

    def draw(self, pieces: Iterable[AnswerPiece]) -> None:
        """Draw all pieces; if the iterator ends early, the pieces so far are on the screen."""
        self._text, self._is_thought, self._has_printed = "", False, False
        with Live(self, console=self.console, refresh_per_second=FRAMES_PER_SECOND, transient=True):
            try:
                for piece in pieces:
                    self._add(piece)
            finally:
                self._print(len(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last lines of the growing block, as many as the terminal can draw again."""
        lines = console.render_lines(self._drawn(self._text), options, pad=False) if self._text else []
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()

    def _add(self, piece: AnswerPiece) -> None:
        if piece.is_thought != self._is_thought:
            self._print(len(self._text))
            self._is_thought = piece.is_thought
        self._text += printable(piece.text)
        if not self._is_thought and "\n" in piece.text:
            self._print(final_length(self._text))

    def _print(self, size: int) -> None:
        """Print the first characters of the growing text for the last time."""
        head, self._text = self._text[:size].strip("\n"), self._text[size:]
        if head.strip():
            if self._has_printed:
                self.console.print()
            self.console.print(self._drawn(head))
            self._has_printed = True

    def _drawn(self, text: str) -> RenderableType:
        return Text(text.strip(), style="dim italic") if self._is_thought else Markdown(text)
