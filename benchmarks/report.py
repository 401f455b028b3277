"""What was measured, and the tables that tell it."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

Times = dict[str, list[float]]
"""Seconds of single calls, by contender; "ours" is one."""

SQNR_GATES = {"y dB": 27.0, "dx dB": 25.0, "dw dB": 24.0}
"""Below these our results are wrong, and the times mean nothing. MXFP8 gives about 28 dB on Gaussian operands."""


@dataclass
class Row:
    """One contest.

    Attributes:
        part: what was computed; a table each.
        shape: on what.
        times: of us and of each peer.
        flops: of one call, 0 for what has no rate.
        more: whatever else was measured, by unit or name.
    """

    part: str
    shape: str
    times: Times
    flops: int = 0
    more: dict[str, float] = field(default_factory=dict)

    @property
    def ours(self) -> float:
        """Our median time."""
        return statistics.median(self.times["ours"])

    def ratios(self) -> dict[str, float]:
        """Each peer's median time over ours."""
        return {who: statistics.median(times) / self.ours for who, times in self.times.items() if who != "ours"}

    @property
    def wrong(self) -> list[str]:
        """Our results that do not agree with torch's."""
        found = ((name, self.more.get(name, gate), gate) for name, gate in SQNR_GATES.items())
        return [f"{name}: {value:.1f}" for name, value, gate in found if value < gate]


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def table(rows: list[Row]) -> str:
    """A line for each row."""
    lines = []
    for row in rows:
        line: dict[str, Any] = {"shape": row.shape, "us": round(row.ours * 1e6, 1)}
        if row.flops:
            line["TFLOP/s"] = row.flops / row.ours / 1e12
        line |= {f"{peer} / ours": ratio for peer, ratio in row.ratios().items()} | row.more
        lines.append({name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()})
    return tabulate(lines, headers="keys", tablefmt="github")


def summary(rows: list[Row]) -> str:
    """Each part's ratios over all shapes."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for peer, ratio in row.ratios().items():
            found.setdefault((row.part, peer), []).append(ratio)
    lines = [
        [*of, len(ratios), *(round(value, 3) for value in (geometric_mean(ratios), min(ratios), max(ratios)))]
        for of, ratios in found.items()
    ]
    return tabulate(lines, ["part", "peer / ours", "rows", "geomean", "lowest", "highest"], tablefmt="github")


def collect(contests: Iterator[Row]) -> list[Row]:
    """All rows, each printed to stderr as soon as it is measured."""
    rows = []
    for row in contests:
        rows.append(row)
        print(f"{row.part}: {table([row]).splitlines()[-1]}", file=sys.stderr, flush=True)
    return rows


def print_report(facts: Mapping[str, str], rows: list[Row]) -> bool:
    """Prints what the times depend on, a table a part, and the summary; returns whether all results were right."""
    print("\n".join(f"{name + ':':13}{value}" for name, value in facts.items()))
    for part in dict.fromkeys(row.part for row in rows):
        print(f"\n## {part}\n\n{table([row for row in rows if row.part == part])}")
    print(f"\n## Summary\n\n{summary(rows)}")
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        print(f"WRONG RESULTS: {row.part} on {row.shape} ({', '.join(row.wrong)}): its times mean nothing.")
    return not wrong


def write_json(path: Path, facts: Mapping[str, str], rows: list[Row], **more: Any) -> None:
    """Writes every time, as a new file that is then renamed, so that no reader sees half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"machine": facts, "rows": [asdict(row) for row in rows], **more}
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
