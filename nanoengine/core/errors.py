"""Named errors of the engine.

A message says the field or file at fault, its value, the limit, and the option to change. Errors about a value are also
`ValueError`s, so that callers without this module can catch them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class NanoEngineError(Exception):
    """Base of errors that nanoengine raises on purpose: of a short message, or of the field at fault and what is behind it."""

    @property
    def field(self) -> str | None:
        """The field at fault, perhaps with a path inside of it; None: no single field is."""
        return self.args[0] if len(self.args) == 2 else None

    def __str__(self) -> str:
        text = "".join(map(str, self.args))
        return text if len(text) <= 2000 else f"{text[:1000]} ... {text[-900:]}"


class InvalidConfig(NanoEngineError, ValueError):
    """An engine option has a value that cannot work."""


class UnknownOption(NanoEngineError, TypeError):
    """A keyword is not an engine option."""


class KVCacheTooSmall(InvalidConfig):
    """The KV pool cannot hold one sequence of the requested length."""


class InvalidSamplingParams(NanoEngineError, ValueError):
    """A sampling parameter has a value outside its range."""


class InvalidPrompt(NanoEngineError, ValueError):
    """A prompt is empty, too long, of a wrong type, or holds token ids outside the vocabulary."""


class PromptTooLong(InvalidPrompt):
    """A prompt leaves no room for a new token below max_model_len."""


class ModelNotFound(NanoEngineError, FileNotFoundError):
    """There is no such model, or a file of it is missing."""


class UnsupportedModel(NanoEngineError, ValueError):
    """The model's config asks for something that this engine does not compute."""


class InvalidWeights(NanoEngineError, ValueError):
    """The weight files are broken, or their tensors do not match the model: missing, unexpected or misshapen."""


class InvalidRequest(NanoEngineError, ValueError):
    """A request cannot be queued: its id is in use, or it was queued before."""


class EngineClosed(NanoEngineError, RuntimeError):
    """The engine was closed and its memory freed."""


class EngineDead(NanoEngineError, RuntimeError):
    """The engine cannot go on, such as without the processes that compute its steps."""


class NotFiniteLogits(NanoEngineError, ArithmeticError):
    """The model produced NaN or infinity, so no token can be chosen."""


class NoTokenLeft(NanoEngineError, ValueError):
    """A request forbids every token that has a finite logit."""


class StepFailed(NanoEngineError, RuntimeError):
    """An exception in a step (`__cause__`) ended some requests of `generate`, with the finish reason "error". `outputs`: all."""

    def __init__(self, message: str, outputs: list[Any]):
        super().__init__(message)
        self.outputs = outputs


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write the longest integers out."""
        return super().repr_int(x, level) if x.bit_length() <= 4096 else f"a number of {x.bit_length()} bits"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the most similar known word, if any."""
    near = get_close_matches(word[:100], list(known), 1, 0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """A value as messages quote it: its repr, at most 80 characters of it."""
    short = _ShortRepr()
    short.maxlevel, short.maxlong = 3, 60
    short.maxdict = short.maxlist = short.maxtuple = short.maxset = 8
    short.maxstring = short.maxother = 80
    return text if len(text := short.repr(value)) <= 80 else f"{text[:38]} ... {text[-37:]}"
