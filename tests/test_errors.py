"""Every way to call an op wrongly: the text names the argument, what it was and what it must be; nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import reference as ref
import torch
from inputs import offs_of, quantizer_layout, random_operand, random_values
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import mxfp8_moe

ops = torch.ops.mxfp8

GROUPS, M, N, K = 3, 150, 40, 64
LENGTHS = [70, 0, 64]
ALIGNED = [64, 0, 32]  # for the plain layout


def good_arguments(op: str, device: torch.device) -> dict[str, object]:
    """Valid arguments by name, fresh tensors each time."""
    offs = offs_of(LENGTHS, device)
    if op.startswith("quantize"):
        return {"x": random_values((M, K), 1, device), "rounding": "rceil"} | (
            {} if op == "quantize_rows" else {"offs": offs}
        )
    if op == "zero_padding_":
        target = random_operand((N, 160), "finite", 1, device)
        return {"data": target.data, "scale": target.scale, "offs": offs_of(ALIGNED, device)}
    if op in ("grouped_mm", "grouped_mm_dgrad"):
        a, b = random_operand((M, K), "finite", 1, device), random_operand((GROUPS, N, K), "finite", 2, device)
        left, right = ("a", "b") if op == "grouped_mm" else ("dy", "wt")
        return {left: a.data, f"{left}_scale": a.scale, right: b.data, f"{right}_scale": b.scale, "offs": offs}
    plain = op.endswith("plain")
    a, b = (
        random_operand((rows, 160), "finite", rows, device)
        if plain
        else quantizer_layout(rows, LENGTHS, M - sum(LENGTHS), "finite", rows, device)
        for rows in (N, K)
    )
    arguments = {"dyt": a.data, "dyt_scale": a.scale, "xt": b.data, "xt_scale": b.scale, "offs": offs}
    if plain:
        arguments |= {"offs": offs_of(ALIGNED, device), "plain": True}
    if "accumulate" in op:
        arguments["main_grad"] = torch.ones(GROUPS, N, K, device=device)
    return arguments


def call(op: str, arguments: dict[str, object]) -> object:
    return getattr(ops, op.split(".")[0])(**arguments)


@dataclass
class Wrong:
    """One way to spoil one argument, and what the message must say besides the argument's name."""

    op: str
    name: str  # the spoilt argument
    spoil: Callable[[Tensor], object]
    says: list[str] = field(default_factory=list)  # regular expressions
    why: str = ""

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{self.why}"


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Another dtype of the same shape; reinterprets nothing but values that exist."""
    return lambda t: torch.zeros(t.shape, dtype=dtype, device=t.device)


def strided(t: Tensor) -> Tensor:
    """The same shape and values, with the last axis no longer contiguous."""
    wide = torch.empty(*t.shape, 2, dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


def shape(*sizes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(sizes, dtype=torch.float32, device=t.device).to(t.dtype)


def transposed(t: Tensor) -> Tensor:
    """The same shape and values, stored column by column."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def other_device(t: Tensor) -> Tensor:
    """Every machine has the meta device, and one such argument must not select the shape-only kernels unnoticed."""
    return t.to("meta") if t.device.type == "cpu" else t.cpu()


E4M3, E8M0, INT32 = "float8_e4m3fn", "float8_e8m0fnu", "int32"


