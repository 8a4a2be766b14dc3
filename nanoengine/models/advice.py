"""How requests that say nothing are sampled: as the model's makers advise, or as suits small models where they advise nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.sampling_params import CoreSamplingParams

logger = logging.getLogger("nanoengine")

WITHOUT_ADVICE = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults. At temperature 1 over the whole vocabulary, a small model writes words without sense."""


def default_sampling(advised: Mapping[str, Any], kind: type[CoreSamplingParams]) -> dict[str, Any]:
    """Values of sampling parameters, for what a request says nothing of.

    Args:
        advised: by the model's makers, unchecked. A value that cannot work is left out with a warning; the others stay.
        kind: the class of the parameters. A field that it does not have is left out.

    Makers who advise a temperature have thought of all: what they do not name stays neutral. Without a temperature,
    `WITHOUT_ADVICE` fills what they do not name.
    """
    known = {field.name for field in fields(kind)}
    found: dict[str, Any] = {}
    for name, value in advised.items():
        if name not in known:
            continue
        try:
            kind(**{name: value})
        except InvalidSamplingParams as error:
            logger.warning("what generation_config.json says of %s is left out: %s", name, error)
        else:
            found[name] = value
    return found if "temperature" in found else WITHOUT_ADVICE | found
