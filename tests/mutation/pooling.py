"""Mutants of embeddings."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

PART = "nanoengine/features/pooling/runner_part.py"
POOLER = "nanoengine/features/pooling/pooler.py"
SERVER = "nanoengine/serve/server/embeddings.py"
TEST_EMBED = "tests/features/pooling/test_embed.py"
TEST_PARAMS = "tests/features/pooling/test_params.py"
TEST_SERVER = "tests/serve/server/test_embeddings.py"

MUTANTS = (
    Mutant(
        "mean-leaves-out-what-the-cache-has",
        POOLER,
        "            request.sequences[0].reads_cache = False  # the mean is of all tokens: all are computed\n",
        "            pass\n",
        "The mean of a prompt whose beginning is cached is that of its end.",
        (TEST_EMBED,),
    ),
    Mutant(
        "sum-survives-a-preemption",
        PART,
        "            self._sums.pop(row, None)\n",
        "            self._sums.pop(None, None)\n",
        "A row that starts anew goes on with the sum of whoever was there.",
        (TEST_EMBED,),
    ),
    Mutant(
        "sum-depends-on-chunks",
        PART,
        "        for state in states:\n            total += state\n",
        "        total += states.sum(0)\n",
        "A mean is rounded otherwise where a prompt is cut into other chunks.",
        (TEST_EMBED,),
    ),
    Mutant(
        "recorded-step-is-not-pooled",
        POOLER,
        "            step.plan.needs_hidden = True\n",
        "            step.plan.needs_hidden = False\n",
        "A prompt that is computed alone is replayed from a recording, where there is one of its size, and has no embedding.",
        (TEST_EMBED,),
    ),
    Mutant(
        "dimensions-are-cut-behind-the-length",
        POOLER,
        "    own = pooled[: params.dimensions]\n    if params.normalize:\n"
        "        own = own / max(float(np.sqrt(np.sum(own * own))), LEAST_LENGTH)\n",
        "    own = pooled\n    if params.normalize:\n"
        "        own = own / max(float(np.sqrt(np.sum(own * own))), LEAST_LENGTH)\n    own = own[: params.dimensions]\n",
        "An embedding of fewer dimensions is shorter than 1.",
        (TEST_PARAMS,),
    ),
    Mutant(
        "base64-has-another-byte-order",
        SERVER,
        'astype("<f4")',
        'astype(">f4")',
        "Clients that ask for base64, as OpenAI's does by itself, read other numbers.",
        (TEST_SERVER,),
    ),
    Mutant(
        "aborted-embedding-is-an-answer",
        SERVER,
        "    if any(EMBEDDING not in own.sequences[0].state for own in job.requests):\n",
        "    if not job.requests:\n",
        "A request that was aborted before its embedding was there is an error of the server's own.",
        (TEST_SERVER,),
    ),
)
