"""Tuning: sizes and ways of kernels that only a measurement can choose. `benchmarks/gpu/choose.py` measures, and
writes its choice for this kind of GPU; the package brings those that were made so far. Without such a file, the defaults hold."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from nanoengine.caches import cache_folder
from nanoengine.core.model_config import read_file

logger = logging.getLogger("nanoengine")


@dataclass(frozen=True)
class Tuning:
    """How kernels are launched on one kind of GPU. The defaults are what an H100 chose (2026-11-26, benchmarks/gpu.md); where
    launches can depend on each other, they do as there.

    Args:
        decode_tile: tokens of K and of V that a program of decode attention works on at once.
        decode_warps: warps of such a program.
        decode_stages: how deep its loads run ahead; 3 + 2 n holds 1 + n tiles in shared memory.
        decode_programs_per_sm: programs of decode attention that are to run side by side on a multiprocessor.
        int8_programs_per_sm: the same, where K and V have 8 bits.
        int8_pair_tile: tokens of such K and V that a program reads as pairs of numbers at once (`attend_range_int8.py`); 0:
            one by one, in tiles as above.
        swapped_rows: up to so many rows, products are computed with the weights as the left factor (`swap_ab.py`); at most 64.
        gated_rows: up to so many rows, gates are computed in the product before them, if not yet for another reason; at most 256.
        gated_prompts: 1: so are those of more than 256 rows.
        dependent_launch: whether a kernel of a decode step may be launched while the one before it ends (programmatic dependent
            launch, compute capability 9.0 and later): see `dependent.py`. 0: no; 1: as soon as that one has begun to read what
            it depends on; 2: behind a product, as soon as the product has started.
        dependent_rows: in steps of more rows none is: cuBLAS computes their products, and there is little to gain.
        heads_in_product: whether, in steps of one to four rows, the product of q, k and v also norms and rotates its heads, and
            writes K and V (`heads.py`).
        weights_ahead: how many of the weights behind those of q, k and v such a product asks for (`ahead.py`); at most 2.
        fused_mlp: whether, in steps of one row, a gated MLP is one launch, if it is small enough, and how the weights of its
            second product come: 0: no; 1: into registers; 2: into the L2 cache (`mlp.py`).
        mlp_depends: whether that launch is dependent, where others are.
        short_prompt: runs of up to so many new tokens are computed by smaller programs of prefill attention.
        prefill_tile, short_tile: tokens of K and of V that a larger and a smaller program of it works on at once: 64; or 32, and
            more of them run side by side on a multiprocessor.
        whole_prompt_tile: tokens of K and of V that are multiplied at once for a prompt that has no history and is alone in its
            step (`attention/whole_prompt.py`), 64 or 128; 0: it is computed like any other.
        flash_prompt: prompts of a step whose longest has so many new tokens or more are computed by flash-attn 4, where it is
            installed (`flash_attn_4.py`). 0: none is.
    """

    decode_tile: int = 32
    decode_warps: int = 4
    decode_stages: int = 5
    decode_programs_per_sm: int = 4
    int8_programs_per_sm: int = 2
    int8_pair_tile: int = 0
    swapped_rows: int = 16
    gated_rows: int = 0
    gated_prompts: int = 0
    dependent_launch: int = 0
    dependent_rows: int = 64
    heads_in_product: int = 0
    weights_ahead: int = 0
    fused_mlp: int = 0
    mlp_depends: int = 0
    short_prompt: int = 512
    prefill_tile: int = 64
    short_tile: int = 64
    whole_prompt_tile: int = 0
    flash_prompt: int = 0

    def launch(self, rows: int, *, product: bool = False) -> int:
        """How a kernel of a step of so many rows is launched (`dependent.py`): only products let the next one start at once."""
        if rows > self.dependent_rows:
            return 0
        is_early = self.dependent_launch % 4 == 2
        return self.dependent_launch - (is_early and not product)

    def save(self, device_name: str) -> Path:
        """Keep it for all GPUs of that name; returns the file."""
        path = file_for(device_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(file.name, path)  # at once: an engine may be starting
        return path


DEFAULTS = Tuning()
DEPENDENT = replace(DEFAULTS, dependent_launch=2)
"""The defaults of GPUs that can launch kernels so."""
MEASURED = Path(__file__).parent / "measured"
"""Choices that come with the package: a file for each kind of GPU that `benchmarks/gpu.sh choose` has run on."""


def file_name(device_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-") + ".json"


def file_for(device_name: str) -> Path:
    """The file with the choice for a kind of GPU; `NANOENGINE_TUNING` names another folder."""
    named = os.environ.get("NANOENGINE_TUNING")
    return (Path(os.path.expanduser(named)) if named else cache_folder("tuning")) / file_name(device_name)


def load_tuning(device: torch.device | None = None) -> Tuning:
    """What was chosen for a GPU of this kind, here or for the package; the defaults if nothing was, or it is no GPU.

    Args:
        device: None: the current GPU, if there is one.
    """
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return DEFAULTS
    can_depend = torch.cuda.get_device_capability(device) >= (9, 0)
    defaults = DEPENDENT if can_depend else DEFAULTS
    name = torch.cuda.get_device_name(device)
    for path in (file_for(name), MEASURED / file_name(name)):
        if path.is_file() and (chosen := _read(path)) is not None:
            return chosen if can_depend else replace(chosen, dependent_launch=0)
    return defaults


def _read(path: Path) -> Tuning | None:
    """What a file holds; None, and a warning, if it is of another version."""
    try:
        values = json.loads(read_file(path, 1 << 20))
        wrong = [field.name for field in fields(Tuning) if type(values[field.name]) is not int]
        if wrong or len(values) != len(fields(Tuning)):
            raise ValueError(f"not a number of this version: {', '.join(wrong) or sorted(values)}")
        return Tuning(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s holds no tuning of this version and is left out: %s", path, error)
        return None
