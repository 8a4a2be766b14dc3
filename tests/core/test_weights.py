"""Weights from safetensors into slots: everything arrives, once in memory, and what does not match is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoengine.core.errors import InvalidWeights, ModelNotFound
from nanoengine.core.weights import EMBEDDING, HEAD, load_weights

TENSORS = {EMBEDDING: torch.randn(6, 4), "a.weight": torch.randn(3, 4), "b.weight": torch.randn(5)}


def slots() -> dict[str, Tensor]:
    return {name: torch.full(tensor.shape, torch.nan) for name, tensor in TENSORS.items()}


def written(folder: Path, **changes: Tensor) -> Path:
    tensors = TENSORS | {name.replace("_", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor.numel()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_in_the_dtype_of_its_slot(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = written(tmp_path)
    found = {name: slot.to(dtype) for name, slot in slots().items()}
    load_weights(found, folder)
    assert all(torch.equal(found[name], TENSORS[name].to(dtype)) for name in TENSORS)


def test_several_files_are_read(tmp_path: Path) -> None:
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, tmp_path / f"{number}.safetensors")
    found = slots()
    load_weights(found, tmp_path)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_weight": torch.empty(0)}, r"lack 1 tensors: a\.weight"),
        ({"c_weight": torch.ones(2)}, r"c\.weight in .* asks for no such tensor"),
        ({"a_weight": torch.ones(4, 3)}, r"a\.weight in .* is torch\.float32 \[4, 3\]: .* a float tensor \[3, 4\]"),
        ({"a_weight": torch.ones(3, 4, dtype=torch.int8)}, r"a\.weight in .* is torch\.int8"),
    ],
)
def test_what_does_not_match_is_named(tmp_path: Path, changes: dict[str, Tensor], message: str) -> None:
    folder, found = written(tmp_path, **changes), slots()
    with pytest.raises(InvalidWeights, match=message):
        load_weights(found, folder)


def test_a_tied_model_may_come_with_its_head(tmp_path: Path) -> None:
    save_file(TENSORS | {HEAD: TENSORS[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    found = slots()
    load_weights(found, tmp_path)
    assert torch.equal(found[EMBEDDING], TENSORS[EMBEDDING])
    save_file(TENSORS | {HEAD: torch.ones(5, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=rf"{HEAD} in .* a float tensor \[6, 4\]"):
        load_weights(found, tmp_path)


def test_no_weights_and_broken_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="can run code"):
        load_weights(slots(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"noise" * 100)
    with pytest.raises(InvalidWeights, match=r"model\.safetensors cannot be read"):
        load_weights(slots(), tmp_path)
