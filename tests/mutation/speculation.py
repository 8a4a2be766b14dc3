"""Mutants of speculation: guesses, which of them are worth it, and how they are counted."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

SPECULATION = "nanoengine/speculation/speculation.py"
VERIFICATION = "nanoengine/speculation/verification.py"
DRAFT_MODEL = "nanoengine/speculation/draft_model.py"
NGRAM = "nanoengine/speculation/ngram.py"
SUFFIX = "nanoengine/speculation/suffix.py"
AUTOMATON = "nanoengine/speculation/suffix_automaton.py"
COSTS = "nanoengine/speculation/step_costs.py"
SCHEDULER = "nanoengine/core/scheduler.py"
TEST_CHOOSING = "tests/speculation/test_choosing.py"
TEST_EVERY_WAY = "tests/speculation/test_every_way.py"
TEST_ENGINE = "tests/speculation/test_engine.py"

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
        "nanoengine/speculation/drafter.py",
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
        "num_tokens = num_decodes + self._num_prompt_tokens",
        "num_tokens = num_decodes",
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
        "fork-changes-the-edges-of-its-prompt",
        AUTOMATON,
        "            self.edges[state] = self.edges[state].copy()\n",
        "",
        "What one completion says shows in the guesses of another.",
        ("tests/speculation/test_suffix_automaton.py",),
    ),
    Mutant(
        "row-ends-with-a-rejected-sample",
        VERIFICATION,
        "last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, last))",
        "last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, drafts.starts))",
        "The next step of a row begins with another token than its last one.",
        ("tests/speculation/test_verification.py",),
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
        "nanoengine/speculation/capability.py",
        "            runner.kv_cache.places += model.kv_cache.places",
        "            _ = model.kv_cache.places",
        "What is done with a block is not done with the K/V of the draft model.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "rejection-is-not-learned",
        "nanoengine/speculation/acceptance.py",
        "for place in range(min(num_accepted + 1, num_drafts)):",
        "for place in range(min(num_accepted, num_drafts)):",
        "Only accepted drafts change what is known of a sequence, so that bad guesses are tried forever.",
        ("tests/speculation/test_acceptance.py",),
    ),
    Mutant(
        "chances-are-not-multiplied",
        "nanoengine/speculation/acceptance.py",
        "return list(accumulate(self._rates[:num_drafts], mul))",
        "return self._rates[:num_drafts]",
        "A later draft counts as likely although all before it must be accepted too.",
        ("tests/speculation/test_acceptance.py",),
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
        "enumerate(chances[:budget], start=1)",
        "enumerate(chances, start=1)",
        "A step gets more drafts than its budget has tokens left.",
        (TEST_CHOOSING,),
    ),
    Mutant(
        "ngram-follows-the-first-occurrence",
        NGRAM,
        "latest[window[-size:]] = position + 1",
        "latest.setdefault(window[-size:], position + 1)",
        "A guess follows the earliest occurrence of its context, and not the latest.",
        ("tests/speculation/test_ngram.py",),
    ),
    Mutant(
        "ngram-guess-begins-a-token-late",
        NGRAM,
        "guess = list(token_ids[source : source + most])",
        "guess = list(token_ids[source + 1 : source + 1 + most])",
        "A guess leaves out the token that comes next.",
        ("tests/speculation/test_ngram.py",),
    ),
    Mutant(
        "outputs-help-across-salts",
        SUFFIX,
        "outputs = self._outputs.get(cache_salt)",
        "outputs = next(iter(self._outputs.values()), None)",
        "Outputs of one cache salt show in the guesses, and so in the times, of another.",
        ("tests/speculation/test_suffix.py",),
    ),
    Mutant(
        "guess-goes-on-into-the-next-output",
        SUFFIX,
        "if token == SEPARATOR or likelihood < least_likelihood:",
        "if likelihood < least_likelihood:",
        "The mark between two outputs is guessed as a token.",
        ("tests/speculation/test_suffix.py",),
    ),
    Mutant(
        "split-state-loses-its-count",
        AUTOMATON,
        "self.counts.append(self.counts[after])",
        "self.counts.append(0)",
        "How often a context has occurred is forgotten when its state is split.",
        ("tests/speculation/test_suffix_automaton.py",),
    ),
    Mutant(
        "costs-are-interpolated-the-wrong-way",
        COSTS,
        "return [(after - 1, 1 - share), (after, share)]",
        "return [(after - 1, share), (after, 1 - share)]",
        "Between two measured sizes, a step counts as taking as long as the farther one.",
        ("tests/speculation/test_step_costs.py",),
    ),
)