def operand_cases(
    op: str, left: str, right: str, left_shape: tuple[int, ...], right_shape: tuple[int, ...]
) -> list[Wrong]:
    """What can be wrong with a pair of operands and their scales."""
    cases = []
    for name, sizes in ((left, left_shape), (right, right_shape)):
        scale_sizes = (*sizes[:-1], sizes[-1] // 32)
        text, axes = re.escape(str(list(sizes))), r"\[\w+" + r", \w+" * (len(sizes) - 1) + r"\]"
        blocks = "multiple of 32" if name == left else rf"{sizes[-1]}\].*\b{left}\b"
        cases += [
            Wrong(op, name, cast(torch.bfloat16), ["bfloat16", E4M3], "bf16"),
            Wrong(op, name, cast(torch.float8_e5m2), ["float8_e5m2", E4M3], "e5m2"),
            Wrong(op, name, cast(torch.uint8), ["uint8", E4M3], "uint8"),
            Wrong(op, name, shape(*sizes[1:]), [re.escape(str(list(sizes[1:]))), axes], "rank too low"),
            Wrong(op, name, shape(1, *sizes), [re.escape(str([1, *sizes])), axes], "rank too high"),
            Wrong(op, name, strided, ["contiguous", text, "stride"], "strided"),
            Wrong(op, name, transposed, ["contiguous", text, "stride"], "transposed"),
            Wrong(op, name, shape(*sizes[:-1], 48), ["48", blocks], "no whole blocks"),
            Wrong(op, f"{name}_scale", cast(torch.float8_e4m3fn), [E4M3, E8M0], "dtype"),
            Wrong(op, f"{name}_scale", cast(torch.float32), ["float32", E8M0], "fp32"),
            Wrong(op, f"{name}_scale", cast(torch.uint8), ["uint8", E8M0], "uint8"),
            Wrong(op, f"{name}_scale", strided, ["contiguous", "stride"], "strided"),
            Wrong(op, f"{name}_scale", other_device, ["cpu", "meta|cuda"], "device"),
        ]
        wrong_sizes = {
            "too wide": [*scale_sizes[:-1], scale_sizes[-1] + 1],
            "too narrow": [*scale_sizes[:-1], scale_sizes[-1] - 1],
            "too tall": [scale_sizes[0] + 1, *scale_sizes[1:]],
            "rank": [*scale_sizes, 1],
        }
        for why, wrong in wrong_sizes.items():
            says = [r"Kc/32\]|Nc/32\]|Tc/32\]" if why == "rank" else re.escape(str(list(scale_sizes))),
                    re.escape(str(wrong))]  # fmt: skip
            cases.append(Wrong(op, f"{name}_scale", shape(*wrong), says, why))
    return cases


def offs_cases(op: str, groups_from: bool = False) -> list[Wrong]:
    """What can be wrong with offs apart from its values; its length only where another argument says E as well."""
    cases = [
        Wrong(op, "offs", cast(torch.int64), ["int64", INT32], "int64"),
        Wrong(op, "offs", cast(torch.float32), ["float32", INT32], "float32"),
        Wrong(op, "offs", shape(3, 1), [r"\[3, 1\]", r"shape \[E\]"], "rank"),
        Wrong(op, "offs", shape(), [r"\[\]", r"shape \[E\]"], "scalar"),
        Wrong(op, "offs", strided, ["contiguous", "stride"], "strided"),
        Wrong(op, "offs", other_device, ["cpu", "meta|cuda"], "device"),
    ]
    if groups_from:
        cases += [
            Wrong(op, "offs", shape(2), [r"\b2\b", r"\b3\b"], "too short"),
            Wrong(op, "offs", shape(4), [r"\b4\b", r"\b3\b"], "too long"),
        ]
    return cases


def quantize_cases(op: str) -> list[Wrong]:
    cases = [
        Wrong(op, "x", cast(torch.float16), ["float16", "bfloat16", "float32"], "fp16"),
        Wrong(op, "x", cast(torch.float64), ["float64", "bfloat16", "float32"], "fp64"),
        Wrong(op, "x", cast(torch.float8_e4m3fn), [E4M3, "bfloat16", "float32"], "fp8"),
        Wrong(op, "x", shape(64), [r"\[64\]", r"\[M, K\]", r"\[E, N, K\]"], "rank 1"),
        Wrong(op, "x", shape(1, 2, 3, 32), [r"\[1, 2, 3, 32\]", r"\[M, K\]", r"\[E, N, K\]"], "rank 4"),
        Wrong(op, "x", strided, ["contiguous", r"\[150, 64\]", "stride"], "strided"),
        Wrong(op, "x", lambda t: t.T.contiguous().T, ["contiguous", r"\[150, 64\]", "stride"], "transposed"),
        Wrong(op, "rounding", lambda _: "nearest", ["nearest", "rceil", "floor", "ceil", "even"], "unknown"),
        Wrong(op, "rounding", lambda _: "", ["rceil", "floor", "ceil", "even"], "empty"),
        Wrong(op, "rounding", lambda _: "RCEIL", ["RCEIL", "rceil"], "case"),
    ]
    if op != "quantize_rows":
        cases += offs_cases(op)
        cases.append(Wrong(op, "offs", lambda _: None, ["None", "2-D"], "missing"))
        cases.append(Wrong(op, "x", shape(3, 50, 64), ["offs", "None", "3-D"], "offs with 3-D"))
    return cases


def product_cases() -> list[Wrong]:
    rows = []
    for op, left, right in (("grouped_mm", "a", "b"), ("grouped_mm_dgrad", "dy", "wt")):
        rows += operand_cases(op, left, right, (M, K), (GROUPS, N, K))
        rows += offs_cases(op, groups_from=True)
        rows.append(Wrong(op, "out_dtype", lambda _: torch.float16, ["float16", "bfloat16", "float32"], "fp16"))
        rows.append(Wrong(op, "out_dtype", lambda _: torch.float8_e4m3fn, [E4M3, "bfloat16", "float32"], "fp8"))
    bias = {
        "dtype": (cast(torch.bfloat16), ["bfloat16", "float32"]),
        "shape": (shape(GROUPS, N + 1), [r"\[3, 41\]", r"\[3, 40\]"]),
        "rank": (shape(N), [r"\[40\]", r"\[E, N\]"]),
        "strided": (strided, ["contiguous", "stride"]),
        "device": (other_device, ["cpu", "meta|cuda"]),
    }
    rows += [Wrong("grouped_mm", "bias", spoil, says, why) for why, (spoil, says) in bias.items()]
    depth = ref.padded_tokens(M, GROUPS)
    for op in (
        "grouped_mm_wgrad",
        "grouped_mm_wgrad.accumulate",
        "grouped_mm_wgrad.plain",
        "grouped_mm_wgrad.accumulate_plain",
    ):
        tokens = 160 if op.endswith("plain") else depth
        rows += operand_cases(op, "dyt", "xt", (N, tokens), (K, tokens))
        rows += offs_cases(op)
        if "accumulate" not in op:
            rows.append(Wrong(op, "out_dtype", lambda _: torch.float16, ["float16", "bfloat16", "float32"], "fp16"))
            continue
        grad = re.escape(str([GROUPS, N, K]))
        rows += [
            Wrong(op, "main_grad", cast(torch.bfloat16), ["bfloat16", "float32"], "bf16"),
            Wrong(op, "main_grad", cast(torch.float64), ["float64", "float32"], "fp64"),
            Wrong(op, "main_grad", shape(GROUPS, K, N), [grad, re.escape(str([GROUPS, K, N]))], "transposed"),
            Wrong(op, "main_grad", shape(GROUPS + 1, N, K), [grad, re.escape(str([GROUPS + 1, N, K]))], "groups"),
            Wrong(op, "main_grad", shape(N, K), [r"\[E, N, K\]", re.escape(str([N, K]))], "rank"),
            Wrong(op, "main_grad", strided, ["contiguous", "stride"], "strided"),
            Wrong(op, "main_grad", other_device, ["cpu", "meta|cuda"], "device"),
        ]
    return rows


CASES = [
    *(case for op in ("quantize_rows", "quantize_cols", "quantize_both") for case in quantize_cases(op)),
    *product_cases(),
    Wrong("zero_padding_", "data", cast(torch.uint8), ["uint8", E4M3], "dtype"),
    Wrong("zero_padding_", "data", shape(2, 40, 160), [r"\[2, 40, 160\]", r"\[N, Tc\]"], "rank"),
    Wrong("zero_padding_", "data", strided, ["contiguous", "stride"], "strided"),
    Wrong("zero_padding_", "data", shape(40, 150), ["150", "multiple of 32"], "no whole blocks"),
    Wrong("zero_padding_", "scale", cast(torch.uint8), ["uint8", E8M0], "dtype"),
    Wrong("zero_padding_", "scale", shape(40, 6), [r"\[40, 6\]", r"\[40, 5\]"], "shape"),
    Wrong("zero_padding_", "scale", strided, ["contiguous", "stride"], "strided"),
    Wrong("zero_padding_", "scale", other_device, ["cpu", "meta|cuda"], "device"),
    *offs_cases("zero_padding_"),
]


def mutable_arguments(op: str) -> tuple[str, ...]:
    return ("data", "scale") if op == "zero_padding_" else ("main_grad",) if "accumulate" in op else ()


def assert_refused(op: str, arguments: dict[str, object], name: str, says: list[str]) -> None:
    """The call raises, the text is complete, and no target has changed."""
    targets = [arguments[target] for target in mutable_arguments(op) if arguments[target].device.type != "meta"]
    before = [ref.bits(target).clone() for target in targets]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call(op, arguments)
    text = str(caught.value)
    for pattern in (rf"\b{name}\b", r"must|expected|needs|ends past", *says):
        assert re.search(pattern, text), f"{pattern!r} not in {text!r}"
    for target, wanted in zip(targets, before, strict=True):
        ref.assert_same_bits(ref.bits(target), wanted, "a target after an error")


def spoilt(case: Wrong, device: torch.device) -> dict[str, object]:
    arguments = good_arguments(case.op, device)
    if case.name == "bias":
        arguments["bias"] = torch.zeros(GROUPS, N, device=device)
    arguments[case.name] = case.spoil(arguments.get(case.name))
    return arguments


def test_good_arguments_are_good(device: torch.device) -> None:
    """Guards the cases below: what they spoil works unspoilt."""
    for op in {case.op for case in CASES}:
        call(op, good_arguments(op, device))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_argument(case: Wrong, device: torch.device) -> None:
    assert_refused(case.op, spoilt(case, device), case.name, case.says)


CONTRACTIONS = [
    ("grouped_mm", "a", "b", (GROUPS, N, 96)),
    ("grouped_mm_dgrad", "dy", "wt", (GROUPS, N, 96)),
    ("grouped_mm_wgrad", "dyt", "xt", (K, 640)),
    ("grouped_mm_wgrad.accumulate", "dyt", "xt", (K, 640)),
    ("grouped_mm_wgrad.plain", "dyt", "xt", (K, 192)),
]


def differing(op: str, right: str, sizes: tuple[int, ...], device: torch.device) -> dict[str, object]:
    data, scale = random_operand(sizes, "finite", 1, device)
    return good_arguments(op, device) | {right: data, f"{right}_scale": scale}


@pytest.mark.parametrize(("op", "left", "right", "sizes"), CONTRACTIONS)
def test_contractions_differ(op: str, left: str, right: str, sizes: tuple[int, ...], device: torch.device) -> None:
    """Two operands, each with scales that fit it, whose contraction extents differ."""
    arguments = differing(op, right, sizes, device)
    assert_refused(op, arguments, right, [rf"\b{left}\b", str(sizes[-1]), str(arguments[left].shape[-1])])


# What follows this section cannot be seen without data or storage: the values of offs, addresses, layouts other than
# strided, memory that runs out.
FAKES = ("meta", "FakeTensorMode", "symbolic sizes")
fakes = pytest.mark.parametrize("kind", FAKES)


def to_meta(t: Tensor, device: torch.device) -> Tensor:
    """Of the same strides, which Tensor.to would not keep. What is on another device goes to the CPU, to differ too."""
    target = "meta" if t.device.type == device.type else "cpu"
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=target)


