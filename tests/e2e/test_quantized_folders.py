"""Folders of quantized layers against transformers on the numbers that they stand for: the same tokens, in float32."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from nanoengine.errors import InvalidWeights
from nanoengine.kernels.native.c_functions import c_functions
from nanoengine.models.architectures import read_model_config
from nanoengine.models.description import METHODS_BY_FILE, config_table
from nanoengine.models.quantization.scheme import read_scheme
from tests.kernels.marks import needs_kernels
from tests.models.families import partial
from tests.models.quantization.packed_models import (
    FORMS,
    Form,
    awq_form,
    edit_weights,
    gptq_form,
    mxfp4_folder,
    pack_folder,
    packed_form,
)
from tests.support import TINY, model_runner, reference_logits, reference_model, save_random, tiny_checkpoint

SHAPE = {"num_hidden_layers": 1, "max_position_embeddings": 64}
PROMPT = [7, 3, 250, 99, 12, 64]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        activation_dtype="float32",
        device="cpu",
        num_kv_blocks=32,
        use_tqdm=False,
        **options,
    )


def assert_tokens_are_those_of_transformers(folder: Path, num_tokens: int = 24) -> None:
    """And as likely as there: small models repeat themselves, so that tokens alone say little."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    with open_llm(folder) as llm:
        completion = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    tokens = completion.token_ids
    assert len(tokens) == num_tokens
    logits = reference_logits(reference_model(folder / "dense"), PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    assert completion.logprobs is not None
    ours = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
    assert ours == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), **SHAPE)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_format(qwen3: Path, tmp_path: Path, form: Form) -> None:
    assert_tokens_are_those_of_transformers(pack_folder(qwen3, tmp_path / "packed", form, files=3))


@pytest.mark.parametrize("where", [*METHODS_BY_FILE, "compression_config", "text_config"])
def test_older_folders_tell_of_quantization_in_other_places(qwen3: Path, tmp_path: Path, where: str) -> None:
    forms = {"quant_config.json": awq_form(), "hf_quant_config.json": FORMS["NVFP4 of ModelOpt"]}
    table = json.loads((qwen3 / "config.json").read_text())
    told = dict(forms.get(where, gptq_form()).config)
    right = table | {"quantization_config": dict(told)}
    if where.endswith(".json"):
        del told["quant_method"]
        told = {"quantization": told} if where == "hf_quant_config.json" else told
        (tmp_path / where).write_text(json.dumps(told))
    elif where == "text_config":
        table = {"architectures": table.pop("architectures"), where: right}
    else:
        table[where] = told
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = config_table(tmp_path)
    assert read_scheme(found) == read_scheme(right)
    assert read_model_config(found) == read_model_config(right)


@pytest.mark.parametrize(
    ("family", "form", "options"),
    [
        ("Qwen2", awq_form(), {}),
        ("Phi3", gptq_form(sym=False), partial(0.5) | {"pad_token_id": 0}),
        (
            "Qwen3Moe",
            packed_form(symmetric=False),
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
    ],
    ids=["biases", "rows in another order", "experts one by one"],
)
def test_layers_of_other_families(tmp_path: Path, family: str, form: Form, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY | SHAPE | options)
    original = save_random(getattr(transformers, f"{family}ForCausalLM")(config).eval(), tmp_path / "original")
    assert_tokens_are_those_of_transformers(pack_folder(original, tmp_path / "packed", form))


LINE = 64
"""Bytes of a line of the CPU's cache."""

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 96, "hidden_size": 64}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**TINY | SHAPE | GPT_OSS)
    folder = tmp_path_factory.mktemp("gpt-oss")
    return mxfp4_folder(
        save_random(transformers.GptOssForCausalLM(config).eval(), folder / "original"), folder / "packed"
    )


def expert_formats(llm: LLM) -> dict[str, int]:
    (layer,) = model_runner(llm).model.layers
    experts = layer.mlp
    return dict(sum((Counter(weights.formats()) for weights in experts.mixture.weights), Counter()))


@needs_kernels
def test_experts_of_gpt_oss_as_they_are_stored(gpt_oss: Path) -> None:
    assert_tokens_are_those_of_transformers(gpt_oss)
    width = c_functions().panel_width()  # outputs that lie together: the CPU's

    def size(outputs: int, inputs: int) -> int:
        """4 bits, and of 32 an exponent as a bfloat16; those of a panel are whole lines of the cache."""
        scales = -(-width * inputs // 32 * 2 // LINE) * LINE
        return outputs // width * (scales + width * inputs // 2)

    with open_llm(gpt_oss) as llm:
        assert expert_formats(llm) == {"MXFP4": 4 * (size(2 * 96, 64) + size(64, 96))}


@needs_kernels
@pytest.mark.parametrize(("quantization", "form"), [("int8", "int8"), ("int4", "int4-32")])
def test_experts_of_gpt_oss_are_quantized_as_they_are_loaded(gpt_oss: Path, quantization: str, form: str) -> None:
    """As long as they are stored as numbers."""
    with open_llm(gpt_oss / "dense", quantization=quantization) as llm:
        assert expert_formats(llm).keys() == {form}
    with open_llm(gpt_oss, quantization=quantization) as llm:
        assert expert_formats(llm).keys() == {"MXFP4"}


def test_a_folder_that_lacks_scales_is_refused_before_anything_is_loaded(qwen3: Path, tmp_path: Path) -> None:
    folder = pack_folder(qwen3, tmp_path / "packed", awq_form())
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"))
    with pytest.raises(InvalidWeights, match=r"model\.layers\.0\.mlp\.up_proj\.scales is missing"):
        open_llm(folder)
