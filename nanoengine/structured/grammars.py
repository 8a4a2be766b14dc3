"""Grammars: what llguidance makes of structured outputs, and a cache of it.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far and says which tokens may come next.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.tokenizer import Tokenizer
from nanoengine.structured.params import JSON_OPTIONS, ONE_SPACE, StructuredOutputs
from nanoengine.structured.trial import Trial

MAX_CACHED = 256
"""Grammars that are kept for the next request that asks for the same."""

MAX_CACHED_BYTES = 256 << 20
"""Of those grammars; a large one has 60 MiB."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
}
"""What one grammar may take: some 0.2 s at the start; a few ms for a mask, where the parser's items are simple; 40 MiB for the
states of the lexer. None of 250 schemas of MaskBench is refused for them."""


class Grammars:
    """Compiles structured outputs for one tokenizer. Any thread may call it.

    Args:
        vocab_size: of the model: masks have a bit for each of its tokens.
        eos_token_ids: what the model may say when the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Seq[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._own: LLTokenizer | None = None  # it takes up to a second: made when it is asked for
        self._trial: Trial | None = None
        self._cache: OrderedDict[Any, tuple[LLMatcher, int]] = OrderedDict()  # with their bytes
        self.num_compiled = self.num_cached_bytes = 0

    @cached_property
    def mask_size(self) -> int:
        """Bits of a mask: a tokenizer may have more tokens than its model."""
        fast = self.tokenizer.fast
        return max(self.vocab_size, 0 if fast is None else fast.get_vocab_size(with_added_tokens=True))

    def matcher(self, outputs: StructuredOutputs) -> LLMatcher:
        """The state of a text that has not begun.

        Raises:
            InvalidSamplingParams: what is asked for is wrong, or llguidance cannot promise it; the message names the keyword.
        """
        with self._lock:
            if (found := self._cache.get(outputs.key)) is not None:
                self._cache.move_to_end(outputs.key)
                return found[0].deep_copy()
        with self._loading:
            if self._own is None:
                self._own, self._trial = self._new_tokenizer()
        compiled, num_bytes = self._compile(outputs, self._own)
        with self._lock:
            self.num_compiled += 1
            if num_bytes <= MAX_CACHED_BYTES and outputs.key not in self._cache:
                self._cache[outputs.key] = compiled, num_bytes
                self.num_cached_bytes += num_bytes
            while len(self._cache) > MAX_CACHED or self.num_cached_bytes > MAX_CACHED_BYTES:
                self.num_cached_bytes -= self._cache.popitem(last=False)[1][1]
            return compiled.deep_copy()

    def _new_tokenizer(self) -> tuple[LLTokenizer, Trial]:
        own = self.tokenizer.fast
        if not self.eos_token_ids:
            raise InvalidSamplingParams("structured_outputs: the model has no end-of-text token, so no text could end")
        if own is None:
            raise InvalidSamplingParams(
                f"structured_outputs: {self.tokenizer.name} has no tokenizer.json, and llguidance reads no other kind"
            )
        text = own.to_str()
        try:
            tokenizer = LLTokenizer(text, n_vocab=self.mask_size, eos_token=self.eos_token_ids)
        except Exception as error:  # of a kind whose tokens are no bytes of the text, such as words
            raise InvalidSamplingParams(
                f"structured_outputs: llguidance cannot use {self.tokenizer.name}: {error}"
            ) from error
        return tokenizer, Trial(text, self.mask_size, self.eos_token_ids, LIMITS)

    def _compile(self, outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[LLMatcher, int]:
        assert self._trial is not None
        try:
            grammar = grammar_of(outputs)
        except InvalidSamplingParams:
            raise
        except (ValueError, RecursionError) as error:  # of another notation than it seems to be
            raise InvalidSamplingParams(f"structured_outputs.{outputs.kind}: {error}") from error
        verdict = self._trial.verdict(grammar)
        if not verdict.error:
            matcher = LLMatcher(tokenizer, grammar, limits=LLParserLimits(**LIMITS), log_level=0)
            verdict = verdict._replace(error=str(matcher.get_error()))
        if verdict.error:
            raise InvalidSamplingParams(f"structured_outputs.{outputs.kind}: {_first_lines(verdict.error)}")
        return matcher, verdict.num_bytes


def grammar_of(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's own notation."""
    if outputs.kind in ("json", "json_object"):
        return json_grammar(outputs.text, outputs)
    if outputs.kind == "structural_tag":
        return tag_grammar(json.loads(outputs.text))
    if outputs.kind == "choice":  # one terminal: of those, a row of the parser holds 2,000
        choices = sorted(set(json.loads(outputs.text)))
        return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))))
    if outputs.kind == "grammar" and outputs.text.startswith("%llguidance"):  # its own dialect, and no guess needed
        return str(LLMatcher.grammar_from_lark(outputs.text))
    return str(grammar_from("regex" if outputs.kind == "regex" else "grammar", outputs.text))


def json_grammar(schema: str, outputs: StructuredOutputs) -> str:
    # Last and strongest: a schema can have options of llguidance in itself, and could make itself weaker.
    overrides: dict[str, Any] = dict(JSON_OPTIONS)
    if outputs.whitespace_pattern is not None:
        overrides |= {"whitespace_flexible": True, "whitespace_pattern": outputs.whitespace_pattern}
    elif outputs.disable_any_whitespace:
        overrides |= ONE_SPACE
    else:
        overrides |= {"whitespace_flexible": True}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, overrides)))


def tag_grammar(table: dict[str, Any]) -> str:
    structures, triggers = table.get("structures"), table.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise InvalidSamplingParams("structured_outputs.structural_tag must have lists of structures and of triggers")
    tags = []
    for own in structures:
        begin, end, schema = (own.get(name) if isinstance(own, dict) else None for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise InvalidSamplingParams(
                "structured_outputs.structural_tag: a structure has strings begin and end, and a schema"
            )
        trigger = next((own for own in triggers if isinstance(own, str) and own and begin.startswith(own)), None)
        if trigger is None:
            raise InvalidSamplingParams(
                f"structured_outputs.structural_tag: {begin!r} begins with none of the triggers"
            )
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _first_lines(message: str) -> str:
    """Without the parser's state, and without advice to allow what is not allowed here."""
    return " ".join(re.split(r"\n<state>|<backtrace>|\. Enable 'coerce_one_of'", message)[0].split())[:500]
