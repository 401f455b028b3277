"""Test kernels: from C (ziglang clang) and assembly (llvm-mc), kept under build/emu by the hash of their source."""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from emu.driver import LIBRARY, Buffer, HipError, Module, launch

KERNELS = pathlib.Path(__file__).parent / "kernels"
ZIG = [sys.executable, "-m", "ziglang"]
TOOL_ENV = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer's runtime is for this process only


def run(command, **kw):
    p = subprocess.run([str(c) for c in command], capture_output=True, text=True, **{"env": TOOL_ENV, **kw})
    if p.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{p.stdout}\n{p.stderr}")
    return p.stdout


def _cached(source, suffix, make):
    out = LIBRARY.parent / "code" / (hashlib.sha256(source.encode()).hexdigest()[:16] + suffix)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            made = pathlib.Path(folder) / out.name
            make(made)
            os.replace(made, out)  # whole or not at all: tests run side by side
    return out


def _link(obj, out):
    run([*ZIG, "ld.lld", "-shared", "-o", out, obj])


def compile_c(source, *flags):
    """A gfx950 code object from C text."""

    def make(out):
        c, obj = out.with_suffix(".c"), out.with_suffix(".o")
        c.write_text(source)
        usual = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-nogpulib", "-O3", "-std=gnu23", "-ffreestanding"]
        run([*ZIG, "clang", *usual, f"-I{KERNELS}", *flags, "-c", c, "-o", obj])
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
