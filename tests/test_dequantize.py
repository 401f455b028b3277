"""dequantize: every code under every scale, and copies of every kind back to what they were made of."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from inputs import generator
from torch import Tensor

import mxfp8_moe

pytestmark = pytest.mark.host

ops = torch.ops.mxfp8
LENGTHS, TAIL, K = [70, 0, 1, 129, 128], 9, 100


def same(got: Tensor, wanted: Tensor) -> None:
    """Equal bits of float32, zeros' signs included; any NaN is a NaN."""
    got, wanted = got.cpu(), wanted.float()
    assert got.dtype == torch.float32
    nan = wanted.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int32)[~nan], wanted.view(torch.int32)[~nan])


def tokens(device: torch.device, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Values of many magnitudes, NaN past the last group; offs."""
    rows = sum(LENGTHS) + TAIL
    x = torch.randn(rows, K, generator=generator(seed)) * 2.0 ** torch.randint(
        -20, 20, (rows, 1), generator=generator(4)
    )
    x[-TAIL:] = torch.nan
    return x.bfloat16().to(device), torch.tensor(LENGTHS).cumsum(0).int().to(device)


def test_every_code_under_every_scale(device: torch.device) -> None:
    """Exact down to 2^-136, a subnormal; past float32's range infinite; NaN from a code or from a scale."""
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    wanted = ref.dequantize(data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    got = ops.dequantize(data.to(device).view(torch.float8_e4m3fn), scale.to(device).view(torch.float8_e8m0fnu))
    same(got, wanted)
    assert got[0, 1] == 2.0**-136
    assert got[255].isnan().all()


def test_subnormals_are_exact_in_any_mode(device: torch.device) -> None:
    data = torch.full((1, 32), 0x01, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 20, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    torch.set_flush_denormal(True)
    try:
        got = ops.dequantize(data, scale)
    finally:
        torch.set_flush_denormal(False)
    assert got.cpu().tolist() == [[2.0 ** (20 - 127 - 9)] * 32]


@pytest.mark.parametrize("rounding", mxfp8_moe.ROUNDINGS)
def test_rows_and_tokens(device: torch.device, rounding: str) -> None:
    """Each copy's own layout, and the token-blocked copy back to tokens, zeros past the last group."""
    x, offs = tokens(device)
    data, scale, data_t, scale_t = ops.quantize_both(x, offs, rounding)
    same(ops.dequantize(data, scale), ref.dequantize(data, scale))
    same(ops.dequantize(data_t, scale_t), ref.dequantize(data_t, scale_t))
    back = mxfp8_moe.dequantize(data_t, scale_t, offs, tokens=len(x))
    wanted, columns = torch.zeros(len(x), K, dtype=torch.float64), ref.dequantize(data_t, scale_t)
    for (begin, end), start in zip(ref.bounds(offs), ref.column_starts(offs), strict=True):
        wanted[begin:end] = columns[:, start : start + end - begin].T
    same(back, wanted)
    used = slice(0, sum(LENGTHS))
    error = (back[used] - x[used].float()).norm() / x[used].float().norm()
    assert 0 < error < 0.05


def test_weights(device: torch.device) -> None:
    """Both copies of a weight: the second is the transposed one."""
    w = torch.randn(3, 70, K, generator=generator(6)).bfloat16().to(device)
    data, scale, data_t, scale_t = ops.quantize_both(w)
    same(ops.dequantize(data, scale), ref.dequantize(data, scale))
    transposed = mxfp8_moe.dequantize(data_t, scale_t)
    same(transposed, ref.dequantize(data_t, scale_t))
    assert (transposed.mT[:, :70] - w.float()).norm() < 0.05 * w.float().norm()


@pytest.mark.parametrize(("lengths", "rows"), [([], 5), ([0, 0], 5), ([0], 0), ([4], 4)])
def test_few_tokens(device: torch.device, lengths: list[int], rows: int) -> None:
    x = torch.ones(rows, 40, dtype=torch.bfloat16, device=device)
    offs = torch.tensor(lengths, dtype=torch.int64).cumsum(0).int().to(device)
    if not lengths:  # quantize_cols has its own tests of it
        data_t = torch.empty(40, 0, dtype=torch.float8_e4m3fn, device=device)
        scale_t = torch.empty(40, 0, dtype=torch.float8_e8m0fnu, device=device)
    else:
        data_t, scale_t = ops.quantize_cols(x, offs)
    wanted = torch.zeros(rows, 40)
    wanted[: sum(lengths)] = 1
    assert torch.equal(mxfp8_moe.dequantize(data_t, scale_t, offs, tokens=rows).cpu(), wanted)


def test_bad_offs_stay_in_bounds(device: torch.device) -> None:
    x, offs = tokens(device)
    data_t, scale_t = ops.quantize_cols(x, offs)
    for bad in ([5, 2**31 - 1, -7, 3, 2**31 - 1], [-(2**31)] * 5, [400, 300, 200, 100, 0]):
        got = mxfp8_moe.dequantize(data_t, scale_t, torch.tensor(bad, dtype=torch.int32, device=device), tokens=len(x))
        assert got.shape == x.shape


def test_compile(device: torch.device) -> None:
    x, offs = tokens(device)
    data_t, scale_t = ops.quantize_cols(x, offs)
    compiled = torch.compile(
        lambda d, s, o: ops.dequantize(d, s, o, tokens=len(x)), fullgraph=True, backend="aot_eager"
    )
    same(compiled(data_t, scale_t, offs), mxfp8_moe.dequantize(data_t, scale_t, offs, tokens=len(x)).cpu())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": lambda d: d.view(torch.uint8)}, ["data", "float8_e4m3fn", "uint8"]),
        ({"scale": lambda s: s.view(torch.uint8)}, ["scale", "float8_e8m0fnu", "uint8"]),
        ({"data": lambda d: d[:, :40]}, ["data", "32", "[100, 40]"]),
        ({"scale": lambda s: s[:, :3]}, ["scale", "[100, 3]"]),
        ({"tokens": lambda _: None}, ["offs needs tokens"]),
        ({"offs": lambda _: None}, ["tokens needs offs"]),
        ({"offs": lambda o: o.long()}, ["offs", "int32", "int64"]),
    ],
)
def test_errors(device: torch.device, change: dict, words: list[str]) -> None:
    x, offs = tokens(device)
    data, scale = ops.quantize_cols(x, offs)
    given = {"data": data, "scale": scale, "offs": offs, "tokens": len(x)}
    given |= {name: make(given[name]) for name, make in change.items()}
    with pytest.raises(RuntimeError) as raised:
        mxfp8_moe.dequantize(given["data"], given["scale"], given["offs"], tokens=given["tokens"])
    assert all(word in str(raised.value) for word in ["mxfp8::dequantize", *words]), raised.value
