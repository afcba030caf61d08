"""Tables and a picture of an ablation's finished cells, for docs/ablation.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import read_rows
from miles_dmd2.config.errors import ConfigError, show

Row = Mapping[str, Any]

# What a student is used with: its own hop; a student of forward_noise has none, so it is shown with both.
USED_WITH = {"simulation_ode": ("ode",), "simulation_sde": ("sde",), "forward_noise": ("sde", "ode")}
FIGURES = ("energy", "on_mode", "spread", "weights_tv")


@dataclass(frozen=True, slots=True)
class Series:
    """The seeds of one cell as it is used. `values`: figure -> one number a seed."""

    name: str
    group: str
    values: Mapping[str, Sequence[float]]


def ring_tables(path: Path) -> str:
    """Markdown: what to compare with, then a line for each cell. ConfigError: the file has no references."""
    references, rows = ring_rows(path)
    return "\n".join([*_reference_lines(references), "", *_cell_lines(rows), "", *_cost_lines(rows)])


def ring_rows(path: Path) -> tuple[Row, list[Row]]:
    found: list[Row] = list(read_rows(path))
    references = [row for row in found if row["key"] == "references"]
    rows = [row for row in found if row["key"] != "references"]
    if len(references) != 1 or not rows:
        raise ConfigError(f"{show(path)}: holds no cells of the ring; give a file that `ablation.py ring` wrote")
    return references[0], rows


def _reference_lines(references: Row) -> list[str]:
    floor = references["floor"]
    listed = {
        "true samples": [{name: statistics.mean(draw[name] for draw in floor) for name in FIGURES}],
        "teacher, 50 steps ode": [references["teacher_50"]],
        **{f"teacher, the student's steps, {hop}": [found] for hop, found in references["teacher"].items()},
        **{f"start, {hop}": [found] for hop, found in references["start"].items()},
    }
    lines = ["| sampler | energy x 1000 | on mode | spread | weights TV |", "|---|---|---|---|---|"]
    for name, (found,) in listed.items():
        lines.append(f"| {name} | {' | '.join(_form(figure)(found[figure]) for figure in FIGURES)} |")
    deviation = {name: statistics.stdev(draw[name] for draw in floor) for name in FIGURES}
    noise = " | ".join(_form(figure)(deviation[figure]) for figure in FIGURES)
    lines.append(f"| deviation of one figure of true samples | {noise} |")
    return lines


def _cell_lines(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| student input, sampled | critic | scoring | energy x 1000, EMA | the same, raw | raw, mean of last tenth "
        "| on mode, EMA | spread, EMA | weights TV, EMA | energy x 1000 by stop step, EMA |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for series, cells in used(rows):
        last = series.values
        by_step = [[cell["by_step"]["ema"][_hop(series)][k]["energy"] for cell in cells] for k in _steps(cells)]
        told = [
            _spread(last["energy"], _thousand),
            _spread(last["raw_energy"], _thousand),
            _spread(last["raw_energy_late"], _thousand),
            *(_spread(last[figure], _form(figure)) for figure in FIGURES[1:]),
            " / ".join(_thousand(statistics.mean(values)) for values in by_step),
        ]
        lines.append(f"| {series.group} | {' | '.join(series.name.split(', '))} | {' | '.join(told)} |")
    return lines


def _cost_lines(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| student input | scoring | engine | critic | teacher | student | all | CPU ms per student update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["input"], row["scoring"]) for row in rows):
        of = [row for row in rows if (row["input"], row["scoring"]) == key]
        counted = [
            statistics.mean(row["forwards_per_update"][name] for row in of) for name in of[0]["forwards_per_update"]
        ]
        cpu = [1e3 * row["seconds"]["cpu"] / row["updates"]["student"] for row in of]
        told = [f"{count:.0f}" for count in (*counted, sum(counted))]
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(told)} | {_spread(cpu, lambda value: f'{value:.0f}')} |")
    return lines


def used(rows: Sequence[Row]) -> list[tuple[Series, list[Row]]]:
    """Every cell as it is used, with its rows, one a seed."""
    found = []
    for input, hops in USED_WITH.items():
        for hop in hops:
            for key in dict.fromkeys((row["critic"], row["scoring"]) for row in rows if row["input"] == input):
                cells = [row for row in rows if (row["input"], row["critic"], row["scoring"]) == (input, *key)]
                found.append((Series(", ".join(key), f"{input}, {hop}", _values(cells, hop)), cells))
    return found


def _values(cells: Sequence[Row], hop: str) -> dict[str, list[float]]:
    """Of the last student, averaged weights; raw weights also over the last tenth of the run."""
    values = {name: [cell["curve"][-1]["ema"][hop][name] for cell in cells] for name in FIGURES}
    values["raw_energy"] = [cell["curve"][-1]["raw"][hop]["energy"] for cell in cells]
    values["raw_energy_late"] = [statistics.mean(_late(cell, hop)) for cell in cells]
    return values


def _late(cell: Row, hop: str) -> list[float]:
    last = cell["curve"][-1]["rollout"]
    return [found["raw"][hop]["energy"] for found in cell["curve"] if found["rollout"] >= 0.9 * last]


def _hop(series: Series) -> str:
    return series.group.rpartition(", ")[2]


def _steps(cells: Sequence[Row]) -> range:
    return range(len(cells[0]["by_step"]["ema"]["ode"]))


def _thousand(value: float) -> str:
    return f"{1e3 * value:.1f}"


def _form(figure: str) -> Callable[[float], str]:
    return {
        "energy": _thousand,
        "on_mode": lambda value: f"{value:.1%}",
        "spread": lambda value: f"{value:.2f}",
        "weights_tv": lambda value: f"{value:.3f}",
    }[figure]


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Mean, and the range where there are several."""
    mean = form(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({form(min(values))} to {form(max(values))})"


TEACHERS = {"teacher_50": "teacher, 50 steps", "teacher": "teacher, the student's steps, ode"}


def digits_tables(path: Path) -> str:
    """Markdown: what to compare with, then a line for each cell. ConfigError: the file holds none."""
    rows: list[Row] = [row for row in read_rows(path) if "columns" in row]
    if not rows:
        raise ConfigError(f"{show(path)}: holds no cells of the digits; give a file that `ablation.py digits` wrote")
    return "\n".join([*_digits_references(rows[0]), "", *_digits_lines(rows)])


def _digits_references(row: Row) -> list[str]:
    """What to compare with; every cell of a file has the same, measured on one noise."""
    found = {name: row["columns"][key] for key, name in TEACHERS.items()}
    lines = ["| sampler | distance | accuracy |", "|---|---|---|"]
    lines += [f"| {name} | {_distance(column)} | {column['accuracy']:.1%} |" for name, column in found.items()]
    return [*lines, f"| floor: data against data | {_distance(row['floor'])} | |"]


def _distance(found: Row) -> str:
    return f"{found['fd']:.2f} ± {found['fd_deviation']:.2f}"


def _digits_lines(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| student input | sampled | seeds | distance, EMA | distance, raw | accuracy, EMA | at rollout 0 "
        "| engine forwards per update | training seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["input"], row["hop"]) for row in rows):
        cells = [row for row in rows if (row["input"], row["hop"]) == key]
        columns = {name: [cell["columns"][name] for cell in cells] for name in cells[0]["columns"]}

        def of(name: str, figure: str, form: str, columns: Mapping[str, list[Row]] = columns) -> str:
            return _spread([column[figure] for column in columns[name]], lambda value: f"{value:{form}}")

        told = [
            " ".join(str(cell["seed"]) for cell in cells),
            of("student_ema", "fd", ".2f"),
            of("student_raw", "fd", ".2f"),
            of("student_ema", "accuracy", ".1%"),
            of("student_start", "fd", ".2f"),
            f"{statistics.mean(cell['forwards_per_update']['engine'] for cell in cells):.0f}",
            f"{statistics.mean(cell['seconds']['wall'] for cell in cells):.0f}",
        ]
        lines.append(f"| {' | '.join(key)} | {' | '.join(told)} |")
    return lines
