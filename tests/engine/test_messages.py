from __future__ import annotations

import pickle

from nanoengine.engine.messages import Phase, Place, SampledBatch, SamplingRow, ScheduledBatch, Tier, Transfer
from nanoengine.outputs import TokenLogprob
from nanoengine.sampling_params import SamplingParams
from tests.engine.toys import ToyModel, make_scheduler, make_sequence, run_step


def test_an_empty_batch_is_false() -> None:
    assert not ScheduledBatch(Phase.PREFILL)
    assert len(ScheduledBatch(Phase.DECODE, seq_ids=[1, 2])) == 2


def test_batches_share_no_lists() -> None:
    ScheduledBatch(Phase.DECODE).seq_ids.append(1)
    assert ScheduledBatch(Phase.DECODE).seq_ids == []


def test_a_scheduled_batch_survives_pickling() -> None:
    row = SamplingRow(SamplingParams(temperature=0.5, stop="x", logprobs=2), seed=2**64 - 1, banned_token_ids=(3, 4))
    batch = ScheduledBatch(
        Phase.PREFILL,
        [7],
        [1, 2, 3],
        [4],
        [3],
        [[1, 2]],
        [0],
        [row],
        [Transfer(Place(Tier.DEVICE, 3), Place(Tier.DISK, "file"), b"header")],
    )
    assert pickle.loads(pickle.dumps(batch)) == batch


def test_a_sampled_batch_survives_pickling() -> None:
    batch = SampledBatch([5, 6], [{5: TokenLogprob(-0.25, 1), 9: TokenLogprob(-2.0, 2)}, None])
    assert pickle.loads(pickle.dumps(batch)) == batch


def test_the_phase_is_stated_and_not_guessed() -> None:
    """A sequence that resumes with output is prefilled, and whoever gets the batch by pickle knows it."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = ToyModel()
    a, b = make_sequence(0, [1] * 6, max_tokens=9), make_sequence(1, [2] * 6, max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    while not b.num_preemptions:
        run_step(scheduler, model)
    scheduler.finish(a, "abort")
    batch = pickle.loads(pickle.dumps(scheduler.schedule()))
    assert b.num_output_tokens > 0
    assert batch.phase is Phase.PREFILL
    assert batch.num_new_tokens == [b.num_known_tokens - batch.num_computed_tokens[0]]
