"""The part of the self-test that is about gfx950: what its instructions do with given registers and addresses.

The first three functions say where an element of an operand, a scale and a result is in the lanes' registers, as the
kernels assume it (AMD CDNA4 ISA 7.1.5, 7.2.1); the device's answer to random operands must be what follows from them.
Where public descriptions of the memory instructions disagree, the kernels are right under each, and the device's
reading is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import mxfp8_moe
from mxfp8_moe.selftest.reference import BLOCK, E4M3, E8M0, NAN, NAN_SCALE, CheckError, expect, generator, integers

LANES, REGISTERS, TILE, DEPTH = 64, 8, 16, 128
MARK = 0xA5A5A5A5  # MX_GFX950_PROBE_MARK
BYTES, SIZE, SCALAR = 3072, 8192, 512  # what a buffer is said to have, what it has, the scalar offset
COPY = 1024  # immediate offset of the second copy to LDS


def data_position(lane: int, byte: int) -> tuple[int, int]:
    """Row and place along the contraction of byte 0 to 31 of a lane's operand registers."""
    return lane % 16, 64 * (byte // 16) + 16 * (lane // 16) + byte % 16


def scale_position(lane: int) -> tuple[int, int]:
    """Row and 32-element block of the scale that a lane holds."""
    return lane % 16, lane // 16


def result_position(lane: int, register: int) -> tuple[int, int]:
    """Row (of the first operand) and column (row of the second) of a lane's result."""
    return 4 * (lane // 16) + register, lane % 16


class _Args(ctypes.Structure):
    """struct mx_gfx950_probe_args (kernels/gfx950/probe.h)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "a_scale", "b_scale", "c", "d", "offset", "from_", "loaded",
                                               "loaded_word", "copied", "to", "to_word")),
        *((name, ctypes.c_uint32) for name in ("bytes", "size", "scalar_offset")),
    ]  # fmt: skip


def is_emulated(device: torch.device) -> bool:
    """Whether the device's tensors go to the emulator."""
    return device.type == "cpu" and os.environ.get("MXFP8_BACKEND") == "gfx950-emu"


def runs_on(device: torch.device) -> bool:
    """Whether the device is a gfx950, or its emulator."""
    if device.type == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").startswith("gfx950"))
    return is_emulated(device)


@contextlib.contextmanager
def emulator_option(name: str, value: str, usual: str) -> Iterator[None]:
    """Sets an option of the emulator meanwhile."""
    emulator = ctypes.CDLL(os.environ["MXFP8_EMU_LIBRARY"])
    emulator.emu_set_option(name.encode(), value.encode())
    try:
        yield
    finally:
        emulator.emu_set_option(name.encode(), usual.encode())


def _both_readings(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The emulator stops where descriptions disagree, as no kernel should depend on it. Here that is the question."""
    return emulator_option("CONFLICT_STOP", "0", "1") if is_emulated(device) else contextlib.nullcontext()


def _probe(device: torch.device, inputs: dict[str, Tensor], scalar: int = 0) -> dict[str, Tensor]:
    """Runs both probes; inputs that are not given are 0, offsets `OFFSETS`. Outputs are filled with the mark before."""
    words = {"a": 512, "b": 512, "a_scale": 64, "b_scale": 64, "c": 256, "offset": 64, "from_": SIZE // 4}
    outputs = {"d": 4096, "loaded": 256, "loaded_word": 64, "copied": 512, "to": SIZE // 4, "to_word": SIZE // 4}
    tensors = {name: torch.zeros(count, dtype=torch.int32) for name, count in words.items()}
    tensors |= {name: torch.full((count,), MARK - 2**32, dtype=torch.int32) for name, count in outputs.items()}
    for name, tensor in (inputs | {"offset": OFFSETS.to(torch.uint32)}).items():
        tensors[name] = tensor.contiguous().view(torch.uint8).flatten().view(torch.int32)
        assert len(tensors[name]) == words[name], name
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    args = _Args(**pointers, bytes=BYTES, size=SIZE, scalar_offset=scalar)
    error = ctypes.create_string_buffer(512)
    library = ctypes.CDLL(str(Path(mxfp8_moe.__file__).with_name("libmxfp8.so")))
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    index = (device.index or 0) if on_gpu else -1
    with _both_readings(device):
        failed = library.mxfp8_probe_gfx950(ctypes.byref(args), index, ctypes.c_void_p(stream), error)
    if failed:
        raise RuntimeError(error.value.decode())
    return {name: tensors[name].cpu() for name in outputs}


# ---------------------------------------------------------------------------------------------------------------------
# The matrix instruction


def _operand_registers(matrix: Tensor) -> Tensor:
    """Bytes ``[16, 128]`` as the lanes hold them: ``[64, 32]``."""
    at = torch.tensor([[data_position(lane, byte) for byte in range(4 * REGISTERS)] for lane in range(LANES)])
    return matrix[at[..., 0], at[..., 1]]


def _scale_registers(scales: Tensor) -> Tensor:
    """Four scale matrices ``[4, 16, 4]`` as the lanes hold them, one in each byte: ``[64, 4]``."""
    at = torch.tensor([scale_position(lane) for lane in range(LANES)])
    return scales[:, at[:, 0], at[:, 1]].T


def _matrix_check(device: torch.device, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    """Codes a, b ``[16, 128]`` and scales ``[4, 16, 4]``; every pair of scale bytes. Sums are exact in float32."""
    c = torch.randint(-8, 9, (TILE, TILE), generator=generator(1)).float()
    at = torch.tensor([[result_position(lane, register) for register in range(4)] for lane in range(LANES)])
    got = _probe(
        device,
        {
            "a": _operand_registers(a),
            "b": _operand_registers(b),
            "a_scale": _scale_registers(a_scale),
            "b_scale": _scale_registers(b_scale),
            "c": c[at[..., 0], at[..., 1]],
        },
    )["d"].view(torch.float32)
    left, right = (
        E4M3[data.long()] * E8M0[scale.long()].repeat_interleave(BLOCK, -1)
        for data, scale in ((a, a_scale), (b, b_scale))
    )
    wanted = torch.einsum("irk,jck->ijrc", left, right) + c
    for i, j in product(range(4), range(4)):
        result = torch.full((TILE, TILE), float("nan"))
        result[at[..., 0], at[..., 1]] = got.view(4, 4, LANES, 4)[i, j]
        expect(result, wanted[i, j], f"scale bytes {i} and {j}, [row, column]")


def _random_data(seed: int) -> Tensor:
    return integers((TILE, DEPTH), seed)[0]


def _random_scales(seed: int) -> Tensor:
    return torch.randint(124, 131, (4, TILE, DEPTH // BLOCK), generator=generator(seed), dtype=torch.uint8)


ONE = 0x38
UNSCALED = torch.full((4, TILE, DEPTH // BLOCK), 127, dtype=torch.uint8)


def check_data_map(device: torch.device) -> str:
    """Rows, columns and pairs of elements."""
    _matrix_check(device, _random_data(2), _random_data(5), UNSCALED, UNSCALED)
    return "rows, columns, elements that meet; C added"


def check_scale_map(device: torch.device) -> str:
    """Whose scale a lane's byte is, for every choice of bytes."""
    ones = torch.full((TILE, DEPTH), ONE, dtype=torch.uint8)
    _matrix_check(device, ones, ones, _random_scales(8), _random_scales(9))
    return "lane and byte (op_sel) of every row's and block's scale"


def check_blocks(device: torch.device) -> str:
    """Which elements a scale scales."""
    _matrix_check(device, _random_data(10), _random_data(13), _random_scales(16), _random_scales(17))
    return "elements of every block, all scales different"


def check_scale_range(device: torch.device) -> str:
    """The ends of E8M0, and NaN of a scale and of an element."""
    a, b, low, high = _random_data(18), _random_data(21), UNSCALED.clone(), UNSCALED.clone()
    low[:], high[:] = 0, 254  # 2^-127 and 2^127
    _matrix_check(device, a, b, low, high)
    _matrix_check(device, a, b, high, low)
    a[5, 100] = NAN
    low[:] = UNSCALED
    low[:, 9, 2] = NAN_SCALE
    _matrix_check(device, a, b, low, UNSCALED)
    return "0x00 is 2^-127, 0xfe 2^127, 0xff NaN; NaN stays in its row"


# ---------------------------------------------------------------------------------------------------------------------
# Memory

# In range; straddling the end of the buffer for 16 bytes; at and past it; the same for the copy at +1024; and where the
# scalar offset decides. Differing places, so that stores do not meet.
_EDGES = [BYTES - 8, BYTES, BYTES + 16, BYTES + 32, 2**31, 2**31 + 4096, BYTES - COPY - 8, BYTES - COPY - 40,
          BYTES - COPY + 8, BYTES - COPY + 24, BYTES - SCALAR, BYTES - SCALAR - 24, BYTES - 64, BYTES - 32]  # fmt: skip
OFFSETS = torch.tensor([16 * lane for lane in range(LANES - len(_EDGES))] + _EDGES)


def _loaded(source: Tensor, offsets: Tensor, scalar: int, width: int, counted: bool, per_word: bool) -> Tensor:
    """What ``width`` words at each offset read, under a reading of the range check: [lane, word], -1 where nothing."""
    end = offsets + (scalar if counted else 0)
    word = torch.arange(width)
    last = end[:, None] + 4 * (word + 1 if per_word else torch.full_like(word, width))
    at = ((offsets + scalar)[:, None] // 4 + word).clamp(max=len(source) - 1)
    return torch.where(last <= BYTES, source[at].long(), -1)


def check_memory(device: torch.device) -> str:
    """Loads outside give 0, stores outside write nothing; and which reading of the range check the device has."""
    source = torch.arange(1, SIZE // 4 + 1, dtype=torch.int32)
    plain, shifted = (_probe(device, {"from_": source}, scalar) for scalar in (0, SCALAR))
    fitting = []
    for counted, per_word, zeros in product((True, False), (True, False), (True, False)):
        fits = True
        for scalar, got in ((0, plain), (SCALAR, shifted)):
            for name, at, width in (("loaded", 0, 4), ("loaded_word", 0, 1), ("copied", 0, 4), ("copied", COPY, 4)):
                read = got[name].view(-1, LANES, width)[int(at > 0)].long()
                outside = 0 if zeros or name != "copied" else MARK - 2**32
                wanted = _loaded(source, OFFSETS + at, scalar, width, counted, per_word)
                fits &= torch.equal(read, torch.where(wanted == -1, outside, wanted))
        if fits:
            fitting.append((counted, per_word, zeros))
    if len(fitting) != 1:
        raise CheckError(f"loads and copies fit {len(fitting)} of 8 readings of the range check, expected one")
    counted, per_word, zeros = fitting[0]
    for name, width in (("to", 4), ("to_word", 1)):
        wanted = torch.full((SIZE // 4,), MARK - 2**32, dtype=torch.int32)
        for lane, first in enumerate(OFFSETS.tolist()):
            for word in range(width):
                if first + 4 * (word + 1 if per_word else width) <= BYTES:
                    wanted[first // 4 + word] = lane << 8 | word
        if not torch.equal(plain[name], wanted):
            raise CheckError(f"{int((plain[name] != wanted).sum())} words of {4 * width}-byte stores differ")
    return (
        f"outside: loads give 0, stores nothing, copies to LDS {'write 0' if zeros else 'write nothing'}; the scalar "
        f"offset {'counts' if counted else 'does not count'}; an access across the end goes "
        f"{'word by word' if per_word else 'as a whole'}"
    )


CHECKS = [
    ("gfx950: matrix lanes", check_data_map),
    ("gfx950: scale lanes", check_scale_map),
    ("gfx950: scaled blocks", check_blocks),
    ("gfx950: scale range", check_scale_range),
    ("gfx950: buffers", check_memory),
]
