"""The shapes of log probabilities, with a tokenizer that writes a character in several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.sampling.token_logprobs import TokenLogprob
from nanoengine.server.logprobs import LEAST, LogprobShapes
from nanoengine.server.text import TokenTexts


class Bytes:
    """Token i is byte i."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


def shapes(as_ids: bool = False) -> LogprobShapes:
    return LogprobShapes(TokenTexts(cast(ModelTokenizer, Bytes())), as_ids)


def entry(**ranks: int) -> dict[int, TokenLogprob]:
    """{letter: rank}; the log probability is minus the rank."""
    return {ord(letter): TokenLogprob(-float(rank), rank) for letter, rank in ranks.items()}


def test_a_completion_names_its_tokens_with_their_places() -> None:
    made = shapes().completion([97, 98], [None, entry(b=3, c=1, d=2)], 2, offset=5)
    assert made == {
        "text_offset": [5, 6],
        "token_logprobs": [None, -3.0],
        "tokens": ["a", "b"],
        "top_logprobs": [None, {"b": -3.0, "c": -1.0, "d": -2.0}],
    }
    assert shapes().completion([98], [entry(b=3, c=1, d=2)], 0)["top_logprobs"] == [{"b": -3.0}]
    assert shapes().completion([], [], 1)["text_offset"] == []


def test_a_character_of_several_tokens_is_named_where_it_is_whole() -> None:
    text = "a€b"
    ids = list(text.encode())
    entries = [{i: TokenLogprob(-1.0, 1)} for i in ids]
    for cut in range(len(ids) + 1):  # as a stream may be
        before = shapes().completion(ids[:cut], entries[:cut], 1)["tokens"]
        after = shapes().completion(ids[cut:], entries[cut:], 1, before=ids[max(0, cut - 4) : cut])["tokens"]
        assert [*before, *after] == ["a", "", "", "€", "b"]


def test_a_chat_has_bytes_and_as_many_alternatives_as_were_asked_for() -> None:
    (made,) = shapes().chat([98], [entry(b=3, c=1, d=2)], 2)["content"]
    assert (made["token"], made["logprob"], made["bytes"]) == ("b", -3.0, [98])
    assert [top["token"] for top in made["top_logprobs"]] == ["b", "c"]


def test_tokens_may_be_called_by_their_ids() -> None:
    assert shapes(as_ids=True).completion([98], [entry(b=1)], 1)["tokens"] == ["token_id:98"]


def test_what_json_cannot_hold_is_its_least_number() -> None:
    never: dict[int, Any] = {98: TokenLogprob(float("-inf"), 9)}
    assert shapes().completion([98], [never], 0)["token_logprobs"] == [LEAST]
    assert shapes().prompt([97, 98], [None, never]) == [
        None,
        {"98": {"logprob": LEAST, "rank": 9, "decoded_token": "b"}},
    ]
