"""Write the table of docs/metrics.md from the declarations in miles_dmd2/observability/declared.py, in place."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_dmd2.observability.declared import METRICS, Metric

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
BEGIN, END = "<!-- written by scripts/write_metrics_reference.py -->\n", "<!-- end -->\n"


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_table(text), encoding="utf-8")
    return 0


def with_table(text: str) -> str:
    """The document with its table as the declarations have it. ValueError: the marks are not there."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{DOCUMENT.name} has lost the lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}{table()}{END}{tail}"


def table() -> str:
    lines = ["| key | reduction | per stop step | what | only with |", "|---|---|---|---|---|"]
    return "\n".join(lines + [_row(metric) for metric in METRICS]) + "\n"


def _row(metric: Metric) -> str:
    source = "<group>" if metric.source == "group" else metric.source
    keys = ", ".join(f"`{source}/{name}`" for name in metric.name.split(", "))
    return f"| {keys} | {metric.reduction} | {'yes' if metric.per_step else ''} | {metric.meaning} | {metric.where} |"


if __name__ == "__main__":
    sys.exit(main())
