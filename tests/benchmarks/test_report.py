from __future__ import annotations

import pytest

from benchmarks.report import Report, show_spread

CASE = {"num_seqs": 4}


def test_ratios_pair_up_the_repetitions() -> None:
    report = Report("throughput")
    for ours, theirs in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0)):
        report.add(CASE, {"output_tok_s": ours, "ttft_ms": ours, "kv_waste": 0.0})
        report.add(CASE, {"output_tok_s": theirs, "ttft_ms": theirs, "kv_waste": 0.0}, "peer")
    report.add(CASE, {"output_tok_s": 99.0})  # and then Ctrl-C: this one has no peer
    peer = report.find(CASE, "peer")
    assert peer is not None
    ratios = report.times_as_fast(peer)
    assert ratios["output_tok_s"] == {"median": 2.0, "min": 1.0, "max": 3.0, "repetitions": 3}
    assert ratios["ttft_ms"]["median"] == 0.5, "twice the time is half as fast"
    assert "kv_waste" not in ratios, "there is no ratio to nothing"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((53.61, 50.0, 55.0, 3), "53.6 ±5%"),
        ((1803.2, 1800.0, 1810.0, 3), "1803 ±0%"),
        ((0.04042, 0.04, 0.041, 1), "0.0404"),
        ((0.0, 0.0, 3.0, 3), "0"),
    ],
)
def test_a_cell_is_the_median_and_half_the_range(values: tuple[float, float, float, int], text: str) -> None:
    assert show_spread(dict(zip(("median", "min", "max", "repetitions"), values, strict=True))) == text
