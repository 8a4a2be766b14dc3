"""An answer that comes in pieces is drawn as the markdown that it is, and nothing is lost where it ends early."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.markdown import Markdown

from nanoengine.serve.chat.answer import AnswerPiece
from nanoengine.serve.chat.screen import Screen

TEXT = """Three *fruits*, and **code**:

- apples
- pears
  of two kinds

```python
def main():

    print("hello")
```

1. first

2. second

| a | b |
| - | - |
| 1 | 2 |

The end."""


def console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def drawn(pieces: Iterator[AnswerPiece]) -> str:
    own = console()
    Screen(own).draw(pieces)
    return shown(own)


def shown(own: Console) -> str:
    assert isinstance(own.file, io.StringIO)
    return "\n".join(line.rstrip() for line in own.file.getvalue().rstrip().splitlines())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_look_like_the_whole(size: int) -> None:
    whole = console()
    whole.print(Markdown(TEXT))
    pieces = (AnswerPiece(TEXT[place : place + size]) for place in range(0, len(TEXT), size))
    said = [line for line in drawn(pieces).splitlines() if line]
    assert said == [line for line in shown(whole).splitlines() if line]
    assert "*" not in "".join(said)


def test_thoughts_come_before_and_are_no_markdown() -> None:
    text = drawn(iter([AnswerPiece("*h", True), AnswerPiece("m*\n", True), AnswerPiece("**yes**")]))
    assert text.split("\n\n") == ["*hm*", "yes"]


def test_what_has_come_is_there_when_it_ends_early() -> None:
    def pieces() -> Iterator[AnswerPiece]:
        yield from (AnswerPiece("one\n\n"), AnswerPiece("tw"))
        raise KeyboardInterrupt

    own = console()
    with pytest.raises(KeyboardInterrupt):
        Screen(own).draw(pieces())
    assert shown(own) == "one\n\ntw"


def test_codes_of_a_terminal_are_not_obeyed() -> None:
    assert drawn(iter([AnswerPiece("a\033]0;title\007b")])) == "a]0;titleb"


def test_a_text_longer_than_the_terminal_is_there_as_a_whole() -> None:
    own = Console(file=io.StringIO(), width=40, height=10, force_terminal=True)
    Screen(own).draw(AnswerPiece(f"line {number}  \n") for number in range(50))
    at_last = shown(own).rpartition("line 0\n")[2]  # frames before it show no more than the terminal has room for
    assert [line for line in at_last.splitlines() if line.startswith("line")] == [f"line {i}" for i in range(1, 50)]
