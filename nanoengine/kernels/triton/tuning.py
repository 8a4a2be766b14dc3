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

logger = logging.getLogger("nanoengine")


@dataclass(frozen=True)
class Tuning:
    """How kernels are launched on one kind of GPU: sizes, and which of several ways of computing the same is used.

    Args:
        decode_tile: tokens of K and of V that a program of decode attention works on at once.
        decode_warps: warps of such a program.
        decode_stages: how deep its loads run ahead; 3 + 2 n holds 1 + n tiles in shared memory.
        decode_programs_per_sm: programs of decode attention that are to run side by side on a multiprocessor.
        decode_longest_part: tokens; a longer sequence is cut even where others fill the device. Not with `decode_equal_shares`.
        decode_equal_shares: whether all programs of decode attention read equally many tokens, whatever sequences they are of.
        decode_rotates: whether decode attention norms and rotates q and k, and writes K and V, itself.
        most_product_rows: up to so many rows, products are computed by our own kernel, together with the norm before them and
            the gate behind them; 0 leaves all to cuBLAS.
        gemv_rows: up to so many rows, a product asks for its weights before it asks for anything else (`gemv.py`); at most 4.
        packed_gemv_rows: the same for weights of 8 and 4 bits (`packed_gemv.py`); at most 4.
        swapped_rows: up to so many rows, products are computed with the weights as the left factor (`swap_ab.py`); at most 64.
        dependent_launch: whether a kernel of a decode step may be launched while the one before it ends (programmatic dependent
            launch, compute capability 9.0 and later): see `dependent.py`. 0: no; 1: as soon as that one has begun to read what
            it depends on; 2: behind a product, as soon as the product has started.
        dependent_rows: in steps of more rows none is: programs that wait would take room from those that read K/V.
        short_prompt: runs of up to so many new tokens are computed by smaller programs of prefill attention.
        draw_in_graph: whether tokens are drawn inside the recorded step where no processor changes its logits.
    """

    decode_tile: int = 32
    decode_warps: int = 4
    decode_stages: int = 7
    decode_programs_per_sm: int = 4
    decode_longest_part: int = 1024
    decode_equal_shares: bool = False
    decode_rotates: bool = False
    most_product_rows: int = 8
    gemv_rows: int = 0
    packed_gemv_rows: int = 0
    swapped_rows: int = 0
    dependent_launch: int = 0
    dependent_rows: int = 16
    short_prompt: int = 0
    draw_in_graph: bool = False

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
MEASURED = Path(__file__).parent / "measured"
"""Choices that come with the package: a file for each kind of GPU that `benchmarks/gpu.sh choose` has run on."""


def file_name(device_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-") + ".json"


def file_for(device_name: str) -> Path:
    """Where the choice for a kind of GPU is kept; `NANOENGINE_TUNING` names another folder."""
    named = os.environ.get("NANOENGINE_TUNING")
    return (Path(os.path.expanduser(named)) if named else cache_folder("tuning")) / file_name(device_name)


def load_tuning() -> Tuning:
    """What was chosen for the current GPU, here or for the package; the defaults if nothing was, there is no GPU, or the file is
    of another version.
    """
    if not torch.cuda.is_available():
        return DEFAULTS
    name = torch.cuda.get_device_name()
    path = next((own for own in (file_for(name), MEASURED / file_name(name)) if own.is_file()), None)
    if path is None:
        return DEFAULTS
    try:
        found = json.loads(path.read_text())
        wrong = [field.name for field in fields(Tuning) if type(found[field.name]) is not type(field.default)]
        if wrong or len(found) != len(fields(Tuning)):
            raise ValueError(f"not a number or flag of this version: {', '.join(wrong) or sorted(found)}")
        chosen = Tuning(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s holds no tuning of this version, defaults are used: %s", path, error)
        return DEFAULTS
    if torch.cuda.get_device_capability() < (9, 0):  # dependent launches came with Hopper
        return replace(chosen, dependent_launch=0)
    return chosen
