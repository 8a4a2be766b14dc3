"""Loading of a draft model, by the same stages of start-up as for the large model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup
from nanoengine.features.speculation.options import SpeculationOptions


def load_draft_model(name: str, startup: Startup) -> Startup:
    """Load a draft model for the model of `startup`: any that the engine can load, in the same dtype.

    Raises:
        InvalidConfig: it has other tokens or too few positions, or no layer of the large model sees all tokens.
    """

    def refusal(why: str) -> InvalidConfig:
        return InvalidConfig(f"speculation is 'model:{name}', {why}")

    max_len = startup.config.max_model_len or startup.model_config.max_position_embeddings
    dtype = str(startup.dtype).removeprefix("torch.")
    options = {  # a tokenizer for the large model is not that of the draft model
        kind: replace(values, tokenizer=None) if hasattr(values, "tokenizer") else values
        for kind, values in startup.config.options.items()
    }
    core: dict[str, Any] = {"model": name, "dtype": dtype, "max_model_len": max_len, "block_size": startup.block_size}
    config = replace(startup.config, **core, options=options)
    parts = [type(part)() for part in startup.capabilities if part.options is not SpeculationOptions]
    draft = Startup(config, parts, use_tqdm=startup.use_tqdm)
    draft.describe()
    if draft.tokenizer.token_ids() != startup.tokenizer.token_ids():
        raise refusal("whose tokenizer has other tokens than the model's: choose a model of the same family")
    if draft.state_shapes is not None:
        raise refusal("whose layers have states: a draft model's must all attend; choose another")
    # The RoPE of some families scales beyond the positions in their files.
    longest = getattr(draft.model_config, "longest", draft.model_config.max_position_embeddings)
    if max_len > longest:
        limit = f"at most {longest} positions, and max_model_len is {max_len}"
        raise refusal(f"which was made for {limit}: lower it, or choose another model")
    if all(layout.forgets for layout in startup.layouts):
        raise refusal(
            f"but every layer of {startup.config.model} has a window: a draft model's K/V lies in the blocks of layers that see "
            "everything; choose another speculation"
        )
    draft.load()
    draft.groups = [list(range(draft.model_config.num_layers))]
    return draft
