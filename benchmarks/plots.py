"""Pictures of a report: distributions, figures over load, and the timeline of a run. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drive import Kind
from benchmarks.options import BadOption
from benchmarks.report import ENGINE, Report

KIND_COLOURS = {Kind.PREFILL: "tab:orange", Kind.DECODE: "tab:blue", Kind.MIXED: "tab:purple"}
CURVES = {  # what is drawn over which key of a case; with its percentiles, where it has any
    "latency": ("input_len", ["ttft_ms", "tpot_ms"]),
    "serve": ("rate", ["output_tok_s", "goodput_req_s", "ttft_ms", "itl_ms"]),
    "scheduler": ("num_seqs", ["us_per_token", "us_per_step"]),
}
BARS = {
    "throughput": ["output_tok_s"],
    "prefix": ["ttft_ms", "whole_run_ms"],
    "startup": ["first_token_s", "peak_memory_mb"],
    "interference": ["slowdown", "slowdown_max", "ttft_ms"],
}

TIMELINES = ("throughput", "serve", "interference")  # elsewhere there is little to see in it

Draw = Callable[[Any, Report], None]


def check_plot(path: Path) -> None:
    """Refuse before any work what could not be drawn after it."""
    if find_spec("matplotlib") is None:
        raise BadOption("--plot needs matplotlib: pip install 'nanoengine[bench]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BadOption(f"--plot {path}: the name must end in .png, .svg or .pdf")


def plot(report: Report, path: Path) -> None:
    """All that this report can show, one panel each."""
    panels = list(_panels(report))
    if not panels:
        return
    import matplotlib  # an extra, and slow to import: only for those who asked

    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    for axis, draw in zip(axes.flat, panels, strict=False):
        draw(axis, report)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    model = report.facts["arguments"].get("random_weights") or report.facts["arguments"].get("model", "")
    figure.suptitle(
        ", ".join(filter(None, [f"nanoengine {report.mode}", model, report.facts["cpu"], report.facts["date"]]))
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panels(report: Report) -> list[Draw]:
    panels: list[Draw] = []
    names = {name for row in report.rows for name in row.values}
    key, curves = CURVES.get(report.mode, ("", []))
    panels += [_curve(key, name) for name in curves if name in names]
    panels += [_bars(name) for name in BARS.get(report.mode, []) if name in names]
    panels += [_distribution(name) for name, values in report.samples.items() if all(values.values())]
    if report.timeline and report.mode in TIMELINES:
        panels += [_batch_timeline, _pool_timeline]
    return panels


def _curve(key: str, name: str) -> Draw:
    """A figure over a key of the cases; a line for each engine and for each combination of the other keys."""

    def draw(axis: Any, report: Report) -> None:
        for row_engine, other in dict.fromkeys((row.engine, _other_keys(row.case, key)) for row in report.rows):
            rows = [r for r in report.rows if (r.engine, _other_keys(r.case, key)) == (row_engine, other)]
            for column in (name, f"{name}_p99"):
                points = sorted((r.case[key], r.figures[column]) for r in rows if column in r.values)
                if not points:
                    continue
                xs, ys = [x for x, _ in points], [y["median"] for _, y in points]
                errors = [[y["median"] - y["min"] for _, y in points], [y["max"] - y["median"] for _, y in points]]
                words = [row_engine if row_engine != ENGINE else "", other, column.removeprefix(name).strip("_")]
                axis.errorbar(xs, ys, errors, marker="o", capsize=3, label=" ".join(filter(None, words)) or None)
        axis.set(xlabel=key, ylabel=name)
        if key == "num_seqs":  # 16 to 4,096
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")

    return draw


def _other_keys(case: dict[str, Any], key: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items() if name != key)


def _bars(name: str) -> Draw:
    """A figure of every case on every engine."""

    def draw(axis: Any, report: Report) -> None:
        rows = [row for row in report.rows if name in row.values][::-1]  # the first on top
        several = len({str(row.case) for row in rows}) > 1
        labels = [(", ".join(map(str, row.case.values())) + "\n" if several else "") + row.engine for row in rows]
        figures = [row.figures[name] for row in rows]
        errors = [[f["median"] - f["min"] for f in figures], [f["max"] - f["median"] for f in figures]]
        axis.barh(labels, [f["median"] for f in figures], xerr=errors, capsize=4)
        axis.set_xlabel(name)

    return draw


def _distribution(name: str) -> Draw:
    """The share of values at or below each value."""

    def draw(axis: Any, report: Report) -> None:
        from matplotlib import ticker

        for label, values in report.samples[name].items():
            axis.ecdf(values, label=label)
        highest = max(float(np.percentile(values, 99.5)) for values in report.samples[name].values() if values)
        lowest = min(min(values) for values in report.samples[name].values() if values)
        axis.set_xlim(max(lowest * 0.8, 1e-3), highest * 1.2)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set(xlabel=name, ylabel="share of values up to it")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")

    return draw


def _batch_timeline(axis: Any, report: Report) -> None:
    """Sequences in each step, coloured by what it computes, and how many wait."""
    for kind, colour in KIND_COLOURS.items():
        steps = [step for step in report.timeline if step.kind is kind]
        if not steps:
            continue
        bars = [(step.start, step.end - step.start) for step in steps]
        axis.bar(
            [start for start, _ in bars], [step.num_seqs for step in steps], [width for _, width in bars],
            align="edge", color=colour, label=f"{kind.value}: sequences in the step",
        )  # fmt: skip
    ends = [step.end for step in report.timeline]
    axis.step(
        ends, [step.num_waiting for step in report.timeline], where="post", color="black", lw=0.8, label="waiting"
    )
    axis.set(xlabel="seconds, last run", ylabel="sequences")
    axis.legend(fontsize="small")


def _pool_timeline(axis: Any, report: Report) -> None:
    """Use of the KV pool, and preemptions so far."""
    ends = [step.end for step in report.timeline]
    axis.plot(ends, [100 * step.kv_usage for step in report.timeline], color="tab:green")
    axis.set(xlabel="seconds, last run", ylabel="KV pool in use, %")
    axis.set_ylim(bottom=0)
    other = axis.twinx()
    other.plot(ends, [step.num_preemptions for step in report.timeline], color="tab:red", lw=0.8)
    other.set_ylabel("preemptions so far", color="tab:red")
    other.set_ylim(0, max(report.timeline[-1].num_preemptions, 1))
