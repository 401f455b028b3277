"""A call of the real gfx950 backend, through libamdhip64's API, captured as a graph and replayed with changed `offs`.

A process of its own, whose libamdhip64.so is the emulator: the product's library opens it as it would the driver.
"""

import json
import os
import subprocess
import sys

from emulator import LIBRARY, ROOT

SCRIPT = r"""
import ctypes, json, sys
import torch
import mxfp8_moe
from pathlib import Path
from test_launcher import Backend, Depth, Error, Exec, Rows
hip = ctypes.CDLL("libamdhip64.so")
product = ctypes.CDLL(str(Path(mxfp8_moe.__file__).with_name("libmxfp8.so")))
product.mx_backends.restype = ctypes.POINTER(ctypes.POINTER(Backend))
count = ctypes.c_int()
backends = product.mx_backends(ctypes.byref(count))
backend = next(b.contents for b in backends[: count.value] if b.contents.name == b"gfx950")
hold = []

def check(code):
    assert code == 0, (code, hip.hipGetLastError())

def device(tensor):
    pointer = ctypes.c_void_p()
    size = ctypes.c_size_t(tensor.nbytes)
    check(hip.hipMalloc(ctypes.byref(pointer), size))
    check(hip.hipMemcpy(pointer, ctypes.c_void_p(tensor.data_ptr()), size, 1))
    return pointer.value

def host(pointer, like):
    out = torch.empty_like(like)
    check(hip.hipMemcpy(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(pointer), ctypes.c_size_t(out.nbytes), 2))
    return out

torch.manual_seed(0)
# Small integers times a power of two of their block: all sums are exact, whatever their order.
def operand(*shape):
    blocks = (*shape[:-1], shape[-1] // 32)
    x = torch.randint(-3, 4, (*blocks, 32)) * torch.exp2(torch.randint(-3, 4, (*blocks, 1)))
    return torch.ops.mxfp8.quantize_rows(x.flatten(-2))

if sys.argv[2] == "rows":
    m, k, n, groups = 70, 96, 40, 3
    operands = operand(m, k) + operand(groups, n, k)
    routings, out = [[20, 20, 64], [0, 33, 70], [1, 2, 3]], torch.full((m, n), 7, dtype=torch.bfloat16)
    args = Rows(*map(device, operands), None, None, device(out), m, n, k, groups, 0)
else:  # tiles enough for a persistent kernel
    m, k, n, groups = 512, 4096, 4096, 2
    operands = operand(n, m) + operand(k, m)
    routings, out = [[256, 512], [224, 480], [0, 288]], torch.full((groups, n, k), 7, dtype=torch.bfloat16)
    args = Depth(*map(device, operands), None, device(out), n, k, m, groups, 0, 0, 1)
routings = [torch.tensor(r, dtype=torch.int32) for r in routings]
args.offs = device(routings[0])
stream = ctypes.c_void_p()
check(hip.hipStreamCreate(ctypes.byref(stream)))
error = Error()
assert backend.available(0, ctypes.byref(error)) == 0, error.text
where = Exec(workspace=device(torch.full((1 << 20,), 255, dtype=torch.uint8)), stream=stream.value, device=0)

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
untouched = torch.equal(host(args.out, out), out)
args.a = 0  # a graph holds its own copy of the arguments
replays = []
for offs in routings:
    check(hip.hipMemcpy(ctypes.c_void_p(args.offs), ctypes.c_void_p(offs.data_ptr()), ctypes.c_size_t(offs.nbytes), 1))
    check(hip.hipGraphLaunch(executable, stream))
    check(hip.hipStreamSynchronize(stream))
    if sys.argv[2] == "rows":
        wanted = torch.ops.mxfp8.grouped_mm(*operands, offs)
    else:
        wanted = torch.ops.mxfp8.grouped_mm_wgrad(*operands, offs, plain=True)
    replays.append(torch.equal(host(args.out, out), wanted))
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
