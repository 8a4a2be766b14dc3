"""The metrics of several models in one text for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.*)", re.ASCII)


def merged(texts: Mapping[str, str], states: Mapping[str, str]) -> bytes:
    """All samples, each with the label `model`.

    Args:
        texts: the metrics of a model's server, by the model.
        states: of each model.
    """
    families: dict[str, list[str]] = {}
    for model, text in texts.items():
        label, lines = f'model="{_escaped(model)}"', families.setdefault("", [])
        for line in text.splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line.split(" ", 3)[2], [])
                if not lines:
                    lines.append(line)
            elif line.startswith("# TYPE "):
                if len(lines) == 1:
                    lines.append(line)
            elif match := SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                lines.append(f"{name}{{{label}{',' + labels if labels else ''}}} {value}")
    of_states = families.setdefault("nanoengine:model_state", [])
    of_states += ["# HELP nanoengine:model_state 1 for the state of each model.", "# TYPE nanoengine:model_state gauge"]
    of_states += [f'nanoengine:model_state{{model="{_escaped(m)}",state="{state}"}} 1' for m, state in states.items()]
    registry = CollectorRegistry()
    ProcessCollector(namespace="nanoengine_front", registry=registry)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode() + generate_latest(registry)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
