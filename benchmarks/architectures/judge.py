"""What the engine makes of a checkpoint, beside transformers on the same folder, in float32.

The engine generates greedy tokens. transformers then sees prompt and tokens at once, and every token must be its most
likely one, with the same log probability: by induction both generate the same text, at the cost of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures.sizes import VOCABULARY
from nanoengine import LLM, SamplingParams
from nanoengine.errors import NanoEngineError
from nanoengine.models.implementation import Implementation

EQUAL = ("nanoengine", "transformers")
PROMPT_LENGTHS, NEW_TOKENS, MAX_LEN = (1, 7, 45, 130), 40, 256
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        kind: "nanoengine" or "transformers" (equal, computed by a family or by transformers' modules), "refused",
            "differs", "noise" (differs, and transformers' two kinds of attention differ as much), "crash", "not made".
        reason: of a refusal, a crash, or no checkpoint.
        worst: the largest difference of a log probability from transformers'.
        noise: that of transformers' sdpa from its eager attention, where it was computed.
    """

    kind: str
    reason: str = ""
    worst: float = 0.0
    noise: float = 0.0

    def __str__(self) -> str:
        if self.kind in EQUAL:
            return f"equal by {self.kind} ({self.worst:.1e})"
        if self.kind in ("differs", "noise"):
            return f"differs by {self.worst:.1e}; transformers' sdpa from eager by {self.noise:.1e}"
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True)
class Text:
    """A prompt, and what was generated behind it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def judge(
    folder: Path, prompt_lengths: Sequence[int] = PROMPT_LENGTHS, new_tokens: int = NEW_TOKENS, **llm_options: Any
) -> Outcome:
    """Run the engine and transformers on a folder. What they raise is part of the outcome."""
    options = {"dtype": "float32", "device": "cpu", "max_model_len": MAX_LEN, "use_tqdm": False, **llm_options}
    try:
        llm = LLM(str(folder), **options)
    except NanoEngineError as error:
        return Outcome("refused", str(error).replace(str(folder), "FOLDER"))
    except Exception as error:
        return crash(error)
    try:
        with llm:
            texts = generate(llm, prompts(prompt_lengths), new_tokens)
            by_family = type(llm.built.models.implementation) is Implementation
        return compare(folder, texts, EQUAL[0] if by_family else EQUAL[1])
    except Exception as error:
        return crash(error)


def crash(error: BaseException) -> Outcome:
    return Outcome("crash", " ".join(f"{type(error).__name__}: {error}".split())[:400])


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens, none of them 0, which pads."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: LLM, some: Sequence[list[int]], new_tokens: int) -> list[Text]:
    """Greedy tokens of the engine, with their log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=1)
    texts = []
    for prompt, result in zip(some, llm.generate(list(some), params, use_tqdm=False), strict=True):
        output = result.outputs[0]
        if output.logprobs is None or len(output.token_ids) != new_tokens:
            raise ValueError(
                f"{len(output.token_ids)} tokens of {new_tokens}, with log probabilities: {output.logprobs}"
            )
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        texts.append(Text(prompt, list(output.token_ids), [table[token].logprob for token, table in pairs]))
    return texts


def compare(folder: Path, texts: Sequence[Text], equal: str) -> Outcome:
    """Of the kind `equal` if every token is transformers' choice, with its log probability."""
    right = reference(folder, texts, "eager")
    worst = difference(texts, right)
    if worst <= TOLERANCE:
        return Outcome(equal, worst=worst)
    try:
        other = reference(folder, texts, "sdpa")
    except (ValueError, ImportError):  # transformers has one way for this class
        return Outcome("differs", worst=worst)
    noise = max(float((own - second).abs().max()) for own, second in zip(right, other, strict=True))
    return Outcome("noise" if worst <= noise else "differs", worst=worst, noise=noise)


def difference(texts: Sequence[Text], right: Sequence[torch.Tensor]) -> float:
    """The largest difference of a log probability; of a token that is not the most likely one, from that one's, and more."""
    worst = 0.0
    for text, rows in zip(texts, right, strict=True):
        tokens = torch.tensor(text.tokens)
        chosen = rows.gather(1, tokens[:, None])[:, 0]
        off = (torch.tensor(text.logprobs, dtype=torch.float64) - chosen).abs()
        missed = torch.where(rows.argmax(1) == tokens, 0.0, rows.amax(1) - chosen + TOLERANCE)
        worst = max(worst, float(torch.maximum(off, missed).nan_to_num(torch.inf, torch.inf).max()))
    return worst


@torch.inference_mode()
def reference(folder: Path, texts: Sequence[Text], attention: str) -> list[torch.Tensor]:
    """transformers' log probabilities of all tokens at the places of the new ones: [new tokens, vocabulary] of each text."""
    model = reference_model(folder, attention)
    rows = []
    for text in texts:
        ids = torch.tensor([text.prompt + text.tokens[:-1]])
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        except TypeError:  # a class without a cache
            logits = model(input_ids=ids).logits
        rows.append(logits[0, len(text.prompt) - 1 :].double().log_softmax(-1))
    return rows


def reference_model(folder: Path, attention: str) -> Any:
    """The class that config.json names, also where the rest of that file is of a model that sees pictures."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    return model_class.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation=attention).eval()
