from __future__ import annotations

from benchmarks.report import Report


def test_ratios_pair_up_the_repetitions() -> None:
    report, case = Report("workloads"), {"num_seqs": 4}
    for ours, theirs in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0)):
        report.add(case, {"output_tok_s": ours, "ttft_ms": ours, "kv_waste": 0.0})
        report.add(case, {"output_tok_s": theirs, "ttft_ms": theirs, "kv_waste": 0.0}, "peer")
    report.add(case, {"output_tok_s": 99.0})  # and then Ctrl-C: this one has no peer
    peer = report.find(case, "peer")
    assert peer is not None
    ratios = report.times_as_fast(peer)
    assert ratios["output_tok_s"] == {"median": 2.0, "min": 1.0, "max": 3.0, "repetitions": 3}
    assert ratios["ttft_ms"]["median"] == 0.5, "twice the time is half as fast"
    assert "kv_waste" not in ratios, "there is no ratio to nothing"
