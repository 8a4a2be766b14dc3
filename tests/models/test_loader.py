"""Loading weights: every broken folder is a named error, and no folder ever runs code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.attention.torch_reference import TorchAttention
from nanoengine.core.layers import Embedding, Linear
from nanoengine.core.model_config import read_json
from nanoengine.errors import InvalidWeights
from nanoengine.kernels.interface import Kernels
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.torch_kernels import RowMajor, TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import Decoder, DecoderLayer, build_model
from nanoengine.models.loader import load_weights
from nanoengine.models.safetensors_folder import SafetensorsFolder
from tests.models.conftest import INDEX, SHAPE
from tests.support import tensors_of, tiny_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def build(folder: Path, kernels: Kernels, dtype: torch.dtype, **changes: Any) -> Decoder:
    config = read_model_config(read_json(folder, "config.json") | changes)
    return build_model(config, kernels, TorchAttention(16), dtype, torch.device("cpu"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """The engine's model with the weights of the folder; it starts full of NaN, so that a hole would show."""
    model = build(folder, TorchKernels(), dtype, **changes)
    for tensor in tensors_of(model).values():
        tensor.fill_(float("nan"))
    load_weights(model.checkpoint_tensors(), SafetensorsFolder(folder), dtype, use_tqdm=False)
    return model


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rows(layer: Embedding) -> Tensor:
    return cast(RowMajor, layer.weight).tensor


