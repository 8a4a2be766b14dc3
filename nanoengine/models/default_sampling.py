"""Default sampling: by the generation_config.json of a model, otherwise defaults for small models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.sampling_params import CoreSamplingParams

logger = logging.getLogger("nanoengine")

SMALL_MODEL_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults. At temperature 1 over the whole vocabulary, a small model writes words without sense."""


def default_sampling(advised: Mapping[str, Any], kind: type[CoreSamplingParams]) -> dict[str, Any]:
    """Default values of sampling parameters.

    Args:
        advised: of generation_config.json, unchecked. An invalid value is dropped with a warning; the others stay.
        kind: the class of the parameters. Other fields are dropped.

    With a temperature in `advised`, other parameters stay neutral; without one, `SMALL_MODEL_DEFAULTS` has their defaults.
    """
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in advised.items():
        if name not in known:
            continue
        try:
            kind(**{name: value})
        except InvalidSamplingParams as error:
            logger.warning("in generation_config.json, the value of %s is left out: %s", name, error)
        else:
            values[name] = value
    return values if "temperature" in values else SMALL_MODEL_DEFAULTS | values
