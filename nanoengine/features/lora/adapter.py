"""Adapter: the checked content of a folder that PEFT has saved, as bytes. No tensor is made here."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, deserialize

from nanoengine.core.errors import InvalidWeights, ModelNotFound, UnsupportedModel, shown
from nanoengine.core.model_config import read_file
from nanoengine.models.config_fields import log_unknown, names_of
from nanoengine.sizes import format_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
HEADER_BYTES, HEADER_BYTES_OF_A_LAYER = 1 << 20, 1 << 10
"""Most bytes of a safetensors header, in all and in addition for each linear layer: other requests wait while it is parsed."""

MAX_ALPHA = 1e6
"""A larger value exceeds the range of float16 or of float32 in the model, or is a mistake."""

TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>A|B)\.weight")
DTYPES = ("F32", "F16", "BF16")
"""Dtypes of tensors, by safetensors' names."""

MODULE = re.compile(r"[\w.]+")
"""A key of `rank_pattern` or `alpha_pattern`: a name of modules. PEFT accepts expressions, too; some of them never end."""

READ = frozenset({"bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
WITHOUT_EFFECT = re.compile(
    r"auto_mapping|base_model_name_or_path|revision|inference_mode|runtime_config|task_type|peft_(type|version)|megatron_(config|core)|"
    r"(target|exclude)_modules|layers_pattern|layers_to_transform|lora_dropout|alora_invocation_string|ensure_weight_tying|"
    r"qalora_group_size|fan_in_fan_out"  # the last is of Conv1D alone: PEFT sets it where it saves
)
"""Fields about the origin of an adapter, or the modules that have one, which follow from its tensors."""

INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the weights of the model as they were."""


class Projection(NamedTuple):
    """The low-rank product that an adapter adds to a linear layer: scale * B (A x)."""

    rank: int
    scale: float
    dtypes: tuple[str, str]  # of A and B, as safetensors has them
    a: bytes  # [rank, inputs]
    b: bytes  # [outputs, rank]


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter. Two of equal digest are the same."""

    name: str
    path: str
    digest: str  # of both files
    projections: Mapping[str, Projection]  # by the name of the linear layer in the checkpoint of the model

    @property
    def num_bytes(self) -> int:
        """Bytes of all A and B in the file."""
        return sum(len(each.a) + len(each.b) for each in self.projections.values())


def read_adapter(
    name: str, path: str, shapes: Mapping[str, tuple[int, int]], *, max_rank: int, max_bytes: int
) -> Adapter:
    """Read an adapter, and check that it matches the model.

    Args:
        name, path: see `LoRARequest`.
        shapes: (outputs, inputs) of each linear layer that may have an adapter, by its name.
        max_rank, max_bytes: limits, see `LoRAOptions`.

    Raises:
        ModelNotFound: a file is missing.
        UnsupportedModel: the adapter needs more than low-rank products, or exceeds the limits.
        InvalidWeights: a file is broken, or does not match the model.
    """
    folder = Path(path).expanduser()
    config_bytes = _read_file(folder / CONFIG, MAX_CONFIG_BYTES, "the limit of a config")
    content = _read_file(folder / WEIGHTS, max_bytes, "max_lora_bytes")
    config = _config(folder, config_bytes)
    projections = _projections(folder / WEIGHTS, config, content, shapes, max_rank)
    digest = hashlib.sha256(hashlib.sha256(config_bytes).digest() + hashlib.sha256(content).digest()).hexdigest()
    return Adapter(name, path, digest, projections)


def _read_file(path: Path, limit: int, knob: str) -> bytes:
    try:
        return read_file(path, limit)
    except (OSError, ValueError) as error:
        other = path.with_suffix(".bin")
        hint = f"; {other.name} is not read: save it as safetensors" if path.name == WEIGHTS and other.exists() else ""
        raise ModelNotFound(
            f"{path} cannot be read, so {path.parent} is no adapter as PEFT saves it ({error}; {limit} is {knob}){hint}"
        ) from error


# ---- adapter_config.json


def _config(folder: Path, content: bytes) -> dict[str, Any]:
    """The fields, checked."""
    where = folder / CONFIG
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidWeights(f"{where} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidWeights(f"{where} must hold a JSON object")
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{where}: peft_type is {shown(config.get('peft_type'))}, and only LORA is computed")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"{where}: bias is {shown(config['bias'])}: adapters with biases are not computed")
    init = config.get("init_lora_weights", True)
    if not any(init is each or (isinstance(init, str) and init == each) for each in INITS):
        raise UnsupportedModel(
            f"{where}: init_lora_weights is {shown(init)}, which changes the weights of the model itself: save the adapter as "
            "one of the original model (path_initial_model_for_weight_conversion)"
        )
    unread = [name for name in sorted(config.keys() - READ) if not WITHOUT_EFFECT.fullmatch(name)]
    stated = {name: config[name] for name in unread if config[name]}  # no None, False or []
    for name in stated:
        if name in names_of("adapter"):
            raise UnsupportedModel(f"{where}: {name} is {shown(config[name])}, which is not computed")
    log_unknown(stated, str(where))
    for name, pattern, is_right in (("r", "rank_pattern", _is_rank), ("lora_alpha", "alpha_pattern", _is_alpha)):
        table = config.get(pattern) or {}
        if not isinstance(table, dict):
            raise InvalidWeights(f"{where}: {pattern} is {shown(table)}: it must be a table")
        for key in table:
            if not MODULE.fullmatch(key):
                raise UnsupportedModel(
                    f"{where}: {pattern} has the key {shown(key)}, and only names of modules are read there"
                )
        numbers = {name: config.get(name, 8)} | {f"{pattern}[{shown(key)}]": value for key, value in table.items()}
        for field, value in numbers.items():
            if not is_right(value):
                must = "a whole number above 0" if name == "r" else f"a number from -{MAX_ALPHA:g} to {MAX_ALPHA:g}"
                raise InvalidWeights(f"{where}: {field} is {shown(value)}: it must be {must}")
    if config.get("use_rslora") not in (None, False, True):
        raise InvalidWeights(f"{where}: use_rslora is {shown(config['use_rslora'])}: it must be true or false")
    return config


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and -MAX_ALPHA <= value <= MAX_ALPHA  # type: ignore[operator]


def _chosen(module: str, table: Mapping[str, Any], otherwise: Any) -> Any:
    """The value of the first key that is the name of a module, or the end of the name, behind a dot."""
    return next((value for key, value in table.items() if module == key or module.endswith("." + key)), otherwise)


# ---- adapter_model.safetensors


def _projections(
    where: Path, config: Mapping[str, Any], content: bytes, shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> dict[str, Projection]:
    parts_of: dict[str, dict[str, tuple[str, list[int], bytes]]] = {}
    most = HEADER_BYTES + HEADER_BYTES_OF_A_LAYER * len(shapes)
    for name, tensor in _tensors(where, content, most).items():
        match = TENSOR.fullmatch(name)
        if match is None or match["module"] not in shapes:
            raise UnsupportedModel(
                f"{where}: {shown(name)} is no adapter of a linear layer that the model has: those of "
                "embeddings, heads and experts are not computed"
            )
        parts_of.setdefault(match["module"], {})[match["part"]] = tensor
    if not parts_of:
        raise InvalidWeights(f"{where} holds no tensors")
    projections: dict[str, Projection] = {}
    for module, parts in parts_of.items():
        rank = _chosen(module, config.get("rank_pattern") or {}, config.get("r", 8))
        alpha = _chosen(module, config.get("alpha_pattern") or {}, config.get("lora_alpha", 8))
        if len(parts) < 2:
            raise InvalidWeights(
                f"{where}: of {module} there is lora_{next(iter(parts))}, and the other part is missing"
            )
        (a_type, a_shape, a), (b_type, b_shape, b) = parts["A"], parts["B"]
        outputs, inputs = shapes[module]
        if rank > max_rank:
            raise UnsupportedModel(
                f"{where}: the rank of {module} is {shown(rank)}, and at most {max_rank} is allowed (max_lora_rank)"
            )
        if a_shape != [rank, inputs] or b_shape != [outputs, rank]:
            raise InvalidWeights(
                f"{where}: A and B of {module} are {a_shape} and {b_shape}, not {[rank, inputs]} and {[outputs, rank]}, as its "
                "rank and the model ask for"
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        projections[module] = Projection(rank, scale, (a_type, b_type), a, b)
    return projections


def _tensors(where: Path, content: bytes, most: int) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> (dtype, shape, bytes) of every tensor of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    if most < size < len(content):
        raise InvalidWeights(
            f"{where} has a header of {format_bytes(size)}, and the adapters of this model have at most {format_bytes(most)}"
        )
    try:
        tensors = dict(sorted(deserialize(content)))
    except (SafetensorError, ValueError) as error:
        raise InvalidWeights(f"{where} is broken: {error}") from error
    for name, tensor in tensors.items():
        if tensor["dtype"] not in DTYPES:
            raise InvalidWeights(f"{where}: {shown(name)} is in {tensor['dtype']}, not in one of {', '.join(DTYPES)}")
    return {name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"])) for name, tensor in tensors.items()}
