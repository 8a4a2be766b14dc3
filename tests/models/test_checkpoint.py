"""A model has the same shape and weights from every format of files, in every family that a GGUF file may hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.models.architectures import read_model_config
from nanoengine.models.decoder import build_model
from nanoengine.models.description import config_table
from nanoengine.models.loader import check_weights, load_weights, open_checkpoint
from nanoengine.models.model_config import ModelConfig
from tests.models.gguf.written import ARCHITECTURES, SPLIT, tiny_model, write_gguf
from tests.support import tensors_of


def load(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The shape, and all weights as they lie in the model."""
    config = read_model_config(config_table(path))
    check_weights(config, open_checkpoint(path))
    model = build_model(config, TorchKernels(), TorchAttention(16), torch.float32, torch.device("cpu"))
    places = tensors_of(model)
    for tensor in places.values():
        tensor.fill_(float("nan"))
    load_weights(model.checkpoint_tensors(), open_checkpoint(path), torch.float32, use_tqdm=False)
    return config, places


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name not in SPLIT])
def test_a_folder_and_a_gguf_file_give_the_same_model(tmp_path: Path, model_type: str) -> None:
    model, tensors = tiny_model(model_type, tmp_path)
    config, weights = load(tmp_path)
    same_config, same_weights = load(write_gguf(model, tensors, tmp_path / "model.gguf"))
    if model_type == "gemma4_text":  # whose file has the experts as they are in the model, not in tensors of them all
        same_config = replace(same_config, experts=config.experts, names=config.names)
    assert replace(same_config, rms_norm_eps=config.rms_norm_eps) == config
    assert same_config.rms_norm_eps == pytest.approx(config.rms_norm_eps)  # the file has it as a float32
    assert same_weights.keys() == weights.keys()
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
