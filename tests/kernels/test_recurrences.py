"""The reference of recurrences against the functions of transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from nanoengine.kernels.recurrences import Decay, StateRuns, Stores, delta_rule, short_conv

TOKENS, HEADS, GROUPS, DEPTH, WIDTH = 70, 4, 2, 8, 12


def test_the_delta_rule_is_that_of_transformers_in_both_of_its_forms() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, TOKENS, GROUPS, DEPTH)
    v, a, b = torch.randn(TOKENS, HEADS, WIDTH), torch.randn(TOKENS, HEADS), torch.randn(TOKENS, HEADS)
    decay, begun = Decay(torch.randn(HEADS), torch.randn(HEADS)), torch.randn(HEADS, DEPTH, WIDTH)
    states = begun[None].clone()
    runs = StateRuns(torch.tensor([0]), torch.tensor([0, TOKENS]))
    out = delta_rule(torch.cat([x.flatten(1) for x in (q, k, v)], 1), a, b, decay, GROUPS, states, runs)
    more = {"g": (-decay.log_rate.exp() * F.softplus(a + decay.bias))[None], "beta": b.sigmoid()[None]}
    query, key = (x.repeat_interleave(HEADS // GROUPS, 1)[None] for x in (q, k))
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        right, state = function(
            query,
            key,
            v[None],
            **more,
            initial_state=begun[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, right[0].flatten(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states, state, rtol=1e-4, atol=1e-5)


def test_tiled_heads_are_the_same_in_another_order() -> None:
    torch.manual_seed(0)
    own = torch.arange(HEADS).view(GROUPS, -1).T.flatten()  # which of the others each tiled head is
    qk, v, a, b = (torch.randn(TOKENS, n) for n in (2 * GROUPS * DEPTH, HEADS * WIDTH, HEADS, HEADS))
    decay, states = Decay(torch.randn(HEADS), torch.randn(HEADS)), torch.randn(1, HEADS, DEPTH, WIDTH)
    runs, moved = StateRuns(torch.tensor([0]), torch.tensor([0, TOKENS])), states[:, own].clone()
    out = delta_rule(torch.cat([qk, v], 1), a, b, decay, GROUPS, states, runs)
    v = v.unflatten(1, (HEADS, WIDTH))[:, own].flatten(1)
    fading = Decay(decay.log_rate[own], decay.bias[own])
    found = delta_rule(torch.cat([qk, v], 1), a[:, own], b[:, own], fading, GROUPS, moved, runs, tiled=True)
    assert torch.equal(found, out.unflatten(1, (HEADS, WIDTH))[:, own].flatten(1))
    assert torch.equal(moved, states[:, own])


def test_a_convolution_is_that_of_torch() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 5), torch.randn(3, 5), torch.randn(5)
    states = torch.zeros(1, 2, 5)
    out = short_conv(x, weight, bias, states, StateRuns(torch.tensor([0]), torch.tensor([0, 9])), silu=True)
    right = F.silu(F.conv1d(x.T, weight.T[:, None], bias, padding=2, groups=5)[:, :9]).T
    torch.testing.assert_close(out, right)
    assert torch.equal(states[0], x[-2:])


def test_runs_say_where_their_states_are_kept() -> None:
    rows, starts = torch.tensor([4, 2]), torch.tensor([0, 2, 3])
    assert list(StateRuns(rows, starts).rows_of_runs()) == [(4, [(0, []), (1, [4])]), (2, [(2, [2])])]
    stores = Stores(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), torch.tensor([7, 4]))
    assert list(StateRuns(rows, starts, stores).rows_of_runs()) == [(4, [(0, [7]), (1, [4])]), (2, [(2, [])])]
