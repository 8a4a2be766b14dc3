"""Acceptance: whether a text could be written under a schema, one token and one mask at a time, as the engine would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from nanoengine import SamplingParams
from nanoengine.models.description import describe
from nanoengine.models.names import find_model
from nanoengine.structured.constraint import Constraint
from nanoengine.structured.grammars import Grammars
from nanoengine.structured.params import StructuredOutputs
from nanoengine.structured.structured import Structured


@dataclass
class Acceptance:
    """The engine's way from a schema to masks, without a model.

    Args:
        model: whose tokenizer it is: "demo", a folder, a .gguf file.
    """

    model: str
    mask_us: list[float] = field(default_factory=list)
    """Microseconds for each mask that was filled."""

    def __post_init__(self) -> None:
        found = describe(find_model(self.model))
        self.tokenizer, self.ends = found.tokenizer, found.eos_token_ids
        fast = found.tokenizer.fast
        assert fast is not None, "llguidance reads tokenizers of the library tokenizers"
        self.structured = Structured(Grammars(found.tokenizer, found.config.vocab_size, self.ends), [], None, 1)

    def outputs(self, schema: Any) -> StructuredOutputs:
        """Of a schema that is supported.

        Raises:
            InvalidSamplingParams: it is not, and why.
        """
        outputs: StructuredOutputs = SamplingParams(structured_outputs={"json": schema}).structured_outputs
        self.structured.grammars.matcher(outputs)
        return outputs

    def refused_at(self, outputs: StructuredOutputs, text: str) -> int | None:
        """The first character that could not be written; None: all of the text, and then its end, can.

        Raises:
            RuntimeError: the grammar went beyond its limits.
        """
        constraint = Constraint(self.structured.grammars.matcher(outputs))
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        for place, token in enumerate([*tokens, self.ends[0]]):
            start = perf_counter()
            [mask] = self.structured._fill([(constraint, [])])
            self.mask_us.append(1e6 * (perf_counter() - start))
            if constraint.error:
                raise RuntimeError(constraint.error.splitlines()[0])
            if not mask.view("uint32")[token // 32] >> (token % 32) & 1:
                return len(self.tokenizer.decode(tokens[:place]))
            if place < len(tokens):
                constraint.read([token])
        return None


def written(value: Any) -> str:
    """JSON as `disable_any_whitespace` has it, which is the default: one space behind each comma and colon."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair can be written as an escape only
        return json.dumps(value)
    return text
