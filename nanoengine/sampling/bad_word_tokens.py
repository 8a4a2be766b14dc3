"""Bad words as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, shown

MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
"""Tokens of all bad words of a request, with and without a space before them."""

Encode = Callable[[str], list[int]]


def bad_word_tokens(words: Iterable[str], encode: Encode, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word as it stands at the start of a text, and as it stands behind a space.

    The latter only if the space makes another first token of it and no more tokens, as vLLM has it: elsewhere its tokens end with
    those of the former.

    Raises:
        InvalidSamplingParams: a word without tokens, with tokens outside the vocabulary, or too many words or tokens.
    """
    added = encode("")
    found: list[tuple[int, ...]] = []
    for word in words:
        try:
            bare, spaced = (_own_tokens(encode(space + word.lstrip()), added) for space in ("", " "))
        except InvalidPrompt as error:
            raise InvalidSamplingParams(f"bad_words holds {shown(word)}, which is not valid Unicode") from error
        if not bare:
            raise InvalidSamplingParams(f"bad_words holds {shown(word)}, which has no tokens: leave it out")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
        outside = [token for token in (*bare, *spaced) if token >= vocab_size]
        if outside:
            raise InvalidSamplingParams(
                f"bad_words holds {shown(word)} with token {outside[0]}: the vocabulary has {vocab_size} tokens"
            )
    unique = tuple(dict.fromkeys(found))
    if len(unique) > MAX_BAD_WORDS:
        raise InvalidSamplingParams(
            f"bad_words holds words which are {len(unique)} with and without a space before them: at most {MAX_BAD_WORDS} can be"
        )
    num_tokens = sum(map(len, unique))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidSamplingParams(
            f"bad_words holds words of {num_tokens} tokens in all: at most {MAX_BAD_WORD_TOKENS} can be"
        )
    return unique


def _own_tokens(token_ids: Sequence[int], added: Sequence[int]) -> tuple[int, ...]:
    """Without those that the tokenizer adds to any text, at its start and behind it."""
    first = 0
    while first < min(len(added), len(token_ids)) and token_ids[first] == added[first]:
        first += 1
    return tuple(token_ids[first : len(token_ids) - (len(added) - first)])
