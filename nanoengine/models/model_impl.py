"""The option `model_impl`: a family of this package or the modules of transformers compute a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.errors import UnsupportedModel, shown
from nanoengine.models.architectures import UnsupportedArchitecture, read_model_config
from nanoengine.models.implementation import Implementation
from nanoengine.models.loader import open_checkpoint
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.models.safetensors_folder import SafetensorsFolder


def choose_implementation(
    name: str, model_impl: str, table: Mapping[str, Any], scaling: Mapping[str, Any] | None, families: Sequence[Any]
) -> Implementation:
    """The implementation of the model called `name`, with the content `table` of its config.json.

    transformers computes only architectures without a family: if a family refuses a field, the model is refused.

    Raises:
        UnsupportedModel: neither computes it; the message has the reasons.
    """
    refusal = "by transformers' modules: "
    if model_impl != "transformers":
        try:
            return Implementation(read_model_config(table, scaling, families))
        except UnsupportedArchitecture:
            if model_impl == "nanoengine":
                raise
            stated = shown(table.get("architectures"))
            refusal = f"architectures is {stated}: no family here has it, and transformers' modules do not run here: "
    from nanoengine.models.transformers_backend.implementation import TransformersModel

    if scaling is not None:
        raise UnsupportedModel(f"{refusal}rope_scaling is not supported with them: change config.json")

    def opened() -> SafetensorsFolder:
        checkpoint = open_checkpoint(find_model(name, WEIGHT_FILES))
        if not isinstance(checkpoint, SafetensorsFolder):
            raise UnsupportedModel(f"its weights are a {type(checkpoint).__name__}, which only families here read")
        return checkpoint

    try:
        return TransformersModel(table, opened)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{refusal}{error}") from error
