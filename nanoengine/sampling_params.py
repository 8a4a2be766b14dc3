"""SamplingParams: how the tokens of one request are chosen, and when to stop.

Values are checked here against what every layer below can hold; what depends on the model is checked in engine/door.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from nanoengine.errors import InvalidSamplingParams

MAX_LOGPROBS = 20
"""Likeliest tokens that a request can ask for, at each position."""

MAX_CANDIDATES = 100
"""Likeliest tokens that a beam search looks at, of each of its beams."""

MAX_COMPLETIONS = 16384
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_STOP_CHARS = 4096
"""Of each string that ends the text."""

MAX_INT32 = 2**31 - 1
"""Positions and top_k have 32 bits on the device."""

LEAST_REPETITION_PENALTY = 1e-5
"""Below it a logit divided by the penalty might leave float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names and meanings follow vLLM.

    The order is fixed: what may not be sampled (`allowed_token_ids`, `bad_words`, the `min_tokens` ban), logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty; then temperature, top_k, top_p, min_p, of which the last three mean
    nothing where the temperature is 0. Numbers of numpy are taken too; fields hold plain Python values.

    Args:
        temperature: 0 is greedy (always the likeliest token); otherwise logits are divided by it. Below 1e-5 it counts as 1e-5.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all, as any k does that is not below the size of the vocabulary.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest one; 0 keeps all.
        presence_penalty: subtracted from the logit of every token that is in the output; -2 to 2.
        frequency_penalty: subtracted from the logit of a token as often as it is in the output; -2 to 2.
        repetition_penalty: the logit of every token in the prompt or the output is divided by it, or multiplied where it is
            negative; above 0 and at most 2.
        logit_bias: {token id: what is added to its logit}; -100 to 100. Kept as pairs, by token id.
        allowed_token_ids: no other tokens are sampled. None: all may be.
        bad_words: strings that are not generated. Of each, as the tokenizer writes it at the start of a text and behind a space,
            the last token is not sampled where the others stand before it in the output.
        seed: makes the request's choices repeatable, whatever else the engine runs. None: drawn by the engine.
        max_tokens: at most this many new tokens; None: up to the model's length.
        min_tokens: no end-of-text, stop token or stop string before this many new tokens.
        stop: a string or strings that end the text; they are cut off from it, unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the sequence, besides the model's own end-of-text tokens.
        ignore_eos: treat the model's end-of-text tokens like any others.
        include_stop_str_in_output: the text ends behind the stop string, or the text of the token, that ended it.
        skip_special_tokens: special tokens, such as an end of text, have no text. False: they are in the text as the tokenizer
            writes them, and stop strings may match them.
        speculate: where the engine speculates, guess ahead for this request too. Its tokens are the same either way.
        n: number of completions per prompt.
        best_of: make this many completions, and report the n of the highest cumulative log probability, best first. None: n.
        logprobs: report the log probability of each chosen token and of this many likeliest ones (0: the chosen only).
            They are the model's own: before penalties, bias, temperature and filters.
        prompt_logprobs: the same for the tokens of the prompt, but for the first, which nothing predicts.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Seq[tuple[int, float]] = ()
    allowed_token_ids: Seq[int] | None = None
    bad_words: Seq[str] = ()
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculate: bool = True
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._keep("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        self._keep("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        self._keep("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._keep("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._keep("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._keep(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 2.0),
        )
        self._keep("top_k", _integer("top_k", self.top_k, -1, MAX_INT32))
        self._keep("n", _integer("n", self.n, 1, MAX_COMPLETIONS))
        self._keep("best_of", _optional("best_of", self.best_of, self.n, MAX_COMPLETIONS))
        self._keep("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_INT32))
        self._keep("max_tokens", _optional("max_tokens", self.max_tokens, 1, MAX_INT32))
        self._keep("seed", _optional("seed", self.seed, -(2**63), 2**64 - 1))
        self._keep("logprobs", _optional("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        self._keep("prompt_logprobs", _optional("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS))
        self._keep("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        for stop in self.stop:
            if len(stop) > MAX_STOP_CHARS:
                raise InvalidSamplingParams(
                    f"stop holds a string of {len(stop)} characters: it must be at most {MAX_STOP_CHARS}"
                )
        self._keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._keep("logit_bias", _biases(self.logit_bias))
        self._keep("bad_words", tuple(dict.fromkeys(_strings("bad_words", self.bad_words))))
        if self.allowed_token_ids is not None:
            self._keep("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidSamplingParams("allowed_token_ids is empty: None allows all tokens")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidSamplingParams(f"bad_words holds {len(self.bad_words)} words: at most {MAX_BAD_WORDS} can be")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower the one or raise the other"
            )
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculate"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidSamplingParams(f"{field} must be True or False, not {getattr(self, field)!r}")

    def _keep(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs the sampler has to report: those asked for, or the chosen token's to find the best of them."""
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    @property
    def num_sequences(self) -> int:
        """Completions that are made, of which n are reported."""
        return self.n if self.best_of is None else self.best_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for the likeliest continuations. Names and meanings follow vLLM and transformers.

    Args:
        beam_width: continuations that are kept in each step, and reported at the end.
        max_tokens: at most this many new tokens.
        length_penalty: the score of a beam is its log probability divided by its length to this power: above 0 favours
            long beams, below 0 short ones.
        early_stopping: when to stop once `beam_width` beams are finished. True: at once. False: when the best running
            beam would not be among them if it ended now. "never": when it could not be at any length.
        ignore_eos: treat the model's end-of-text tokens like any others.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    beam_width: int
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, 1))
        object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_INT32))
        object.__setattr__(self, "length_penalty", _number("length_penalty", self.length_penalty, -10.0, 10.0))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingParams(f"early_stopping is {self.early_stopping!r}: it must be True, False or 'never'")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingParams(f"ignore_eos must be True or False, not {self.ignore_eos!r}")

    def sampling(self, num_candidates: int) -> SamplingParams:
        """How each beam is sampled: for the log probabilities of its likeliest next tokens, which may be more than the requests
        of users can ask for.

        Raises:
            InvalidSamplingParams: more than `MAX_CANDIDATES`.
        """
        if num_candidates > MAX_CANDIDATES:
            raise InvalidSamplingParams(
                f"beam_width is {self.beam_width}: its {num_candidates} candidates a step (beams x (1 + end-of-text tokens), at "
                f"least 2 a beam) are more than {MAX_CANDIDATES}: lower it"
            )
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, n=self.beam_width)
        object.__setattr__(params, "logprobs", num_candidates)
        return params


