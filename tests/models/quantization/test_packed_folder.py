"""A folder of quantized layers is a checkpoint of matrices; what does not fit together is named before anything is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.core.model_config import read_json
from nanoengine.errors import InvalidWeights, ModelNotFound, UnsupportedModel
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import Decoder, build_model
from nanoengine.models.loader import check_weights, load_weights, open_checkpoint
from nanoengine.models.safetensors_folder import SafetensorsFolder
from tests.models.quantization.packed_models import (
    FORMS,
    MIXED,
    Form,
    Tensors,
    awq_form,
    edit_config,
    edit_weights,
    gptq_form,
    mixed,
    pack_folder,
    packed_form,
)
from tests.support import tensors_of, tiny_checkpoint

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 40}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original"), **SHAPE)


@pytest.fixture
def packed_in(original: Path, tmp_path: Path) -> Callable[..., Path]:
    return lambda form, **options: pack_folder(original, tmp_path / "packed", form, **options)


def build(folder: Path) -> Decoder:
    """The engine's model, full of sevens."""
    config = read_model_config(read_json(folder, "config.json"))
    model = build_model(config, TorchKernels(), TorchAttention(16), torch.float32, torch.device("cpu"))
    for tensor in tensors_of(model).values():
        tensor.fill_(7.0)
    return model


def load(folder: Path) -> Decoder:
    model, checkpoint = build(folder), open_checkpoint(folder)
    check_weights(model.config, checkpoint)
    load_weights(model.checkpoint_tensors(), checkpoint, torch.float32, use_tqdm=False)
    return model


def refused(folder: Path, message: str) -> None:
    """Nothing may have been copied when it is."""
    model = build(folder)
    with pytest.raises(InvalidWeights, match=message):
        check_weights(model.config, open_checkpoint(folder))
    with pytest.raises(InvalidWeights, match=message):
        load_weights(model.checkpoint_tensors(), open_checkpoint(folder), torch.float32, use_tqdm=False)
    assert all(bool((tensor == 7.0).all()) for tensor in tensors_of(model).values())


@pytest.mark.parametrize("form", [*FORMS.values(), *MIXED.values()], ids=[*FORMS, *MIXED])
def test_what_is_loaded_are_the_numbers_that_were_packed(packed_in: Callable[..., Path], form: Form) -> None:
    """The tensors of a layer are in several files."""
    folder = packed_in(form, files=3)
    model, expected = load(folder), load_file(folder / "dense" / "model.safetensors")
    assert tensors_of(model).keys() == expected.keys()
    for name, tensor in tensors_of(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0, msg=name)


def test_how_a_folder_is_read_is_known_when_it_is_opened(
    original: Path, tmp_path: Path, packed_in: Callable[..., Path]
) -> None:
    assert isinstance(open_checkpoint(original), SafetensorsFolder)
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    folder = packed_in(awq_form())
    edit_config(folder, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedModel, match="quant_method is 'aqlm'"):
        open_checkpoint(folder)


