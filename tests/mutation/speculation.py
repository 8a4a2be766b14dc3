"""Mutants of speculation: guesses, which of them are worth it, and how they are counted."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

RUNS = "nanoengine/engine/speculation/drafted_runs.py"
SPECULATION = "nanoengine/engine/speculation/speculation.py"
NGRAM = "nanoengine/engine/speculation/ngram.py"
SUFFIX = "nanoengine/engine/speculation/suffix.py"
COSTS = "nanoengine/engine/speculation/step_costs.py"
TEST_RUNS = "tests/engine/speculation/test_drafted_runs.py"
TEST_SPECULATION = "tests/engine/speculation/test_speculation.py"

MUTANTS = (
    Mutant(
        "token-behind-the-last-draft-is-lost",
        RUNS,
        "count = next(ends, num_accepted + 1)",
        "count = next(ends, num_accepted)",
        "The token that was sampled behind the last accepted draft is dropped.",
        (TEST_RUNS,),
    ),
    Mutant(
        "tokens-behind-a-stop-are-kept",
        RUNS,
        "count = next(ends, num_accepted + 1)",
        "count = num_accepted + 1",
        "Accepted drafts behind a stop token become tokens of the sequence.",
        (TEST_RUNS,),
    ),
    Mutant(
        "drafts-outgrow-their-slots",
        RUNS,
        "                del drafts[seq.num_slots - seq.num_tokens :]\n",
        "",
        "Drafts for which there is no block are computed all the same.",
        ("tests/e2e/test_speculation_every_way.py",),
    ),
    Mutant(
        "drafts-pass-the-length-limit",
        RUNS,
        "most = min(seq.max_num_tokens - seq.num_tokens, self.most_new) - 1",
        "most = min(seq.max_num_tokens - seq.num_tokens, self.most_new)",
        "With all drafts accepted, a sequence has one token more than it may have.",
        (TEST_RUNS,),
    ),
    Mutant(
        "masked-sequence-is-drafted",
        RUNS,
        "and not seq.in_lockstep and seq not in self._outbox.masks:",
        "and not seq.in_lockstep:",
        "A sequence whose mask is made token by token gets drafts, to which the mask of the first applies.",
        (TEST_RUNS, "tests/engine/test_masks.py"),
    ),
    Mutant(
        "rejected-nan-stays-in-its-block",
        RUNS,
        "self._block_manager.trim(seq, wipe=UNKNOWN in samples)",
        "self._block_manager.trim(seq)",
        "A block with the NaN of a rejected draft is given to others without being zeroed.",
        (TEST_RUNS,),
    ),
    Mutant(
        "rejection-is-not-learned",
        "nanoengine/engine/speculation/acceptance.py",
        "for place in range(min(num_accepted + 1, num_drafts)):",
        "for place in range(min(num_accepted, num_drafts)):",
        "Only accepted drafts change what is known of a sequence, so that bad guesses are tried forever.",
        ("tests/engine/speculation/test_acceptance.py",),
    ),
    Mutant(
        "chances-are-not-multiplied",
        "nanoengine/engine/speculation/acceptance.py",
        "return list(accumulate(self._rates[:num_drafts], mul))",
        "return self._rates[:num_drafts]",
        "A later draft counts as likely although all before it must be accepted too.",
        ("tests/engine/speculation/test_acceptance.py",),
    ),
    Mutant(
        "guess-does-not-skip-tokens-in-flight",
        SPECULATION,
        "for token in list(guess)[skip : skip + most]:",
        "for token in list(guess)[:most]:",
        "While a token is on its way, drafts stand one place too early.",
        (TEST_SPECULATION,),
    ),
    Mutant(
        "draft-of-an-end-is-verified",
        SPECULATION,
        "or not 0 <= token < self.vocab_size or token in ends:",
        "or not 0 <= token < self.vocab_size:",
        "Tokens behind a guessed end of text are verified in vain.",
        (TEST_SPECULATION,),
    ),
    Mutant(
        "guess-outside-the-vocabulary-is-computed",
        SPECULATION,
        "or not 0 <= token < self.vocab_size or token in ends:",
        "or token in ends:",
        "A guesser's token outside the vocabulary reaches the model.",
        (TEST_SPECULATION,),
    ),
    Mutant(
        "drafts-pass-the-budget",
        SPECULATION,
        "enumerate(chances[:budget], start=1)",
        "enumerate(chances, start=1)",
        "A step gets more drafts than its budget has tokens left.",
        (TEST_SPECULATION,),
    ),
    Mutant(
        "ngram-follows-the-first-occurrence",
        NGRAM,
        "latest[window[-size:]] = position + 1",
        "latest.setdefault(window[-size:], position + 1)",
        "A guess follows the earliest occurrence of its context, and not the latest.",
        ("tests/engine/speculation/test_ngram.py",),
    ),
    Mutant(
        "ngram-guess-begins-a-token-late",
        NGRAM,
        "guess = list(token_ids[source : source + most])",
        "guess = list(token_ids[source + 1 : source + 1 + most])",
        "A guess leaves out the token that comes next.",
        ("tests/engine/speculation/test_ngram.py",),
    ),
    Mutant(
        "outputs-help-across-salts",
        SUFFIX,
        "outputs = self._outputs.get(cache_salt)",
        "outputs = next(iter(self._outputs.values()), None)",
        "Outputs of one cache salt show in the guesses, and so in the times, of another.",
        ("tests/engine/speculation/test_suffix.py",),
    ),
    Mutant(
        "guess-goes-on-into-the-next-output",
        SUFFIX,
        "if token == SEPARATOR or likelihood < least_likelihood:",
        "if likelihood < least_likelihood:",
        "The mark between two outputs is guessed as a token.",
        ("tests/engine/speculation/test_suffix.py",),
    ),
    Mutant(
        "split-state-loses-its-count",
        "nanoengine/engine/speculation/suffix_automaton.py",
        "self.counts.append(self.counts[after])",
        "self.counts.append(0)",
        "How often a context has occurred is forgotten when its state is split.",
        ("tests/engine/speculation/test_suffix_automaton.py",),
    ),
    Mutant(
        "costs-are-interpolated-the-wrong-way",
        COSTS,
        "return [(after - 1, 1 - share), (after, share)]",
        "return [(after - 1, share), (after, 1 - share)]",
        "Between two measured sizes, a step counts as taking as long as the farther one.",
        ("tests/engine/speculation/test_step_costs.py",),
    ),
)
