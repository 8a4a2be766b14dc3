"""ChatEncoder: the token ids of rendered conversations; and the checks of their messages."""

from __future__ import annotations

import itertools
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.errors import InvalidPrompt, shown
from nanoengine.features.fair_cache import FairCache
from nanoengine.models.tokenizer import Message, ModelTokenizer
from nanoengine.serve.server.errors import APIError

CHARS_OF_A_PIECE = 64
"""Added to the characters and tokens of each remembered piece: a short one takes memory, too."""

MAX_MARK_CHARS = 128
"""The longest special token in front of which chats are cut."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatEncoder:
    """Rendered conversations to token ids; what a client has had encoded before is remembered, message by message.

    Every turn of a chat comes with all turns before it. A tokenizer first splits a text at its special tokens, which templates
    write around messages, and what is between two of them has the same tokens wherever it stands. So a rendered chat is cut in
    front of every special token, and only pieces that this client has not sent before are encoded: how long that takes would tell
    it what others have sent.

    Args:
        tokenizer: of the model.
        max_chars: characters and tokens of all pieces that are remembered; see `FairCache` for what goes first.
    """

    def __init__(self, tokenizer: ModelTokenizer, max_chars: int):
        self.tokenizer = tokenizer
        self.pieces: FairCache[tuple[str, str], array[int]] = FairCache(max_chars)
        tokens = tokenizer.added_tokens()
        # A token with single_word matches only between other characters than letters: nothing is cut then.
        if any(token.single_word or len(token.content) > MAX_MARK_CHARS for token in tokens):
            tokens = []
        # The longest first, as the tokenizer matches. No cut before a token with lstrip: it takes the blanks before it.
        marks = sorted({token.content for token in tokens if token.content})
        self._tokens = re.compile(longest_of(marks)) if marks and max_chars else None
        self._with_lstrip = {token.content for token in tokens if token.lstrip}

    def encode(self, text: str, *, client: str = "", salt: str = "", add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered chat; templates write all special tokens themselves, so none are added by default.

        Args:
            text: the chat.
            client, salt: whose it is; only lookups with the same two match its pieces.
            add_special_tokens: as the tokenizer adds them to any text.
        """
        if add_special_tokens:
            return self.tokenizer.encode(text)
        token_ids: list[int] = []
        for piece in self._cut(text):
            if (known := self.pieces.get(client, (salt, piece))) is None:
                known = array("i", self.tokenizer.encode(piece, add_special_tokens=False))
                self.pieces.put(client, (salt, piece), known, len(piece) + len(known) + CHARS_OF_A_PIECE)
            token_ids += known
        return token_ids

    def _cut(self, text: str) -> list[str]:
        if self._tokens is None:
            return [text]
        cuts = [match.start() for match in self._tokens.finditer(text) if match[0] not in self._with_lstrip]
        return [text[start:end] for start, end in itertools.pairwise(dict.fromkeys([0, *cuts, len(text)]))]


def longest_of(texts: Sequence[str]) -> str:
    """A regular expression that matches the longest of some sorted texts at a position. A common prefix is compared once: a
    vocabulary may have thousands of special tokens, and a text of a client their common prefix at every position.
    """
    alternatives = []
    for _, group in itertools.groupby((text for text in texts if text), lambda text: text[0]):
        texts_of_group = list(group)
        head = os.path.commonprefix(texts_of_group)  # noqa: RUF071 - of texts
        alternatives.append(re.escape(head) + longest_of([text[len(head) :] for text in texts_of_group]))
    if not alternatives:
        return ""
    return f"(?:{'|'.join(alternatives)})" + ("?" if "" in texts else "")


def joined(message: Message) -> Mapping[str, Any]:
    """A message whose content is one text: templates of models for text alone take no parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not content and isinstance(message, Mapping) and isinstance(message.get("refusal"), str):
        content = [{"type": "refusal", "refusal": message["refusal"]}]
    if not isinstance(content, list) or not content:
        return message
    texts = []
    for part in content:
        kind = part.get("type") or "text" if isinstance(part, Mapping) else ""
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        elif isinstance(part, str):
            texts.append(part)
        else:
            only = 'this model takes text, {"type": "text", "text": ...}'
            raise InvalidPrompt("content", f" holds a part of type {shown(kind)} that has no text: {only}")
    return {**message, "content": "\n".join(texts)}


def check_turns(messages: Sequence[Message], template: str, field: str) -> None:
    """See that each message is of a role that is known, and that each result of a tool has its call before it.

    Args:
        messages: of a conversation.
        template: of the model: it may know further roles, which it has as texts.
        field: what the client calls the messages.

    Raises:
        APIError: a message has another role, or no call.
    """
    called: set[Any] = set()
    for index, message in enumerate(messages):
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES and not any(f"{q}{role}{q}" in template for q in "'\""):
            roles = f"{', '.join(ROLES)}, or one that the chat template names"
            raise APIError(400, f"{field}[{index}]: role is {shown(role)}: it must be one of {roles}", field)
        if role == "assistant" and isinstance(calls := message.get("tool_calls"), list):
            called |= {str(call.get("id")) for call in calls if isinstance(call, dict)}
        call_id = message.get("tool_call_id")
        if role == "tool" and (not called or (call_id is not None and str(call_id) not in called)):
            result = "a result of a tool" + (f" (tool_call_id {shown(call_id)})" if call_id is not None else "")
            raise APIError(400, f"{field}: {result} answers no call that a message before it has made", field)
