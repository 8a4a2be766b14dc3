"""Loading weights: every tensor goes where it belongs, and what does not fit is a named error before anything is copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.core.kernels import Weight
from nanoengine.core.model_config import read_json
from nanoengine.errors import InvalidWeights
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import RowMajor, TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.decoder import Decoder, build_model
from nanoengine.models.loader import load_weights
from nanoengine.models.safetensors_folder import SafetensorsFolder
from tests.models.conftest import INDEX, SHAPE
from tests.models.quantization.packed_models import Tensors, edit_weights
from tests.support import tensors_of, tiny_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def build(folder: Path, dtype: torch.dtype, **changes: Any) -> Decoder:
    config = read_model_config(read_json(folder, "config.json") | changes)
    return build_model(config, TorchKernels(), TorchAttention(16), dtype, torch.device("cpu"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """The engine's model with the weights of the folder; it starts full of NaN, so that a hole would show."""
    model = build(folder, dtype, **changes)
    for tensor in tensors_of(model).values():
        tensor.fill_(float("nan"))
    load_weights(model.checkpoint_tensors(), SafetensorsFolder(folder), dtype, use_tqdm=False)
    return model


def weights(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rows(weight: Weight) -> Tensor:
    return cast(RowMajor, weight).tensor


def assert_loaded(model: Decoder, expected: Tensors, dtype: torch.dtype = torch.float32) -> None:
    tensors = tensors_of(model)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


# ---- what is loaded


def test_every_tensor_is_loaded_whatever_files_it_lies_in(original: Path, sharded: Path, sharded_copy: Path) -> None:
    assert not (original / INDEX).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 3
    (sharded_copy / INDEX).unlink()
    for folder in (original, sharded, sharded_copy):
        model = load(folder)
        assert_loaded(model, weights(original))
        assert model.lm_head is model.embed_tokens, "it is tied"


def test_other_files_are_not_read(copy: Path, sharded_copy: Path, original: Path) -> None:
    (sharded_copy / "leftover.safetensors").write_bytes(b"no safetensors at all")  # which the index does not name
    save_file({"model.layers.0.adapter": torch.zeros(2)}, copy / "adapter.safetensors")  # beside model.safetensors
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    for folder in (copy, sharded_copy):
        assert_loaded(load(folder), weights(original))


@pytest.mark.parametrize(
    ("stored", "wanted", "tied"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, False),
        (torch.float16, torch.float32, True),
    ],
)
def test_weights_get_the_dtype_of_the_model_and_norms_float32(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, tied: bool
) -> None:
    folder = tiny_checkpoint(tmp_path, **SHAPE, tie_word_embeddings=tied)
    edit_weights(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    torchs = load(folder, wanted)
    assert_loaded(torchs, weights(folder), wanted)
    assert torch.equal(rows(torchs.lm_head), rows(torchs.embed_tokens)) == tied


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(copy: Path) -> None:
    edit_weights(copy, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    for dtype in (torch.float32, torch.bfloat16):
        assert rows(load(copy, dtype).lm_head).isfinite().all()


# ---- what does not fit


def changed(name: str, change: Callable[[Tensor], Tensor], of: str | None = None) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[of or name])})


def other_number(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[7, 3] += 1
    return tensor


def spoil(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors[Q_PROJ] = tensors[Q_PROJ][:3]


def layers(count: int) -> dict[str, Any]:
    return {"num_hidden_layers": count, "layer_types": None}


UNTOUCHED: Callable[[Tensors], object] = dict
REFUSED: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], str]] = {
    "another head": (changed(HEAD, other_number, EMBEDDING), {}, r"lm_head\.weight.*tie_word_embeddings"),
    "a smaller head": (changed(HEAD, lambda t: t[:-1].clone(), EMBEDDING), {}, r"lm_head\.weight"),
    "no head": (UNTOUCHED, {"tie_word_embeddings": False}, r"missing \(1\): lm_head\.weight"),
    "missing": (lambda t: t.pop(Q_PROJ), {}, rf"missing \(1\): {Q_PROJ}"),
    "many missing": (UNTOUCHED, layers(4), r"missing \(\d\d\): model\.layers\.2\..* and \d+ more"),
    "layers": (UNTOUCHED, layers(1), r"unexpected \(\d+\): model\.layers\.1\."),
    "biases": (UNTOUCHED, {"attention_bias": False}, r"unexpected .*_proj\.bias"),
    "all at once": (spoil, {}, r"missing \(1\).*unexpected \(1\).*misshapen \(1\)"),
    "what would broadcast": (changed(Q_PROJ, lambda t: t[:1].clone()), {}, rf"{Q_PROJ} is F32 \[1, 24\]"),
    **{
        f"misshapen, {number}": (changed(Q_PROJ, change), {}, rf"misshapen \(1\): {Q_PROJ} is .*\[64, 24\]")
        for number, change in enumerate((Tensor.t, lambda t: t[:-1], lambda t: t[None], Tensor.flatten))
    },
    **{
        name: (changed(Q_PROJ, lambda t, dtype=dtype: t.to(dtype)), {}, f"{Q_PROJ} is {name}")  # type: ignore[misc]
        for name, dtype in (("I8", torch.int8), ("I64", torch.int64), ("BOOL", torch.bool))
    },
    "F8_E4M3": (changed(Q_PROJ, lambda t: t.to(torch.float8_e4m3fn)), {}, f"{Q_PROJ} is F8_E4M3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_copied(copy: Path, name: str) -> None:
    edit, changes, message = REFUSED[name]
    edit_weights(copy, edit)
    model = build(copy, torch.float32, **changes)
    for tensor in tensors_of(model).values():
        tensor.fill_(7.0)
    with pytest.raises(InvalidWeights, match=message):
        load_weights(model.checkpoint_tensors(), SafetensorsFolder(copy), torch.float32, use_tqdm=False)
    if name != "another head":  # which is seen when it is there
        assert all(bool((tensor == 7.0).all()) for tensor in tensors_of(model).values())


def test_a_tensor_in_two_files_is_refused_and_named(sharded_copy: Path) -> None:
    """One of the two must be wrong, and nobody can say which."""
    (sharded_copy / INDEX).unlink()
    save_file({Q_PROJ: torch.zeros(64, 24)}, sharded_copy / "second.safetensors")
    with pytest.raises(InvalidWeights, match=rf"repeated \(1\): {Q_PROJ} in second\.safetensors"):
        load(sharded_copy)


def test_of_tensors_without_a_place_not_all_are_looked_at() -> None:
    looked_at = []

    class Many:
        location = "many"

        def headers(self) -> Iterator[TensorHeader]:
            for number in range(10**6):
                looked_at.append(number)
                yield TensorHeader(f"t{number}", "F32", [0], "many")

    with pytest.raises(InvalidWeights, match=r"unexpected \(1001\)"):
        load_weights({}, cast(Any, Many()), torch.float32)
    assert len(looked_at) == 1001
