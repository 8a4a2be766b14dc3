"""Text: renders chats, encodes and decodes, in threads of its own, so that one long prompt holds nobody else up."""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from nanoengine.core.detokenizer import INCOMPLETE
from nanoengine.errors import InvalidPrompt
from nanoengine.models.tokenizer import Message, ModelTokenizer
from nanoengine.server.turns import Turns

T = TypeVar("T")

CURRENT_CLIENT = ContextVar("CURRENT_CLIENT", default="")
"""Whose request a task of the event loop answers."""

CHARS_OF_A_PIECE = 64
"""That a remembered piece counts for beside its own characters and tokens: a short one takes memory, too."""

MOST_PARTS = 4
"""Tokens before one that may be parts of the same character."""


class TextThreads:
    """A bounded pool: what is asked for beyond it waits, and the event loop goes on. One client never has all threads, if there
    are several.

    Args:
        num_threads: as many texts as are worked on at once.
    """

    def __init__(self, num_threads: int):
        self._turns = Turns(num_threads, max(1, num_threads - 1))

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a function, called in one of the threads."""
        return await self._turns.run(CURRENT_CLIENT.get(), partial(function, *args, **kwargs))

    def close(self) -> None:
        self._turns.close()


class ChatEncoder:
    """Rendered conversations to token ids; what was encoded before is remembered, message by message.

    Every turn of a chat comes with all turns before it. A tokenizer first splits a text at its special tokens, which templates
    write around messages, and what is between two of them has the same tokens wherever it stands. So a rendered chat is cut in
    front of every special token, and only pieces that were never met are encoded.

    Args:
        tokenizer: of the model.
        max_chars: characters and tokens of all pieces that are remembered; those used least recently go first.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_chars: int):
        self.tokenizer = tokenizer
        self.max_chars = max_chars
        self._num_chars = 0
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        tokens = tokenizer.added_tokens()
        if any(token.single_word for token in tokens):  # found only beside what is no letter: nothing is cut then
            tokens = []
        # Where one begins another, the tokenizer takes the longest. One that takes the blanks before it is left with them.
        found = sorted((token.content for token in tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, found))) if found and max_chars else None
        self._kept = {token.content for token in tokens if token.lstrip}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered chat; templates write all special tokens themselves, so more are added only if asked for."""
        if add_special_tokens:
            return self.tokenizer.encode(text)
        token_ids: list[int] = []
        for piece in self._cut(text):
            token_ids += self._encode_piece(piece)
        return token_ids

    def _cut(self, text: str) -> list[str]:
        if self._tokens is None:
            return [text]
        cuts = [match.start() for match in self._tokens.finditer(text) if match[0] not in self._kept]
        return [text[start:end] for start, end in itertools.pairwise(dict.fromkeys([0, *cuts, len(text)]))]

    def _encode_piece(self, piece: str) -> array[int]:
        with self._lock:
            if piece in self._pieces:
                self._pieces.move_to_end(piece)
                return self._pieces[piece]
        token_ids = array("i", self.tokenizer.encode(piece, add_special_tokens=False))
        with self._lock:
            if piece not in self._pieces:
                self._pieces[piece] = token_ids
                self._num_chars += _size(piece, token_ids)
            while self._num_chars > self.max_chars:
                self._num_chars -= _size(*self._pieces.popitem(last=False))
        return token_ids


def _size(piece: str, token_ids: array[int]) -> int:
    """What remembering a piece counts for."""
    return len(piece) + len(token_ids) + CHARS_OF_A_PIECE


def joined(message: Message) -> Mapping[str, Any]:
    """A message whose content is one text: templates of models for text alone take no parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise InvalidPrompt(f"content holds a part of type {str(kind)[:80]!r}: this model takes text")
    return {**message, "content": "\n".join(texts)}


class TokenTexts:
    """The texts of single tokens, as log probabilities name them."""

    def __init__(self, tokenizer: ModelTokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def after(self, before: Sequence[int], token: int) -> str:
        """What a token adds to the text of those before it: nothing, while a character is incomplete, then all of it."""
        text = self[token]
        if not text.endswith(INCOMPLETE):
            return text
        for count in range(1, len(before) + 1):
            whole = self._decode([*before[-count:], token])
            if not whole.endswith(INCOMPLETE):
                return whole[len(self._decode(before[-count:]).rstrip(INCOMPLETE)) :]
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
