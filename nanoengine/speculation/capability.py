"""Speculative decoding as a capability of the engine."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from nanoengine.core.block_manager import FullLayout
from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.startup import Startup
from nanoengine.progress import stage
from nanoengine.speculation.draft_model import DraftModel
from nanoengine.speculation.ngram import NgramProposer
from nanoengine.speculation.options import NGRAM, SpeculationOptions
from nanoengine.speculation.speculation import Speculation
from nanoengine.speculation.step_costs import StepCosts
from nanoengine.speculation.step_timing import StepTiming, time_steps
from nanoengine.speculation.suffix import SuffixProposer
from nanoengine.speculation.verification import DraftVerifier


class SpeculativeDecoding(Capability):
    """`speculation` is set by `policy`, for its statistics; None without speculation."""

    options = SpeculationOptions
    speculation: Speculation | None = None
    draft: Startup | None = None
    """The draft model, loaded."""

    def before_pool(self, startup: Startup) -> None:
        name = startup.config.of(SpeculationOptions).draft_model
        if name is not None:
            self.draft = load_draft_model(name, startup)
            startup.block_bytes += self.draft.bytes_of_block(self.draft.groups)

    def runner(self, startup: Startup) -> None:
        options, runner = startup.config.of(SpeculationOptions), startup.runner
        if options.speculation is None:
            return
        startup.facts["num_drafts"] = options.num_drafts
        model = None
        if self.draft is not None:
            startup.facts["runs_eagerly"] = True  # what the draft model does in a step is not recorded
            self.draft.model.prepare(startup.max_model_len)
            group = next(i for i, layout in enumerate(startup.layouts) if isinstance(layout, FullLayout))
            model = DraftModel(self.draft.model, self.draft.new_kv_cache(startup.num_blocks), group, runner)
            runner.kv_cache.places += model.kv_cache.places  # what is done with a block is done with the K/V of both
            runner.parts.append(model)
        runner.sampler.verifier = DraftVerifier(startup.device, model)

    def policy(self, startup: Startup) -> None:
        options = startup.config.of(SpeculationOptions)
        if options.speculation is None:
            return
        with stage("Measuring steps", shown=startup.use_tqdm):
            timing = self._time_steps(startup)
        proposer = NgramProposer() if options.speculation == NGRAM else SuffixProposer()
        self.speculation = startup.drafter = Speculation(
            None if self.draft is not None else proposer,
            num_drafts=options.num_drafts,
            vocab_size=startup.model_config.vocab_size,
            costs=StepCosts(timing.seconds),
            guess_share=timing.guess_share,
        )
        startup.extras.append(self.speculation)
        startup.listeners.append(self.speculation)

    def _time_steps(self, startup: Startup) -> StepTiming:
        """Steps as they will be: recorded, if steps are."""
        return time_steps(
            lambda plan: startup.runner.launch(plan).result(),
            num_rows=startup.num_rows,
            max_tokens=startup.config.max_num_batched_tokens,
            max_len=startup.max_model_len,
            num_blocks=startup.num_blocks,
            block_size=startup.config.block_size,
            num_groups=len(startup.layouts),
            guesses=self.draft is not None,
        )

    def describe_itself(self, startup: Startup) -> str | None:
        name = startup.config.of(SpeculationOptions).speculation
        return None if name is None else f"speculation: {name}"


def load_draft_model(name: str, startup: Startup) -> Startup:
    """A small model that guesses for the model of `startup`: any that the engine can load, in the same dtype.

    Raises:
        InvalidConfig: it knows other tokens or too few positions, or there are no blocks that could hold its K/V.
    """
    max_len = startup.config.max_model_len or startup.model_config.max_position_embeddings
    dtype = str(startup.dtype).removeprefix("torch.")
    config = replace(startup.config, model=name, dtype=dtype, max_model_len=max_len)
    config = replace(config, options={kind: _without_tokenizer(own) for kind, own in config.options.items()})
    parts = [type(own)() for own in startup.capabilities if not isinstance(own, SpeculativeDecoding)]
    draft = Startup(config, parts, use_tqdm=startup.use_tqdm)
    draft.describe()
    if draft.tokenizer.token_ids() != startup.tokenizer.token_ids():
        raise InvalidConfig(
            f"speculation is 'model:{name}', whose tokenizer has other tokens than the model's: choose a model of the same family"
        )
    # The rotations of some families stretch beyond the positions that their files name.
    longest = getattr(draft.model_config, "longest", draft.model_config.max_position_embeddings)
    if max_len > longest:
        raise InvalidConfig(
            f"speculation is 'model:{name}', which was made for at most {longest} positions, and max_model_len is {max_len}: "
            "lower it, or choose another model"
        )
    if not any(isinstance(layout, FullLayout) for layout in startup.layouts):
        raise InvalidConfig(
            f"speculation is 'model:{name}', but every layer of {startup.config.model} has a window: a draft model's K/V lies "
            "in the blocks of layers that see everything; choose another speculation"
        )
    draft.load()
    draft.groups = [list(range(draft.model_config.num_layers))]
    return draft


def _without_tokenizer(options: Any) -> Any:
    """A tokenizer that was chosen for the large model says nothing of the tokens of the draft model."""
    if any(field.name == "tokenizer" for field in fields(options)):
        return replace(options, tokenizer=None)
    return options
