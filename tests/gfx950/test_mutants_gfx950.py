"""The emulator and the calls of a kernel must notice a kernel that is wrong: mutants of every built gfx950 kernel."""

from __future__ import annotations

import collections
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from emulator import reset
from mutant_subjects import kernels, subject
from mutants import Result, hunt

SEED = 1


def family(kernel: str) -> str:
    return "_".join(kernel.split("_")[1:3])


def run(kernel: str) -> Result:
    """One mutant of each kind, two where kernels are few."""
    reset()
    return hunt(subject(kernel), 1 if "gemm" in kernel else 2, f"{SEED} {kernel}")


def worker(path: list[str]) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Per kernel its mutants with what showed each; in processes, since a mutant may do anything."""
    names = sorted(kernels(), key=lambda name: "prepare" not in name)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), worker, (sys.path,)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def table(results: dict[str, Result]) -> str:
    """Kind by family: mutants caught by a diagnosis + by wrong bits / all."""
    cells: dict[str, dict[str, collections.Counter]] = collections.defaultdict(
        lambda: collections.defaultdict(collections.Counter)
    )
    for kernel, result in results.items():
        for mutant, how in result.mutants:
            for row in (mutant.kind, "all"):
                for column in (family(kernel), "all"):
                    cells[row][column][how if how in ("", "wrong bits") else "diagnosis"] += 1
    columns = [*sorted({family(k) for k in results}), "all"]
    lines = [" " * 24 + "".join(f"{c:>18}" for c in columns)]
    for row in sorted(cells, key=lambda kind: (kind == "all", kind)):
        shown = [f"{c['diagnosis']} + {c['wrong bits']} / {c.total()}" for c in (cells[row][x] for x in columns)]
        lines.append(f"{row:24}" + "".join(f"{x:>18}" for x in shown))
    return "\n".join(lines)


def test_mutants(results):
    print(table(results))
    found = [(kernel, *pair) for kernel, result in results.items() for pair in result.mutants]
    survivors = [f"{kernel} {mutant}" for kernel, mutant, how in found if not how]
    for line in survivors:
        print("survived:", line)
    equal, missed, all_ = (
        sum(f(r.drawn_from) for r in results.values())
        for f in (lambda d: d.equal, lambda d: len(d.missed), lambda d: d.instructions)
    )
    print(f"changed waits that are the same kernel: {equal}; instructions reached: {all_ - missed} of {all_}")
    assert len(found) >= 200
    assert len(survivors) <= 0.05 * len(found)
