"""Requests with adapters, in engines: alone and together, in drawn ways, loaded anew, in the cache, and at the limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from nanoengine.core.sequence import Request
from nanoengine.errors import InvalidConfig, InvalidRequest, StepFailed
from nanoengine.features.lora.adapted_products import AdaptedProducts
from nanoengine.features.lora.adapters import Adapters, adapters_of
from nanoengine.features.lora.runner_part import AdapterPart
from tests.e2e.small_engine import Broken, raise_at, sabotage, step
from tests.features.lora.written import ALL, linear_layers, merged, write_adapter
from tests.models.families import family_checkpoint
from tests.support import fill_kv_with_nan, model_runner

SHARED = [(3 * i + 1) % 200 for i in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "Llama", seed=5, head_dim=32)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Of all layers, of some, and of other ranks."""
    folder, layers = tmp_path_factory.mktemp("adapters"), linear_layers(model)
    written = [
        write_adapter(folder / "0", layers, 1),
        write_adapter(folder / "1", layers, 2, targets=("q_proj", "down_proj"), r=9, dtype=torch.bfloat16),
        write_adapter(folder / "2", layers, 3, use_rslora=True, rank_pattern={"o_proj": 17}, dtype=torch.float16),
    ]
    return [LoRARequest(f"adapter {i}", i + 1, str(path)) for i, path in enumerate(written)]


def opened(model: Path, **options: Any) -> LLM:
    defaults = {"num_kv_blocks": 100, "device": "cpu", "dtype": "float32", "max_model_len": 256, "enable_lora": True}
    llm = LLM(str(model), use_tqdm=False, **defaults | options)
    fill_kv_with_nan(llm)
    return llm


def own_adapters(llm: LLM) -> Adapters:
    return adapters_of(llm.engine.scheduler.parts)


def own_products(llm: LLM) -> AdaptedProducts:
    (part,) = (own for own in model_runner(llm).parts if isinstance(own, AdapterPart))
    return part.products


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with opened(model, max_loras=3) as own:
        yield own


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def make(llm: LLM, prompt: list[int], params: SamplingParams, adapter: LoRARequest | None) -> Request:
    request = llm.engine.make_request(prompt, params)
    if adapter is not None:
        own_adapters(llm).use_for_requests([request], adapter)
    return request


def test_steps_with_adapters_are_recorded_beside_those_without(llm: LLM, adapters: list[LoRARequest]) -> None:
    recorder = model_runner(llm).recorder
    if recorder is None:
        pytest.skip("nothing is recorded here")
    for adapter in (None, adapters[0], adapters[1]):
        llm.generate([[5, 6, 7]], GREEDY, lora_request=adapter, use_tqdm=False)
    kinds = {variant for bucket, variant in recorder._replays if bucket.num_runs == 1}  # type: ignore[attr-defined]
    assert kinds == {False, True}


# ---- right


FUSED = ("Phi3", "Qwen3-MoE", "Gemma3", "Granite, biases", "Phi3, partial, long factors", "Falcon H1", "Nemotron-H")


@pytest.mark.parametrize(
    ("shape", "kernels"), [*((shape, "auto") for shape in FUSED), ("Phi3", "torch"), ("Falcon H1", "torch")]
)
def test_families_with_fused_and_reordered_layers(tmp_path: Path, shape: str, kernels: str) -> None:
    """Attention alone where there are experts. Where rows are does not depend on the kernels (their products:
    test_products.py).
    """
    sizes = {"head_dim": 32} if shape in ("Qwen3-MoE", "Granite, biases", "Falcon H1", "Nemotron-H") else {}
    folder = family_checkpoint(tmp_path / "model", shape, seed=3, **sizes)
    layers = {name: own for name, own in linear_layers(folder).items() if ".experts" not in name}
    path = write_adapter(tmp_path / "adapter", layers, 4, size=0.15)
    with opened(folder, num_kv_blocks=200, kernels=kernels, attention_backend=kernels) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        wanted = LoRARequest("own", 1, str(path))
        plain, own = llm.generate([SHARED, SHARED], params, lora_request=[None, wanted], use_tqdm=False)
    found = own.outputs[0].token_ids
    with torch.no_grad():
        right = merged(folder, path)(torch.tensor([SHARED + found])).logits[0, len(SHARED) - 1 : -1].argmax(-1).tolist()
    assert found == right
    assert plain.outputs[0].token_ids != found


