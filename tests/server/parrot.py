"""A toy model for servers: it repeats its prompt, token by token, then ends. What it says is what a test has asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from nanoengine.builder import Built
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.messages import Chunk, PromptLogprobs, StepPlan, StepResult
from nanoengine.models.tokenizer import HFTokenizer
from nanoengine.outputs import TokenLogprob
from tests.engine.toys import Eager, make_scheduler, samples_of
from tests.support import TOY, byte_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ name or 'assistant' }}\n{% endif %}"
)
POISON = "\x01"
"""A step that begins a prompt with it at its start fails."""


LOGPROB = TokenLogprob(-0.5, 1)


class Row(NamedTuple):
    """What is known of a sequence."""

    token_ids: list[int]
    num_prompt: int  # how many of them are the prompt
    wants_logprobs: bool
    wants_prompt_logprobs: bool


class BrokenStep(Exception):
    """What such a step raises."""


class Parrot(Eager):
    """The executor."""

    def __init__(self, eos: int, poison: int):
        self.eos = eos
        self.poison = poison
        self.rows: dict[int, Row] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for start in plan.started:
            sampling = start.sampling
            self.rows[start.row] = Row(
                list(start.token_ids),
                sampling.num_prompt_tokens,
                sampling.params.num_logprobs is not None,
                sampling.prompt_logprobs is not None,
            )
        if any(start.token_ids[0] == self.poison for start in plan.started):
            raise BrokenStep("the step broke")
        samples = samples_of(plan)
        tokens = [self._next(position, row) for position, row in samples]
        wanted = {i: {tokens[i]: LOGPROB} for i, (_, row) in enumerate(samples) if self.rows[row].wants_logprobs}
        return StepResult(tokens, wanted, [self._prompt_logprobs(chunk) for chunk in plan.chunks])

    def close(self) -> None:
        pass

    def _next(self, position: int, row: int) -> int:
        own = self.rows[row]
        return own.token_ids[position - own.num_prompt] if position < 2 * own.num_prompt else self.eos

    def _prompt_logprobs(self, chunk: Chunk) -> PromptLogprobs:
        """Of the tokens that those of a chunk predict: one behind each, as far as the prompt goes."""
        own = self.rows[chunk.row]
        start = chunk.num_computed + 1
        end = min(start + chunk.num_new, own.num_prompt) if own.wants_prompt_logprobs else start
        return PromptLogprobs(chunk.row, start, [{token: LOGPROB} for token in own.token_ids[start:end]])


def save_tokenizer(folder: Path) -> Path:
    """One token for each byte, ends of text and of turns, and a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def build(folder: Path, **options: Any) -> Built:
    """An engine around a parrot.

    Args:
        folder: see `save_tokenizer`.
        options: see `make_scheduler`.
    """
    tokenizer = HFTokenizer(folder)
    assert tokenizer.eos_token_id is not None
    [poison] = tokenizer.encode(POISON)
    sizes = {"num_blocks": 4000, "max_num_seqs": 64, "budget": 512, "max_model_len": 1024, "policy": "mixed"}
    engine = LLMEngine(
        make_scheduler(**(sizes | options)),
        Parrot(tokenizer.eos_token_id, poison),
        tokenizer,
        vocab_size=len(tokenizer.token_ids()),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return Built(engine, TOY, tokenizer, {})
