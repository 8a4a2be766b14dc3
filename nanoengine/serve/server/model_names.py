"""ModelNames: the names by which requests may call the model and its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoengine.serve.server.errors import APIError

if TYPE_CHECKING:
    from nanoengine.features.lora.adapter import Adapter
    from nanoengine.features.lora.adapters import Adapters


class ModelNames:
    """Names of one model, and of its adapters, which are models to clients, too.

    Args:
        of_model: names of the model; answers have the first.
        adapters: those that are loaded; None: there are none.
    """

    def __init__(self, of_model: tuple[str, ...], adapters: Adapters | None):
        self.of_model, self._adapters = of_model, adapters

    @property
    def all(self) -> list[str]:
        """The names of the model, then those of the adapters."""
        return [*self.of_model, *(() if self._adapters is None else self._adapters.loaded)]

    def is_model(self, name: str) -> bool:
        """Whether a name is the model's, with or without the tag that Ollama's clients add."""
        return name in self.of_model or name.removesuffix(":latest") in self.of_model

    def check(self, name: str) -> Adapter | None:
        """The adapter of a name; None: it is a name of the model itself.

        Raises:
            APIError: there is no such model.
        """
        if self.is_model(name):
            return None
        adapter = None if self._adapters is None else self._adapters.loaded.get(name)
        if adapter is None:
            known = ", ".join(self.all)
            raise APIError(404, f"The model `{name[:80]}` does not exist. Valid names: {known}.", "model")
        return adapter

    def answered(self, name: str | None) -> str:
        """The name in the answer to a request, whose name of the model was checked."""
        return self.of_model[0] if not name or self.is_model(name) else name
