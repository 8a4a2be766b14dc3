"""Whatever a folder says, its model runs as if it had not said it, or is refused in one line before memory is taken for it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architectures.checkpoints import make
from nanoengine import LLM, SamplingParams
from nanoengine.builder import read_config
from nanoengine.core.startup import Startup
from nanoengine.errors import InvalidWeights, NanoEngineError, UnsupportedModel
from nanoengine.models.capability import Models
from nanoengine.models.model_config import ModelConfig
from tests.models.damages import CONFIG, GENERATION, WEIGHTS, Damage, change, write

HUB, CODE = "org/name", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
REFUSED: list[tuple[str, Any]] = [
    *(("architectures", [name]) for name in ("GPTNeoXModel", "pipeline", "GPTNeoXConfig", "BartForCausalLM")),
    *(("model_type", value) for value in (None, 5, [], "gpt2", "clip", "../gpt_neox", "a\nb", "m" * 10**5)),
    *(("hidden_size", value) for value in (-1, 0, 3, 2**24, 10**400, 1e9, float("nan"), "64", [64], {}, None)),
    *(("num_hidden_layers", value) for value in (-1, 0, 180, 10**9, 4.0, "4", [4])),
    *(("num_attention_heads", value) for value in (0, -4, 7, 2**24, 1e9)),
    *(("head_dim", value) for value in (1e9, 2**24)),
    *(("vocab_size", value) for value in (-1, 2**24, 10**9, 1e6)),
    *(("layer_types", value) for value in (["full_attention"] * 10**5, ["x"] * 4, [1] * 4, 7)),
    *(("rope_parameters", {"rope_type": kind, "rope_theta": 1e4}) for kind in ("nope", ["yarn"], "yarn")),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0**24}),
    *(("dtype", value) for value in ("nope", "os", "manual_seed", "a\nb")),
    *((name, {"quant_method": "nope"}) for name in ("quantization_config", "compression_config", "kernel_config")),
    *(("text_config", value) for value in (5, {"hidden_size": 10**9}, {"quantization_config": {"bits": 4}})),
    *(("transformers_weights", value) for value in (HUB, "../model.safetensors")),
    *(("a\nb" * 10**4 + "_layers", value) for value in (10**9, [[10**9]], {"x": [{"num_layers": 10**9}]})),
    *(("other", value) for value in ([0] * 10**5, {str(i): i for i in range(10**5)})),
    *((name, 5) for name in ("get_text_config", "to_dict", "self", "hidden_act", "use_cache")),
]
WITHOUT_EFFECT: list[tuple[str, Any]] = [
    *(("auto_map", value) for value in (CODE, {"AutoModelForCausalLM": f"{HUB}--code.M"}, 5, ["AutoConfig"])),
    *((f"{kind}_implementation", value) for kind in ("attn", "_attn", "_experts") for value in (HUB, {"": HUB}, 5)),
    *(("attribute_map", {"other": name, "hidden_size": "other"}) for name in ("quantization_config", "fusion_config")),
    *(("num_labels", value) for value in (2**24, -1, "x")),
    *((name, 5) for name in ("id2label", "base_model_tp_plan", "sub_configs", "__class__", "_name_or_path")),
    *(("configuration_files", value) for value in (["config.1.0.0.json"], 5)),
]
short = lambda value: ascii(value)[:20]  # noqa: E731
Tensors = dict[str, torch.Tensor]
MATRIX = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
WRONG_WEIGHTS: dict[str, Callable[[Tensors], Tensors]] = {
    "none": lambda _: {},
    "missing": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != MATRIX},
    "other names": lambda tensors: {"x\n" + name: tensor for name, tensor in tensors.items()},
    "smaller": lambda tensors: tensors | {MATRIX: tensors[MATRIX][:-1]},
    "turned": lambda tensors: tensors | {MATRIX: tensors[MATRIX].T.contiguous()},
    "a scalar": lambda tensors: tensors | {MATRIX: tensors[MATRIX][0, 0]},
    "no numbers": lambda tensors: tensors | {MATRIX: tensors[MATRIX] * torch.nan},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make("GPTNeoXForCausalLM", folder := tmp_path_factory.mktemp("made"))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it looks for a host"))
    return shutil.copytree(made, tmp_path / "model")


def described(folder: Path) -> ModelConfig:
    """What its files say; nothing is loaded."""
    models = Models()
    Startup(read_config(str(folder), {}), [models]).describe()
    return models.model_config


def tokens(folder: Path) -> list[int]:
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=64, use_tqdm=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids


def check_message(raised: pytest.ExceptionInfo[NanoEngineError]) -> None:
    assert len(str(raised.value)) < 2000
    assert len(str(raised.value).splitlines()) == 1
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=short)
def test_a_field_is_refused_in_one_line_and_at_once(folder: Path, field: str, value: Any) -> None:
    change(CONFIG, **{field: value})(folder)
    start = time.process_time()
    with pytest.raises((UnsupportedModel, InvalidWeights)) as raised:
        described(folder)
    check_message(raised)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(("field", "value"), WITHOUT_EFFECT, ids=short)
def test_a_field_that_names_code_or_labels_has_no_effect(made: Path, folder: Path, field: str, value: Any) -> None:
    change(CONFIG, **{field: value, "other": {"quant_method": "nope"}})(folder)
    assert described(folder) == described(made)


@pytest.mark.parametrize("damage", WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_other_weights_are_refused(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    save_file(damage(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    with pytest.raises((UnsupportedModel, InvalidWeights)) as raised:
        tokens(folder)
    check_message(raised)


def test_files_of_code_and_adapters_beside_the_weights_are_not_looked_at(made: Path, folder: Path) -> None:
    ran = folder / "ran"
    (folder / "custom_generate").mkdir()
    files = "code.py", "custom_generate/generate.py"
    damages: list[Damage] = [write(name, f"open({str(ran)!r}, 'w')") for name in files]
    damages += [write("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')]
    damages += [write(GENERATION, '{"custom_generate": "org/name", "num_beams": 1000000000}')]
    for damage in [*damages, change(CONFIG, auto_map=CODE)]:
        damage(folder)
    assert tokens(folder) == tokens(made)
    assert not ran.exists()


def test_a_model_that_only_its_own_code_computes_is_refused_by_name(folder: Path) -> None:
    change(CONFIG, model_type="mine", auto_map=CODE)(folder)
    with pytest.raises(UnsupportedModel, match=r"model_type is 'mine'.*code in its folder is never run"):
        described(folder)


def test_a_family_that_refuses_a_field_has_the_last_word(folder: Path) -> None:
    change(CONFIG, architectures=["Qwen3ForCausalLM"], model_type="qwen3", other=1)(folder)
    with pytest.raises(UnsupportedModel, match="hidden_act is 'gelu'"):
        described(folder)
