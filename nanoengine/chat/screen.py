"""Screen: draws an answer while it comes, as markdown."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from nanoengine.chat.answer import Piece
from nanoengine.chat.markdown import printable, settled

SECONDS_OF_A_FRAME = 1 / 15


class Tail:
    """The last lines of something, as many as the terminal can redraw."""

    def __init__(self, whole: RenderableType):
        self.whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.whole, options, pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


class Screen:
    """Blocks that are whole are printed for good; the one that grows is redrawn, fifteen times a second where that is fast."""

    def __init__(self, console: Console):
        self.console = console
        self._text, self._is_thought, self._has_printed = "", False, False

    def draw(self, pieces: Iterable[Piece]) -> None:
        """All of them; where it ends early, what has come is on the screen."""
        self._text, self._is_thought, self._has_printed = "", False, False
        due = 0.0
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            try:
                for piece in pieces:
                    self._add(piece)
                    if (start := monotonic()) >= due:
                        live.update(Tail(self._drawn(self._text)), refresh=True)
                        due = monotonic() + max(SECONDS_OF_A_FRAME, 4 * (monotonic() - start))
            finally:
                live.update("", refresh=True)
                self._print(len(self._text))

    def _add(self, piece: Piece) -> None:
        if piece.is_thought != self._is_thought:
            self._print(len(self._text))
            self._is_thought = piece.is_thought
        self._text += printable(piece.text)
        if not self._is_thought and "\n" in piece.text:
            self._print(settled(self._text))

    def _print(self, size: int) -> None:
        """The first characters of what grows, for good."""
        head, self._text = self._text[:size].strip("\n"), self._text[size:]
        if head.strip():
            if self._has_printed:
                self.console.print()
            self.console.print(self._drawn(head))
            self._has_printed = True

    def _drawn(self, text: str) -> RenderableType:
        return Text(text.strip(), style="dim italic") if self._is_thought else Markdown(text)
