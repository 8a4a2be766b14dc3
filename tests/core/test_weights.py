"""Weights from safetensors into slots: everything arrives, once in memory, and what does not match is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoengine.core.errors import InvalidWeights, ModelNotFound
from nanoengine.core.weights import EMBEDDING, HEAD, SafetensorsFolder, load_weights, release_mapped

TENSORS = {EMBEDDING: torch.randn(6, 4), "a.weight": torch.randn(3, 4), "b.weight": torch.randn(5)}


def slots() -> dict[str, Tensor]:
    return {name: torch.full(tensor.shape, torch.nan) for name, tensor in TENSORS.items()}


def written(folder: Path, **changes: Tensor) -> SafetensorsFolder:
    tensors = TENSORS | {name.replace("_", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor.numel()}, folder / "model.safetensors")
    return SafetensorsFolder(folder)


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
    load_weights(found, SafetensorsFolder(tmp_path))
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_weight": torch.empty(0)}, r"missing \(1\): a\.weight"),
        ({"c_weight": torch.ones(2)}, r"unexpected \(1\): c\.weight"),
        ({"a_weight": torch.ones(4, 3)}, r"misshapen \(1\): a\.weight is F32 \[4, 3\], not a float \[3, 4\]"),
        ({"a_weight": torch.ones(3, 4, dtype=torch.int8)}, r"a\.weight is I8"),
        ({"a_weight": torch.empty(0), "c_weight": torch.ones(2)}, r"missing \(1\).*; unexpected \(1\)"),
    ],
)
def test_what_does_not_match_is_named_and_nothing_is_copied(
    tmp_path: Path, changes: dict[str, Tensor], message: str
) -> None:
    folder, found = written(tmp_path, **changes), slots()
    with pytest.raises(InvalidWeights, match=message):
        load_weights(found, folder)
    assert all(bool(slot.isnan().all()) for slot in found.values())


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(InvalidWeights, match=r"repeated \(3\): .* in 2\.safetensors"):
        load_weights(slots(), SafetensorsFolder(tmp_path))


def test_a_tied_model_may_come_with_its_head(tmp_path: Path) -> None:
    save_file(TENSORS | {HEAD: TENSORS[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    found = slots()
    load_weights(found, SafetensorsFolder(tmp_path))
    assert torch.equal(found[EMBEDDING], TENSORS[EMBEDDING])
    save_file(TENSORS | {HEAD: torch.ones(5, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=rf"misshapen \(1\): {HEAD}"):
        load_weights(found, SafetensorsFolder(tmp_path))


def test_no_weights_and_broken_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="can run code"):
        load_weights(slots(), SafetensorsFolder(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"noise" * 100)
    with pytest.raises(InvalidWeights, match=r"model\.safetensors cannot be read"):
        load_weights(slots(), SafetensorsFolder(tmp_path))


def test_memory_that_was_given_back_is_read_again(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100_000.0)}, tmp_path / "model.safetensors")
    for _, tensor in SafetensorsFolder(tmp_path).tensors():
        release_mapped(tensor)
        assert torch.equal(tensor, torch.arange(100_000.0))
