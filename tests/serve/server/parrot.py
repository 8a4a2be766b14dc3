"""A toy model for servers: it repeats its prompt, token by token, then ends. What it says is what a test has asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken

from nanoengine.builder import Built, read_config
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.features.observability.observer import Observer
from nanoengine.features.sampling.collector import LOGPROBS, PROMPT_LOGPROBS, Collector
from nanoengine.features.sampling.token_logprobs import TokenLogprobs
from nanoengine.models.tokenizer import HFTokenizer
from tests.core.toys import Done
from tests.support import byte_tokenizer

BLOCK_SIZE = 4

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ name or 'assistant' }}\n{% endif %}"
)
POISON = "\x01"
"""A step that begins a prompt with it at its start fails."""


class Row(NamedTuple):
    """What is known of a sequence."""

    token_ids: list[int]
    num_prompt: int  # how many of them are the prompt
    wants_logprobs: bool


class BrokenStep(Exception):
    """What such a step raises."""


class Parrot:
    """The executor."""

    def __init__(self, eos: int, poison: int):
        self.eos = eos
        self.poison = poison
        self.rows: dict[int, Row] = {}

    def launch(self, plan: StepPlan) -> Done:
        for start in plan.started:
            params = start.sampling.params
            self.rows[start.row] = Row(
                start.token_ids, start.sampling.num_prompt_tokens, params.num_logprobs is not None
            )
        if any(start.token_ids[0] == self.poison for start in plan.started):
            return Done(BrokenStep("the step broke"))
        # Who samples, and the place of the token that comes.
        decodes = zip(plan.decode_rows.tolist(), (plan.decode_starts + 1).tolist(), strict=True)
        samples = [*decodes, *((run.row, run.start + run.num_new) for run in plan.runs if run.samples)]
        tokens = [self._next(row, position) for row, position in samples]
        asked = {i: logprob(tokens[i]) for i, (row, _) in enumerate(samples) if self.rows[row].wants_logprobs}
        of_prompts = [
            (place, self._prompt(plan, place, count)) for place, count, _ in plan.extras.get(PROMPT_LOGPROBS, ())
        ]
        return Done(StepResult(tokens, extras={LOGPROBS: asked, PROMPT_LOGPROBS: of_prompts}))

    def close(self) -> None:
        pass

    def _next(self, row: int, position: int) -> int:
        own = self.rows[row]
        return own.token_ids[position - own.num_prompt] if position < 2 * own.num_prompt else self.eos

    def _prompt(self, plan: StepPlan, place: int, count: int) -> list[TokenLogprobs]:
        """Of the tokens behind the first ones of a chunk."""
        run = plan.runs[place]
        return [logprob(token) for token in self.rows[run.row].token_ids[run.start + 1 : run.start + 1 + count]]


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, np.zeros(0, np.int64), np.zeros(0, np.float32))


def save_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """One token for each byte, ends of text and of turns, and a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def build(
    folder: Path,
    *,
    num_blocks: int = 4000,
    max_num_seqs: int = 64,
    max_model_len: int = 1024,
    policy: str = "mixed",
    toy: type[Parrot] = Parrot,
) -> Built:
    """An engine around a parrot, or a toy like it, with the tokenizer of a folder (see `save_tokenizer`)."""
    tokenizer = HFTokenizer(folder)
    assert tokenizer.eos_token_id is not None
    *_, poison = tokenizer.encode(POISON)
    observer, collector = Observer(max_model_len, max_model_len // BLOCK_SIZE), Collector()
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE, stores=[observer.events]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        policy=policy,
        parts=[collector, observer],
    )
    engine = LLMEngine(
        scheduler,
        toy(tokenizer.eos_token_id, poison),
        tokenizer,
        vocab_size=len(tokenizer.token_ids()),
        max_model_len=max_model_len,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    capabilities: dict[str, Any] = {
        "observability": SimpleNamespace(metrics=observer),
        "models": SimpleNamespace(
            default_sampling={},
            checkpoint=SimpleNamespace(location=str(folder / "tokenizer.json")),
            model_config=SimpleNamespace(
                architecture="ParrotForCausalLM", dtype="float32", num_layers=0, hidden_size=0
            ),
            num_parameters=0,
            metadata={},
            quantization=None,
        ),
    }
    return Built(read_config("parrot", {}), engine, tokenizer, capabilities)
