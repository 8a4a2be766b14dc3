"""Mutants of sampling: filters and noise, what changes logits, log probabilities."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

CORE = "nanoengine/core/sampling.py"
SAMPLER = "nanoengine/core/sampler.py"
KERNELS = "nanoengine/core/kernels.py"
PENALTIES = "nanoengine/features/sampling/penalties.py"
OFFSETS = "nanoengine/features/sampling/logit_offsets.py"
ROWS = "nanoengine/features/sampling/row_processor.py"
TEST_CORE = "tests/core/test_sampling.py"
TEST_KERNELS = "tests/core/test_kernels.py"
TEST_ROWS = "tests/features/sampling/test_row_processor.py"
TEST_PROCESSORS = "tests/features/sampling/test_processors.py"
TEST_LOGPROBS = "tests/features/sampling/test_logprobs.py"
TEST_ENGINE = "tests/features/sampling/test_in_an_engine.py"

MUTANTS = (
    Mutant(
        "logprobs-come-after-the-rules",
        "nanoengine/features/sampling/logprobs.py",
        "self._raw = logits.index_select(0, samples) if self._others_change else None",
        "self._raw = None",
        "Reported log probabilities are those after penalties and bans, and not the model's own.",
        (TEST_LOGPROBS,),
    ),
    Mutant(
        "row-keeps-the-rules-of-another",
        SAMPLER,
        "ended = [*plan.ended, *(start.row for start in started)]",
        "ended = plan.ended",
        "A row that begins anew is sampled by the penalties of the sequence before.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "seed-loses-bits",
        SAMPLER,
        "integers = self.device.send(np.array([[start.row for start in started], top_k, seeds], np.int64))",
        "integers = self.device.send(np.array([[start.row for start in started], top_k, seeds], np.int32))",
        "Requests whose seeds differ in high bits get the same tokens.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "forbidden-tokens-are-called-broken",
        SAMPLER,
        "if own == NONE_LEFT and i not in forbidden else own",
        "if own == NONE_LEFT else own",
        "A request that forbids every token is told that the weights are broken.",
        (TEST_PROCESSORS, TEST_ENGINE),
    ),
    Mutant(
        "rejected-samples-are-tokens",
        "nanoengine/core/scheduler.py",
        "enumerate(sampled[: num_accepted + 1])",
        "enumerate(sampled)",
        "Samples behind a rejected draft become tokens, and NaN among them ends the request.",
        ("tests/features/speculation/test_every_way.py",),
    ),
    Mutant(
        "frequency-counts-the-prompt",
        PENALTIES,
        "outputs.append(cells[start.sampling.num_prompt_tokens :])",
        "outputs.append(cells)",
        "The frequency and presence penalties count tokens of the prompt.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "repetition-raises-negative-logits",
        PENALTIES,
        "x = x.clamp(min=0) / penalty + x.clamp(max=0) * penalty",
        "x = x / penalty",
        "The repetition penalty makes tokens of negative logits likelier.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "presence-counts-every-time",
        PENALTIES,
        "x -= presence * times.clamp(max=1)",
        "x -= presence * times",
        "The presence penalty grows with every occurrence.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "counts-of-another-row-stay",
        PENALTIES,
        "        self.counts.index_fill_(0, send(np.array([start.row for start, _ in begun], dtype=np.int64)), 0)\n",
        "",
        "A row with penalties begins with the counts of the row that had its place before.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "drafts-are-not-penalized",
        PENALTIES,
        "counts.scatter_add_(1, tokens.clamp(min=0), stand_before.to(counts.dtype) * IN_OUTPUT)",
        "pass",
        "Penalties behind a draft do not count the drafts before it.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "rejected-drafts-are-counted",
        PENALTIES,
        "None if verified is None else verified.is_token.index_select(0, samples)",
        "None",
        "Penalties count what was sampled behind a rejected draft.",
        (TEST_ENGINE,),
    ),
    Mutant(
        "min-tokens-counts-the-prompt",
        OFFSETS,
        "until = start.sampling.num_prompt_tokens + params.min_tokens",
        "until = params.min_tokens",
        "min_tokens is reached by the tokens of the prompt.",
        (TEST_PROCESSORS,),
    ),
    Mutant(
        "rule-holds-a-token-too-long",
        ROWS,
        "np.flatnonzero(self._ends[rows] > positions)",
        "np.flatnonzero(self._ends[rows] >= positions)",
        "An end of text is forbidden for one token more than min_tokens says.",
        (TEST_ROWS, TEST_PROCESSORS),
    ),
    Mutant(
        "packed-rules-stay-stale",
        ROWS,
        '        self.pieces[row] = piece\n        self._samples = b""\n',
        "        self.pieces[row] = piece\n",
        "A row that gets another rule is sampled by the one that was packed before.",
        (TEST_ROWS,),
    ),
    Mutant(
        "rank-counts-equals",
        "nanoengine/features/sampling/logprobs.py",
        "ranks = (logits > logits.gather(-1, own_ids)).sum(-1) + 1",
        "ranks = (logits >= logits.gather(-1, own_ids)).sum(-1)",
        "A token among equals is ranked behind all of them.",
        (TEST_LOGPROBS,),
    ),
    Mutant(
        "draft-behind-a-rejected-one-is-accepted",
        "nanoengine/features/speculation/verification.py",
        "counts = (tokens[numbers] == self.tokens).long().cumprod(1).sum(1)",
        "counts = (tokens[numbers] == self.tokens).long().sum(1)",
        "A draft that came true behind a rejected one counts as accepted.",
        ("tests/features/speculation/test_verification.py",),
    ),
    Mutant(
        "sample-behind-the-last-draft-is-no-token",
        "nanoengine/features/speculation/verification.py",
        "is_token = self.depth <= counts.index_select(0, self.run_of)",
        "is_token = self.depth < counts.index_select(0, self.run_of)",
        "The sample that follows the accepted drafts is not counted as a token.",
        ("tests/features/speculation/test_verification.py",),
    ),
    Mutant(
        "top-p-drops-the-token-that-reaches-it",
        CORE,
        "before = probabilities.cumsum(-1) - probabilities",
        "before = probabilities.cumsum(-1)",
        "The token with which top_p is reached is dropped.",
        (TEST_CORE,),
    ),
    Mutant(
        "top-k-keeps-one-more",
        CORE,
        "(rank >= top_k[:, None])",
        "(rank > top_k[:, None])",
        "top_k keeps a token too many.",
        (TEST_CORE,),
    ),
    Mutant(
        "top-p-is-a-share-of-all",
        CORE,
        "keep_probable(values, values.logsumexp(-1), top_p, min_p), token_ids",
        "keep_probable(values, logits.logsumexp(-1), top_p, min_p), token_ids",
        "Beside top_k, top_p is taken of all tokens, and not of those that top_k leaves.",
        (TEST_CORE,),
    ),
    Mutant(
        "min-p-is-a-share-of-one",
        CORE,
        "probabilities < min_p[:, None] * probabilities[:, :1]",
        "probabilities < min_p[:, None]",
        "min_p is taken of certainty, and not of the likeliest token.",
        (TEST_CORE,),
    ),
    Mutant(
        "filters-settle-too-early",
        "nanoengine/kernels/reference/filters.py",
        "if count == vocab_size else _are_settled(kept, own, token_ids).tolist()",
        "",
        "Tokens beyond the likeliest thousand are dropped though top_p keeps them.",
        ("tests/kernels/reference/test_filters.py",),
    ),
    Mutant(
        "noise-ignores-the-position",
        CORE,
        "return _mix(seeds + (positions + 1) * signed(GOLDEN_GAMMA))",
        "return _mix(seeds + signed(GOLDEN_GAMMA) + 0 * positions)",
        "All tokens of a sequence are drawn with the same noise.",
        (TEST_CORE,),
    ),
    Mutant(
        "noise-is-subtracted",
        CORE,
        "return -torch.log(-torch.log1p(-uniform))",
        "return torch.log(-torch.log1p(-uniform))",
        "Draws do not follow the softmax of the logits.",
        (TEST_CORE,),
    ),
    Mutant(
        "temperature-is-multiplied",
        KERNELS,
        "scaled = logits[group] / temperature[group, None]",
        "scaled = logits[group] * temperature[group, None]",
        "With a filter, a higher temperature makes tokens less random.",
        (TEST_KERNELS,),
    ),
    Mutant(
        "none-left-is-called-nan",
        CORE,
        "return tokens.masked_fill_(highest == -torch.inf, NONE_LEFT)",
        "return tokens",
        "A row of which all tokens are forbidden counts as one with broken weights.",
        (TEST_KERNELS, TEST_PROCESSORS),
    ),
)