def _items(field: str, value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise InvalidSamplingParams(f"{field} must be a list, not {value!r}")
    return list(value)


def _strings(field: str, value: object) -> tuple[str, ...]:
    strings = _items(field, value)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingParams(
                f"{field} holds {string!r}: every one must be a string of at least one character"
            )
    return tuple(map(str, strings))


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    """Each of them once."""
    return tuple(dict.fromkeys(_integer(field, token, 0, MAX_INT32) for token in _items(field, value)))


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs, in the order of their token ids: equal values are equal params."""
    pairs = list(value.items()) if isinstance(value, Mapping) else _items("logit_bias", value)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidSamplingParams(f"logit_bias holds {pair!r}: it must be {{token id: bias}}")
        token = _integer("logit_bias: token id", pair[0], 0, MAX_INT32)
        if token in biases:
            raise InvalidSamplingParams(f"logit_bias holds token id {token} twice: every token has one bias")
        biases[token] = _number(f"logit_bias: bias of token {token}", pair[1], -100.0, 100.0)
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidSamplingParams(f"logit_bias holds {len(biases)} tokens: at most {MAX_LOGIT_BIAS} can have a bias")
    return tuple(sorted(biases.items()))


def _number(field: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidSamplingParams(f"{field} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high or (above and number == low):
        raise InvalidSamplingParams(
            f"{field} is {value}: it must be {'above' if above else 'at least'} {low} and at most {high}"
        )
    return number


def _integer(field: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidSamplingParams(f"{field} must be an integer, not {value!r}")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidSamplingParams(f"{field} is {value}: it must be {limit}")
    return number


def _optional(field: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(field, value, low, high)
