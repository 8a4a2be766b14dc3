"""Mutants of the sampler: its rules, log probabilities, and the verification of drafts."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

SAMPLER = "nanoengine/runner/sampler.py"
PENALTIES = "nanoengine/runner/penalties.py"
OFFSETS = "nanoengine/runner/logit_offsets.py"
BAD_WORDS = "nanoengine/runner/bad_words.py"
MASKS = "nanoengine/runner/token_masks.py"
RULES = "nanoengine/runner/row_rules.py"
LOGPROBS = "nanoengine/runner/logprobs.py"
DRAFTS = "nanoengine/runner/drafts.py"
FILTERS = "nanoengine/kernels/filters.py"
CHOICE = "nanoengine/kernels/sampling.py"
GUMBEL = "nanoengine/kernels/gumbel.py"
TORCH = "nanoengine/kernels/torch_kernels.py"
TEST_SAMPLER = "tests/runner/test_sampler.py"
TEST_FILTERS = "tests/kernels/test_filters.py"
TEST_SAMPLING = "tests/kernels/test_sampling.py"

MUTANTS = (
    Mutant(
        "logprobs-come-after-the-rules",
        SAMPLER,
        "            if bound:\n                raw = logits.index_select(0, at)\n",
        "",
        "Reported log probabilities are those after penalties and bans, and not the model's own.",
        (TEST_SAMPLER,),
    ),
    Mutant(
        "row-keeps-the-rules-of-another",
        SAMPLER,
        "        self.end(row.row for row in started)\n",
        "",
        "A row that begins anew is sampled by the penalties of the sequence before.",
        (TEST_SAMPLER,),
    ),
    Mutant(
        "rejected-samples-raise-errors",
        SAMPLER,
        "return [token if own else 0 for token, own in zip(found, self._is_token.tolist(), strict=False)]",
        "return found",
        "NaN behind a rejected draft ends the request.",
        ("tests/runner/test_sampler_with_drafts.py", "tests/runner/test_drafted_steps.py"),
    ),
    Mutant(
        "frequency-counts-the-prompt",
        PENALTIES,
        "outputs.append(cells[row.sampling.num_prompt_tokens :])",
        "outputs.append(cells)",
        "The frequency and presence penalties count tokens of the prompt.",
        ("tests/runner/test_penalties.py",),
    ),
    Mutant(
        "repetition-raises-negative-logits",
        PENALTIES,
        "x = x.clamp(min=0) / penalty + x.clamp(max=0) * penalty",
        "x = x / penalty",
        "The repetition penalty makes tokens of negative logits likelier.",
        ("tests/runner/test_penalties.py", TEST_SAMPLER),
    ),
    Mutant(
        "presence-counts-every-time",
        PENALTIES,
        "x -= presence * times.clamp(max=1)",
        "x -= presence * times",
        "The presence penalty grows with every occurrence.",
        ("tests/runner/test_penalties.py", TEST_SAMPLER),
    ),
    Mutant(
        "counts-of-another-row-stay",
        PENALTIES,
        "        self._counts.index_fill_(0, send_array(np.array(slots, dtype=np.int64), self._stream), 0)\n",
        "",
        "A row with penalties begins with the counts of the row that had its place before.",
        ("tests/runner/test_penalties.py",),
    ),
    Mutant(
        "drafts-are-not-penalized",
        PENALTIES,
        "counts.scatter_add_(1, tokens.clamp(min=0), stand_before.to(counts.dtype) * IN_OUTPUT)",
        "pass",
        "Penalties behind a draft do not count the drafts before it.",
        ("tests/runner/test_sampler_with_drafts.py",),
    ),
    Mutant(
        "min-tokens-counts-the-prompt",
        OFFSETS,
        "return Offsets(tokens, values, sampling.num_prompt_tokens + sampling.params.min_tokens)",
        "return Offsets(tokens, values, sampling.params.min_tokens)",
        "min_tokens is reached by the tokens of the prompt.",
        ("tests/runner/test_logit_offsets.py",),
    ),
    Mutant(
        "rule-holds-a-token-too-long",
        RULES,
        "return np.flatnonzero(self._ends[rows] > positions) if self._pieces else NO_SAMPLES",
        "return np.flatnonzero(self._ends[rows] >= positions) if self._pieces else NO_SAMPLES",
        "An end of text is forbidden for one token more than min_tokens says.",
        ("tests/runner/test_row_rules.py", "tests/runner/test_logit_offsets.py"),
    ),
    Mutant(
        "packed-rules-stay-stale",
        RULES,
        '        self._ends[row] = until\n        self._samples = b""\n',
        "        self._ends[row] = until\n",
        "A row that gets another rule is sampled by the one that was packed before.",
        ("tests/runner/test_row_rules.py",),
    ),
    Mutant(
        "bad-word-begins-in-the-prompt",
        BAD_WORDS,
        "last = row.token_ids[max(row.sampling.num_prompt_tokens, len(row.token_ids) - width) :]",
        "last = row.token_ids[max(0, len(row.token_ids) - width) :]",
        "A bad word is forbidden where its beginning stands in the prompt.",
        ("tests/runner/test_bad_words.py",),
    ),
    Mutant(
        "half-a-bad-word-is-enough",
        BAD_WORDS,
        "offsets = torch.where(num_differing > 0, 0.0, -torch.inf)",
        "offsets = torch.where(num_differing > 1, 0.0, -torch.inf)",
        "The last token of a bad word is forbidden though one token before it differs.",
        ("tests/runner/test_bad_words.py",),
    ),
    Mutant(
        "mask-overrules-allowed-tokens",
        MASKS,
        "return np.bitwise_and.reduce(masks)",
        "return masks[-1]",
        "A mask of a grammar allows tokens that allowed_token_ids forbids.",
        ("tests/runner/test_token_masks.py",),
    ),
    Mutant(
        "rank-counts-equals",
        LOGPROBS,
        "ranks = (logits > logits.gather(-1, own_ids)).sum(-1) + 1",
        "ranks = (logits >= logits.gather(-1, own_ids)).sum(-1)",
        "A token among equals is ranked behind all of them.",
        ("tests/runner/test_logprobs.py",),
    ),
    Mutant(
        "draft-behind-a-rejected-one-is-accepted",
        DRAFTS,
        "counts = (tokens[numbers] == self.tokens).long().cumprod(1).sum(1)",
        "counts = (tokens[numbers] == self.tokens).long().sum(1)",
        "A draft that came true behind a rejected one counts as accepted.",
        ("tests/runner/test_drafts.py",),
    ),
    Mutant(
        "sample-behind-the-last-draft-is-no-token",
        DRAFTS,
        "is_token = self.depth <= counts.index_select(0, self.run_of)",
        "is_token = self.depth < counts.index_select(0, self.run_of)",
        "The sample that follows the accepted drafts is not counted as a token.",
        ("tests/runner/test_drafts.py",),
    ),
    Mutant(
        "top-p-drops-the-token-that-reaches-it",
        FILTERS,
        "before = probabilities.cumsum(-1) - probabilities",
        "before = probabilities.cumsum(-1)",
        "The token with which top_p is reached is dropped.",
        (TEST_FILTERS,),
    ),
    Mutant(
        "top-k-keeps-one-more",
        FILTERS,
        "values = values.masked_fill(rank >= top_k, -torch.inf)",
        "values = values.masked_fill(rank > top_k, -torch.inf)",
        "top_k keeps a token too many.",
        (TEST_FILTERS,),
    ),
    Mutant(
        "top-p-is-a-share-of-all",
        FILTERS,
        "share = torch.where(top_k < vocab_size, log_sum_exp(values)[:, None], total)",
        "share = log_sum_exp(logits)[:, None]",
        "Beside top_k, top_p is taken of all tokens, and not of those that top_k leaves.",
        (TEST_FILTERS,),
    ),
    Mutant(
        "filters-settle-too-early",
        FILTERS,
        "if count == vocab_size or _is_settled(kept, logits, token_ids):",
        "if True:",
        "Tokens beyond the likeliest thousand are dropped though top_p keeps them.",
        (TEST_FILTERS,),
    ),
    Mutant(
        "noise-ignores-the-position",
        GUMBEL,
        "return _mix(seeds + (positions + 1) * signed(GOLDEN_GAMMA))",
        "return _mix(seeds + signed(GOLDEN_GAMMA) + 0 * positions)",
        "All tokens of a sequence are drawn with the same noise.",
        ("tests/kernels/test_gumbel.py",),
    ),
    Mutant(
        "noise-is-subtracted",
        GUMBEL,
        "return -torch.log(-torch.log1p(-uniform))",
        "return torch.log(-torch.log1p(-uniform))",
        "Draws do not follow the softmax of the logits.",
        ("tests/kernels/test_gumbel.py",),
    ),
    Mutant(
        "temperature-is-multiplied",
        CHOICE,
        "scaled = logits[group] / temperature[group, None]",
        "scaled = logits[group] * temperature[group, None]",
        "With a filter, a higher temperature makes tokens less random.",
        (TEST_SAMPLING,),
    ),
    Mutant(
        "none-left-is-called-nan",
        TORCH,
        "return tokens.masked_fill_(highest == -torch.inf, NONE_LEFT)",
        "return tokens",
        "A row of which all tokens are forbidden counts as one with broken weights.",
        (TEST_SAMPLING,),
    ),
)
