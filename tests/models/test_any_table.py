"""Any value in any field of the tables that come with a model or an adapter: it is read, or an error of ours says what it is."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from nanoengine.features.pooling.files import defaults_of_folder, defaults_of_gguf
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.models.architectures import read_model_config
from nanoengine.models.default_sampling import default_sampling
from nanoengine.models.description import describe
from nanoengine.models.gguf.architectures import ARCHITECTURES
from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.header import TensorRecord
from nanoengine.models.gguf.tokenizer import GGUFTokenizer
from nanoengine.models.gguf.translate import hf_config
from nanoengine.models.names import DEMO
from tests.features.lora.test_adapter import LAYERS, read
from tests.features.lora.written import write_adapter
from tests.models.configs import QWEN3_06B
from tests.models.families import SHAPES
from tests.models.gguf.test_tokenizer import bpe, sentencepiece
from tests.models.gguf.test_translate import NEEDED
from tests.models.quantization import test_scheme as schemes
from tests.models.quantization.packed_models import A_TENSOR, BLOCKS, FP4, FP8, MIXED, MODELOPT, compressed
from tests.outside import VALUES, wrong
from tests.support import TINY

FACTORS = {"long_factor": [1.0] * 64, "short_factor": [1.0] * 64, "original_max_position_embeddings": 4096}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 9000},
    "yarn": YARN | {"beta_slow": 1, "truncate": True, "attention_factor": 1.0},
    "longrope": FACTORS | {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 1.0},
}
PACKED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)
QUANTIZATIONS: list[dict[str, Any]] = [
    *(schemes.AWQ, schemes.OLD_AWQ, A_TENSOR, FP8, BLOCKS, FP4, MODELOPT | {"group_size": 16}),
    schemes.GPTQ | {"dynamic": {"-:x": {}}, "checkpoint_format": "gptq", "method": "gptq", "pack_dtype": "int32"},
    *(schemes.AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16}}}, PACKED | {"sparsity_config": {}}),
    *(MIXED["NVFP4, floats of 8 bits and words"].config, {"quant_method": "mxfp4"}),
]


@pytest.mark.parametrize("table", QUANTIZATIONS, ids=lambda table: str(table["quant_method"]))
def test_of_a_quantization(table: dict[str, Any]) -> None:
    assert wrong(lambda own: schemes.read(own["all"]), {"all": table}) == []


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_of_a_rotation(kind: str, key: str) -> None:
    table = {key: {"rope_type": kind, "rope_theta": 1e4, **ROTATIONS[kind]}}
    assert wrong(lambda own: read_model_config(QWEN3_06B | own), table) == []


@pytest.mark.parametrize("family", sorted({family for family, _ in SHAPES.values()}))
def test_of_the_config_of_a_family(family: str) -> None:
    shape = dict(SHAPES.values())[family]
    options = {key: TINY[key] for key in TINY.keys() - {"rope_theta", "head_dim", "attention_bias"}} | shape
    config = getattr(transformers, f"{family}ForCausalLM").config_class(**options | {"pad_token_id": None})
    table = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [f"{family}ForCausalLM"]}
    if family == "HunYuanDenseV1":
        table["rope_parameters"] = {"rope_type": "dynamic", "alpha": 1000.0}
    assert wrong(read_model_config, table, 1500) == []


END = "<|endoftext|>"
ADVICE = {"eos_token_id": [0], "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
TEXT: dict[str, Any] = {"eos_token": {"content": END}, "bos_token": END, "add_bos_token": True, "add_eos_token": False}
TEXT |= {"chat_template": [{"name": "default", "template": "{{ 1 }}"}], "tokenizer_class": "PreTrainedTokenizerFast"}
TEXT |= {"added_tokens_decoder": {"0": {"content": END, "special": True, "lstrip": False}}}


def write_anew(path: Path, value: Any) -> int:
    """A new file of JSON: to write over one waits for the disk."""
    path.unlink(missing_ok=True)
    return path.write_text(json.dumps(value))


@pytest.mark.parametrize(("file", "table"), [("generation_config.json", ADVICE), ("tokenizer_config.json", TEXT)])
def test_of_how_a_model_writes(tmp_path: Path, file: str, table: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model", copy_function=os.symlink))
    (folder / file).unlink()

    def read_files(own: Any) -> None:
        write_anew(folder / file, own)
        found = describe(folder)
        default_sampling(found.advised_sampling, SamplingParams)
        _ = found.tokenizer.chat_templates

    assert wrong(read_files, table, 60) == []


def test_of_an_adapter(tmp_path: Path) -> None:
    fields = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}, "use_rslora": False, "lora_dropout": 0.0}
    path = write_adapter(tmp_path, LAYERS, r=4, lora_alpha=6, **fields) / "adapter_config.json"
    table = json.loads(path.read_text())
    assert wrong(lambda own: write_anew(path, own) and read(tmp_path), table, 300) == []


def test_of_how_embeddings_are_made(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    steps, modes = tmp_path / "modules.json", tmp_path / "1" / "config.json"
    table = {"steps": [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1"}]}
    table |= {"modes": {"pooling_mode_mean_tokens": True, "pooling_mode": "mean"}}  # type: ignore[dict-item]

    def made(own: dict[str, Any]) -> None:
        write_anew(steps, own["steps"])
        write_anew(modes, own["modes"])
        defaults_of_folder(tmp_path)

    assert wrong(made, table, 300) == []


OF_GGUF = [
    own for own in VALUES if isinstance(own, str | bool | float) or (type(own) is int and -(2**63) <= own < 2**64)
]
OF_GGUF += [np.array(own) for own in ([], [1], [-1, 5], [1.5, np.nan, np.inf], [True, False], [2**63], range(99_999))]
OF_GGUF += [[], ["x"], ["", "\0"], ["a b"] * 3]
"""What the header of a GGUF file can hold."""


HUGE = [2**63, 2**32 - 1, 2**31, 30_000_000, 1e38]
HUGE += [np.ones(2_000_000, np.uint8), np.zeros(2_000_000, np.float32), ["a"] * 1000]  # type: ignore[list-item]
MAX_BYTES = 32 << 20
SLIDES = "attention.sliding_window_pattern"
STATES = {"attention.recurrent_layers": np.array([True, False]), "ssm.inner_size": 512}
ATTENDS = {"attention.head_count_kv": np.array([0, 2]), "ssm.inner_size": 512}
OF_LAYERS: dict[str, dict[str, Any]] = {
    **{name: {SLIDES: 2} for name in ("gemma3", "olmo3", "exaone4", "gpt-oss", "gptoss")},
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), STATES),
    **dict.fromkeys(("lfm2", "lfm2moe", "granitehybrid"), ATTENDS),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), ATTENDS | {"feed_forward_length": np.array([0, 0])}),
    "gemma4": {SLIDES: np.array([True, False]), "attention.key_length_swa": 2, "attention.shared_kv_layers": 0},
    "llama4": {"expert_used_count": 1},
}
"""What layers of these architectures have, so that a file is read whole but for the value that is drawn."""

ONES = np.ones(128, np.float32).tobytes()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_factors", [False, True])
def test_of_a_gguf_file(architecture: str, has_factors: bool) -> None:
    """Every number is bounded before it is multiplied, too: nothing takes more than `MAX_BYTES`."""
    name = architecture.split()[0]
    sizes = ("attention.head_count_kv", "rope.dimension_count", "attention.key_length")
    keys = NEEDED | dict.fromkeys((*ARCHITECTURES[architecture].keys, *sizes), 2)
    keys |= {"rope.freq_base": 1e4, "pooling_type": 1} | OF_LAYERS.get(name, {})
    if not has_factors:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    table = {"general.architecture": name, "general.type": "model", "tokenizer.ggml.eos_token_id": 0}
    table |= {f"{name}.{key}": value for key, value in keys.items()}
    tensors = {"token_embd.weight": TensorRecord("token_embd.weight", "F32", (10, 8), 320, 0, 0)}
    if has_factors:
        tensors["rope_freqs.weight"] = TensorRecord("rope_freqs.weight", "F32", (1,), 4, 0, 0)

    def config(own: dict[str, Any]) -> None:
        defaults_of_gguf(own)
        read_model_config(hf_config(GGUFFile(Path("model.gguf"), own, tensors, [ONES])))  # type: ignore[list-item]

    tracemalloc.start()
    try:
        assert wrong(config, table, 400, OF_GGUF + HUGE) == []
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


MARKS = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}


@pytest.mark.parametrize("table", [sentencepiece(), bpe(**MARKS)], ids=["sentencepiece", "bpe"])
def test_of_a_vocabulary(table: dict[str, Any]) -> None:
    assert wrong(lambda own: GGUFTokenizer(own).fast, table, 150, OF_GGUF) == []
