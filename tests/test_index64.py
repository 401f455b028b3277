"""Index arithmetic past 2^31 elements, in every operand and output.

Operands are anonymous zero pages that are only read, so they cost next to no memory; what must differ from zero is a
few rows at the far end. An index that wraps at 32 bits reads another place (zeros) or crashes. Where an op has to
write more than 2^31 bytes itself, the test says how much memory it needs and is skipped on smaller machines.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import pytest
import reference as ref
import torch
from inputs import generator, offs_of, random_codes, random_operand
from torch import Tensor

ops = torch.ops.mxfp8

MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.14 on
LIMIT = 2**31
GIB = 2**30


@pytest.fixture(autouse=True)
def not_interpreted(backend: str) -> None:
    if backend == "gfx950-emu":
        pytest.skip("interpreting kernels over 2^31 elements takes hours")


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written (on the CPU)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype) if dtype.itemsize == 1 else torch.zeros(
            shape, dtype=dtype, device=device
        )  # fmt: skip
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def need_memory(gib: float, device: torch.device) -> None:
    """Skips when the test's own writes would not fit."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if free < (gib + 1) * GIB:
        pytest.skip(f"writes {gib} GiB; {free / GIB:.1f} GiB are free")


def huge_operand(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    assert math.prod(shape) > LIMIT
    scale = huge_zeros((*shape[:-1], shape[-1] // 32), torch.float8_e8m0fnu, device)
    return huge_zeros(shape, torch.float8_e4m3fn, device), scale


def fill(data: Tensor, scale: Tensor, seed: int) -> None:
    """Random integers into views of an operand."""
    codes, scales = random_codes(tuple(data.shape), "integers", generator(seed))
    data.view(torch.uint8).copy_(codes)
    scale.view(torch.uint8).copy_(scales)


def last_group(groups: int, tokens: int, extents: tuple[int, int], seed: int, device: torch.device) -> list[Tensor]:
    """Wgrad operands whose tokens, up to 32, are all the last group's."""
    depth, operands = ref.padded_tokens(tokens, groups), []
    for index, rows in enumerate(extents):
        data = huge_zeros((rows, depth), torch.float8_e4m3fn, device)
        scale = huge_zeros((rows, depth // 32), torch.float8_e8m0fnu, device)
        fill(data[:, :32], scale[:, :1], seed + index)
        data[:, tokens:32].view(torch.uint8).zero_()
        operands += [data, scale]
    return operands


def last_group_exactly(operands: list[Tensor], tokens: int) -> Tensor:
    """The last group's product of `last_group`."""
    first = [t[:, : 4 if t.dtype == torch.float8_e8m0fnu else 128] for t in operands]
    return ref.grouped_depth(*first, offs_of([tokens])).value[0]


def assert_exact(got: Tensor, exact: Tensor) -> None:
    assert exact.any()
    assert torch.equal(got.cpu().double(), exact)


@pytest.mark.parametrize("op", [ops.grouped_mm, ops.grouped_mm_dgrad], ids=["forward", "dgrad"])
def test_weights_past_the_limit(op: torch._ops.OpOverloadPacket, device: torch.device) -> None:
    """B [2049, 1024, 1024]: the last expert starts at 2^31."""
    groups, n, k = 2049, 1024, 1024
    b, b_scale = huge_operand((groups, n, k), device)
    fill(b[-1], b_scale[-1], 1)
    a, a_scale = random_operand((5, k), "integers", 2, device)
    offs = torch.zeros(groups, dtype=torch.int32, device=device)
    offs[-1] = 5
    exact = ref.grouped_rows(a, a_scale, b[-1:], b_scale[-1:], offs_of([5]))
    assert_exact(op(a, a_scale, b, b_scale, offs, out_dtype=torch.float32), exact.value)


def test_tokens_past_the_limit(device: torch.device) -> None:
    """A [2^22 + 8, 512]: row 2^22 starts at 2^31; the rows before are zeros."""
    m, k = 2**22 + 8, 512
    a, a_scale = huge_operand((m, k), device)
    fill(a[-8:], a_scale[-8:], 3)
    b, b_scale = random_operand((2, 3, k), "integers", 4, device)
    got = ops.grouped_mm(a, a_scale, b, b_scale, offs_of([m - 7, 7], device), out_dtype=torch.float32)
    assert not got[:-8].any()
    exact = ref.grouped_rows(a[-8:], a_scale[-8:], b, b_scale, offs_of([1, 7]))
    assert_exact(got[-8:], exact.value)


def test_product_past_the_limit(device: torch.device) -> None:
    """Y [2^20 + 5, 2048] in bfloat16. A contraction over nothing keeps it short: y is the bias, then zeros."""
    need_memory(4, device)
    m, n = 2**20 + 5, 2048
    a, b = (torch.empty(shape, dtype=torch.uint8, device=device) for shape in ((m, 0), (2, n, 0)))
    operands = [t.view(dtype) for t in (a, b) for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)]
    bias = torch.randn(2, n, generator=generator(5)).to(device)
    got = ops.grouped_mm(*operands, offs_of([7, m - 9], device), bias=bias)
    assert got.numel() > LIMIT
    for row in (0, 6):
        assert torch.equal(got[row], bias[0].bfloat16())
    for row in (7, m // 2, 2**20, m - 3):
        assert torch.equal(got[row], bias[1].bfloat16())
    assert (ref.bits(got[-2:]) == 0).all()


def test_tail_past_the_limit(device: torch.device) -> None:
    """Y [2^20 + 5, 2048] in bfloat16: everything after three rows is past offs[-1]."""
    need_memory(4, device)
    m, n, k = 2**20 + 5, 2048, 32
    a, a_scale = (huge_zeros(*each, device) for each in (((m, k), torch.float8_e4m3fn), ((m, 1), torch.float8_e8m0fnu)))
    fill(a[:3], a_scale[:3], 6)
    b, b_scale = random_operand((1, n, k), "integers", 7, device)
    got = ops.grouped_mm(a, a_scale, b, b_scale, offs_of([3], device))
    exact = ref.grouped_rows(a[:3], a_scale[:3], b, b_scale, offs_of([3]))
    assert torch.equal(got[:3].cpu(), exact.value.float().bfloat16())
    assert not got[3:].view(torch.int64).any()


def test_weight_gradients_past_the_limit(device: torch.device) -> None:
    """Dw [2049, 1024, 1024] in bfloat16: all experts empty but the last, which starts at 2^31."""
    need_memory(4, device)
    groups, n, k = 2049, 1024, 1024
    operands = last_group(groups, 20, (n, k), 8, device)
    got = ops.grouped_mm_wgrad(*operands, offs_of([0] * (groups - 1) + [20], device))
    assert got.numel() > LIMIT
    assert not got[:-1].view(torch.int64).any()
    assert torch.equal(got[-1].cpu(), last_group_exactly(operands, 20).float().bfloat16())


def test_wgrad_operands_past_the_limit(device: torch.device) -> None:
    """Dyt [2^22 + 3, 512]: rows past 2^31, one group of 32 tokens at the end of the columns."""
    n, k, depth = 2**22 + 600, 2, 512
    a, a_scale = huge_operand((n, depth), device)
    b, b_scale = (t.clone() for t in random_operand((k, depth), "integers", 7, device))
    fill(a[-3:, 384:416], a_scale[-3:, 12:13], 8)
    # Groups of 384 and 32 tokens: dyt's first 384 columns are zeros, xt's are not.
    for t in (b[:, 416:], b_scale[:, 13:]):
        t.view(torch.uint8).zero_()
    offs = offs_of([384, 32], device)
    exact = ref.grouped_depth(a[-3:], a_scale[-3:], b, b_scale, offs)
    for left, right, swapped in (((a, a_scale), (b, b_scale), False), ((b, b_scale), (a, a_scale), True)):
        got = ops.grouped_mm_wgrad(*left, *right, offs, out_dtype=torch.float32)
        got = got.transpose(1, 2) if swapped else got
        assert not got[0].any()
        assert not got[1, :-3].any()
        assert_exact(got[:, -3:], exact.value)


def test_main_grad_past_the_limit(device: torch.device) -> None:
    """main_grad [2049, 1024, 1024] float32, 8 GiB of untouched pages: only the last expert, at 2^31, has tokens."""
    if device.type == "cuda":
        need_memory(9, device)
    groups, n, k = 2049, 1024, 1024
    operands = last_group(groups, 20, (n, k), 9, device)
    grad = huge_zeros((groups, n, k), torch.float32, device)
    grad[-1, -1, -1] = 1.0
    assert grad.numel() > LIMIT
    ops.grouped_mm_wgrad(*operands, offs_of([0] * (groups - 1) + [20], device), main_grad=grad)
    exact = last_group_exactly(operands, 20)
    exact[-1, -1] += 1
    assert_exact(grad[-1], exact)
    assert not grad[0].any()
    assert not grad[groups - 2].any()


def test_quantizer_past_the_limit(device: torch.device) -> None:
    """X [2^22 + 40, 512]: more than 2^31 elements in x, in the row copy and in the transposed copy."""
    need_memory(5, device)
    m, k = 2**21 + 40, 1152
    x = huge_zeros((m, k), torch.bfloat16, device)
    assert x.numel() > LIMIT
    x[-40:] = torch.randn(40, k, generator=generator(11)).bfloat16().to(device)
    offs = offs_of([m - 33, 33], device)
    data, scale, data_t, scale_t = ops.quantize_both(x, offs)
    tail = x[-40:].cpu()
    for got, wanted in zip((data[-40:], scale[-40:]), ref.quantize_rows(tail), strict=True):
        ref.assert_same_bits(ref.codes(got), wanted)
    start = ref.column_starts(offs)[1]
    for got, wanted, unit in zip((data_t, scale_t), ref.quantize_rows(tail[-33:].T), (1, 32), strict=True):
        begin = start // unit
        ref.assert_same_bits(ref.codes(got[:, begin : begin + wanted.shape[1]].contiguous()), wanted)
        assert not ref.codes(got[:, : 4096 // unit].contiguous()).any()
    last = (m - 33) // 32 * 32  # the first group's last block, of 7 tokens
    assert m - 33 - last == 7
    wanted = ref.quantize_rows(tail[:7].T)
    ref.assert_same_bits(ref.codes(data_t[:, last : last + 32].contiguous()), wanted[0])
    ref.assert_same_bits(ref.codes(scale_t[:, last // 32 : last // 32 + 1].contiguous()), wanted[1])


def test_zero_padding_past_the_limit(device: torch.device) -> None:
    """Data [2^22 + 1, 512]: the last row's padding starts past 2^31. Its columns hold what is to be cleared."""
    rows, depth = 2**22 + 1, 512
    data, scale = huge_operand((rows, depth), device)
    data.view(torch.uint8)[-1] = 0x38
    scale.view(torch.uint8)[-1] = 127
    offs = offs_of([480, 0], device)
    need_memory(2.1, device)  # clearing zeros writes them
    ops.zero_padding_(data, scale, offs)
    last, last_scale = ref.codes(data[-1]), ref.codes(scale[-1])
    assert (last[:480] == 0x38).all()
    assert (last[480:] == 0).all()
    assert (last_scale[:15] == 127).all()
    assert (last_scale[15:] == 0).all()
