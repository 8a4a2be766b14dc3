"""Door: makes requests, and checks what can be checked only beside a model and its tokenizer, before anything runs.

A value that a layer below could not hold must not get past here: on a GPU, a token id outside the vocabulary would end the
process, and all requests with it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Protocol

from nanoengine.engine.beam_search import BeamRequest, BeamSearch, num_candidates
from nanoengine.engine.request import Request
from nanoengine.engine.scheduler import Scheduler
from nanoengine.errors import InvalidPrompt, InvalidRequest, InvalidSamplingParams, shown
from nanoengine.sampling_params import MAX_BAD_WORDS, BeamSearchParams, SamplingParams

MAX_BAD_WORD_TOKENS = 1024
"""Tokens of all bad words of a request, with and without a space before them."""

MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1


class Encoder(Protocol):
    """Text to ids."""

    def encode(self, text: str) -> list[int]: ...


class Tokenizer(Encoder, Protocol):
    """What the engine needs of a tokenizer: text to ids and back."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Door:
    """Where requests come in. Whatever gets past it, no layer below has to refuse.

    Args:
        scheduler: how long a sequence may be, and how many may run.
        tokenizer: text to ids and back.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a sequence, unless its params ignore them.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> Request:
        """See `LLMEngine.make_request`."""
        for field, name in (("cache_salt", cache_salt), ("client", client)):
            if not isinstance(name, str) or not name.isprintable():
                raise InvalidRequest(f"{field} is {shown(name)}: it must be a string of printable characters")
        priority = check_priority(priority)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidSamplingParams(f"sampling_params must be SamplingParams, not {params!r}")
        limit = self.scheduler.max_model_len
        bad_words = resolve_bad_words(params.bad_words, self.tokenizer, self.vocab_size)
        eos = () if params.ignore_eos else self.eos_token_ids
        stops = (*eos, *params.stop_token_ids)
        check_params(params, self.vocab_size, limit, stop_token_ids=stops, bad_words=bad_words)
        text = prompt if isinstance(prompt, str) else None
        token_ids = check_prompt(prompt, self.tokenizer, self.vocab_size, limit)
        return Request(
            request_id,
            text,
            token_ids,
            params,
            cache_salt=cache_salt,
            priority=priority,
            client=client,
            bad_words=bad_words,
        )

    def beam_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: BeamSearchParams,
        priority: int = 0,
        client: str = "",
    ) -> BeamRequest:
        """See `LLMEngine.make_beam_request`."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidSamplingParams(f"params must be BeamSearchParams, not {params!r}")
        scheduler, width = self.scheduler, params.beam_width
        eos = () if params.ignore_eos else self.eos_token_ids
        sampling = params.sampling(num_candidates(params, eos))
        if width > scheduler.max_num_seqs:
            raise InvalidSamplingParams(
                f"beam_width is {width}, but max_num_seqs is {scheduler.max_num_seqs}: raise it"
            )
        request = self.request(request_id, prompt, sampling, priority=priority, client=client)
        length = min(len(request.prompt_token_ids) + params.max_tokens, scheduler.max_model_len)
        manager = scheduler.block_manager
        needed = width * manager.groups.blocks_at_once(length)
        if needed > manager.pool.num_blocks:
            raise InvalidSamplingParams(
                f"{width} beams of {length} tokens take {needed} blocks, but the KV pool has "
                f"{manager.pool.num_blocks}: lower beam_width or max_tokens, or raise num_kv_blocks or kv_cache_memory"
            )
        return BeamRequest(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            params=sampling,
            priority=request.priority,
            client=request.client,
            search=BeamSearch(params, eos, length - len(request.prompt_token_ids)),
            decode=self.tokenizer.decode,
        )


def check_priority(priority: object) -> int:
    """A priority as a plain integer.

    Raises:
        InvalidRequest: it is none, or needs more than 64 bits.
    """
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise InvalidRequest(f"priority must be an integer, not {shown(priority)}")
    number = operator.index(priority)
    if not MIN_PRIORITY <= number <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {shown(number)}: it must be at least {MIN_PRIORITY} and at most {MAX_PRIORITY}"
        )
    return number


