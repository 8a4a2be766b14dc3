"""Grammars: compiles structured outputs with llguidance, and caches the results.

llguidance (https://github.com/guidance-ai/llguidance) parses the text so far and computes the mask of the next token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nanoengine.core.errors import EngineClosed, InvalidSamplingParams, shown
from nanoengine.core.tokenizer import Tokenizer
from nanoengine.errors import GrammarsUnavailable
from nanoengine.features.fair_cache import FairCache
from nanoengine.features.structured.compiler_client import CompilerClient, CompilerUnavailable
from nanoengine.features.structured.long_text import LongText
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.json_grammar import MAX_COUNT, MAX_ITEMS
from nanoengine.features.tool_calls.rules import Rules
from nanoengine.features.tool_calls.schemas import OF_FIELD, ONE_SPACE, normalized_schema

MAX_CACHED_BYTES = 256 << 20
"""Capacity of the cache of compiled grammars; a large one has 60 MiB."""

LEAST_BYTES = 1 << 20
"""Least size of an entry of the cache."""

MAX_TRIGGERS = 64
"""Most triggers of a structural tag: each of its structures is compared with all of them."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
}
"""Limits of a grammar: some 0.2 s for compilation; a few ms for a mask, where the parser's items are simple; 40 MiB for the
states of the lexer. None of 250 schemas of MaskBench is refused for them."""

ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
"""An escape in GBNF. llguidance's translator drops leading zeros of a code point, and cannot read its result."""

ADVICE = {
    '"uniqueItems"': f"it can be where items is an enum of at most {MAX_ITEMS} values, or maxItems is 1",
    '"contains"': f"it can be beside items, minItems and maxItems alone, with maxItems up to {MAX_COUNT}",
    "are not disjoint": "a name that fits both would have two schemas; write expressions that no name fits both of",
    "NoExtensionBias": "no text fits it",
}
"""Advice for users, by words of llguidance's messages."""


