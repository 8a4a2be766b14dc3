"""CoreSamplingParams: sampling and stop conditions of one request."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.core.errors import InvalidSamplingParams, shown
from nanoengine.core.options import MAX_INT32, check, option
from nanoengine.core.outputs import CompletionOutput

MAX_COMPLETIONS = 16384


class ModelFacts(Protocol):
    """Facts of a model that parameters are checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSamplingParams:
    """Sampling parameters of one request. Names and meanings follow vLLM. Numbers of numpy become plain Python values.

    Args:
        n: completions of the prompt.
        temperature: 0 is greedy (the likeliest token); otherwise logits are divided by it. Below 1e-5 it counts as 1e-5.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest one, before top_k and top_p; 0 keeps all.
        top_p: of the remaining tokens, keep the fewest of the likeliest whose probability reaches top_p; 1 keeps all, 0 one.
        seed: makes the request's choices repeatable, whatever else the engine runs. None: drawn by the engine.
        max_tokens: most new tokens; None: up to the model's length.
        stop_token_ids: tokens that end it.
        ignore_eos: the model's end-of-text tokens end nothing.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    n: int = option(1, high=MAX_COMPLETIONS)
    temperature: float = option(1.0, 0, 100)
    top_k: int = option(0, -1)
    top_p: float = option(1.0, 0, 1)
    min_p: float = option(0.0, 0, 1)
    seed: int | None = option(None, -(2**63), 2**64 - 1)
    max_tokens: int | None = option(64)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check(self, InvalidSamplingParams)
        if self.temperature:  # a top_p that is 0 in float32 keeps the likeliest token alone
            self.keep("temperature", max(self.temperature, 1e-5) if self.top_p > 1e-30 else 0.0)
        self.keep("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))

    # ---- overridden by capabilities

    @property
    def num_sequences(self) -> int:
        """Completions that are made, of which n are returned."""
        return self.n

    def for_model(self, model: ModelFacts) -> CoreSamplingParams:
        """These parameters, checked against a model; raises InvalidSamplingParams for tokens outside the vocabulary."""
        self.check_vocabulary("stop_token_ids", self.stop_token_ids, model)
        return self

    def new_detokenizer(self, decode: Callable[..., str], prompt: Seq[int]) -> Detokenizer:
        """A detokenizer for a completion of these prompt tokens; see `Tokenizer.decode`."""
        return Detokenizer(decode, prompt)

    def choose(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The completions to return, of all that were made."""
        return outputs

    def returned_logprobs(self, logprobs: list[Any] | None, tokens: list[int]) -> tuple[list[Any] | None, float | None]:
        """The part of the collected log probabilities that is returned, and their sum."""
        return None, None

    def keep(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def check_vocabulary(self, field: str, tokens: Iterable[int], model: ModelFacts) -> None:
        for token in tokens:
            if token >= model.vocab_size:
                raise InvalidSamplingParams(field, f" holds {token}: the vocabulary has {model.vocab_size} tokens")


def items(field: str, value: object) -> Seq[Any]:
    """A list or another collection, but no string, nor an array without dimensions; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, Iterable) or isinstance(value, str) or getattr(value, "shape", None) == ():
        raise InvalidSamplingParams(field, f" must be a list, not {shown(value)}")
    return list(value)


def token_ids(field: str, value: object) -> tuple[int, ...]:
    """Checked token ids, without duplicates."""
    return tuple(dict.fromkeys(integer(field, token, 0, MAX_INT32) for token in items(field, value)))


def integer(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidSamplingParams(field, f" must be an integer, not {shown(value)}")
    number = operator.index(value)
    if not low <= number <= high:
        raise InvalidSamplingParams(field, f" is {shown(number)}: it must be between {low} and {high}")
    return number
