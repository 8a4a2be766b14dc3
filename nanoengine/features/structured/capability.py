"""Structured outputs as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.speculation.drafter import Drafter
from nanoengine.features.speculation.verification import DraftVerifier
from nanoengine.features.structured.forced_drafts import ForcedDrafts
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.mask_filling import GrammarPolicy
from nanoengine.features.structured.mask_logits import MaskPart


class StructuredOutput(Capability):
    def runner(self, startup: Startup) -> None:
        MaskPart(startup.runner)
        sampler = startup.runner.sampler
        if sampler.verifier is None:
            sampler.verifier = DraftVerifier(startup.device)

    def policy(self, startup: Startup) -> None:
        grammars = Grammars(startup.tokenizer, startup.model_config.vocab_size, startup.eos_token_ids)
        speculates = any(isinstance(part, Drafter) for part in startup.parts)
        forced = None if speculates else ForcedDrafts(startup.num_rows, startup.model_config.vocab_size)
        startup.parts.append(GrammarPolicy(grammars, forced))
        if forced is not None:
            startup.parts.append(forced)
