"""Speculative decoding as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.speculation.ngram import NgramProposer
from nanoengine.features.speculation.options import SpeculationOptions
from nanoengine.features.speculation.speculation import STEP_TOKENS, Speculation


class SpeculativeDecoding(Capability):
    """Speculation, with n-grams or a draft model. It sets the startup's `draft`, whose K/V is in every block beside that of the
    large model, and `runs_eagerly` with it.
    """

    options = SpeculationOptions
    speculation: Speculation | None = None
    """Set by `policy`; None without speculation."""

    def before_pool(self, startup: Startup) -> None:
        options = startup.config.of(SpeculationOptions)
        startup.most_drafts = options.num_drafts if options.speculation is not None else 0
        name = options.draft_model
        if name is not None:
            from nanoengine.features.speculation.draft_loading import load_draft_model

            draft = startup.draft = load_draft_model(name, startup)
            startup.block_bytes += draft.bytes_of_block(draft.groups)

    def runner(self, startup: Startup) -> None:
        options, runner = startup.config.of(SpeculationOptions), startup.runner
        if options.speculation is None:
            return
        # Options are read before a model is loaded, and without torch.
        from nanoengine.features.speculation.draft_model import DraftModel
        from nanoengine.features.speculation.verification import DraftVerifier

        model, draft = None, startup.draft
        if draft is not None:
            startup.runs_eagerly = True  # the draft model's part of a step is not recorded
            draft.model.prepare(startup.max_model_len)
            group = next(i for i, layout in enumerate(startup.layouts) if not layout.forgets)
            model = DraftModel(draft.model, draft.new_kv_cache(startup.num_blocks), group, runner)
            runner.kv_cache.pool_layers += model.kv_cache.pool_layers  # copies of a block copy the K/V of both models
            runner.parts.append(model)
        runner.sampler.verifier = DraftVerifier(startup.device, model)

    def policy(self, startup: Startup) -> None:
        options = startup.config.of(SpeculationOptions)
        if options.speculation is None:
            return
        self.speculation = speculation = Speculation(
            None if options.draft_model is not None else NgramProposer(),
            num_drafts=options.num_drafts,
            vocab_size=startup.model_config.vocab_size,
            step_tokens=STEP_TOKENS[startup.device.torch_device.type],
        )
        startup.metric_sources["speculation"] = lambda: speculation.stats
        startup.parts.append(self.speculation)

    def describe_itself(self, startup: Startup) -> str | None:
        name = startup.config.of(SpeculationOptions).speculation
        return None if name is None else f"speculation: {name}"
