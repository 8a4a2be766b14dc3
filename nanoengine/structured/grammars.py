"""Grammars: what llguidance makes of structured outputs, and a cache of it.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far and says which tokens may come next.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.tokenizer import Tokenizer
from nanoengine.structured.params import StructuredOutputs

MAX_CACHED = 256
"""Grammars that are kept for the next request that asks for the same."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_grammar_size=500_000
)
"""What one grammar may take: about 40 ms of its lexer at the start; 15 ms and 3 ms of a mask."""


class Grammars:
    """Compiles structured outputs for one tokenizer. Any thread may call it.

    Args:
        vocab_size: of the model: masks have a bit for each of its tokens.
        eos_token_ids: what the model may say when the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Seq[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._own: LLTokenizer | None = None  # it takes up to a second: made when it is asked for
        self._cache: OrderedDict[Any, LLMatcher] = OrderedDict()
        self.num_compiled = 0

    def matcher(self, outputs: StructuredOutputs) -> LLMatcher:
        """The state of a text that has not begun.

        Raises:
            InvalidSamplingParams: what is asked for is wrong, or llguidance cannot promise it; the message names the keyword.
        """
        with self._lock:
            if (found := self._cache.get(outputs.key)) is not None:
                self._cache.move_to_end(outputs.key)
                return found.deep_copy()
            if self._own is None:
                self._own = self._new_tokenizer()
        compiled = self._compile(outputs, self._own)
        with self._lock:
            self.num_compiled += 1
            self._cache[outputs.key] = compiled
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled.deep_copy()

    def _new_tokenizer(self) -> LLTokenizer:
        own = self.tokenizer.fast
        if not self.eos_token_ids:
            raise InvalidSamplingParams("structured_outputs: the model has no end-of-text token, so no text could end")
        size = max(self.vocab_size, own.get_vocab_size(with_added_tokens=True))
        return LLTokenizer(own.to_str(), n_vocab=size, eos_token=self.eos_token_ids)

    def _compile(self, outputs: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        try:
            matcher = LLMatcher(tokenizer, grammar_of(outputs), limits=LIMITS, log_level=0)
        except InvalidSamplingParams:
            raise
        except ValueError as error:  # of another notation than it seems to be
            raise InvalidSamplingParams(f"structured_outputs.{outputs.kind}: {error}") from error
        if matcher.is_error():
            raise InvalidSamplingParams(f"structured_outputs.{outputs.kind}: {_first_lines(matcher.get_error())}")
        return matcher


def grammar_of(outputs: StructuredOutputs) -> str:
    """The grammar in llguidance's own notation."""
    if outputs.kind in ("json", "json_object"):
        return json_grammar(outputs.text, outputs)
    if outputs.kind == "structural_tag":
        return tag_grammar(json.loads(outputs.text))
    if outputs.kind == "choice":  # longer ones first: none is the beginning of another then
        choices = sorted(set(json.loads(outputs.text)), key=lambda own: (-len(own), own))
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices))))
    if outputs.kind == "grammar" and outputs.text.startswith("%llguidance"):  # its own dialect, and no guess needed
        return str(LLMatcher.grammar_from_lark(outputs.text))
    return str(grammar_from("regex" if outputs.kind == "regex" else "grammar", outputs.text))


def json_grammar(schema: str, outputs: StructuredOutputs) -> str:
    # Last and strongest: a schema can have options of llguidance in itself, and could make itself weaker.
    overrides: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if outputs.whitespace_pattern is not None:
        overrides |= {"whitespace_flexible": True, "whitespace_pattern": outputs.whitespace_pattern}
    elif outputs.disable_any_whitespace:
        overrides |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
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
    return " ".join(message.split("\n<state>")[0].split())[:500]
