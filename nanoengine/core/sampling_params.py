"""SamplingParams: how the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from nanoengine.core.errors import InvalidSamplingParams, shown
from nanoengine.core.outputs import CompletionOutput

MAX_INT32 = 2**31 - 1
MAX_COMPLETIONS = 16384
MAX_STOP_CHARS = 4096


class ModelFacts(Protocol):
    """What parameters are checked against beside a model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names and meanings follow vLLM. Numbers of numpy are taken too; fields hold plain Python values.

    Args:
        n: completions of the prompt.
        temperature: 0 is greedy (the likeliest token); otherwise logits are divided by it. Below 1e-5 it counts as 1e-5.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest one; 0 keeps all.
        seed: makes the request's choices repeatable, whatever else the engine runs. None: drawn by the engine.
        max_tokens: most new tokens; None: up to the model's length.
        stop: strings that end the text.
        stop_token_ids: tokens that end it.
        ignore_eos: the model's end-of-text tokens end nothing.
        include_stop_str_in_output: the text ends behind its stop, and not before it.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.keep("n", integer("n", self.n, 1, MAX_COMPLETIONS))
        self.keep("temperature", number("temperature", self.temperature, 0.0, 100.0))
        if self.temperature:
            self.keep("temperature", max(self.temperature, 1e-5))
        self.keep("top_k", integer("top_k", self.top_k, -1, MAX_INT32))
        self.keep("top_p", number("top_p", self.top_p, 0.0, 1.0, above=True))
        self.keep("min_p", number("min_p", self.min_p, 0.0, 1.0))
        self.keep("seed", optional("seed", self.seed, -(2**63), 2**64 - 1))
        self.keep("max_tokens", optional("max_tokens", self.max_tokens, 1, MAX_INT32))
        self.keep("stop", strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidSamplingParams(f"stop holds a string of {longest} characters: at most {MAX_STOP_CHARS} can be")
        self.keep("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self.check_bool(field)

    def keep(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def check_bool(self, field: str) -> None:
        if not isinstance(getattr(self, field), bool):
            raise InvalidSamplingParams(f"{field} must be True or False, not {shown(getattr(self, field))}")

    # ---- what capabilities override

    @property
    def num_sequences(self) -> int:
        """Completions that are made, of which n are returned."""
        return self.n

    def for_model(self, model: ModelFacts) -> SamplingParams:
        """These parameters, checked against a model.

        Raises:
            InvalidSamplingParams: token ids outside the vocabulary.
        """
        self.check_vocabulary("stop_token_ids", self.stop_token_ids, model)
        return self

    def check_vocabulary(self, field: str, tokens: Iterable[int], model: ModelFacts) -> None:
        for token in tokens:
            if token >= model.vocab_size:
                raise InvalidSamplingParams(f"{field} holds {token}: the vocabulary has {model.vocab_size} tokens")

    def may_stop(self, num_output_tokens: int) -> bool:
        """Whether a stop string may end a text of so many tokens."""
        return True

    def choose(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The completions to return, of all that were made."""
        return outputs

    def shown_logprobs(self, logprobs: list[Any] | None, tokens: list[int]) -> tuple[list[Any] | None, float | None]:
        """What to return of the collected log probabilities of some tokens: those themselves, and their sum."""
        return None, None


# ---- checks of values; each returns plain Python values


def items(field: str, value: object) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise InvalidSamplingParams(f"{field} must be a list, not {shown(value)}")
    return list(value)


def strings(field: str, value: object) -> tuple[str, ...]:
    found = items(field, value)
    for string in found:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingParams(
                f"{field} holds {shown(string)}: each must be a string of at least one character"
            )
    return tuple(map(str, found))


def token_ids(field: str, value: object) -> tuple[int, ...]:
    """Each of them once."""
    return tuple(dict.fromkeys(integer(field, token, 0, MAX_INT32) for token in items(field, value)))


def number(field: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidSamplingParams(f"{field} must be a number, not {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not low <= found <= high or (above and found == low):
        least = "above" if above else "at least"
        raise InvalidSamplingParams(f"{field} is {shown(value)}: it must be {least} {low} and at most {high}")
    return found


def integer(field: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidSamplingParams(f"{field} must be an integer, not {shown(value)}")
    found = operator.index(value)
    if found < low or (high is not None and found > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidSamplingParams(f"{field} is {shown(found)}: it must be {limit}")
    return found


def optional(field: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else integer(field, value, low, high)
