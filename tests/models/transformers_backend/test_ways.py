"""Whatever else an engine does, a model that transformers' modules compute says what it says in a plain run, one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoengine
from benchmarks.architectures.checkpoints import make
from benchmarks.architectures.judge import reference_model
from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.errors import InvalidConfig
from nanoengine.scale.parallel import capability as parallel
from nanoengine.scale.replicas.capability import Replicas

ARCHITECTURES = [
    *("Qwen3 of the package", "DeepseekV3ForCausalLM", "Gemma3nForCausalLM", "Llama4ForCausalLM", "GPT2LMHeadModel"),
    *("CohereForCausalLM", "BartForCausalLM", "GptOssForCausalLM", "OPTForCausalLM"),
]
NUMBERS: list[dict[str, Any]] = [{}, {}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}]
"""What changes tokens, in a plain run as in any other."""
KERNELS: list[dict[str, Any]] = [{}, {"kernels": "torch"}, {"attention_backend": "torch"}, {"enforce_eager": True}]
WAYS: dict[str, list[dict[str, Any]]] = {
    "chunks": [{}, {"long_prefill_token_threshold": 7}, {"max_num_batched_tokens": 16, "max_num_seqs": 5}],
    "policy": [{"scheduling_policy": "prefill_first"}, {"scheduling_policy": "mixed", "async_scheduling": True}],
    "pool": [{}, {"num_kv_blocks": 26}, {"num_kv_blocks": 26, "preemption_mode": "swap"}],
    "blocks": [{}, {"block_size": 32}, {"kv_host_memory": 2**26}, {"kv_disk_path": "kept"}],
    "guesses": [{}, {"speculation": "ngram"}, {"speculation": "model:demo"}, {"speculation": "model:itself"}],
    "processes": [*[{}] * 10, {"replicas": 1}],  # a replica imports transformers anew, which takes seconds
}
PLAIN = {"dtype": "float32", "device": "cpu", "max_model_len": 192, "use_tqdm": False, "model_impl": "transformers"}
NEW = 8


def checkpoint(name: str, folder: Path) -> Path:
    if name == ARCHITECTURES[0]:
        return Path(nanoengine.__file__).parent / "demo"
    make(name, folder / name)
    return folder / name


def drawn_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    begin, found = rng.choices(range(1, 4000), k=48), []
    for shared, own in ((0, 1), (48, 7), (48, 30), (17, 60), (0, 16)):
        greedy: dict[str, Any] = {"temperature": 0.0, "prompt_logprobs": rng.choice([None, 1])}
        drawn = {"temperature": 1.0, "top_p": 0.9, "n": rng.randint(1, 3), "seed": rng.randrange(99)}
        formed = {"temperature": 0.7, "seed": 5, "structured_outputs": {"regex": "[a-z]{3,9} [0-9]{2,5}"}}
        wish = rng.choice([greedy, greedy, drawn, formed])
        params = SamplingParams(max_tokens=NEW, ignore_eos="structured_outputs" not in wish, logprobs=1, **wish)
        found.append((begin[:shared] + rng.choices(range(1, 4000), k=own), params))
    return found


def answers(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]]) -> tuple[list[Any], list[float]]:
    """Tokens of all completions, and all log probabilities and embeddings, of requests at once."""
    tokens, numbers = [], list[float]()
    for output in llm.generate([own[0] for own in asked], [own[1] for own in asked], use_tqdm=False):
        tokens += [list(own.token_ids) for own in output.outputs]
        for entries in (*(output.prompt_logprobs or ()), *(at for own in output.outputs for at in own.logprobs or ())):
            numbers += [entry.logprob for entry in (entries or {}).values()]
    embedded = llm.embed([own[0] for own in asked], use_tqdm=False)
    return tokens, numbers + [number for own in embedded for number in own.embedding]


@pytest.mark.parametrize("case", range(len(ARCHITECTURES)))
def test_tokens_are_those_of_a_plain_run(tmp_path: Path, case: int) -> None:
    rng, name = random.Random(case), ARCHITECTURES[case]
    folder, asked, numbers = checkpoint(name, tmp_path), drawn_requests(rng), rng.choice(NUMBERS)
    way = {key: value for choices in WAYS.values() for key, value in rng.choice(choices).items()}
    way |= {} if numbers else rng.choice(KERNELS)
    if "kv_disk_path" in way:
        way["kv_disk_path"] = str(tmp_path / "kept")
    if way.get("speculation") == "model:itself":
        way["speculation"] = f"model:{folder}"
    with LLM(str(folder), enable_prefix_caching=False, enforce_eager=True, **PLAIN, **numbers) as llm:
        plain = [answers(llm, [own]) for own in asked]
        embedding_size = len(llm.embed([1], use_tqdm=False)[0].embedding)
    right, exact = [own for tokens, _ in plain for own in tokens], [numbers for _, numbers in plain]
    logprobs = [number for own in exact for number in own[:-embedding_size]]
    embeddings = [number for own in exact for number in own[-embedding_size:]]
    with LLM(str(folder), **PLAIN | numbers | way) as llm:
        for _ in range(2):  # without and with what the first has left in caches
            tokens, found = answers(llm, asked)
            assert tokens == right, (name, numbers, way)
            within = 1e-3 if "kv_cache_dtype" in numbers else 1e-4
            torch.testing.assert_close(torch.tensor(found), torch.tensor(logprobs + embeddings), rtol=0, atol=within)


@pytest.mark.parametrize("name", ["Qwen3 of the package", "GPT2LMHeadModel", "GptOssForCausalLM"])
def test_adapters_are_those_of_peft(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")
    folder = checkpoint(name, tmp_path)
    base = reference_model(folder, "eager")
    linear = [key for key, own in base.named_modules() if type(own).__name__ in ("Linear", "Conv1D")]
    targets = [key for key in linear if base.get_submodule(key) is not base.get_output_embeddings()]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets))
    torch.manual_seed(1)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            weight.data.normal_(0, 0.05)
    model.save_pretrained(tmp_path / "adapter")
    wanted = LoRARequest("own", 1, str(tmp_path / "adapter"))
    prompt = [(7 * i + 3) % 250 + 1 for i in range(40)]
    with LLM(str(folder), enable_lora=True, **PLAIN) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate([prompt] * 2, params, lora_request=[wanted, None], use_tqdm=False)
    adapted, plain = (list(output.outputs[0].token_ids) for output in outputs)
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(input_ids=torch.tensor([prompt + adapted[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    assert adapted == logits.argmax(-1).tolist() != plain


@pytest.mark.parametrize("options", [{}, {"replicas": 0}, {"decode_context_parallel_size": 2, "block_size": 512}])
def test_ranks_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(Replicas, "_carrier", lambda *_: pytest.fail("replicas were started"))
    monkeypatch.setattr(parallel, "_remote_runner", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(
        InvalidConfig, match="tensor_parallel_size is 2, but ranks do not share layers that transformers"
    ):
        LLM("demo", tensor_parallel_size=2, **PLAIN | options)


def test_the_start_up_line_says_who_computes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nanoengine")
    with LLM("demo", **PLAIN) as llm:
        assert llm.built.models.model_config.dtype == "bfloat16"  # that of the files, whatever computes
    assert "layers by transformers " in caplog.messages[0]
    assert "(attention, 36 products, 21 norms by nanoengine)" in caplog.messages[0]