class Grammars:
    """The compiler of structured outputs for one tokenizer. Any thread may call it.

    Args:
        vocab_size: of the model: masks have a bit for each of its tokens.
        eos_token_ids: tokens that the model may sample when the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Seq[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None  # made with the first grammar, in up to a second
        self.long_text: LongText | None = None  # made with it
        self._compiler: CompilerClient | None = None
        self._is_closed = False
        self.cache: FairCache[Any, LLMatcher] = FairCache(MAX_CACHED_BYTES)
        self.num_compiled = 0

    @cached_property
    def mask_size(self) -> int:
        """Bits of a mask: a tokenizer may have more tokens than its model."""
        return max(self.vocab_size, self.tokenizer.fast.get_vocab_size(with_added_tokens=True))

    def matcher(self, outputs: StructuredOutputs, client: str = "", salt: str = "") -> LLMatcher:
        """The state of a grammar at the beginning of a text.

        Args:
            outputs: the request.
            client, salt: of the request; a compiled grammar is cached for these two only.

        Raises:
            InvalidSamplingParams: the request is wrong, or llguidance does not support it; the message names the keyword.
            GrammarsUnavailable: the process that compiles grammars cannot be started.
        """
        key = salt, outputs.key
        if (cached := self.cache.get(client, key)) is not None:
            return cached.deep_copy()
        with self._loading:
            if self._is_closed:
                raise EngineClosed("the engine is closed: make a new one")
            if self._tokenizer is None:
                self._tokenizer, self._compiler = self._new_tokenizer()
                self.long_text = LongText(self._tokenizer)
        compiled, num_bytes = self._compile(outputs, self._tokenizer)
        self.num_compiled += 1
        self.cache.put(client, key, compiled, max(num_bytes, LEAST_BYTES))
        return compiled.deep_copy()

    def close(self) -> None:
        """End the process that compiles, and drop all grammars."""
        with self._loading:
            self._is_closed = True
        if self._compiler is not None:
            self._compiler.close()
        self.cache, self._tokenizer = FairCache(MAX_CACHED_BYTES), None

    def _new_tokenizer(self) -> tuple[LLTokenizer, CompilerClient]:
        fast = self.tokenizer.fast
        if not self.eos_token_ids:
            raise InvalidSamplingParams(
                "structured_outputs", ": the model has no end-of-text token, so no text could end"
            )
        added = fast.get_added_tokens_decoder().values()
        text = _with_marks_apart(
            fast.to_str(),
            {token.content for token in added if not token.special and re.fullmatch("(?s)<.*>", token.content)},
        )
        try:
            tokenizer = LLTokenizer(text, n_vocab=self.mask_size, eos_token=self.eos_token_ids)
        except Exception as error:  # a tokenizer of words, for example: its tokens are no bytes of the text
            raise InvalidSamplingParams(
                "structured_outputs", f": llguidance cannot use {self.tokenizer.name}: {error}"
            ) from error
        return tokenizer, CompilerClient(text, self.mask_size, self.eos_token_ids, LIMITS)

    def _compile(self, outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[LLMatcher, int]:
        assert self._compiler is not None
        try:
            grammar, notation = grammar_of(outputs)
        except InvalidSamplingParams:
            raise
        except (ValueError, RecursionError) as error:
            raise InvalidSamplingParams(f"structured_outputs.{outputs.kind}", f": {error}") from error
        try:
            verdict = self._compiler.verdict(grammar, notation)
            if verdict.error and outputs.kind == "json":  # llguidance leaves out optional properties without any value
                grammar = json_grammar(outputs, is_apart=False)
                verdict = self._compiler.verdict(grammar)
        except CompilerUnavailable as error:
            raise GrammarsUnavailable(f"structured outputs: {error}") from error
        if not verdict.error:
            matcher = LLMatcher(tokenizer, verdict.grammar or grammar, limits=LLParserLimits(**LIMITS), log_level=0)
            verdict = verdict._replace(error=str(matcher.get_error()))
        if verdict.error:
            raise InvalidSamplingParams(*_message(verdict.error, outputs, grammar))
        bits = np.zeros(-(-self.mask_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)  # no step waits for the first mask
        return matcher, verdict.num_bytes


def _with_marks_apart(text: str, marks: set[str]) -> str:
    """A tokenizer.json in which the added tokens `marks` have names that occur in no text.

    llguidance treats `<tool_call>` as a special token, which is not made of the characters of a text. Where that text is
    forced, it would force the token nonetheless, and then refuse it.
    """
    if not marks:
        return text
    table = json.loads(text)
    vocab = table["model"]["vocab"]
    for token in table["added_tokens"]:
        if (mark := token["content"]) in marks:
            token["content"] = f"<\ue000{mark[1:]}"
            if isinstance(vocab, list) and token["id"] < len(vocab):
                vocab[token["id"]][0] = token["content"]
            elif mark in vocab:
                vocab[token["content"]] = vocab.pop(mark)
    return json.dumps(table, ensure_ascii=False)


def grammar_of(outputs: StructuredOutputs) -> tuple[str, str]:
    """The grammar, and its notation as `CompilerClient` takes it. The work here grows linearly with the length of the text."""
    if outputs.kind in ("json", "json_object"):
        return json_grammar(outputs), "llguidance"
    if outputs.kind == "structural_tag":
        return tag_grammar(outputs), "llguidance"
    if outputs.kind == "choice":  # one terminal: a row of the parser holds 2,000 of them
        choices = sorted(set(json.loads(outputs.text)))
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)), "lark"
    if outputs.kind == "grammar" and outputs.text.startswith("%llguidance"):  # llguidance's dialect
        return outputs.text, "lark"
    is_gbnf = outputs.kind == "grammar" and "::=" in outputs.text
    text = ESCAPE.sub(_read_escape, outputs.text) if is_gbnf else outputs.text
    return text, outputs.kind  # GBNF is translated in the process: that may take the square of its length


def _read_escape(match: re.Match[str]) -> str:
    """The character of an escape, or an escape of two digits for an ASCII character; any other escape is unchanged."""
    digits = match[1] or match[2] or match[3]
    code = 0x110000 if digits is None else int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else match[0]


def json_grammar(outputs: StructuredOutputs, *, is_apart: bool = True) -> str:
    """The grammar of a schema; `is_apart`: with a rule for each part of it."""
    rules, field = Rules(lambda _: None), f"structured_outputs.{outputs.kind}"
    schema = normalized_schema(json.loads(outputs.text), field)
    rules.rules["start"] = rules.json(schema, field, _spaces(outputs), is_apart=is_apart)
    return rules.text()


def _spaces(outputs: StructuredOutputs) -> dict[str, Any]:
    if outputs.whitespace_pattern is not None:
        return {"whitespace_flexible": True, "whitespace_pattern": outputs.whitespace_pattern}
    return ONE_SPACE if outputs.disable_any_whitespace else {"whitespace_flexible": True}


def tag_grammar(outputs: StructuredOutputs) -> str:
    tag, field = json.loads(outputs.text), "structured_outputs.structural_tag"
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise InvalidSamplingParams(field, " must have lists of structures and of triggers")
    if len(triggers) > MAX_TRIGGERS:
        raise InvalidSamplingParams(field, f" has {len(triggers)} triggers: at most {MAX_TRIGGERS} can be")
    rules = Rules(lambda _: None)
    tags: list[str] = []
    for entry in structures:
        table = entry if isinstance(entry, dict) else {}
        begin, end, schema = (table.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise InvalidSamplingParams(field, ": a structure has strings begin and end, and a schema")
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None)
        if trigger is None:
            raise InvalidSamplingParams(field, f": {shown(begin)} begins with none of the triggers")
        tags.append(f"tag_{len(tags)}")
        rest, value = begin.removeprefix(trigger), rules.json(normalized_schema(schema, field), field, _spaces(outputs))
        rules.rules[f"{tags[-1]}_trigger[lazy]"] = f"TEXT {json.dumps(trigger)}"
        rules.rules[tags[-1]] = " ".join((f"{tags[-1]}_trigger", json.dumps(rest), value, json.dumps(end)))
    rules.rules["start"] = f"({' | '.join(tags)})* TEXT"
    return rules.text()


def _message(message: str, outputs: StructuredOutputs, grammar: str) -> tuple[str, str]:
    """The field at fault and the reason, without the parser's state, and without llguidance's advice."""
    field = f"structured_outputs.{outputs.kind}"
    position = re.match(r"at (\d+)\(\d+\): failed to compile JSON schema: ", message)
    lines = grammar.split("\n")[int(position[1]) - 1 :] if position is not None else []
    if lines and OF_FIELD in lines[0]:
        field, message = lines[0].rpartition(OF_FIELD)[2], re.split(r"\n *\d+ \| ", message.partition("schema: ")[2])[0]
    why = " ".join(re.split(r"\n<state>|<backtrace>|\. Enable 'coerce_one_of'", message)[0].split())[:500]
    for keyword, words in ADVICE.items():
        if keyword in why:
            why += f": {words}"
    return field, f": {why}"
