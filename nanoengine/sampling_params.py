"""SamplingParams: how the tokens of one request are chosen, and when to stop."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidSamplingParams

MAX_LOGPROBS = 100
MAX_COMPLETIONS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names and meanings follow vLLM.

    The order of the filters is fixed: `min_tokens` ban, temperature, top_k, top_p, min_p.

    Args:
        temperature: 0 is greedy (always the likeliest token); otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest one; 0 keeps all.
        seed: makes the request's choices repeatable, whatever else the engine runs. None: drawn by the engine.
        max_tokens: at most this many new tokens; None: up to the model's length.
        min_tokens: no end-of-text, stop token or stop string before this many new tokens.
        stop: a string or strings that end the text; they are cut off from it.
        stop_token_ids: tokens that end the sequence, besides the model's own end-of-text tokens.
        ignore_eos: treat the model's end-of-text tokens like any others.
        n: number of completions per prompt.
        best_of: make this many completions, and report the n of the highest cumulative log probability, best first. None: n.
        logprobs: report the log probability of each chosen token and of this many likeliest ones (0: the chosen only).
            They are the model's own: before temperature and filters.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingParams(f"ignore_eos must be True or False, not {self.ignore_eos!r}")

        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1)
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_COMPLETIONS)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidSamplingParams(
                    f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower the one or raise the other"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise InvalidSamplingParams(
                    f"stop holds {string!r}: every stop must be a string of at least one character"
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs the sampler has to report: those asked for, or the chosen token's to find the best of them."""
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    @property
    def num_sequences(self) -> int:
        """Completions that are made, of which n are reported."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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
        _integer("beam_width", self.beam_width, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingParams(f"early_stopping is {self.early_stopping!r}: it must be True, False or 'never'")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSamplingParams(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def _tuple(field: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidSamplingParams(f"{field} must be a list, not {value!r}")
    return tuple(value)


def _number(field: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSamplingParams(f"{field} must be a number, not {value!r}")
    if not low <= value <= high or (above and value == low):
        raise InvalidSamplingParams(
            f"{field} is {value}: it must be {'above' if above else 'at least'} {low} and at most {high}"
        )


def _integer(field: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSamplingParams(f"{field} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidSamplingParams(f"{field} is {value}: it must be {limit}")
