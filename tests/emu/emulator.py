"""ctypes access to the emulator's HIP API, and builders for test kernels: C (ziglang clang) and assembly (llvm-mc).

Everything is cached under build/emu by the hash of its source, so a test run compiles only what changed. The emulator
itself is built by make.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
from typing import ClassVar

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emu"
KERNELS = pathlib.Path(__file__).parent / "kernels"
LIBRARY = pathlib.Path(os.environ.get("MXFP8_EMU_LIBRARY", BUILD / "libmxfp8_emu.so"))
ZIG = [sys.executable, "-m", "ziglang"]


TOOL_ENV = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # a sanitizer's runtime is for this process only


def run(command, **kw):
    p = subprocess.run([str(c) for c in command], capture_output=True, text=True, **{"env": TOOL_ENV, **kw})
    if p.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{p.stdout}\n{p.stderr}")
    return p.stdout


def _cached(source, suffix, make):
    out = BUILD / "code" / (hashlib.sha256(source.encode()).hexdigest()[:16] + suffix)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        make(out)
    return out


def _link(obj, out):
    run([*ZIG, "ld.lld", "-shared", "-o", out, obj])


def compile_c(source, *flags):
    """A gfx950 code object from C text."""

    def make(out):
        c, obj = out.with_suffix(".c"), out.with_suffix(".o")
        c.write_text(source)
        run(
            [
                *ZIG,
                "clang",
                "--target=amdgcn-amd-amdhsa",
                "-mcpu=gfx950",
                "-nogpulib",
                "-O3",
                "-std=gnu23",
                "-ffreestanding",
                f"-I{KERNELS}",
                *flags,
                "-c",
                c,
                "-o",
                obj,
            ]
        )
        _link(obj, out)

    return _cached(source + (KERNELS / "device.h").read_text() + repr(flags), ".hsaco", make)


ASM_HEAD = """.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
.text
.globl k
.p2align 8
.type k,@function
k:
{body}
  s_endpgm
