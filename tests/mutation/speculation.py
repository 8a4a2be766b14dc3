"""Mutants of speculation: guesses, which of them are worth it, and how they are counted."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

SPECULATION = "nanoengine/features/speculation/speculation.py"
VERIFICATION = "nanoengine/features/speculation/verification.py"
DRAFT_MODEL = "nanoengine/features/speculation/draft_model.py"
NGRAM = "nanoengine/features/speculation/ngram.py"
SCHEDULER = "nanoengine/core/scheduler.py"
TEST_CHOOSING = "tests/features/speculation/test_choosing.py"
TEST_EVERY_WAY = "tests/features/speculation/test_every_way.py"
TEST_ENGINE = "tests/features/speculation/test_engine.py"

MUTANTS = (
    Mutant(
        "token-behind-the-last-draft-is-lost",
        SCHEDULER,
        "enumerate(sampled[: num_accepted + 1])",
        "enumerate(sampled[: max(num_accepted, 1)])",
        "The token that was sampled behind the last accepted draft is dropped.",
        (TEST_EVERY_WAY,),
    ),
    Mutant(
        "tokens-behind-a-stop-are-kept",
        SCHEDULER,
        "                self._end(seq, token)\n                return\n",
        "                self._end(seq, token)\n",
        "Accepted drafts behind a stop token become tokens of the sequence.",
        (TEST_EVERY_WAY,),
    ),
    Mutant(
        "drafts-outgrow-their-slots",
        "nanoengine/features/speculation/drafter.py",
        "drafts = drafts[: seq.num_slots - seq.num_computed]",
        "drafts = drafts[:]",
        "Drafts for which there is no block are computed all the same.",
        (TEST_EVERY_WAY,),
    ),
    Mutant(
        "rejected-nan-stays-in-its-block",
        SCHEDULER,
        "            if UNKNOWN in sampled:  # ",
        "            if False:  # ",
        "A block with the NaN of a rejected draft is given to others without being cleared.",
        (TEST_EVERY_WAY,),
    ),
    Mutant(
        "postponed-for-a-step-full-of-prompts",
        SPECULATION,
        "prompts = self._num_prompt_tokens",
        "prompts = 0",
        "A sequence waits for a step in which prompts leave no room for drafts.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "prompt-is-read-by-each-completion",
        SPECULATION,
        "prompt = self._prompts[request] = proposer.begin",
        "prompt = proposer.begin",
        "Each completion of a request reads the prompt anew.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "row-ends-with-a-rejected-sample",
        VERIFICATION,
        "last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, last))",
        "last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, drafts.starts))",
        "The next step of a row begins with another token than its last one.",
        ("tests/features/speculation/test_verification.py",),
    ),
    Mutant(
        "draft-model-does-not-follow",
        DRAFT_MODEL,
        "        self._forward(batch.input_ids, batch.positions, replace",
        "        (batch.input_ids, batch.positions, replace",
        "The draft model has no K/V of the tokens before its guesses.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "guesses-come-back-in-another-order",
        DRAFT_MODEL,
        "return guesses.index_select(0, original)",
        "return guesses",
        "Drafts of one sequence are compared with the samples of another.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "kv-of-the-draft-model-is-not-in-the-blocks",
        "nanoengine/features/speculation/capability.py",
        "            runner.kv_cache.places += model.kv_cache.places",
        "            _ = model.kv_cache.places",
        "What is done with a block is not done with the K/V of the draft model.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "guess-does-not-skip-tokens-in-flight",
        SPECULATION,
        "list(guess)[num_in_flight : num_in_flight + most]",
        "list(guess)[:most]",
        "While a token is on its way, drafts stand one place too early.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "draft-of-an-end-is-verified",
        SPECULATION,
        "or not 0 <= token < self.vocab_size or token in seq.stop_token_ids:",
        "or not 0 <= token < self.vocab_size:",
        "Tokens behind a guessed end of text are verified in vain.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "guess-outside-the-vocabulary-is-computed",
        SPECULATION,
        "or not 0 <= token < self.vocab_size or token in seq.stop_token_ids:",
        "or token in seq.stop_token_ids:",
        "A guesser's token outside the vocabulary reaches the model.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "drafts-pass-the-budget",
        SPECULATION,
        "room = min(budget, self.step_tokens - num_tokens)",
        "room = self.step_tokens - num_tokens",
        "A step gets more drafts than its budget has tokens left.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "drafts-fill-more-than-a-step",
        SPECULATION,
        "if place < len(guess) and room > 0:",
        "if place < len(guess):",
        "A step has more drafts than it has room for.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "rejection-is-not-noticed",
        SPECULATION,
        "state.most = 2 * (num_accepted - state.num_forced + 1)",
        "state.most = 2 * (num_drafts - state.num_forced + 1)",
        "A sequence whose drafts are rejected gets more of them all the same.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "ngram-follows-the-first-occurrence",
        NGRAM,
        "latest[window[-size:]] = position + 1",
        "latest.setdefault(window[-size:], position + 1)",
        "A guess follows the earliest occurrence of its context, and not the latest.",
        ("tests/features/speculation/test_ngram.py",),
    ),
    Mutant(
        "ngram-guess-begins-a-token-late",
        NGRAM,
        "guess = list(token_ids[source : source + most])",
        "guess = list(token_ids[source + 1 : source + 1 + most])",
        "A guess leaves out the token that comes next.",
        ("tests/features/speculation/test_ngram.py",),
    ),
)
