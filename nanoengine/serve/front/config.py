"""FrontConfig: the options of a server of several models, beside those of the server and of the engines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from nanoengine.core.options import check, option
from nanoengine.errors import InvalidConfig, shown

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)
MAX_DURATION_CHARS = 64

MAX_SECONDS = 1e8
"""A longer time, of three years, is for ever: clocks have limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Every option of a server of several models.

    Args:
        models_dir: a folder; each GGUF file and each folder of a model below it is served by its name.
        max_loaded_models: most models that are loaded at a time; half of the free memory, divided by it, is the default of a
            model's kv_cache_memory.
        pin: names of models that are loaded at the start, and are never unloaded to make room or because they are idle.
        keep_alive: time without requests after which a model is unloaded: "5m", "1h30m" or seconds; 0: after each answer; -1:
            never. Ollama's keep_alive in a request comes first.
        load_timeout: seconds that a load may take, and that a request waits which is not streamed.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    models_dir: str | None = None
    max_loaded_models: int = option(3, 1, 64)
    pin: tuple[str, ...] | None = None
    keep_alive: str = "5m"
    load_timeout: float = option(300.0, 0, 1e6, above=True)

    def __post_init__(self) -> None:
        check(self)
        duration(self.keep_alive)


def duration(value: str | float) -> float:
    """Seconds of a duration as Ollama has it: a number of seconds, or Go's text such as "1h30m"; infinite if it is negative.

    Raises:
        InvalidConfig: it is none.
    """
    text = str(value).strip()[: MAX_DURATION_CHARS + 1]
    digits = text.removeprefix("-")
    digits += "s" if digits[-1:].isdigit() and not PART.match(digits) else ""
    if len(text) > MAX_DURATION_CHARS or not digits or PART.sub("", digits):
        raise InvalidConfig(f"keep_alive is {shown(value)}: it must be seconds, or a duration such as '5m' or '1h30m'")
    seconds = sum(float(number) * SECONDS[unit] for number, unit in PART.findall(digits))
    return math.inf if text.startswith("-") or seconds > MAX_SECONDS else seconds
