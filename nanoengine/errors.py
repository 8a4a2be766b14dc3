"""Every error that a user of nanoengine can meet, by name.

A message says which field or file is at fault, its value, the limit, and what to change. Errors about a value are also
`ValueError`s, so that callers who know nothing of this module can still catch them.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoengine.outputs import RequestOutput


class NanoEngineError(Exception):
    """Base of all errors that nanoengine raises on purpose."""


class InvalidConfig(NanoEngineError, ValueError):
    """An engine option has a value that cannot work."""


class UnknownOption(NanoEngineError, TypeError):
    """A keyword that is not an engine option."""


class KVCacheTooSmall(InvalidConfig):
    """The KV pool cannot hold even one sequence of the length asked for."""


class InvalidSamplingParams(NanoEngineError, ValueError):
    """A sampling parameter has a value outside its range."""


class InvalidPrompt(NanoEngineError, ValueError):
    """A prompt is empty, too long, of a wrong type, or holds token ids outside the vocabulary."""


class ModelNotFound(NanoEngineError, FileNotFoundError):
    """The model is neither bundled, nor fetched, nor a local path, nor on a reachable hub; or a file of it is missing."""


class FetchFailed(NanoEngineError, RuntimeError):
    """A model could not be downloaded, was damaged on its way, or cannot be kept."""


class UnsupportedModel(NanoEngineError, ValueError):
    """The model's config asks for something that this engine does not compute."""


class InvalidWeights(NanoEngineError, ValueError):
    """The weight files are broken, or their tensors do not match the model: missing, unexpected or misshapen."""


class InvalidRequest(NanoEngineError, ValueError):
    """A request cannot be queued: its id is in use, or it was queued before."""


class EngineClosed(NanoEngineError, RuntimeError):
    """The engine was closed; its memory is gone."""


class EngineDead(NanoEngineError, RuntimeError):
    """The engine's loop has met an error that it cannot go on from; `__cause__` is what it was."""


class NotFiniteLogits(NanoEngineError, ArithmeticError):
    """The model produced NaN or infinity, so that no token can be chosen."""


class NoTokenLeft(NanoEngineError, ValueError):
    """What a request forbids (allowed_token_ids, bad_words, min_tokens, a mask) leaves no token with a finite logit."""


class StepFailed(NanoEngineError, RuntimeError):
    """An exception inside an engine step ended some of the requests of a `generate` call.

    The other requests ran on to their end: `outputs` holds all results in input order, and those of the failed requests
    have the finish reason "error". The cause is the exception itself (`__cause__`).
    """

    def __init__(self, message: str, outputs: list[RequestOutput]):
        super().__init__(message)
        self.outputs = outputs


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 8
        self.maxstring = self.maxother = 200
        self.maxlong = 60

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 4096:  # Python refuses to write the longest out
            return f"a number of {x.bit_length()} bits"
        return super().repr_int(x, level)


def shown(value: object) -> str:
    """A value as messages show it: its repr, cut short if it is long or deep, so that any file's content can be quoted."""
    return _Short().repr(value)
