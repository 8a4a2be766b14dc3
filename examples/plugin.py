"""A plugin: a capability from outside of the package, with an option of its own. This module is the plugin, and runs it.

On the command line: PYTHONPATH=examples nanoengine serve demo --plugins plugin --most-prompt-tokens 16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoengine import LLM, SamplingParams
from nanoengine.core.capability import Capability
from nanoengine.core.options import check, option
from nanoengine.core.seams import PolicyPart
from nanoengine.errors import InvalidPrompt

if TYPE_CHECKING:
    from nanoengine.core.sequence import Request, Sequence
    from nanoengine.core.startup import Startup


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimitOptions:
    """Options of the plugin.

    Args:
        most_prompt_tokens: tokens of the longest prompt that is taken. None: no limit.
    """

    most_prompt_tokens: int | None = option(None, high=2**24)

    def __post_init__(self) -> None:
        check(self)


class PromptLimit(PolicyPart):
    """Refuses long prompts, and counts the tokens of what it has taken."""

    def __init__(self, most: int):
        self.most, self.num_tokens = most, 0

    def made(self, request: Request) -> None:
        if (count := len(request.prompt_token_ids)) > self.most:
            raise InvalidPrompt(f"the prompt has {count} tokens, but most_prompt_tokens is {self.most}: shorten it")

    def finished(self, seq: Sequence) -> None:
        self.num_tokens += seq.num_tokens


class Limits(Capability):
    """Start-up calls it; `nanoengine/core/capability.py` says when."""

    options = PromptLimitOptions
    part: PromptLimit | None = None

    def policy(self, startup: Startup) -> None:
        most = startup.config.of(PromptLimitOptions).most_prompt_tokens
        if most is not None:
            self.part = PromptLimit(most)
            startup.parts.append(self.part)

    def describe_itself(self, startup: Startup) -> str | None:
        return None if self.part is None else f"prompts of at most {self.part.most} tokens"


CAPABILITY = Limits

if __name__ == "__main__":
    with LLM("demo", plugins=["plugin"], most_prompt_tokens=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        print(llm.generate("def fibonacci(n):", params)[0].outputs[0].text)
        print(llm.built.capabilities["plugin.CAPABILITY"].part.num_tokens, "tokens were computed")
        try:
            llm.generate("import json\n" * 9, params)
        except InvalidPrompt as error:
            print(error)