def test_layers_that_were_left_as_they_are_are_read_as_they_are(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(gptq_form())
    dense = load_file(folder / "dense" / "model.safetensors")[f"{Q}.weight"]

    def leave(tensors: Tensors) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.weight"] = dense

    edit_weights(folder, leave)
    assert torch.equal(tensors_of(load(folder))[f"{Q}.weight"], dense)


def test_biases_of_zeros_need_no_place_and_others_do(packed_in: Callable[..., Path], tmp_path: Path) -> None:
    """AutoGPTQ stores one beside every layer."""
    placed = tiny_checkpoint(tmp_path / "original", **SHAPE, attention_bias=True)
    folder = pack_folder(placed, tmp_path / "placed", gptq_form())
    edit_weights(folder, lambda t: t.update({f"{Q}.bias": torch.zeros(32)}))
    assert torch.equal(tensors_of(load(folder))[f"{Q}.bias"], torch.zeros(32))
    folder = packed_in(gptq_form())
    edit_weights(folder, lambda t: t.update({f"{Q}.bias": torch.zeros(32), f"{DOWN}.bias": torch.zeros(32)}))
    assert all(bool((tensor != 7.0).any()) for tensor in tensors_of(load(folder)).values())
    edit_weights(folder, lambda t: t.update({f"{Q}.bias": torch.ones(32)}))
    refused(folder, rf"unexpected \(1\): {Q}\.bias")


def test_scales_of_a_kv_cache_are_left_out(packed_in: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = packed_in(FORMS["NVFP4 of ModelOpt"])
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale", "q_scale")]
    edit_weights(folder, lambda t: t.update({name: torch.tensor(0.5) for name in names}))
    load(folder)
    assert "3 scales of a KV cache" in caplog.text


def test_scales_of_nvfp4_are_positive(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(FORMS["NVFP4"])
    edit_weights(folder, change(f"{Q}.weight_scale", lambda t: (-t.float()).to(t.dtype)))
    with pytest.raises(InvalidWeights, match=f"{Q} in .*weight_scale has numbers below zero"):
        load(folder)


def test_a_quantized_head_is_a_head(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path / "original", **SHAPE, tie_word_embeddings=False)
    form = gptq_form(sym=False)
    folder = pack_folder(original, tmp_path / "packed", form)
    parts, dense = form.make(40, 32)

    def pack_head(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{suffix}": part for suffix, part in parts.items()})

    edit_weights(folder, pack_head)
    torch.testing.assert_close(tensors_of(load(folder))["lm_head.weight"], dense, rtol=1e-6, atol=0)


def test_the_fingerprint_is_that_of_bytes_and_scheme(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(gptq_form(sym=False))
    first = open_checkpoint(folder).fingerprint()
    assert first == open_checkpoint(folder).fingerprint()
    edit_config(folder, quantization_config=gptq_form(sym=False, version=2).config)
    second = open_checkpoint(folder).fingerprint()
    edit_weights(folder, lambda t: t[f"{Q}.scales"].neg_())
    assert len({first, second, open_checkpoint(folder).fingerprint()}) == 3


# ---- what does not fit together

Edit = Callable[[Tensors], Any]


def change(name: str, to: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({name: to(tensors[name])})


def drop(suffix: str) -> Edit:
    return lambda tensors: tensors.pop(f"{Q}.{suffix}")


BACKWARDS = torch.arange(31, -1, -1, dtype=torch.int32) // 16
NEEDED = [("GPTQ", "scales"), ("GPTQ", "qzeros"), ("AWQ", "qzeros"), ("packed", "weight_scale")]
NEEDED += [("packed, zeros", "weight_zero_point"), ("floats, a scale", "weight_scale")]
NEEDED += [("fp8, blocks", "weight_scale_inv")]


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        *((form, drop(suffix), rf"{Q}\.{suffix} is missing") for form, suffix in NEEDED),
        ("GPTQ", lambda t: t.pop(f"{Q}.qweight"), rf"missing \(1\): {Q}\.weight; unexpected \(3\): .*{Q}\.scales"),
        ("GPTQ", change(f"{Q}.scales", lambda t: t[:-1]), rf"{Q}\.scales .*is F16 \[1, 32\].*must be F16 \[2, 32\]"),
        ("GPTQ", change(f"{Q}.scales", Tensor.int), rf"{Q}\.scales .*is I32 .*must be F16"),
        ("GPTQ", change(f"{Q}.qzeros", lambda t: t[:, :-1]), rf"{Q}\.qzeros .*is I32 \[2, 3\].*must be I32 \[2, 4\]"),
        ("GPTQ", change(f"{Q}.qweight", Tensor.long), rf"{Q}\.qweight .*is I64 .*must be I32"),
        ("GPTQ", change(f"{Q}.qweight", Tensor.flatten), rf"{Q}\.qweight .*must have two dimensions"),
        ("GPTQ", change(f"{Q}.g_idx", lambda t: t.flip(0)), rf"g_idx of {Q} in .*another order \(desc_act"),
        ("GPTQ", change(f"{Q}.g_idx", lambda t: t[:-8]), rf"{Q}\.g_idx .*is I32 \[24\].*must be I32 \[32\]"),
        (
            "GPTQ",
            change(f"{Q}.qzeros", lambda t: t + 1),
            rf"qzeros of {Q} in .*other .*than 8, but sym is true.*gptq_v2",
        ),
        ("packed", lambda t: t.update({f"{Q}.weight_g_idx": BACKWARDS}), rf"weight_g_idx of {Q} in .*another order"),
        ("packed, zeros", change(f"{Q}.weight_zero_point", Tensor.char), r"I8 \[4, 2\].*I32 \[4, 2\] or I8 \[32, 2\]"),
        ("bytes", change(f"{Q}.weight", Tensor.byte), rf"{Q}\.weight .*is U8.*must be I8"),
        ("floats, a scale", change(f"{Q}.weight", lambda t: t.to(torch.float8_e5m2)), rf"{Q}\.weight .*is F8_E5M2"),
        ("floats, a scale", change(f"{Q}.weight_scale", lambda t: t.expand(3)), rf"{Q}\.weight_scale .*is F32 \[3\]"),
        ("NVFP4", change(f"{Q}.weight_scale", lambda t: t[:, :1]), r"must be F8_E4M3 \[32, 2\]"),
        ("AWQ", change(f"{Q}.scales", lambda t: t.bool()), rf"{Q}\.scales .*is BOOL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "edited",
)
def test_a_layer_that_does_not_fit_together_is_named(
    packed_in: Callable[..., Path], form: str, edit: Edit, message: str
) -> None:
    folder = packed_in(FORMS[form])
    edit_weights(folder, edit)
    refused(folder, message)


def test_a_layer_that_is_not_the_models_is_misshapen(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(awq_form())
    parts, _ = awq_form().make(48, 32)
    edit_weights(folder, lambda t: t.update({f"{Q}.{suffix}": part for suffix, part in parts.items()}))
    refused(folder, rf"misshapen \(1\): {Q}\.weight is F32 \[48, 32\], not a float \[32, 32\]")


AMBIGUOUS = mixed("packed, a scale a row", "packed, a scale a row")
AMBIGUOUS.config["config_groups"]["group_1"] = packed_form(bits=8, group=None).config["config_groups"]["group_0"] | {
    "format": "pack-quantized"
}


@pytest.mark.parametrize(
    ("stored", "said", "message"),
    [
        (awq_form(), awq_form(group=20), r"has \d+ inputs: they must be whole groups of 20"),
        (packed_form(group=None), AMBIGUOUS, "may be any of several config_groups"),
        (packed_form(), packed_form(group=8), r"weight_scale .*is BF16 \[\d+, 3\].*it must be .*BF16 \[\d+, 6\]"),
    ],
)
def test_a_config_of_other_groups_is_named(
    packed_in: Callable[..., Path], stored: Form, said: Form, message: str
) -> None:
    folder = packed_in(stored)
    edit_config(folder, quantization_config=said.config)
    refused(folder, message)


def test_a_tensor_in_two_files_is_named(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(gptq_form(), files=2)
    save_file({f"{Q}.qweight": torch.zeros(4, 32, dtype=torch.int32)}, folder / "more.safetensors")
    refused(folder, rf"{Q}\.qweight twice, in model-\d\.safetensors and more\.safetensors")


def test_a_layer_that_is_there_twice_is_named(packed_in: Callable[..., Path]) -> None:
    folder = packed_in(gptq_form())
    edit_weights(folder, lambda t: t.update({f"{Q}.weight": torch.zeros(32, 32)}))
    refused(folder, rf"repeated \(1\): {Q}\.weight")