def check_params(
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    *,
    stop_token_ids: Iterable[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
) -> None:
    """Check params against the model.

    Args:
        params: of one request.
        vocab_size: token ids are below it.
        max_model_len: tokens of the longest sequence.
        stop_token_ids: all that end its sequences: the model's end-of-text tokens that count, and those of the params.
        bad_words: as `resolve_bad_words` returns them.

    Raises:
        InvalidSamplingParams: token ids outside the vocabulary; a min_tokens that no sequence can reach; or nothing to sample at
            the start, as every allowed token is a bad word by itself, or ends the sequence before min_tokens.
    """
    of_fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": dict(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for field, token_ids in of_fields.items():
        for token in token_ids:
            if token >= vocab_size:
                raise InvalidSamplingParams(f"{field} holds {token}: the vocabulary ends at {vocab_size - 1}")
    if params.min_tokens >= max_model_len:
        raise InvalidSamplingParams(
            f"min_tokens is {params.min_tokens}, but max_model_len, in which the prompt counts too, is {max_model_len}: lower "
            "the one or raise the other"
        )
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(stop_token_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if len(banned) >= len(allowed) and banned.issuperset(allowed):
        raise InvalidSamplingParams(
            f"bad_words and min_tokens forbid each of the {len(allowed)} tokens that may be sampled at all: allow more by "
            "allowed_token_ids, or forbid less"
        )


def resolve_bad_words(bad_words: Sequence[str], tokenizer: Encoder, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids: each as it stands at the start of a text, and as it stands behind a space.

    The latter only if the space makes another first token of it and no more tokens, as vLLM has it: elsewhere its tokens end with
    those of the former.

    Raises:
        InvalidSamplingParams: a word without tokens, with tokens outside the vocabulary, or too much of them all.
    """
    if not bad_words:
        return ()
    added = tokenizer.encode("")
    resolved: list[tuple[int, ...]] = []
    for word in bad_words:
        try:
            bare, spaced = (_own_tokens(tokenizer.encode(space + word.lstrip()), added) for space in ("", " "))
        except InvalidPrompt as error:
            raise InvalidSamplingParams(f"bad_words holds {word!r}, which is not valid Unicode") from error
        if not bare:
            raise InvalidSamplingParams(f"bad_words holds {word!r}, which has no tokens: leave it out")
        resolved.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            resolved.append(spaced)
        outside = [token for tokens in resolved for token in tokens if token >= vocab_size]
        if outside:
            raise InvalidSamplingParams(
                f"bad_words holds {word!r} with token {outside[0]}: the vocabulary ends at {vocab_size - 1}"
            )
    words = tuple(dict.fromkeys(resolved))
    if len(words) > MAX_BAD_WORDS:
        raise InvalidSamplingParams(
            f"bad_words holds {len(bad_words)} words, which are {len(words)} with and without a space before them: at most "
            f"{MAX_BAD_WORDS} can be"
        )
    num_tokens = sum(map(len, words))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidSamplingParams(
            f"bad_words holds words of {num_tokens} tokens in all: at most {MAX_BAD_WORD_TOKENS} can be"
        )
    return words


def check_prompt(prompt: str | Sequence[int], tokenizer: Encoder, vocab_size: int, max_model_len: int) -> list[int]:
    """The token ids of a prompt.

    Raises:
        InvalidPrompt: neither text nor token ids, empty, too long for `max_model_len`, or token ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple):
        token_ids = list(prompt)
    else:
        raise InvalidPrompt(f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}")
    if not token_ids:
        raise InvalidPrompt("the prompt is empty: it must have at least one token")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidPrompt(f"the prompt holds {token!r}: token ids must be integers")
        if not 0 <= token < vocab_size:
            raise InvalidPrompt(f"the prompt holds token id {token}: the vocabulary is 0 to {vocab_size - 1}")
    if len(token_ids) >= max_model_len:
        raise InvalidPrompt(
            f"the prompt has {len(token_ids)} tokens, but max_model_len is {max_model_len}: "
            f"at most {max_model_len - 1} leave room for a new one; shorten it or raise max_model_len"
        )
    return token_ids


def _own_tokens(token_ids: Sequence[int], added: Sequence[int]) -> tuple[int, ...]:
    """Without those that the tokenizer adds to any text, at its start and behind it."""
    first = 0
    while first < min(len(added), len(token_ids)) and token_ids[first] == added[first]:
        first += 1
    return tuple(token_ids[first : len(token_ids) - (len(added) - first)])
