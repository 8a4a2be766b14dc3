"""A model that says a given text, token by token, with everything of the real engine around it: grammars, stop strings, biases,
drafts and limits act on its logits as on any other model's.

A token is a byte of text, or a mark such as `<think>`. Where the engine makes it say something else, it goes on in its text
behind the longest end of what it has said that its text holds, the last one of several: behind a `</think>` that was forced,
say, with its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from torch import Tensor

from nanoengine import LLM
from nanoengine.builder import Built, build_engine, read_config
from nanoengine.core.messages import Started
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.sampler import LogitsProcessor
from tests.support import byte_tokenizer, model_runner, tiny_checkpoint

SURE = 50.0
"""The logit of the token that the text has; all others keep those of a random model, some units around 0."""

ENDS = "<|return|>", "<|call|>", "<|im_end|>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL = (
    *ENDS,
    "<|im_start|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|tool_call|>",
)

_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
_END = "{% endif %}"
_HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer as <tool_call>{...}</tool_call>.\n{% endif %}"
_XML = "{% if tools %}{{ tools | tojson }} <tool_call><function=f><parameter=p>v</parameter></function></tool_call>\n{% endif %}"
_OFF = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"

TEMPLATES = {
    "qwen2.5": _HERMES + _TURNS + _END,
    "qwen3": _HERMES + _TURNS + _OFF + _END + _END,
    "qwen3-thinking": _HERMES + _TURNS + "<think>\n" + _END + "{# </think> #}",
    "qwen3.5": _XML + _TURNS + _OFF + "{% else %}<think>\n" + _END + _END,
    "qwen3-coder": _XML + _TURNS + _END,
    "deepseek": _TURNS + "{% if thinking %}<think>{% else %}</think>{% endif %}" + _END,
    "harmony": "{% if tools %}{{ tools | tojson }}{% endif %}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "granite": "{% if tools %}{{ tools | tojson }} <|tool_call|>{% endif %}" + _TURNS + _END,
}
"""Chat templates with the signs of the families that they are named after."""


class Script(LogitsProcessor):
    """Sees to it that the model says its text.

    Args:
        encode: text to token ids, marks included.
    """

    forbids = False

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[Seq[int]], str], end: int):
        self.encode, self.decode, self.end_token = encode, decode, end
        self.text: str | Callable[[str], str] = ""
        """What it says; or a function of the prompt's text that tells."""
        self.pieces: dict[
            int, tuple[int, list[int]]
        ] = {}  # row -> length of the prompt; tokens, those sampled included
        self._positions: Seq[int] = ()

    def start(self, started: Seq[Started]) -> None:
        for own in started:
            self.pieces[own.row] = own.sampling.num_prompt_tokens, list(own.token_ids)

    def end(self, rows: list[int]) -> None:
        for row in rows:
            self.pieces.pop(row, None)

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self._positions = positions.tolist()
        return np.array([number for number, row in enumerate(rows.tolist()) if row in self.pieces], np.int64)

    def apply(self, logits: Tensor, numbers: np.ndarray, rows: np.ndarray, drafts: Any) -> None:
        for number in numbers.tolist():
            num_prompt, tokens = self.pieces[int(rows[number])]
            depth = 0 if drafts is None else int(drafts.depth[number])
            known = tokens[: self._positions[number] - depth]
            if depth:
                known += drafts.tokens[drafts.run_of[number], :depth].tolist()
            logits[number, self.token_behind(known[:num_prompt], known[num_prompt:])] = SURE

    def observe(self, logits: Tensor, tokens: Tensor, numbers: np.ndarray, rows: np.ndarray, verified: Any) -> None:
        for number in numbers.tolist():
            if verified is None or bool(verified.is_token[number]):
                own = self.pieces[int(rows[number])][1]
                own[self._positions[number] :] = [int(tokens[number])]

    def token_behind(self, prompt: list[int], said: list[int]) -> int:
        tokens = self.encode(self.text if isinstance(self.text, str) else self.text(self.decode(prompt)))
        text, end = "".join(map(chr, tokens)), "".join(map(chr, said))  # token ids as characters, to be looked for
        start = 0 if text.startswith(end) else -1
        while start < 0:
            end = end[1:]
            start = text.rfind(end) if end else 0
        return [*tokens, self.end_token][start + len(end)]


def folder_of(folder: Path, template: str, **config: Any) -> Path:
    """A random tiny model whose tokenizer has the marks and one of TEMPLATES, or another template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(own) for own in SPECIAL]})
    tokenizer.add_tokens([AddedToken(own, special=False) for own in MARKS])
    tokenizer.chat_template = TEMPLATES.get(template, template)
    ends = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, ENDS)]
    tiny_checkpoint(folder, **{"eos_token_id": ends, "max_position_embeddings": 4096, **config})
    tokenizer.save_pretrained(folder)
    return folder


def add_script(runner: ModelRunner, tokenizer: Any) -> Script:
    """Make the model of a runner say a text; it says nothing until `Script.text` is set."""
    script = Script(
        tokenizer.encode, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False), tokenizer.eos_token_id
    )
    runner.sampler.processors.insert(0, script)
    return script


OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 2000,
    "max_model_len": 4096,
    "enable_prefix_caching": True,
}


def scripted_llm(folder: Path, **options: Any) -> tuple[LLM, Script]:
    llm = LLM(str(folder), use_tqdm=False, **{**OPTIONS, **options})
    return llm, add_script(model_runner(llm), llm.tokenizer)


def scripted_engine(folder: Path, **options: Any) -> tuple[Built, Script]:
    """For `tests.serve.server.running.Server`."""
    built = build_engine(read_config(str(folder), {**OPTIONS, **options}), use_tqdm=False)
    runner = built.engine.executor
    assert isinstance(runner, ModelRunner)
    return built, add_script(runner, built.tokenizer)
