"""Schemas: whether what a tool takes can be promised."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.tools.tool import Tool


def check_schema(tool: Tool) -> None:
    """See that a grammar can hold a tool's arguments to their schema.

    Raises:
        InvalidSamplingParams: it cannot; the message names the tool and the keyword. Or structured outputs are not installed.
    """
    if find_spec("nanoengine.structured") is None or find_spec("llguidance") is None:
        raise InvalidSamplingParams(
            "tool_choice forces a call, or a tool is strict, which needs structured outputs: pip install 'nanoengine[structured]'"
        )
    try:
        problem = _problem(json.dumps(tool.parameters))
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error).removeprefix("structured_outputs.")
    if problem:
        raise InvalidSamplingParams(
            f"tools: the parameters of {tool.name} cannot be promised, which a forced or strict call needs: {problem}"
        )


@lru_cache(maxsize=256)
def _problem(schema: str) -> str:
    from llguidance import LLMatcher, LLParserLimits

    from nanoengine.structured.grammars import LIMITS, json_grammar
    from nanoengine.structured.params import StructuredOutputs

    outputs = StructuredOutputs(json=schema)
    return " ".join(
        LLMatcher.validate_grammar(json_grammar(outputs.text, outputs), limits=LLParserLimits(**LIMITS)).split()
    )[:500]
