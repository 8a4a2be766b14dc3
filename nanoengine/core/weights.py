"""Weights: the *.safetensors of a model folder, copied into the slots of a model. Nothing is ever unpickled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanoengine.core.errors import InvalidWeights, ModelNotFound, shown
from nanoengine.core.kernels import WeightSlot
from nanoengine.core.model_config import read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(slots: Mapping[str, WeightSlot], folder: Path) -> None:
    """Copy every tensor of a folder into its slot, converted to the dtype there.

    Raises:
        ModelNotFound: a file is missing.
        InvalidWeights: a file is broken, or its tensors do not match the slots.
    """
    missing = dict.fromkeys(slots)
    for path in weight_files(folder):
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping, it has keys() only
                tensor = file.get_tensor(name)
                slot = slots.get(EMBEDDING if name == HEAD else name)  # a tied model may come with its head, too
                if slot is None or slot.shape != tensor.shape or not tensor.is_floating_point():
                    must = "no such tensor" if slot is None else f"a float tensor {list(slot.shape)}"
                    has = f"{name} in {path} is {tensor.dtype} {list(tensor.shape)}"
                    raise InvalidWeights(f"{has}: config.json asks for {must}")
                if name in slots:
                    slots[name].copy_(tensor)
                    missing.pop(name, None)
    if missing:
        raise InvalidWeights(f"the weights in {folder} lack {len(missing)} tensors: {', '.join(list(missing)[:5])}")


def weight_files(folder: Path) -> list[Path]:
    """The files that the index names; without an index model.safetensors, or all *.safetensors."""
    index = folder / "model.safetensors.index.json"
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if os.path.lexists(index):
        weight_map = read_json(folder, index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidWeights(f"{index} has no weight_map from tensor names to file names")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    elif folder / "model.safetensors" in files:
        files = [folder / "model.safetensors"]
    for path in files:
        if path.parent != folder:
            raise InvalidWeights(f"{index} names {shown(path.name)} outside the model folder")
        if not os.path.isfile(path):  # False for an impossible path, too
            raise ModelNotFound(f"{str(path)[:500]} is missing, though {index.name} lists it: fetch the model again")
    if not files:
        why = "a GGUF file is opened by its file name, and other formats can run code"
        raise ModelNotFound(f"{folder} holds no *.safetensors: {why}")
    return files


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error
