"""From logits to tokens: filters, randomness by address, log probabilities."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.messages import SamplingRow
from nanoengine.engine.randomness import GOLDEN_GAMMA, MASK, MIX_1, MIX_2, mix, position_key, sequence_seed
from nanoengine.errors import NotFiniteLogits
from nanoengine.kernels.gumbel import _mix, gumbel_noise, key_tensor
from nanoengine.kernels.reference import TorchKernels
from nanoengine.runner.filters import keep_likeliest
from nanoengine.runner.sampler import Sampler, draw

EULER_GAMMA = 0.5772156649015329


CPU = torch.device("cpu")
KERNELS = TorchKernels()


def row(*, seed: int = 1, banned: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), sequence_seed(seed, 0), banned)  # type: ignore[arg-type]


def sample(logits: Tensor, rows: list[SamplingRow], positions: list[int] | None = None) -> list[int]:
    return Sampler(KERNELS).sample(logits.clone(), rows, positions or [7] * len(rows)).token_ids


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: Tensor, **params: object) -> set[int]:
    """Tokens that the filters leave, for one row of logits."""
    [survivors] = survivors_of(logits[None], [row(**params)])
    return survivors


def survivors_of(logits: Tensor, rows: list[SamplingRow]) -> list[set[int]]:
    values, token_ids = keep_likeliest(logits.clone(), rows)
    finite = values.isfinite()
    assert torch.equal(values[finite], logits.gather(-1, token_ids)[finite])  # what stays keeps its logit
    return [set(ids[mask].tolist()) for ids, mask in zip(token_ids, finite, strict=True)]


# ---- greedy


def test_greedy_is_argmax() -> None:
    logits = random_logits(0, 20, 50)
    assert sample(logits, [row(temperature=0) for i in range(20)]) == logits.argmax(-1).tolist()


def test_greedy_rows_are_argmax_inside_a_mixed_batch() -> None:
    logits = random_logits(1, 40, 50)
    rows = [row(seed=i, temperature=0 if i % 3 == 0 else 50.0, top_k=i % 4) for i in range(40)]
    tokens = sample(logits, rows)
    best = logits.argmax(-1).tolist()
    assert tokens[::3] == best[::3]
    assert tokens != best  # the others do draw


def test_greedy_takes_no_notice_of_filters_and_seeds() -> None:
    logits = random_logits(2, 1, 50)
    rows = [row(seed=s, temperature=0, top_p=0.1, min_p=0.9, top_k=2) for s in range(5)]
    assert {sample(logits, [r])[0] for r in rows} == {int(logits.argmax())}


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = random_logits(3, 200, 30)
    rows = [row(seed=i, temperature=100.0, top_k=1) for i in range(200)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_takes_the_likeliest_token_and_does_not_overflow() -> None:
    logits = random_logits(4, 50, 30) * 10
    rows = [row(seed=i, temperature=1e-30) for i in range(50)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


# ---- filters, against a slow reference


def reference_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Temperature, then top_k, then top_p of what is left, then min_p; in plain Python."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if top_k > 0:
        order = order[:top_k]
    highest = scaled[order[0]]
    weights = [math.exp(scaled[token] - highest) for token in order]
    total = math.fsum(weights)
    survivors, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if reached >= top_p and top_p < 1:
            break
        reached += weight / total
        if weight >= min_p:  # the likeliest has weight 1
            survivors.append(token)
    return set(survivors)


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = random_logits(5, 64)
    for k in (1, 2, 3, 10, 63, 64, 1000):
        assert kept(logits, top_k=k) == set(logits.topk(min(k, 64)).indices.tolist())


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.05, {3}), (0.39, {3}), (0.6, {2, 3}), (0.69, {2, 3}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_token_that_crosses_p(p: float, expected: set[int]) -> None:
    assert kept(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), top_p=p) == expected


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.2, {0, 1, 2, 3}), (0.4, {1, 2, 3}), (0.7, {2, 3}), (0.8, {3}), (1.0, {3})]
)
def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest(min_p: float, expected: set[int]) -> None:
    assert kept(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), min_p=min_p) == expected


def random_params(rng: random.Random, vocab_size: int) -> dict[str, float | int]:
    """Some filters on, some off. The values are odd ones, so that no probability lies on a limit."""
    return {
        "top_k": rng.choice([0, -1, rng.randint(1, vocab_size + 3)]),
        "top_p": rng.choice([1.0, rng.uniform(0.01, 0.999)]),
        "min_p": rng.choice([0.0, rng.uniform(0.001, 0.9)]),
    }


def test_filters_agree_with_the_slow_reference_in_random_batches() -> None:
    rng = random.Random(0)
    for case in range(150):
        vocab_size = rng.choice([2, 3, 17, 64])
        count = rng.randint(1, 6)
        logits = random_logits(case, count, vocab_size)
        settings = [random_params(rng, vocab_size) for _ in range(count)]
        found = survivors_of(logits, [row(**s) for i, s in enumerate(settings)])  # type: ignore[arg-type]
        for i, (setting, survivors) in enumerate(zip(settings, found, strict=True)):
            assert survivors == reference_filter(logits[i].tolist(), 1.0, **setting), (case, i, setting)  # type: ignore[arg-type]


def test_sampling_draws_exactly_the_tokens_that_the_reference_keeps() -> None:
    """Temperature and filters together, through `sample`: nothing else is drawn, and all of it is."""
    rng = random.Random(1)
    for case in range(15):
        logits = random_logits(100 + case, 8) / 2
        setting = random_params(rng, 8)
        temperature = rng.uniform(0.5, 3.0)
        rows = [row(seed=i, temperature=temperature, **setting) for i in range(3000)]  # type: ignore[arg-type]
        drawn = set(sample(logits.expand(3000, -1), rows))
        survivors = reference_filter(logits.tolist(), temperature, **setting)  # type: ignore[arg-type]
        assert drawn <= survivors
        chances = (logits / temperature).softmax(-1)
        assert {token for token in survivors if chances[token] > 0.01} <= drawn


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.5) == {0, 1}
    assert kept(logits, top_k=2, top_p=0.5) == {0}  # of the two, the first alone has 0.57


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(2000, -1)
    cold = {*sample(logits, [row(seed=i, temperature=0.25, top_p=0.7) for i in range(2000)])}
    hot = {*sample(logits, [row(seed=i, temperature=100.0, top_p=0.7) for i in range(2000)])}
    assert cold == {0}  # 0.4 ** 4 is 0.72 of the sum
    assert hot == {0, 1, 2}  # all near 0.25


def test_filters_that_are_off_change_no_draw() -> None:
    logits = random_logits(6, 300, 40)
    plain = [row(seed=i) for i in range(300)]
    off = [row(seed=i, top_k=40, top_p=1.0, min_p=0.0) for i in range(300)]
    assert sample(logits, plain) == sample(logits, off)
    assert sample(logits, plain) == sample(logits, [row(seed=i, top_k=-1) for i in range(300)])


def test_a_filtered_neighbour_leaves_a_row_alone() -> None:
    logits = random_logits(7, 2, 40)
    free = [row(seed=s, temperature=5.0) for s in range(100)]
    alone = [sample(logits[:1], [r])[0] for r in free]
    beside = [sample(logits, [r, row(top_k=1, temperature=3.0)])[0] for r in free]
    assert beside == alone


def test_banned_tokens_are_never_sampled() -> None:
    logits = random_logits(8, 12).expand(2000, -1)
    best = int(logits[0].argmax())
    banned = (best, 3, 5)
    settings = ({"temperature": 0}, {"temperature": 20.0}, {"temperature": 20.0, "top_k": 4, "top_p": 0.9})
    rows = [row(seed=i, banned=banned, **settings[i % 3]) for i in range(2000)]  # type: ignore[arg-type]
    drawn = set(sample(logits, rows))
    assert not drawn & set(banned)
    assert drawn


def test_a_ban_binds_its_own_row_only() -> None:
    logits = random_logits(9, 12).expand(2, -1)
    best = int(logits[0].argmax())
    tokens = sample(logits, [row(temperature=0, banned=(best,)), row(temperature=0)])
    assert tokens[0] != best
    assert tokens[1] == best


def test_top_k_counts_the_tokens_that_are_not_banned() -> None:
    logits = random_logits(10, 1, 12)
    second = int(logits[0].argsort(descending=True)[1])
    best = int(logits.argmax())
    assert {sample(logits, [row(seed=s, temperature=9.0, top_k=1, banned=(best,))])[0] for s in range(20)} == {second}


# ---- randomness


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    counts = [tokens.count(token) for token in range(len(probabilities))]
    expected = [p * len(tokens) for p in probabilities]
    return sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True) if e)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_are_those_of_the_softmax(vary: str) -> None:
    probabilities = [0.02, 0.08, 0.1, 0.2, 0.25, 0.35]
    count = 20_000
    logits = torch.tensor(probabilities).log().expand(count, -1)
    rows = [row(seed=i if vary == "seed" else 5) for i in range(count)]
    positions = list(range(count)) if vary == "position" else [3] * count
    assert chi_square(sample(logits, rows, positions), probabilities) < 20.5  # 5 degrees of freedom: one in a thousand


def test_frequencies_after_temperature_and_top_k_are_those_of_what_is_left() -> None:
    count = 20_000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(count, -1)
    tokens = sample(logits, [row(seed=i, temperature=2.0, top_k=3) for i in range(count)])
    weights = [0.0, 0.2**0.5, 0.3**0.5, 0.4**0.5]
    assert 0 not in tokens
    assert chi_square(tokens, [w / sum(weights) for w in weights]) < 13.8  # 2 degrees of freedom: one in a thousand


def test_a_draw_is_the_same_alone_in_a_batch_and_reordered() -> None:
    logits = random_logits(11, 30, 60)
    rows = [row(seed=i * 17, temperature=2.0, top_k=(0, 20)[i % 2]) for i in range(30)]
    positions = [i * 5 for i in range(30)]
    together = sample(logits, rows, positions)
    alone = [sample(logits[i : i + 1], [rows[i]], [positions[i]])[0] for i in range(30)]
    order = random.Random(3).sample(range(30), 30)
    shuffled = sample(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert alone == together
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("what", ["seed", "position", "completion"])
def test_another_address_gives_another_draw(what: str) -> None:
    logits = torch.zeros(100, 1000)  # equal chances: two draws agree once in a thousand
    base = SamplingParams()
    rows = [
        SamplingRow(base, sequence_seed(i if what == "seed" else 9, i if what == "completion" else 0), ())
        for i in range(100)
    ]
    tokens = sample(logits, rows, list(range(100)) if what == "position" else [4] * 100)
    assert len(set(tokens)) > 85  # 95 expected


def unmix(value: int) -> int:
    """The inverse of `mix`: multiplications undone modulo 2**64, shifts undone bit by bit."""

    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(64 // bits + 1):
            y = x ^ (y >> bits)
        return y

    value = unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & MASK
    return unshift(value, 30)


def key_with_bits(bits: int, token: int) -> int:
    """The key under which `token` gets these 64 random bits."""
    key = (unmix(bits) - (token + 1) * GOLDEN_GAMMA) & MASK
    assert mix(key + (token + 1) * GOLDEN_GAMMA) == bits
    return key


def test_the_tensors_mix_is_that_of_whole_numbers() -> None:
    rng = random.Random(0)
    values = [0, 1, MASK, 1 << 63, (1 << 63) - 1, *(rng.getrandbits(64) for _ in range(2000))]
    signed = torch.tensor([v - (1 << 64) if v >> 63 else v for v in values])
    assert [v & MASK for v in _mix(signed).tolist()] == [mix(v) for v in values]


def test_noise_has_the_mean_and_variance_of_gumbels_distribution() -> None:
    noise = gumbel_noise(
        key_tensor([position_key(3, position) for position in range(20)], CPU), torch.arange(10_000)[None]
    ).double()
    assert noise.mean().item() == pytest.approx(EULER_GAMMA, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    keys = [1, 2**63 + 5, MASK]
    many, few = (gumbel_noise(key_tensor(keys, CPU), torch.arange(count)[None]) for count in (1000, 77))
    assert torch.equal(many[:, :77], few)


def test_noise_of_a_row_does_not_depend_on_its_neighbours() -> None:
    ids = torch.arange(50)[None]
    assert torch.equal(gumbel_noise(key_tensor([5, 6, 7], CPU), ids)[1], gumbel_noise(key_tensor([6], CPU), ids)[0])


@pytest.mark.parametrize("bits", [0, MASK, MASK << 24 & MASK, 1 << 63])
def test_noise_is_finite_whatever_the_random_bits(bits: int) -> None:
    assert gumbel_noise(key_tensor([key_with_bits(bits, 3)], CPU), torch.arange(6)[None]).isfinite().all()


def test_the_only_token_left_is_drawn_whatever_the_random_bits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 3.0]])
    for bits in (0, MASK):
        assert draw(logits.clone(), [row(top_k=1)], [key_with_bits(bits, 3)], KERNELS).tolist() == [3]


# ---- what no token can be chosen from


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_refused(value: float, temperature: float) -> None:
    logits = random_logits(12, 3, 10)
    logits[1, 4] = value
    with pytest.raises(NotFiniteLogits, match="1 of 3 rows"):
        sample(logits, [row(temperature=temperature) for i in range(3)])


def test_a_row_of_minus_infinity_is_refused() -> None:
    logits = random_logits(13, 2, 10)
    logits[0] = -torch.inf
    with pytest.raises(NotFiniteLogits):
        sample(logits, [row(temperature=0), row(temperature=0)])


def test_single_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.zeros(500, 4)
    logits[:, 2] = -torch.inf
    assert set(sample(logits, [row(seed=i, top_p=0.99) for i in range(500)])) == {0, 1, 3}


# ---- log probabilities


def test_logprobs_are_the_models_own_before_temperature_filters_and_bans() -> None:
    logits = random_logits(14, 1, 30)
    expected = logits[0].double().log_softmax(-1)
    params = {"logprobs": 5, "temperature": 3.0, "top_k": 2}
    result = Sampler(KERNELS).sample(logits.clone(), [row(banned=(int(logits.argmax()),), **params)], [0])  # type: ignore[arg-type]
    entries = result.logprobs[0]
    assert entries is not None
    assert set(expected.topk(5).indices.tolist()) <= entries.keys()  # the banned one too
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-5)


def test_logprobs_of_the_whole_vocabulary_sum_to_one_and_are_ranked() -> None:
    logits = random_logits(15, 1, 30)
    entries = Sampler(KERNELS).sample(logits.clone(), [row(logprobs=30)], [0]).logprobs[0]
    assert entries is not None
    assert entries.keys() == set(range(30))
    assert math.fsum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1.0, abs=1e-5)
    order = logits[0].argsort(descending=True).tolist()
    assert [entries[token].rank for token in order] == list(range(1, 31))


def test_top_logprobs_are_the_likeliest_and_the_chosen_one() -> None:
    logits = random_logits(16, 60, 30)
    result = Sampler(KERNELS).sample(
        logits.clone(), [row(seed=i, temperature=9.0, logprobs=3) for i in range(60)], [0] * 60
    )
    for values, token, entries in zip(logits, result.token_ids, result.logprobs, strict=True):
        assert entries is not None
        assert entries.keys() == {*values.topk(3).indices.tolist(), token}
        assert entries[token].rank == 1 + sum(other > values[token] for other in values)
    assert any(len(entries or ()) == 4 for entries in result.logprobs)  # chosen outside of the top


def test_logprobs_0_reports_the_chosen_token_alone() -> None:
    result = Sampler(KERNELS).sample(random_logits(17, 1, 30), [row(logprobs=0)], [0])
    assert result.logprobs[0] is not None
    assert list(result.logprobs[0]) == result.token_ids


def test_rows_that_ask_for_no_logprobs_get_none() -> None:
    result = Sampler(KERNELS).sample(random_logits(18, 3, 30), [row(), row(logprobs=2), row()], [0, 0, 0])
    assert [entries is None for entries in result.logprobs] == [True, False, True]


def test_asking_for_logprobs_changes_no_draw() -> None:
    logits = random_logits(19, 50, 30)
    plain = sample(logits, [row(seed=i, temperature=2.0) for i in range(50)])
    assert sample(logits, [row(seed=i, temperature=2.0, logprobs=2) for i in range(50)]) == plain


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    entries = Sampler(KERNELS).sample(random_logits(20, 1, 5), [row(logprobs=100)], [0]).logprobs[0]
    assert entries is not None
    assert len(entries) == 5
