"""All named errors of nanoengine: the core's, and further ones."""

from nanoengine.core.errors import *  # noqa: F403
from nanoengine.core.errors import NanoEngineError


class FetchFailed(NanoEngineError, RuntimeError):
    """A model could not be downloaded, was damaged on the way, or cannot be stored."""


class GrammarsUnavailable(NanoEngineError, RuntimeError):
    """The process that compiles grammars cannot be started, whatever the grammar is: the same request may succeed later."""


class MissingPackage(NanoEngineError, ImportError):
    """A request needs a package that is not installed; the message says how to install it."""