def assert_loaded(model: Decoder, expected: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    tensors = tensors_of(model)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


# ---- what is loaded


def test_every_tensor_of_a_single_file_is_loaded(original: Path) -> None:
    assert not (original / INDEX).exists()
    model = load(original)
    assert_loaded(model, weights(original))
    assert all(tensor.isfinite().all() for tensor in tensors_of(model).values())


def test_every_tensor_of_a_sharded_checkpoint_is_loaded(sharded: Path, original: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_loaded(load(sharded), weights(original))


def test_several_files_without_an_index_are_all_read(sharded_copy: Path, original: Path) -> None:
    (sharded_copy / INDEX).unlink()
    assert_loaded(load(sharded_copy), weights(original))


def test_a_file_that_the_index_does_not_name_is_not_read(sharded_copy: Path, original: Path) -> None:
    (sharded_copy / "leftover.safetensors").write_bytes(b"no safetensors at all")
    assert_loaded(load(sharded_copy), weights(original))


def test_without_an_index_model_safetensors_alone_is_read(copy: Path, original: Path) -> None:
    save_file({"model.layers.0.adapter": torch.zeros(2)}, copy / "adapter.safetensors")
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    assert_loaded(load(copy), weights(original))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_get_the_dtype_of_the_model_and_norms_float32(
    copy: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    edit_weights(copy, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    assert_loaded(load(copy, wanted), weights(copy), wanted)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_native_weights_compute_with_what_is_in_the_checkpoint(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, tied: bool
) -> None:
    reason = unsupported_reason(torch.device("cpu"), wanted)
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    folder = tiny_checkpoint(tmp_path, **SHAPE, tie_word_embeddings=tied)
    edit_weights(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    native, torchs = build(folder, NativeKernels(), wanted), load(folder, wanted)
    load_weights(native.checkpoint_tensors(), SafetensorsFolder(folder), wanted, use_tqdm=False)
    ids = torch.arange(native.config.vocab_size)
    assert torch.equal(native.embed_tokens(ids), torchs.embed_tokens(ids))
    assert torch.equal(
        native.lm_head.logits(torch.eye(24, dtype=wanted)), torchs.lm_head.logits(torch.eye(24, dtype=wanted))
    )
    for ours, theirs in zip(native.layers, torchs.layers, strict=True):
        for left, right in zip(linears(ours), linears(theirs), strict=True):
            ones = torch.eye(left.weight.shape[1], dtype=wanted)  # their products are the columns themselves
            assert torch.equal(left(ones), right(ones))
        for left, right in zip(ours.self_attn.norms, theirs.self_attn.norms, strict=True):
            assert torch.equal(left.weight, right.weight)


def linears(layer: DecoderLayer) -> list[Linear]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def test_an_untied_head_is_its_own(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, **SHAPE, tie_word_embeddings=False)
    model = load(folder)
    assert_loaded(model, weights(folder))
    assert not torch.equal(rows(model.lm_head), rows(model.embed_tokens))


def test_a_tied_head_is_the_embedding(original: Path) -> None:
    model = load(original)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(copy: Path) -> None:
    edit_weights(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert rows(load(copy).lm_head).isfinite().all()
    assert rows(load(copy, torch.bfloat16).lm_head).isfinite().all()


def test_a_tied_checkpoint_may_not_contradict_its_embedding(copy: Path) -> None:
    def change_one_number(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][7, 3] += 1

    edit_weights(copy, change_one_number)
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(copy)


def test_a_tied_checkpoint_may_not_have_a_head_of_another_shape(copy: Path) -> None:
    edit_weights(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:-1].clone()}))
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight"):
        load(copy)


def test_an_untied_model_without_a_head_is_refused(copy: Path) -> None:
    with pytest.raises(InvalidWeights, match=r"missing \(1\): lm_head\.weight"):
        load(copy, tie_word_embeddings=False)


# ---- tensors that do not match


def test_missing_tensors_are_named(copy: Path) -> None:
    edit_weights(copy, lambda t: t.pop(Q_PROJ))
    with pytest.raises(InvalidWeights, match=rf"missing \(1\): {Q_PROJ}"):
        load(copy)


def test_many_missing_tensors_are_counted_and_some_are_named(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=4, layer_types=None)
    with pytest.raises(InvalidWeights, match=r"missing \(\d\d\): model\.layers\.2\..* and \d+ more"):
        load(copy)


def test_unexpected_tensors_are_named(copy: Path) -> None:
    edit_weights(copy, lambda t: t.update({"model.layers.0.adapter": torch.zeros(2)}))
    with pytest.raises(InvalidWeights, match=r"unexpected \(1\): model\.layers\.0\.adapter"):
        load(copy)


def test_layers_that_the_config_does_not_know_are_unexpected(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=1, layer_types=None)
    with pytest.raises(InvalidWeights, match=r"unexpected \(\d+\): model\.layers\.1\."):
        load(copy)


def test_biases_that_the_config_denies_are_unexpected(copy: Path) -> None:
    edit_config(copy, attention_bias=False)
    with pytest.raises(InvalidWeights, match=r"unexpected .*_proj\.bias"):
        load(copy)


@pytest.mark.parametrize("reshape", [Tensor.t, lambda t: t[:-1], lambda t: t[None], lambda t: t.flatten()])
def test_misshapen_tensors_are_named_with_both_shapes(copy: Path, reshape: Callable[[Tensor], Tensor]) -> None:
    edit_weights(copy, lambda t: t.update({Q_PROJ: reshape(t[Q_PROJ]).contiguous()}))
    with pytest.raises(InvalidWeights, match=rf"misshapen \(1\): {Q_PROJ} is .*\[64, 24\]"):
        load(copy)


def test_a_tensor_that_would_broadcast_is_misshapen(copy: Path) -> None:
    edit_weights(copy, lambda t: t.update({Q_PROJ: t[Q_PROJ][:1].clone()}))
    with pytest.raises(InvalidWeights, match=rf"{Q_PROJ} is F32 \[1, 24\]"):
        load(copy)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")],
    ids=str,
)
def test_weights_that_are_no_floats_of_their_own_scale_are_refused(copy: Path, dtype: torch.dtype, name: str) -> None:
    edit_weights(copy, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(dtype)}))
    with pytest.raises(InvalidWeights, match=rf"{Q_PROJ} is {name}"):
        load(copy)


def test_nothing_is_copied_from_a_checkpoint_that_does_not_fit(copy: Path) -> None:
    model = build(copy, TorchKernels(), torch.float32)
    for tensor in tensors_of(model).values():
        tensor.fill_(7.0)
    edit_weights(copy, lambda t: t.pop(Q_PROJ))
    with pytest.raises(InvalidWeights):
        load_weights(model.checkpoint_tensors(), SafetensorsFolder(copy), torch.float32, use_tqdm=False)
    assert all(bool((tensor == 7.0).all()) for tensor in tensors_of(model).values())


def test_a_tensor_in_two_files_is_refused_and_named(sharded_copy: Path) -> None:
    """One of the two must be wrong, and nobody can say which."""
    (sharded_copy / INDEX).unlink()
    save_file({Q_PROJ: torch.zeros(64, 24)}, sharded_copy / "second.safetensors")
    with pytest.raises(InvalidWeights, match=rf"repeated \(1\): {Q_PROJ} in second\.safetensors"):
        load(sharded_copy)


def test_all_problems_are_told_at_once(copy: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["extra"] = torch.zeros(1)
        tensors[Q_PROJ] = tensors[Q_PROJ][:3].clone()

    edit_weights(copy, spoil)
    with pytest.raises(InvalidWeights, match=r"missing \(1\).*unexpected \(1\).*misshapen \(1\)"):
        load(copy)
