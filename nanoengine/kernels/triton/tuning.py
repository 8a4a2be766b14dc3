"""Tuning: the sizes of kernels that only a measurement can choose. `benchmarks/gpu/tune.py` measures, and writes its choice for
this kind of GPU where the next start finds it; without that file, the defaults hold."""

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
    """How kernels for 16-bit numbers are launched.

    Args:
        decode_tile: tokens of K and of V that a program of decode attention works on at once.
        decode_warps: warps of such a program.
        decode_stages: how deep its loads run ahead; 3 + 2 n holds 1 + n tiles in shared memory.
        decode_programs_per_sm: parts of sequences that are to run side by side on a multiprocessor.
        decode_longest_part: tokens; a longer sequence is cut even where others fill the device.
        most_product_rows: up to so many rows, products are computed by our own kernel, together with the norm before them and
            the gate behind them; 0 leaves all to cuBLAS.
        dependent_launch: whether a kernel of a decode step may be launched while the one before it ends (programmatic dependent
            launch, compute capability 9.0 and later).
    """

    decode_tile: int = 32
    decode_warps: int = 4
    decode_stages: int = 7
    decode_programs_per_sm: int = 4
    decode_longest_part: int = 1024
    most_product_rows: int = 8
    dependent_launch: bool = False

    def save(self, device_name: str) -> Path:
        """Keep it for all GPUs of that name; returns the file."""
        path = file_for(device_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(file.name, path)  # at once: an engine may be starting
        return path


DEFAULTS = Tuning()


def file_for(device_name: str) -> Path:
    """Where the choice for a kind of GPU is kept; `NANOENGINE_TUNING` names another folder."""
    named = os.environ.get("NANOENGINE_TUNING")
    folder = Path(os.path.expanduser(named)) if named else cache_folder("tuning")
    return folder / (re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-") + ".json")


def load_tuning() -> Tuning:
    """What was chosen for the current GPU; the defaults if nothing was, there is no GPU, or the file is of another version."""
    if not torch.cuda.is_available():
        return DEFAULTS
    path = file_for(torch.cuda.get_device_name())
    if not path.is_file():
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
        return replace(chosen, dependent_launch=False)
    return chosen
