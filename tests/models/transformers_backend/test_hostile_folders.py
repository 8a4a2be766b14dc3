"""Whatever a folder says, its model runs as if it had not said it, or is refused in one line before memory is taken for it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.architectures.checkpoints import make
from nanoengine import LLM, SamplingParams
from nanoengine.builder import read_config
from nanoengine.core.startup import Startup
from nanoengine.errors import InvalidWeights, UnsupportedModel
from nanoengine.models.capability import Models
from nanoengine.models.model_config import ModelConfig
from tests.models.damages import CONFIG, GENERATION, WEIGHTS, change, write

HUB, CODE = "org/name", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
ROPE, QUANTIZED = {"rope_type": "default", "rope_theta": 1e4}, {"quant_method": "nope"}
REFUSED: dict[str, list[Any]] = {
    "architectures": [*([name] for name in ("GPTNeoXModel", "pipeline", "GPTNeoXConfig", 5)), [], 5, "GPTNeoXModel"],
    "model_type": [None, 5, [], "gpt2", "clip", "../gpt_neox", "a\nb", "m" * 10**5],
    "hidden_size": [-1, 0, 3, 2**24, 10**400, 1e9, float("nan"), "64", [64], {}, None],
    "num_hidden_layers": [-1, 0, 180, 10**9, 4.0, "4", [4]],
    "num_attention_heads": [0, -4, 7, 2**24, 1e9],
    "vocab_size head_dim": [2**24, 10**9, 1e9],
    "layer_types": [["full_attention"] * 10**5, ["x"] * 4, [1] * 4, 7],
    "rope_parameters": [ROPE | {"rope_type": "nope"}, ROPE | {"partial_rotary_factor": 2.0**24}],
    "dtype": ["nope", "os", "manual_seed", "a\nb"],
    "quantization_config compression_config kernel_config": [QUANTIZED],
    "text_config": [5, {"hidden_size": 10**9}, {"quantization_config": QUANTIZED}],
    "transformers_weights": [HUB, "../model.safetensors"],
    "a\n_layers": [10**9, [[10**9]], {"x": [{"num_layers": 10**9}]}],
    "other": [[0] * 10**5, {str(i): i for i in range(10**5)}],
    "get_text_config to_dict self hidden_act use_cache": [5],
}
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "auto_map": [CODE, {"AutoModelForCausalLM": f"{HUB}--code.M"}, 5, ["AutoConfig"]],
    "attn_implementation _attn_implementation _experts_implementation": [HUB, {"": HUB}, 5],
    "attribute_map": [{"other": name, "hidden_size": "other"} for name in ("quantization_config", "fusion_config")],
    "num_labels": [2**24, -1, "x"],
    "id2label base_model_tp_plan sub_configs __class__ _name_or_path": [5],
    "configuration_files": [["config.1.0.0.json"], 5],
}
Tensors = dict[str, torch.Tensor]
MATRIX = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
OTHER_WEIGHTS: dict[str, Callable[[Tensors], Tensors]] = {
    "none": lambda _: {},
    "missing": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != MATRIX},
    "other names": lambda tensors: {"x\n" + name: tensor for name, tensor in tensors.items()},
    "smaller": lambda tensors: tensors | {MATRIX: tensors[MATRIX][:-1]},
    "turned": lambda tensors: tensors | {MATRIX: tensors[MATRIX].T.contiguous()},
    "no numbers": lambda tensors: tensors | {MATRIX: tensors[MATRIX] * torch.nan},
}


def drawn(table: dict[str, list[Any]]) -> pytest.MarkDecorator:
    pairs = [(field, value) for fields, values in table.items() for field in fields.split(" ") for value in values]
    return pytest.mark.parametrize(("field", "value"), pairs, ids=lambda value: ascii(value)[:20])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make("GPTNeoXForCausalLM", folder := tmp_path_factory.mktemp("made"))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it looks for a host"))
    return shutil.copytree(made, tmp_path / "model")


def described(folder: Path) -> ModelConfig:
    Startup(read_config(str(folder), {}), [models := Models()]).describe()
    return models.model_config


def tokens(folder: Path) -> list[int]:
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=64, use_tqdm=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    with pytest.raises((UnsupportedModel, InvalidWeights)) as raised:
        yield
    assert len(str(raised.value)) < 2000
    assert len(str(raised.value).splitlines()) == 1


@drawn(REFUSED)
def test_a_field_is_refused_in_one_line_and_at_once(folder: Path, field: str, value: Any) -> None:
    change(CONFIG, **{field: value})(folder)
    start = time.process_time()
    with refused_in_one_line():
        described(folder)
    assert time.process_time() - start < 5


@drawn(WITHOUT_EFFECT)
def test_a_field_that_names_code_or_labels_has_no_effect(made: Path, folder: Path, field: str, value: Any) -> None:
    change(CONFIG, **{field: value, "other": QUANTIZED})(folder)
    assert described(folder) == described(made)


@pytest.mark.parametrize("damage", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_other_weights_are_refused(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    save_file(damage(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    with refused_in_one_line():
        tokens(folder)


def test_code_and_adapters_in_the_folder_are_not_looked_at(made: Path, folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    for name in ("code.py", "custom_generate/generate.py"):
        write(name, f"open({str(folder / 'ran')!r}, 'w')")(folder)
    write("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')(folder)
    write(GENERATION, '{"custom_generate": "org/name", "num_beams": 1000000000}')(folder)
    change(CONFIG, auto_map=CODE)(folder)
    assert tokens(folder) == tokens(made)
    assert not (folder / "ran").exists()


def test_a_family_that_refuses_a_field_has_the_last_word(folder: Path) -> None:
    change(CONFIG, architectures=["Qwen3ForCausalLM"], model_type="qwen3", other=1)(folder)
    with pytest.raises(UnsupportedModel, match="hidden_act is 'gelu'"):
        described(folder)
