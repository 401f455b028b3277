"""A call of the real gfx950 backend, through libamdhip64's API, captured as a graph and replayed with changed `offs`.

A process of its own, whose libamdhip64.so is the emulator: the product's library opens it as it would the driver.
"""

import json
import os
import subprocess
import sys

from emu.driver import LIBRARY, ROOT

SCRIPT = r"""
import ctypes, json, sys
import numpy as np
import torch
import mxfp8_moe
from pathlib import Path
from abi.args import Depth, Rows
from emu.driver import Buffer, check, library
from test_launcher import Backend, Error, Exec
hip = library()
product = ctypes.CDLL(str(Path(mxfp8_moe.__file__).with_name("libmxfp8.so")))
product.mx_backends.restype = ctypes.POINTER(ctypes.POINTER(Backend))
count = ctypes.c_int()
backends = product.mx_backends(ctypes.byref(count))
backend = next(b.contents for b in backends[: count.value] if b.contents.name == b"gfx950")

def bytes_of(tensor):
    return tensor.flatten().view(torch.uint8).numpy()

def device(*tensors):
    return [Buffer(bytes_of(tensor)).ptr for tensor in tensors]

def out_is(wanted):
    return bool((out.read(np.uint8) == bytes_of(wanted)).all())

torch.manual_seed(0)
# Small integers times a power of two of their block: all sums are exact, whatever their order.
def operand(*shape):
    blocks = (*shape[:-1], shape[-1] // 32)
    x = torch.randint(-3, 4, (*blocks, 32)) * torch.exp2(torch.randint(-3, 4, (*blocks, 1)))
    return torch.ops.mxfp8.quantize_rows(x.flatten(-2))

if sys.argv[2] == "rows":
    m, k, n, groups = 70, 96, 40, 3
    operands = operand(m, k) + operand(groups, n, k)
    routings, start = [[20, 20, 64], [0, 33, 70], [1, 2, 3]], torch.full((m, n), 7, dtype=torch.bfloat16)
    args = Rows(*device(*operands), m=m, n=n, k=k, groups=groups)
else:  # tiles enough for a persistent kernel
    m, k, n, groups = 512, 4096, 4096, 2
    operands = operand(n, m) + operand(k, m)
    routings, start = [[256, 512], [224, 480], [0, 288]], torch.full((groups, n, k), 7, dtype=torch.bfloat16)
    args = Depth(*device(*operands), n=n, k=k, depth=m, groups=groups, plain=1)
routings = [torch.tensor(r, dtype=torch.int32) for r in routings]
out, where_offs = Buffer(bytes_of(start)), Buffer(routings[0].numpy())
args.out, args.offs = out.ptr, where_offs.ptr
stream = ctypes.c_void_p()
check(hip.hipStreamCreate(ctypes.byref(stream)))
error = Error()
assert backend.available(0, ctypes.byref(error)) == 0, error.text
where = Exec(workspace=Buffer(np.full(1 << 20, 255, np.uint8)).ptr, stream=stream.value, device=0)

def call():
    gemm = getattr(backend, "gemm_" + sys.argv[2])
    assert gemm(ctypes.byref(args), ctypes.byref(where), ctypes.byref(error)) == 0, error.text

if sys.argv[1] == "loaded":  # else the first call, which loads the kernels, is the captured one
    call()
graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
check(hip.hipStreamBeginCapture(stream, 0))
call()
check(hip.hipStreamEndCapture(stream, ctypes.byref(graph)))
check(hip.hipGraphInstantiate(ctypes.byref(executable), graph, None, None, ctypes.c_size_t(0)))
untouched = out_is(start)
args.a = 0  # a graph holds its own copy of the arguments
replays = []
for offs in routings:
    where_offs.write(offs.numpy())
    check(hip.hipGraphLaunch(executable, stream))
    check(hip.hipStreamSynchronize(stream))
    if sys.argv[2] == "rows":
        wanted = torch.ops.mxfp8.grouped_mm(*operands, offs)
    else:
        wanted = torch.ops.mxfp8.grouped_mm_wgrad(*operands, offs, plain=True)
    replays.append(out_is(wanted))
print(json.dumps({"untouched": untouched, "replays": replays}))
"""


def run(when: str, op: str = "rows") -> dict[str, object]:
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(LIBRARY.parent),
        "PYTHONPATH": os.pathsep.join(paths),
        "MXFP8_EMU_OOB": "zero",
        "MXFP8_BACKEND": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT, when, op], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_capture_after_a_call() -> None:
    assert run("loaded")["replays"] == [True, True, True]


def test_capture_of_the_first_call() -> None:
    assert run("first") == {"untouched": True, "replays": [True, True, True]}


def test_capture_of_a_persistent_kernel() -> None:
    """Each replay counts its tiles from the start."""
    assert run("first", "depth") == {"untouched": True, "replays": [True, True, True]}