def refusal(op: str, arguments: dict[str, object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call(op, arguments)
    return str(caught.value)


def assert_fakes_refused(op: str, arguments: dict[str, object], kind: str, device: torch.device) -> None:
    """The same text as for real tensors, but for the devices' names on meta."""
    wanted = refusal(op, arguments)
    if kind == "meta":
        devices = r"\b(cpu|meta|cuda:\d+)\b"
        metas = {
            name: to_meta(value, device) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        assert re.sub(devices, "", refusal(op, metas)) == re.sub(devices, "", wanted)
        return
    symbolic = kind == "symbolic sizes"
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)

    def fake(name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if not symbolic:
            return mode.from_tensor(value)
        symbols = StatelessSymbolicContext([DimDynamic.DYNAMIC] * value.dim())
        return mode.from_tensor(value, symbolic_context=symbols, source=ConstantSource(name))

    made = {name: fake(name, value) for name, value in arguments.items()}
    with mode:
        text = refusal(op, made)
    if symbolic:  # these stand for the sizes, in the text
        wanted, text = (re.sub(r"\[.*?\]|(?<=of )\d+", "", t) for t in (wanted, text))
    assert text == wanted


@fakes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_argument_without_data(case: Wrong, kind: str, device: torch.device) -> None:
    """Tracing and export refuse what the kernels refuse."""
    assert_fakes_refused(case.op, spoilt(case, device), kind, device)


@fakes
@pytest.mark.parametrize(("op", "left", "right", "sizes"), CONTRACTIONS)
def test_contractions_differ_without_data(
    op: str, left: str, right: str, sizes: tuple[int, ...], kind: str, device: torch.device
) -> None:
    assert_fakes_refused(op, differing(op, right, sizes, device), kind, device)


def test_unsupported_device(device: torch.device) -> None:
    """Tensors on a device that has no kernels: an error, not a wrong result."""
    if device.type != "cpu":
        pytest.skip("CPU tensors are supported in every build")
    x = torch.empty(4, 32, device="meta")
    data, scale = ops.quantize_rows(x)  # shapes only
    assert data.device.type == scale.device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        ops.quantize_rows(torch.ones(4, 32).to_mkldnn())


# ------------------------------------------------------------------------------------------------- values of offs

BAD_OFFS = {  # values, all multiples of 32, and what the message must quote
    "decreasing": ([64, 32, 96], ["32", "64"]),
    "negative": ([-32, 64, 96], ["-32"]),
    "negative later": ([64, -64, 96], ["-64"]),
    "beyond M": ([64, 64, 100000], ["100000"]),
    "beyond M early": ([100000, 100000, 100000], ["100000"]),
    "largest": ([64, 64, 2**31 - 32], [str(2**31 - 32)]),
    "smallest": ([-(2**31), 64, 96], [str(-(2**31))]),
}
OFFS_OPS = (
    "quantize_cols", "quantize_both", "zero_padding_", "grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad",
    "grouped_mm_wgrad.accumulate", "grouped_mm_wgrad.plain", "grouped_mm_wgrad.accumulate_plain",
)  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OFFS)
@pytest.mark.parametrize("op", OFFS_OPS)
def test_bad_offs_values(op: str, bad: str, device: torch.device, checks_offs: bool) -> None:
    values, says = BAD_OFFS[bad]
    arguments = good_arguments(op, device)
    arguments["offs"] = torch.tensor(values, dtype=torch.int32, device=device)
    if checks_offs:
        assert_refused(op, arguments, "offs", says)
        return
    # A device cannot raise without a sync. It must stay in bounds: operands and targets lie between guards.
    guarded, guards = {}, []
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != "offs":
            size = value.numel() * value.element_size()
            buffer = torch.full((size + 8192,), 0xA5, dtype=torch.uint8, device=device)
            buffer[4096:-4096] = value.view(torch.uint8).flatten()
            guards.append(buffer)
            value = buffer[4096:-4096].view(value.dtype).view(value.shape)
        guarded[name] = value
    call(op, guarded)
    for buffer in guards:
        assert (buffer[:4096] == 0xA5).all()
        assert (buffer[-4096:] == 0xA5).all()


@pytest.mark.parametrize("op", OFFS_OPS)
def test_one_row_beyond_the_end(op: str, device: torch.device, checks_offs: bool) -> None:
    """offs[-1] = M is the last good value, M + 1 (or the next block, in the plain layout) the first bad one."""
    if not checks_offs:
        pytest.skip("a device clamps offs instead of raising (test_bad_offs_values covers it)")
    tokens = 160 if op in ("zero_padding_",) or op.endswith("plain") else M
    step = 32 if tokens == 160 else 1
    if op.startswith("grouped_mm_wgrad") and tokens == M:  # the operands' own padding is the only bound: 128 a group
        tokens, step = ref.padded_tokens(M, GROUPS), 1
    arguments = good_arguments(op, device)
    arguments["offs"] = torch.tensor([0, 0, tokens], dtype=torch.int32, device=device)
    call(op, arguments)
    arguments["offs"] = torch.tensor([0, 0, tokens + step], dtype=torch.int32, device=device)
    assert_refused(op, arguments, "offs", [str(tokens + step)])


@pytest.mark.parametrize("op", ["grouped_mm_wgrad", "grouped_mm_wgrad.accumulate"])
def test_groups_that_overrun_the_padded_layout(op: str, device: torch.device, checks_offs: bool) -> None:
    """Each end is within the operand's columns, but the groups' 128-aligned starts are not."""
    if not checks_offs:
        pytest.skip("a device clamps offs instead of raising (test_bad_offs_values covers it)")
    a, b = random_operand((N, 128), "finite", 1, device), random_operand((K, 128), "finite", 2, device)
    arguments = {
        "dyt": a.data,
        "dyt_scale": a.scale,
        "xt": b.data,
        "xt_scale": b.scale,
        "offs": offs_of([1, 1, 1], device),
    }
    if "accumulate" in op:
        arguments["main_grad"] = torch.ones(GROUPS, N, K, device=device)
    assert_refused(op, arguments, "offs", ["128"])


@pytest.mark.parametrize("op", ["zero_padding_", "grouped_mm_wgrad.plain", "grouped_mm_wgrad.accumulate_plain"])
@pytest.mark.parametrize("values", [[33, 33, 64], [32, 40, 64], [32, 64, 95]], ids=str)
def test_plain_layout_needs_whole_blocks(op: str, values: list[int], device: torch.device, checks_offs: bool) -> None:
    if not checks_offs:
        pytest.skip("a device cannot raise for values of offs without a sync")
    arguments = good_arguments(op, device) | {"offs": torch.tensor(values, dtype=torch.int32, device=device)}
    assert_refused(op, arguments, "offs", ["32", "33|40|95"])


# ------------------------------------------------------------------------------------------------------- check_offs


@pytest.mark.parametrize("values", [[], [0], [5], [0, 0, 3, 3, 5]], ids=str)
def test_check_offs_accepts(values: list[int], device: torch.device) -> None:
    assert mxfp8_moe.check_offs(torch.tensor(values, dtype=torch.int32, device=device), 5) is None


@pytest.mark.parametrize("values", [[6], [-1], [3, 2], [0, 5, 4], [0, 5, 6], [5, 2**31 - 1], [-(2**31)]], ids=str)
def test_check_offs_refuses_values(values: list[int], device: torch.device) -> None:
    offs = torch.tensor(values, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"offs.*\b5\b") as caught:
        mxfp8_moe.check_offs(offs, 5)
    assert any(str(value) in str(caught.value) for value in values)


@pytest.mark.parametrize(
    ("offs", "says"),
    [
        (torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.zeros(3), "float32"),
        (torch.zeros(3, 1, dtype=torch.int32), r"\[3, 1\]"),
        (torch.tensor(5, dtype=torch.int32), r"\[\]"),
    ],
    ids=["int64", "float32", "2-D", "scalar"],
)
def test_check_offs_refuses_types(offs: Tensor, says: str, device: torch.device) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"offs.*int32.*{says}"):
        mxfp8_moe.check_offs(offs.to(device), 5)


# --------------------------------------------------------------------------------------------------------- memory


def test_out_of_memory_is_an_error(device: torch.device) -> None:
    """An output that cannot be allocated raises and names its shape; the process lives on."""
    # dw [E, N, K] grows with E alone, for which offs is the only operand: 2^24 * 2048 * 2048 elements.
    offs = torch.zeros(2**24, dtype=torch.int32, device=device)
    data = torch.zeros(2048, 0, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(2048, 0, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    with pytest.raises(RuntimeError, match=r"(?s)memory.*16777216, 2048, 2048"):
        ops.grouped_mm_wgrad(data, scales, data, scales, offs)
    assert ops.grouped_mm_wgrad(data, scales, data, scales, offs[:2]).shape == (2, 2048, 2048)
