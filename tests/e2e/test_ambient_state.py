"""What a process, or a thread of it, has set in torch reaches no tensor of an engine, and is left as it was."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.kernels.native.support import unsupported_reason
from tests.features.lora.written import linear_layers, write_adapter
from tests.models.families import family_checkpoint
from tests.support import tiny_checkpoint

REASON = unsupported_reason(torch.device("cpu"), torch.float32)


@contextmanager
def setting(set_it: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


State = Callable[[], AbstractContextManager[Any]]

STATES: dict[str, State] = {
    **{
        f"default dtype {dtype}": lambda dtype=dtype: setting(torch.set_default_dtype, dtype, torch.float32)  # type: ignore[misc]
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    },
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "a device around": lambda: torch.device("meta"),
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "no inference mode": lambda: torch.inference_mode(mode=False),
    "deterministic": lambda: setting(
        torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled()
    ),
    "threads": lambda: setting(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
}


def drawn(rng: random.Random) -> list[str]:
    """Any one state, or some that come together."""
    return rng.sample(sorted(STATES), rng.choice([1, 1, 2, 3]))


@contextmanager
def entered(names: list[str]) -> Iterator[None]:
    """Inside, what is set is looked at again at the end: nobody may have changed it."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(STATES[name]())
        before = facts()
        yield
        assert facts() == before


def facts() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


# ---- engines


def plain(folder: Path) -> dict[str, Any]:
    """Plain torch, whose products autocast would round."""
    return {"model": str(tiny_checkpoint(folder / "plain")), "dtype": "float32", "kernels": "torch"}


def adapted(folder: Path) -> dict[str, Any]:
    """Native kernels, an adapter, and drafts."""
    model = tiny_checkpoint(folder / "adapted", head_dim=32)
    write_adapter(folder / "adapter", linear_layers(model), size=0.3)
    options = {"dtype": "bfloat16", "kernels": "native", "enable_lora": True, "speculation": "ngram"}
    return {"model": str(model), **options}


def hybrid(folder: Path) -> dict[str, Any]:
    """Native kernels, layers with states, weights of int8, and blocks that go to files."""
    model = family_checkpoint(folder / "hybrid", "Qwen3.5", head_dim=32)
    return {
        "model": str(model),
        "dtype": "float32",
        "kernels": "native",
        "quantization": "int8",
        "kv_disk_path": str(folder / "kv"),
    }


def requests() -> list[tuple[list[int], SamplingParams]]:
    """One for each kind of computing that a step may have."""
    common: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True, "logprobs": 2}
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "seed": 4},
        {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "min_tokens": 3},
        {"temperature": 0.7, "seed": 6, "allowed_token_ids": list(range(40, 90))},
    ]
    if importlib.util.find_spec("llguidance") is not None:
        asked.append({"temperature": 1.0, "seed": 7, "structured_outputs": {"regex": "[a-f]{9}"}})
    return [
        ([(17 * i + 5 * j) % 200 for j in range(20)], SamplingParams(**common | own)) for i, own in enumerate(asked)
    ]


def answers(llm: LLM, asked: list[tuple[list[int], SamplingParams]], folder: Path, options: dict[str, Any]) -> object:
    """Tokens and log probabilities, with every bit."""
    prompts, params = zip(*asked, strict=True)
    adapter = LoRARequest("own", 1, str(folder / "adapter")) if options.get("enable_lora") else None
    found = llm.generate(list(prompts), list(params), lora_request=adapter, use_tqdm=False)
    return [
        (own.token_ids, [dict(entry) for entry in own.logprobs or []], repr(output.prompt_logprobs))
        for output in found
        for own in output.outputs
    ]


@pytest.mark.parametrize("kind", [plain, adapted, hybrid])
def test_what_is_set_in_torch_changes_no_bit(kind: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    """Set before an engine is made, changed while it lives, and set around `generate`."""
    if kind is not plain and REASON is not None:
        pytest.skip(f"no native kernels: {REASON}")
    options, rng = kind(tmp_path), random.Random(kind.__name__)
    asked = requests()

    def made() -> LLM:
        return LLM(**options, device="cpu", num_threads=1, num_kv_blocks=100, max_model_len=64, use_tqdm=False)

    def check(llm: LLM, states: list[str]) -> None:
        found = answers(llm, asked, tmp_path, options)
        assert found == right, states
        llm.reset_prefix_cache()

    with made() as llm:
        right = answers(llm, asked, tmp_path, options)
        for names in ([name] for name in STATES):
            with entered(names):
                check(llm, names)
        check(llm, ["none, afterwards"])
    for _ in range(4):
        before, around = drawn(rng), drawn(rng)
        with entered(before):
            llm = made()
        with llm:
            check(llm, [*before, "before"])
            with entered(around):
                check(llm, [*before, "before", *around, "around"])
