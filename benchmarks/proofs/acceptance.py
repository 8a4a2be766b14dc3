"""Acceptance: whether a text could be written under a schema, one token and one mask at a time, as the engine would."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from nanoengine import SamplingParams
from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.constraint import Constraint
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.mask_filling import GrammarPolicy
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.schemas import NAMED, VALUES
from nanoengine.models.description import describe
from nanoengine.models.names import find_model

LONGEST = 32
"""Characters of a token that is looked for."""


@dataclass
class Acceptance:
    """The engine's way from a schema to masks, without a model.

    Args:
        model: whose tokenizer it is: "demo", a folder, a .gguf file.
    """

    model: str
    mask_us: list[float] = field(default_factory=list)
    """Microseconds for each mask that was filled."""

    num_respelled: int = 0
    """How often a mask did not hold the token that the tokenizer would have written."""

    def __post_init__(self) -> None:
        found = describe(find_model(self.model))
        self.tokenizer, self.ends = found.tokenizer, found.eos_token_ids
        fast = found.tokenizer.fast
        assert fast is not None, "llguidance reads tokenizers of the library tokenizers"
        ids = range(fast.get_vocab_size())
        self._by_text = {self.tokenizer.decode([token]): token for token in ids}
        self.structured = GrammarPolicy(Grammars(found.tokenizer, found.config.vocab_size, self.ends), num_threads=1)

    def outputs(self, schema: Any) -> StructuredOutputs:
        """Of a schema that is supported, as JSON Schema has it: objects are open where it is silent.

        Raises:
            InvalidSamplingParams: it is not, and why.
        """
        outputs: StructuredOutputs = SamplingParams(structured_outputs={"json": opened(schema)}).structured_outputs
        self.structured.grammars.matcher(outputs)
        return outputs

    def counted_outputs(self, schema: Any, counts: Counter[str], reasons: Counter[str]) -> StructuredOutputs | None:
        """Of a schema, counted; None if it is refused, for a reason that is counted too."""
        try:
            outputs = self.outputs(schema)
        except InvalidSamplingParams as error:
            counts["schemas refused"] += 1
            reasons[reason(str(error))] += 1
            return None
        counts["schemas compiled"] += 1
        return outputs

    def refused_at(self, outputs: StructuredOutputs, text: str) -> int | None:
        """The first character that could not be written; None: all of the text, and then its end, can.

        The tokens are those of the tokenizer. Where a mask does not hold the next one, the longest is taken that it holds and
        that the text goes on with: of a text that must come, llguidance allows one spelling only, and looks at less of what
        stands before it than the tokenizer does.

        Raises:
            RuntimeError: the grammar went beyond its limits.
        """
        constraint = Constraint(self.structured.grammars.matcher(outputs))
        said: list[int] = []
        left = self._encode(text)
        while True:
            start = perf_counter()
            [mask] = self.structured._fill([(constraint, ())])
            self.mask_us.append(1e6 * (perf_counter() - start))
            if constraint.error:
                raise RuntimeError(constraint.error.splitlines()[0])
            allowed = mask.view("uint32")
            token = left[0] if left else self.ends[0]
            if not _holds(allowed, token):
                done = len(self.tokenizer.decode(said))
                rest = text[done:]
                begins = [self._by_text.get(rest[:count], -1) for count in range(min(len(rest), LONGEST), 0, -1)]
                token = next((own for own in begins if own >= 0 and _holds(allowed, own)), -1)
                if token < 0 or self.tokenizer.decode(said) != text[:done]:
                    return done
                left = [token, *self._encode(rest[len(self.tokenizer.decode([token])) :])]
                self.num_respelled += 1
            if not left:
                return None
            said.append(left.pop(0))
            constraint.read(said[-1:])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


def _holds(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def reason(message: str) -> str:
    """Without what differs from schema to schema."""
    message = message.removeprefix("structured_outputs.json: ")
    if keys := re.search(r"Unimplemented keys: (\[.*?\])", message):
        return f"Unimplemented keys: {keys[1]}"
    message = re.sub(r"(`|'|\").*?\1|[/#]\S+|\{.*\}", "...", message)
    return message[:70]


def written(value: Any) -> str:
    """JSON as `disable_any_whitespace` has it, which is the default: one space behind each comma and colon."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair can be written as an escape only
        return json.dumps(value)
    return text


def opened(schema: Any) -> Any:
    """The same schema, for which an object that does not say so is not closed."""
    if isinstance(schema, list):
        return [opened(own) for own in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: {key: opened(own) for key, own in value.items()}
        if name in NAMED and isinstance(value, dict)
        else value
        if name in VALUES
        else opened(value)
        for name, value in schema.items()
    }
    return {"additionalProperties": True, **found} if "properties" in found else found
