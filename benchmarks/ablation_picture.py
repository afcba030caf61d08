"""The ring's cells as a picture: a line for each cell, a dot for each seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from benchmarks.ablation_report import ring_rows, used

LEFT, PANEL, BETWEEN, LINE, TOP, BOTTOM = 400, 360, 50, 26, 60, 40
COLOURS = {"told": (31, 119, 180), "shared": (214, 96, 20)}
GREY, BAND = (225, 225, 225), (190, 225, 190)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Panel:
    """One figure from `left` on. `place`: a value to a share of the panel's width; values outside are on the edge."""

    draw: ImageDraw.ImageDraw
    font: Font
    left: int
    title: str
    ticks: Sequence[float]
    label: Callable[[float], str]
    scale: Callable[[float], float]

    def place(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        inside = min(max(value, low), high)
        return self.left + PANEL * (self.scale(inside) - self.scale(low)) / (self.scale(high) - self.scale(low))

    def band(self, low: float, high: float, top: int, bottom: int) -> None:
        self.draw.rectangle((self.place(low), top, self.place(high) + 1, bottom), fill=BAND)

    def frame(self, top: int, bottom: int) -> None:
        self.draw.text((self.left, 8), self.title, fill="black", font=self.font)
        for tick in self.ticks:
            x = self.place(tick)
            self.draw.line((x, top, x, bottom), fill=GREY)
            self.draw.text((x, bottom + 4), self.label(tick), fill="dimgrey", font=self.font, anchor="ma")

    def dots(self, values: Sequence[float], y: int, colour: tuple[int, int, int]) -> None:
        """A ring for each seed, a bar at the mean."""
        mean = self.place(statistics.mean(values))
        self.draw.line((mean, y - 9, mean, y + 9), fill=colour, width=3)
        for value in values:
            x = self.place(value)
            self.draw.ellipse((x - 5, y - 5, x + 5, y + 5), outline=colour, width=2)


def picture(path: Path, target: Path) -> None:
    """Energy distance (logarithmic) and share on modes of the averaged students; the band is true samples.

    ConfigError: `path` holds no cells of the ring.
    """
    references, rows = ring_rows(path)
    cells = [series for series, _ in used(rows)]
    groups = list(dict.fromkeys(series.group for series in cells))
    height = TOP + LINE * len(cells) + LINE * len(groups) + BOTTOM
    sheet = Image.new("RGB", (LEFT + 2 * PANEL + BETWEEN + 40, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    energies = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
    shares = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    of_true = [found["energy"] for found in references["floor"]]
    title = f"energy distance (true samples {statistics.mean(of_true):.4f} ± {statistics.stdev(of_true):.4f})"
    energy = Panel(draw, font, LEFT, title, energies, "{:g}".format, math.log)
    share = Panel(draw, font, LEFT + PANEL + BETWEEN, "share of samples on a mode", shares, "{:.0%}".format, float)
    top, bottom = TOP - LINE, height - BOTTOM
    of_true = [found["on_mode"] for found in references["floor"]]
    share.band(min(of_true), max(of_true), top, bottom)
    for panel in (energy, share):
        panel.frame(top, bottom)
    y, before = TOP - LINE, ""
    for series in cells:
        if series.group != before:
            y += LINE
            draw.text((12, y + 4), ", sampled ".join(series.group.split(", ")), fill="black", font=font)
            before = series.group
        draw.text((240, y + 4), series.name, fill=COLOURS[series.name.split(", ")[0]], font=font)
        for panel, figure in ((energy, "energy"), (share, "on_mode")):
            panel.dots(series.values[figure], y + LINE // 2, COLOURS[series.name.split(", ")[0]])
        y += LINE
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, optimize=True)
