"""Same input, same bits: for every number of threads, from run to run, and with other work in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import reference as ref
import torch
from inputs import offs_of, random_lengths, random_values
from torch import Tensor

ops = torch.ops.mxfp8


@dataclass
class Inputs:
    """One routing's tokens, gradients and weights, made once: only the ops run again."""

    x: Tensor
    dy: Tensor
    w: Tensor
    offs: Tensor

    @classmethod
    def draw(cls, lengths: list[int], n: int, k: int, device: torch.device) -> Inputs:
        m = sum(lengths) + 13
        x, dy = random_values((m, k), 1, device), random_values((m, n), 2, device)
        return cls(x, dy, random_values((len(lengths), n, k), 3, device), offs_of(lengths, device))

    def run(self) -> list[Tensor]:
        """The outputs of every op, main_grad included."""
        x, dy, w, offs = self.x, self.dy, self.w, self.offs
        xq, xs, xtq, xts = ops.quantize_both(x, offs)
        wq, ws, wtq, wts = ops.quantize_both(w)
        dq, ds, dtq, dts = ops.quantize_both(dy, offs)
        grad = torch.ones(w.shape, device=w.device)
        ops.grouped_mm_wgrad(dtq, dts, xtq, xts, offs, main_grad=grad)
        return [
            xq, xs, xtq, xts, wq, ws, wtq, wts, dq, ds, dtq, dts, grad,
            *ops.quantize_rows(x), *ops.quantize_cols(x, offs), *ops.quantize_cols(w),
            ops.grouped_mm(xq, xs, wq, ws, offs),
            ops.grouped_mm(xq, xs, wq, ws, offs, out_dtype=torch.float32),
            ops.grouped_mm_dgrad(dq, ds, wtq, wts, offs, out_dtype=torch.float32),
            ops.grouped_mm_wgrad(dtq, dts, xtq, xts, offs, out_dtype=torch.float32),
        ]  # fmt: skip

    def assert_repeats(self, wanted: list[Tensor], what: str) -> None:
        for index, (got, usual) in enumerate(zip(self.run(), wanted, strict=True)):
            ref.assert_same_bits(got, usual, f"output {index}, {what},")


CASES = {
    "skewed": (random_lengths(8, 700, 4), 200, 416),
    "short groups": (random_lengths(64, 200, 5), 129, 288),
    "one group": ([520], 130, 1056),
}


@pytest.mark.parametrize("name", CASES)
def test_thread_count_changes_no_bit(name: str, device: torch.device, backend: str, threads: None) -> None:
    if not backend.startswith("cpu"):
        pytest.skip("only the CPU kernels use torch's thread pool")
    inputs = Inputs.draw(*CASES[name], device)
    torch.set_num_threads(1)
    usual = inputs.run()
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert torch.get_num_threads() == count
        inputs.assert_repeats(usual, f"{count} threads")


@pytest.mark.parametrize("name", CASES)
def test_runs_repeat_bit_for_bit(name: str, device: torch.device, backend: str) -> None:
    """The results of a race vary from run to run."""
    inputs = Inputs.draw(*CASES[name], device)
    usual = inputs.run()
    for repeat in range(2 if backend == "gfx950-emu" else 20):
        inputs.assert_repeats(usual, f"repeat {repeat}")


def test_calls_from_several_python_threads(device: torch.device, backend: str) -> None:
    """Ops called at once from several Python threads share no state."""
    if backend == "gfx950-emu":
        pytest.skip("the emulator interprets one kernel at a time")
    inputs = [Inputs.draw(*case, device) for case in CASES.values()]
    usual = [each.run() for each in inputs]
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(each.assert_repeats, wanted, "a Python thread")
            for each, wanted in [*zip(inputs, usual, strict=True)] * 5
        ]
        for job in jobs:
            job.result()


def test_deterministic_mode_accepts_every_op(device: torch.device) -> None:
    """torch.use_deterministic_algorithms raises for ops that are not deterministic; ours must pass and agree."""
    inputs = Inputs.draw([40, 0, 33], 32, 64, device)
    usual = inputs.run()
    torch.use_deterministic_algorithms(True)
    try:
        inputs.assert_repeats(usual, "deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)