# ---- the cache, and loading anew


def test_a_changed_file_under_the_same_name_is_another_adapter(
    llm: LLM, model: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    """And the cache has nothing for it of the model alone, or of another adapter."""
    layers, wanted = linear_layers(model), LoRARequest("changing", 1, str(tmp_path / "own"))
    found, cached = [], []
    llm.reset_prefix_cache()
    llm.generate([SHARED], GREEDY, use_tqdm=False)
    for seed in (1, 7, 1):
        write_adapter(tmp_path / "own", layers, seed)
        (output,) = llm.generate([SHARED], GREEDY, lora_request=wanted, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
        cached.append(output.num_cached_tokens)
    assert found[0] == found[2] != found[1]
    assert cached == [0, 0, 64], "what the same bytes have computed is found again"
    (same,) = llm.generate([SHARED], GREEDY, lora_request=adapters[0], use_tqdm=False)
    assert (same.outputs[0].token_ids, same.num_cached_tokens) == (found[0], 64), "by another name, too"


def test_one_that_is_replaced_or_unloaded_stays_for_its_requests(
    model: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    with opened(model) as llm:
        expected = tokens(llm.generate([SHARED], GREEDY, lora_request=adapters[0], use_tqdm=False))[0]
        own, products = own_adapters(llm), own_products(llm)
        own.unload("adapter 0")
        shutil.copytree(adapters[0].lora_path, tmp_path / "own")
        own.load("own", str(tmp_path / "own"))
        request = make(llm, SHARED, GREEDY, LoRARequest("own"))
        llm.engine.submit(request)
        step(llm, 2)
        write_adapter(tmp_path / "own", linear_layers(model), 9)
        own.load("own", str(tmp_path / "own"))
        step(llm, 1)
        own.unload("own")
        while llm.engine.has_unfinished:
            step(llm)
        assert request.sequences[0].output_token_ids == expected
        with pytest.raises(InvalidRequest, match="no adapter 'own' is loaded"):
            own.unload("own")
        assert own.wants_step()
        llm.engine.step()
        assert not own.wants_step()
        kept = [*products.adapters, *getattr(products, "_memory", ())]
        assert not kept, "the runner has given back what nobody needs"


def test_a_new_adapter_takes_no_slot_of_one_that_stays(model: Path, adapters: list[LoRARequest]) -> None:
    with opened(model, max_loras=2) as llm:
        expected = tokens(llm.generate([SHARED] * 2, GREEDY, lora_request=adapters[:2], use_tqdm=False))
        own_adapters(llm).unload("adapter 0")
        found = tokens(llm.generate([SHARED] * 2, GREEDY, lora_request=[adapters[2], adapters[1]], use_tqdm=False))
        assert found[1] == expected[1] != found[0]


# ---- beside other features


def test_beams_have_their_adapter(llm: LLM, adapters: list[LoRARequest], model: Path) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    (found,) = llm.beam_search([SHARED], params, lora_request=adapters[0], use_tqdm=False)
    (plain,) = llm.beam_search([SHARED], params, use_tqdm=False)
    assert found.outputs[0].token_ids != plain.outputs[0].token_ids
    best = found.outputs[0]
    with torch.no_grad():
        logits = merged(model, Path(adapters[0].lora_path))(torch.tensor([SHARED + best.token_ids])).logits[0]
    own = logits.log_softmax(-1)[len(SHARED) - 1 : -1].gather(-1, torch.tensor(best.token_ids)[:, None]).sum().item()
    assert abs(own - (best.cumulative_logprob or 0.0)) < 1e-3


def test_chats_streams_and_embeddings_take_an_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    text, own = "abc" * 9, adapters[0]
    (expected,) = llm.generate([text], GREEDY, lora_request=own, use_tqdm=False)
    assert "".join(llm.stream(text, GREEDY, lora_request=own)) == expected.outputs[0].text
    first, second, third = (
        llm.embed([text], lora_request=adapter, use_tqdm=False)[0].embedding for adapter in (None, own, own)
    )
    assert (second == third).all()
    assert not (first == second).all()


def test_after_a_failed_step_adapters_are_loaded_again(
    model: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the orders of a failed step were carried out, nobody knows."""
    with opened(model) as llm:
        expected = tokens(llm.generate([SHARED] * 3, GREEDY, lora_request=adapters, use_tqdm=False))
        llm.reset_prefix_cache()
        for slot in range(3):
            own_products(llm).drop(slot)
        with monkeypatch.context() as patch:
            sabotage(llm, patch, raise_at(1, Broken()))
            with pytest.raises(StepFailed):
                llm.generate([SHARED[:40]], GREEDY, lora_request=adapters[0], use_tqdm=False)
        assert tokens(llm.generate([SHARED] * 3, GREEDY, lora_request=adapters, use_tqdm=False)) == expected


# ---- limits


def test_limits_are_told_by_their_names(model: Path, adapters: list[LoRARequest]) -> None:
    with opened(model, max_loras=2) as llm:
        own = own_adapters(llm)
        for adapter in adapters[:2]:
            own.load(adapter.lora_name, adapter.lora_path)
        with pytest.raises(InvalidRequest, match=r"2 are loaded or in use, the most that may be \(max_loras\)"):
            own.load("third", adapters[2].lora_path)
        with pytest.raises(InvalidRequest, match="'adapter 0' is loaded: unload it"):
            own.load("adapter 0", adapters[2].lora_path, replaces=False)
        with pytest.raises(InvalidRequest, match="no room") as refused:
            llm.generate([[1]] * 3, GREEDY, lora_request=[adapters[2], adapters[0], adapters[1]], use_tqdm=False)
        assert refused.traceback, "who keeps the error keeps no adapter in use"
        found = tokens(llm.generate([SHARED], GREEDY, lora_request=adapters[2], use_tqdm=False))  # it makes room
        assert set(own.loaded) == {"adapter 2", "adapter 1"} or set(own.loaded) == {"adapter 2", "adapter 0"}
        assert found == tokens(llm.generate([SHARED], GREEDY, lora_request=adapters[2], use_tqdm=False))
        llm.engine.submit(make(llm, SHARED, GREEDY, adapters[2]))
        for adapter in adapters[:2]:
            own.find(adapter)
        assert set(own.loaded) == {"adapter 2", "adapter 1"}, "one that is in use makes no room"
    size = len((Path(adapters[0].lora_path) / "adapter_model.safetensors").read_bytes())
    with opened(model, max_lora_bytes=size + 10) as llm:
        own_adapters(llm).load("one", adapters[0].lora_path)
        with pytest.raises(InvalidRequest, match="max_lora_bytes"):
            own_adapters(llm).load("two", adapters[1].lora_path)


def test_mistakes_are_told_before_anything_runs(model: Path, llm: LLM, adapters: list[LoRARequest]) -> None:
    for wanted, message in (
        ("adapter 0", "it must be a LoRARequest"),
        ([{}], "it must be a LoRARequest"),
        (LoRARequest("unknown"), "no adapter 'unknown' is loaded"),
        ([adapters[0]] * 2, "2 entries for 1 prompts"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate([[1, 2]], GREEDY, lora_request=wanted, use_tqdm=False)  # type: ignore[arg-type]
    for fields in (("", 1), (1, 1), ("a", 0), ("a", True), ("a\n", 1), ("a", 1, 5)):
        with pytest.raises(InvalidRequest):
            LoRARequest(*fields)  # type: ignore[arg-type]
    with opened(model, enable_lora=False) as plain:
        with pytest.raises(InvalidRequest, match="set enable_lora=True"):
            plain.generate([[1]], GREEDY, lora_request=adapters[0], use_tqdm=False)
        without, beside = (own.generate([SHARED], GREEDY, lora_request=[None], use_tqdm=False) for own in (plain, llm))
        assert tokens(without) == tokens(beside), "a request without an adapter does not notice that there may be some"
    for options in ({"lora_modules": ["a=b"], "enable_lora": False}, {"lora_modules": "a=b"}, {"lora_modules": ["a"]}):
        with pytest.raises(InvalidConfig, match="lora_modules"):
            opened(model, **options)
    with opened(model, lora_modules=[f"first={adapters[0].lora_path}"]) as started:
        assert list(own_adapters(started).loaded) == ["first"]
    assert json.loads((Path(adapters[0].lora_path) / "adapter_config.json").read_text())["target_modules"] == [*ALL]
