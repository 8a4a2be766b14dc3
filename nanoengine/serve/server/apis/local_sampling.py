"""Sampling parameters by the names that llama.cpp's server has, and Ollama after it."""

from __future__ import annotations

from nanoengine.serve.server.bodies.fields import Body, with_fields
from nanoengine.serve.server.bodies.protocol import SAMPLING, Stops, Table

OURS = {"repeat_penalty" if name == "repetition_penalty" else name: name for name in SAMPLING}
"""Their names -> those of /v1/chat/completions."""

THEIRS = {ours: theirs for theirs, ours in OURS.items()}
"""The reverse."""

OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class LocalSampling(
    with_fields(Body, (), {theirs: SAMPLING[name] for theirs, name in OURS.items()}),  # type: ignore[misc]
    kw_only=True,  # type: ignore[call-arg]
):
    """Sampling parameters. Penalties are of the whole text, or of none with repeat_last_n 0."""

    stop: Stops | None = None
    repeat_last_n: int | None = None

    def of_chat(self) -> Table:
        """The same as fields of a `ChatRequest`."""
        values = {name: getattr(self, theirs) for theirs, name in OURS.items()}
        return {"stop": self.stop, **values, **(OFF if self.repeat_last_n == 0 else {})}
