"""SamplingParams: the parameters of the core and those of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams, shown
from nanoengine.core.options import option
from nanoengine.core.outputs import CompletionOutput
from nanoengine.core.sampling_params import (
    MAX_COMPLETIONS,
    MAX_INT32,
    CoreSamplingParams,
    ModelFacts,
    integer,
    items,
    token_ids,
)
from nanoengine.features.sampling.stop_detokenizer import StopDetokenizer
from nanoengine.features.thought import Thought, ThoughtReader

MAX_LOGPROBS = 20
"""Most likeliest tokens of a position in a request."""

MAX_LOGIT_BIAS, MAX_BIAS = 1024, 100
MAX_STOP_CHARS = 4096
"""Most characters of all stop strings of a request: each new token is compared with as many beginnings of them."""

LEAST_REPETITION_PENALTY = 1e-5
"""Below it a logit divided by the penalty might leave float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(CoreSamplingParams):
    """How to sample one request. Names and meanings follow vLLM, or transformers where vLLM has no such field.

    The order is fixed: masks (`allowed_token_ids`, the `min_tokens` ban), logit_bias, repetition_penalty, frequency_penalty,
    presence_penalty; then temperature, top_k, top_p, min_p. The last three have no effect where the temperature is 0.

    Args, beside those of the core:
        stop: a string or strings that end the text; they are cut off from it, unless `include_stop_str_in_output`.
        include_stop_str_in_output: the text ends behind the stop string, or the text of the token, that ended it.
        skip_special_tokens: special tokens, such as an end of text, have no text. False: they are in the text as the tokenizer
            writes them, and stop strings may match them.
        presence_penalty: subtracted from the logit of every token that is in the output; -2 to 2.
        frequency_penalty: subtracted from the logit of a token as often as it is in the output; -2 to 2.
        repetition_penalty: the logit of every token in the prompt or the output is divided by it, or multiplied where it is
            negative; above 0 and at most 2.
        logit_bias: {token id: number that is added to its logit}; -100 to 100. Stored as pairs, by token id.
        allowed_token_ids: no other tokens are sampled. None: all may be.
        min_tokens: no end-of-text, stop token or stop string before this many new tokens.
        speculate: use drafts for this request, if the engine speculates. Its tokens are the same either way.
        best_of: make this many completions, and return the n of the highest cumulative log probability, best first. None: n.
        logprobs: return the log probability of each chosen token and of this many likeliest ones (0: the chosen only).
            They are those of the model: before penalties, bias, temperature and filters.
        prompt_logprobs: the same for the tokens of the prompt, except for the first, which has none.
        structured_outputs: the grammar of the text: `StructuredOutputs`, or a dict of its fields.
        thinking_budget: most tokens of the thought before an answer: behind them its end is forced. For chats only.
        thought: the marks of thoughts (`Thought`) in the chat template. Set by `Prompt.params`.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = option(0.0, -2, 2)
    frequency_penalty: float = option(0.0, -2, 2)
    repetition_penalty: float = option(1.0, LEAST_REPETITION_PENALTY, 2)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = option(0, 0)
    speculate: bool = True
    best_of: int | None = option(None, high=MAX_COMPLETIONS)
    logprobs: int | None = option(None, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = option(None, 0, MAX_LOGPROBS)
    structured_outputs: Any = None
    thinking_budget: int | None = option(None, 0)
    thought: Thought | None = None

    def __post_init__(self) -> None:
        CoreSamplingParams.__post_init__(self)
        self.keep("stop", strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        if (num_chars := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise InvalidSamplingParams("stop", f" holds {num_chars} characters: at most {MAX_STOP_CHARS} can be")
        self.keep("logit_bias", biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self.keep("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidSamplingParams("allowed_token_ids", " is empty: None allows all tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams(
                "min_tokens",
                f" is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower the one or raise the other",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingParams("best_of", f" is {self.best_of}: it must be at least n, which is {self.n}")
        if self.thought is not None and not isinstance(self.thought, Thought):
            raise InvalidSamplingParams("thought", f" is {shown(self.thought)}: it must be a Thought, or None")
        if self.structured_outputs is not None:
            self.keep("structured_outputs", structured(self.structured_outputs))

    @property
    def is_penalized(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens that the sampler reports; 0: only the chosen one, which `best_of` needs; None:
        nothing.
        """
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs

    @property
    def is_of_answer(self) -> bool:
        """Whether a parameter does not hold for a thought."""
        of_answer = self.stop, self.stop_token_ids, self.min_tokens, self.logit_bias, self.allowed_token_ids
        return any(of_answer) or self.structured_outputs is not None or self.thinking_budget is not None

    # ---- called by the core

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    def for_model(self, model: ModelFacts) -> SamplingParams:
        """These parameters, checked against a model.

        Raises:
            InvalidSamplingParams: token ids outside the vocabulary; a min_tokens that no sequence can reach; or nothing to sample
                at the start, as every allowed token ends the sequence before min_tokens.
        """
        for name in ("stop_token_ids", "allowed_token_ids"):
            self.check_vocabulary(name, getattr(self, name) or (), model)
        self.check_vocabulary("logit_bias", dict(self.logit_bias), model)
        if self.min_tokens >= model.max_model_len:
            raise InvalidSamplingParams(
                "min_tokens",
                f" is {self.min_tokens}, but max_model_len, in which the prompt counts too, is {model.max_model_len}: "
                "lower the one or raise the other",
            )
        if self.min_tokens:
            banned = {*self.stop_token_ids, *(() if self.ignore_eos else model.eos_token_ids)}
            allowed = range(model.vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
            if len(banned) >= len(allowed) and banned.issuperset(allowed):
                raise InvalidSamplingParams(
                    "min_tokens",
                    f" forbids each of the {len(allowed)} tokens that may be sampled at all: allow more by "
                    "allowed_token_ids, or let fewer end the text",
                )
        return self

    def new_detokenizer(self, decode: Callable[..., str], prompt: Sequence[int]) -> StopDetokenizer:
        until = getattr(self.structured_outputs, "until", None)
        return StopDetokenizer(
            partial(decode, skip_special_tokens=self.skip_special_tokens),
            self.stop,
            prompt=prompt,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            until=None if until is None else until(),
            thought=None if self.thought is None else ThoughtReader(self.thought, decode),
        )

    def choose(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """With `best_of`, the likeliest outputs, best first; failed ones and those without a token are the last."""
        if self.best_of is None:
            return outputs
        best = sorted(outputs, key=_rank)[: self.n]
        return [dataclasses.replace(output, index=index) for index, output in enumerate(best)]

    def returned_logprobs(self, logprobs: list[Any] | None, tokens: list[int]) -> tuple[list[Any] | None, float | None]:
        if logprobs is None:
            return None, None
        total = sum(entry[token].logprob for entry, token in zip(logprobs, tokens, strict=False))
        return None if self.logprobs is None else logprobs[: len(tokens)], total


def _rank(output: CompletionOutput) -> tuple[bool, float]:
    return output.finish_reason == "error" or not output.token_ids, -(output.cumulative_logprob or 0.0)


def structured(value: object) -> Any:
    """The `StructuredOutputs` of a value, which is one, or a table of its fields."""
    try:
        kind = import_module("nanoengine.features.structured.params").StructuredOutputs
        import_module("llguidance")
    except ModuleNotFoundError:  # this folder, or another that it needs, was deleted, or the package
        why = "structured outputs are not installed: pip install llguidance"
        raise InvalidSamplingParams("structured_outputs", f" is set, but {why}") from None
    if isinstance(value, kind):
        return value
    names = [each.name for each in dataclasses.fields(kind) if each.init]
    if not isinstance(value, Mapping) or not value.keys() <= set(names):
        raise InvalidSamplingParams(
            "structured_outputs", f" is {shown(value)}: it must have fields among {', '.join(names)}"
        )
    return kind(**value)


def strings(field: str, value: object) -> tuple[str, ...]:
    values = items(field, value)
    for string in values:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingParams(
                field, f" holds {shown(string)}: each must be a string of at least one character"
            )
    return tuple(map(str, values))


def biases(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs (token id, bias), sorted by token ids, so that equal values are equal params."""
    pairs: Iterable[Any] = value.items() if isinstance(value, Mapping) else items("logit_bias", value)
    bias_of: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidSamplingParams("logit_bias", f" holds {shown(pair)}: it must be {{token id: bias}}")
        token, bias = integer("logit_bias: token id", pair[0], 0, MAX_INT32), pair[1]
        if token in bias_of:
            raise InvalidSamplingParams("logit_bias", f" holds token id {token} twice: every token has one bias")
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            must = f"it must be a number from {-MAX_BIAS} to {MAX_BIAS}"
            raise InvalidSamplingParams("logit_bias", f": bias of token {token} is {shown(bias)}: {must}")
        bias_of[token] = float(bias)
    if len(bias_of) > MAX_LOGIT_BIAS:
        raise InvalidSamplingParams("logit_bias", f" holds {len(bias_of)} tokens: at most {MAX_LOGIT_BIAS} can be")
    return tuple(sorted(bias_of.items()))