.Lend:
.size k, .Lend-k
.rodata
.p2align 6
.amdhsa_kernel k
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_kernarg_size {kernarg}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset {accum}
  .amdhsa_ieee_mode 1
  .amdhsa_dx10_clamp 1
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
  .amdhsa_fp16_overflow {ovfl}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.kernels:
  - .name: k
    .symbol: k.kd
    .kernarg_segment_size: {kernarg}
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 64
    .vgpr_count: {vgprs}
    .max_flat_workgroup_size: 1024
    .args:
{args}
...
.end_amdgpu_metadata
"""


def assemble(body, lds=0, vgprs=128, accum=64, nargs=1, ovfl=0):
    """A code object with one kernel k: s[0:1] = kernargs (nargs pointers), s2 = block x, v0 = thread, body as given."""
    args = "\n".join(
        f"      - {{ .offset: {8 * n}, .size: 8, .value_kind: global_buffer, .address_space: global }}"
        for n in range(nargs)
    )
    source = ASM_HEAD.format(body=body, lds=lds, kernarg=8 * nargs, vgprs=vgprs, accum=accum, args=args, ovfl=ovfl)

    def make(out):
        s, obj = out.with_suffix(".s"), out.with_suffix(".o")
        s.write_text(source)
        run(["llvm-mc-22", "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-filetype=obj", "-o", obj, s])
        _link(obj, out)

    return _cached(source, ".hsaco", make)


@functools.cache
def library():
    sources = [s for s in (ROOT / "emu").glob("*") if s.suffix in (".c", ".h", ".def")]
    if not LIBRARY.exists() or any(s.stat().st_mtime > LIBRARY.stat().st_mtime for s in sources):
        raise RuntimeError(f"{LIBRARY} is missing or older than emu/: `make test-gfx950` builds it")
    lib = ctypes.CDLL(str(LIBRARY))
    for name in ("hipGetErrorName", "hipGetErrorString", "emu_last_error", "emu_counter_name"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emu_counter.restype = ctypes.c_uint64
    return lib


class HipError(RuntimeError):
    def __init__(self, code):
        super().__init__(f"{library().hipGetErrorName(code).decode()}: {library().emu_last_error().decode()}")
        self.code = code


def check(code):
    if code:
        raise HipError(code)


class Buffer:
    """Device memory of exactly the given size."""

    live: ClassVar[set[int]] = set()

    def __init__(self, data):
        """data: a numpy array to copy in, or a number of bytes left as junk."""
        lib = library()
        size = data if isinstance(data, int) else data.nbytes
        p = ctypes.c_void_p()
        check(lib.hipMalloc(ctypes.byref(p), ctypes.c_size_t(size)))
        self.ptr, self.size = p.value, size
        self.live.add(p.value)
        if not isinstance(data, int):
            data = np.ascontiguousarray(data)
            check(lib.hipMemcpy(p, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(size), 1))

    def read(self, dtype, shape=-1):
        out = np.empty(self.size, np.uint8)
        check(
            library().hipMemcpy(
                out.ctypes.data_as(ctypes.c_void_p), ctypes.c_void_p(self.ptr), ctypes.c_size_t(self.size), 2
            )
        )
        return out.view(dtype).reshape(shape)

    def free(self):
        self.live.remove(self.ptr)
        check(library().hipFree(ctypes.c_void_p(self.ptr)))

    @classmethod
    def free_all(cls):
        """What callers that failed did not free."""
        while cls.live:
            check(library().hipFree(ctypes.c_void_p(cls.live.pop())))


class Module:
    def __init__(self, path):
        self.image = pathlib.Path(path).read_bytes()
        self.handle = ctypes.c_void_p()
        check(library().hipModuleLoadData(ctypes.byref(self.handle), self.image))

    def function(self, name):
        f = ctypes.c_void_p()
        check(library().hipModuleGetFunction(ctypes.byref(f), self.handle, name.encode()))
        return f


def launch(function, grid, block, args, lds=0, sync=True):
    """args: Buffer, int (int32) or ctypes values, in kernel order."""
    lib = library()
    values = [
        ctypes.c_void_p(a.ptr) if isinstance(a, Buffer) else ctypes.c_int(a) if isinstance(a, int) else a for a in args
    ]
    params = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
    grid, block = ([*list(x), 1, 1, 1] for x in (grid, block))
    check(lib.hipModuleLaunchKernel(function, *grid[:3], *block[:3], lds, None, params, None))
    if sync:
        check(lib.hipDeviceSynchronize())


def run_asm(body, out_bytes, data=(), threads=64, grid=1, **kw):
    """Assembles body, runs it with pointers (out, *data), returns out as bytes."""
    out = Buffer(out_bytes)
    buffers = [out] + [Buffer(d) for d in data]
    m = Module(assemble(body, nargs=len(buffers), **kw))
    launch(m.function("k"), [grid], [threads], buffers)
    return out.read(np.uint8)


def stops(body, out_bytes=4096, data=(), **kw):
    """The text with which running body stops; fails when it does not stop."""
    try:
        run_asm(body, out_bytes, data, **kw)
    except HipError as e:
        return str(e)
    raise AssertionError("the kernel ran to its end")


def set_option(name, value):
    assert library().emu_set_option(name.encode(), str(value).encode()) == 0, (name, value)


DEFAULTS = {
    "SEED": 0,
    "STRICT": 1,
    "RACES": 1,
    "OOB": "stop",
    "FILL": "zero",
    "RANGE": "rj",
    "SADDR": "zext",
    "FP8_EDGE": "round",
    "SCALE255": "apply",
    "PERMLANE": "all",
    "CONFLICT_STOP": 1,
    "SUM": "wide",
    "LANDING": "seed",
    "THREADS": 1,
    "BLOCKS": 2,
    "DEFER": 0,
    "MAX_INSTS": 0,
}


def reset(**changes):
    """Default options but for `changes`, no error, counters at 0."""
    for name, value in {**DEFAULTS, **changes}.items():
        set_option(name, value)
    library().emu_clear_error()
    library().emu_reset_counters()


def counter(name):
    return library().emu_counter(name.encode())
