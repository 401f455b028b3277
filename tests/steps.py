"""One call of every op on the same tokens, gradients and weights, to be compared with another such."""

from __future__ import annotations

from dataclasses import dataclass

import reference as ref
import torch
from inputs import offs_of, random_values
from torch import Tensor

ops = torch.ops.mxfp8


@dataclass
class Step:
    """One routing's tokens, gradients and weights, made once: only the ops run again."""

    x: Tensor
    dy: Tensor
    w: Tensor
    offs: Tensor

    @classmethod
    def draw(cls, lengths: list[int], n: int, k: int, device: torch.device) -> Step:
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
        assert_same(self.run(), wanted, what)


def assert_same(got: list[Tensor], wanted: list[Tensor], what: str) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        ref.assert_same_bits(a, b, f"output {index}, {what},")
