"""The HIP API surface: values, errors, order of work, capture."""

import ctypes

import numpy as np
import pytest
from builders import assemble, compile_c, run

from emu.driver import LIBRARY, Buffer, HipError, Module, check, counter, launch, library, set_option

P = ctypes.c_void_p
SOURCE = """#include "device.h"
INL u32 at(void) { return __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x(); }
KERNEL void fill(GLB int *out, int value) { out[at()] = value; }
KERNEL void add(GLB int *out, int value) { out[at()] += value; }
KERNEL void ids(GLB u32 *out) {
  u32 x = __builtin_amdgcn_workitem_id_x(), y = __builtin_amdgcn_workitem_id_y(), z = __builtin_amdgcn_workitem_id_z();
  u32 b = (__builtin_amdgcn_workgroup_id_z() * 3 + __builtin_amdgcn_workgroup_id_y()) * 2 + __builtin_amdgcn_workgroup_id_x();
  u32 t = (z * __builtin_amdgcn_workgroup_size_y() + y) * __builtin_amdgcn_workgroup_size_x() + x;
  out[b * 24 + t] = b << 24 | z << 16 | y << 8 | x;
}
"""  # noqa: E501


@pytest.fixture
def module():
    return Module(compile_c(SOURCE))


def test_device():
    lib, n = library(), ctypes.c_int()
    check(lib.hipInit(0))
    check(lib.hipGetDeviceCount(ctypes.byref(n)))
    assert n.value == 1
    prop = (ctypes.c_uint8 * 1472)()
    check(lib.hipGetDevicePropertiesR0600(prop, 0))
    assert bytes(prop)[1160:1416].split(b"\0")[0] == b"gfx950:sramecc+:xnack-"
    for attribute, value in ((63, 256), (74, 163840), (87, 64), (10018, 8)):
        check(lib.hipDeviceGetAttribute(ctypes.byref(n), attribute, 0))
        assert n.value == value
    assert lib.hipSetDevice(1) == 101
    assert lib.hipGetErrorName(101) == b"hipErrorInvalidDevice"
    assert LIBRARY.with_name("libamdhip64.so.7").exists()


def test_exports():
    """Every call that a launcher, or one that captures graphs, resolves is exported."""
    names = run(["llvm-nm-22", "-D", "--defined-only", LIBRARY])
    for name in [
        "hipInit",
        "hipGetDevice",
        "hipSetDevice",
        "hipGetDeviceCount",
        "hipDeviceGetAttribute",
        "hipGetDevicePropertiesR0600",
        "hipModuleLoadData",
        "hipModuleUnload",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
        "hipMemsetAsync",
        "hipMemcpyAsync",
        "hipStreamSynchronize",
        "hipDeviceSynchronize",
        "hipGetErrorName",
        "hipGetErrorString",
        "hipGetLastError",
        "hipPointerGetAttributes",
        "hipStreamIsCapturing",
        "hipMalloc",
        "hipFree",
    ]:
        assert f" T {name}\n" in names
    assert all(line.split()[-1].startswith(("hip", "emu_")) for line in names.splitlines())


def test_memory():
    lib = library()
    x = np.arange(1000, dtype=np.int32)
    b, c = Buffer(x), Buffer(4000)
    assert (b.read(np.int32) == x).all()
    check(lib.hipMemcpyAsync(P(c.ptr), P(b.ptr), ctypes.c_size_t(4000), 3, None))
    check(lib.hipMemsetAsync(P(c.ptr), 0x1FF, ctypes.c_size_t(4), None))
    got = c.read(np.int32)
    assert got[0] == -1
    assert (got[1:] == x[1:]).all()
    assert lib.hipMemcpy(P(c.ptr + 4), P(b.ptr), ctypes.c_size_t(4000), 3) == 1
    assert b"not inside a device allocation" in lib.emu_last_error()
    assert lib.hipFree(P(c.ptr + 4)) == 1
    c.free()
    assert lib.hipFree(P(c.ptr)) == 1
    assert lib.hipGetLastError() == 1
    assert lib.hipGetLastError() == 0
    assert lib.hipMemcpy(P(c.ptr), P(b.ptr), ctypes.c_size_t(4), 3) == 1  # freed


def test_pointer_attributes():
    lib, b = library(), Buffer(64)
    out = (ctypes.c_uint32 * 8)()
    check(lib.hipPointerGetAttributes(out, P(b.ptr + 8)))
    assert out[0] == 2
    assert out[1] == 0
    host = np.zeros(64, np.uint8)
    check(lib.hipPointerGetAttributes(out, P(host.ctypes.data)))
    assert out[0] == 0
    assert out[1] == 2**32 - 2
    assert lib.hipPointerGetAttributes(out, None) == 1


def test_registered_host_memory(module):
    """A CPU tensor's storage becomes device memory; out of it nothing is visible."""
    lib, host = library(), np.zeros(128, np.int32)
    f = module.function("fill")
    with pytest.raises(HipError, match="outside every live allocation"):
        launch(f, [1], [64], [P(host.ctypes.data), 7])
    lib.emu_clear_error()
    check(lib.hipHostRegister(P(host.ctypes.data), ctypes.c_size_t(256), 0))
    assert lib.hipHostRegister(P(host.ctypes.data + 4), ctypes.c_size_t(16), 0) == 712
    launch(f, [1], [64], [P(host.ctypes.data), 7])
    check(lib.hipHostUnregister(P(host.ctypes.data)))
    check(lib.hipHostRegister(P(host.ctypes.data), ctypes.c_size_t(256), 8))
    with pytest.raises(HipError, match="read-only"):
        launch(f, [1], [64], [P(host.ctypes.data), 8])
    lib.emu_clear_error()
    check(lib.hipHostUnregister(P(host.ctypes.data)))
    assert (host[:64] == 7).all()
    assert (host[64:] == 0).all()


def test_ids_and_hidden_arguments(module):
    out = Buffer(2 * 3 * 4 * 24 * 4)
    launch(module.function("ids"), [2, 3, 4], [4, 3, 2], [out])
    got = out.read(np.uint32, (24, 24))
    t = np.arange(24)
    assert (got == (np.arange(24)[:, None] << 24 | t // 12 << 16 | t // 4 % 3 << 8 | t % 4)).all()


def test_kernelparams_and_extra(module):
    lib, out, f = library(), Buffer(256), module.function("fill")
    args = np.zeros(12, np.uint8)
    args[:8].view(np.uint64)[0], args[8:].view(np.int32)[0] = out.ptr, 5
    size = ctypes.c_size_t(12)
    extra = (P * 5)(1, args.ctypes.data, 2, ctypes.addressof(size), 3)
    check(lib.hipModuleLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, None, None, extra))
    args[8:].view(np.int32)[0] = 9  # the launch copied its arguments
    check(lib.hipDeviceSynchronize())
    assert (out.read(np.int32) == 5).all()
    params = (P * 2)(args.ctypes.data, args.ctypes.data + 8)
    assert lib.hipModuleLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, None, params, extra) == 1
    size.value = 8
    assert lib.hipModuleLaunchKernel(f, 1, 1, 1, 64, 1, 1, 0, None, None, extra) == 1
    assert b"takes 12" in lib.emu_last_error()


def test_bad_launches(module):
    lib, out, f = library(), Buffer(256), module.function("fill")
    for grid, block, lds, code in (
        ([0, 1, 1], [64, 1, 1], 0, 1),
        ([1, 65536, 1], [64, 1, 1], 0, 1),
        ([1, 1, 1], [2048, 1, 1], 0, 719),
        ([1, 1, 1], [64, 1, 1], 163841, 1),
    ):
        with pytest.raises(HipError) as e:
            launch(f, grid, block, [out, 1], lds)
        assert e.value.code == code
    with pytest.raises(HipError, match=r"hipErrorNotFound.*nothing"):
        module.function("nothing")
    handle = P()
    assert lib.hipModuleLoadData(ctypes.byref(handle), b"\x7fELF" + bytes(200)) == 200
    assert b"not an AMDGPU" in lib.emu_last_error()


def test_other_gpu_is_refused():
    handle, image = P(), bytearray(compile_c(SOURCE).read_bytes())
    image[48] = 0x4C  # e_flags: gfx942
    assert library().hipModuleLoadData(ctypes.byref(handle), bytes(image)) == 209
    assert b"not gfx950" in library().emu_last_error()


def test_code_object_v5():
    m = Module(compile_c(SOURCE, "-mcode-object-version=5"))
    out = Buffer(256)
    launch(m.function("fill"), [1], [64], [out, 3])
    assert (out.read(np.int32) == 3).all()


@pytest.mark.parametrize("defer", [0, 1])
def test_streams_events_and_defer(module, defer):
    """With MXFP8_EMU_DEFER=1 nothing runs before something waits, and order is kept."""
    set_option("DEFER", defer)
    lib, out, stream, event = library(), Buffer(np.zeros(64, np.int32)), P(), P()
    check(lib.hipStreamCreate(ctypes.byref(stream)))
    check(lib.hipEventCreate(ctypes.byref(event)))
    host = np.zeros(64, np.int32)
    for name, value in (("fill", 4), ("add", 3)):
        launch(module.function(name), [1], [64], [out, value], sync=False, stream=stream)
    check(lib.hipMemcpyAsync(P(host.ctypes.data), P(out.ptr), ctypes.c_size_t(256), 2, stream))
    check(lib.hipEventRecord(event, stream))
    assert (host == (0 if defer else 7)).all()
    check(lib.hipEventSynchronize(event))
    assert (host == 7).all()
    check(lib.hipStreamDestroy(stream))


def test_graph_capture(module):
    lib, out, stream, graph, status = library(), Buffer(np.zeros(64, np.int32)), P(), P(), ctypes.c_int()
    check(lib.hipStreamCreate(ctypes.byref(stream)))
    check(lib.hipStreamBeginCapture(stream, 0))
    check(lib.hipStreamIsCapturing(stream, ctypes.byref(status)))
    assert status.value == 1
    launch(module.function("add"), [1], [64], [out, 5], sync=False, stream=stream)
    q = P()
    assert lib.hipMalloc(ctypes.byref(q), ctypes.c_size_t(16)) == 900
    assert lib.hipMemcpy(P(out.ptr), P(out.ptr), ctypes.c_size_t(4), 3) == 906
    check(lib.hipStreamEndCapture(stream, ctypes.byref(graph)))
    assert (out.read(np.int32) == 0).all()
    exe = P()
    check(lib.hipGraphInstantiate(ctypes.byref(exe), graph, None, None, ctypes.c_size_t(0)))
    check(lib.hipGraphDestroy(graph))
    for _ in range(3):
        check(lib.hipGraphLaunch(exe, stream))
    check(lib.hipStreamSynchronize(stream))
    assert (out.read(np.int32) == 15).all()
    check(lib.hipGraphExecDestroy(exe))


def test_synchronize_invalidates_a_capture():
    lib, stream, graph = library(), P(), P()
    check(lib.hipStreamCreate(ctypes.byref(stream)))
    check(lib.hipStreamBeginCapture(stream, 0))
    assert lib.hipStreamSynchronize(stream) == 900
    assert lib.hipStreamEndCapture(stream, ctypes.byref(graph)) == 901


def test_fault_reports_at_the_next_call(module):
    lib, small = library(), Buffer(128)
    launch(module.function("fill"), [1], [64], [small, 1], sync=False)
    assert lib.hipDeviceSynchronize() == 700
    text = lib.emu_last_error().decode()
    assert text.startswith("fill: pc 0x")
    assert "lane 32" in text
    assert "global_store_dword" in text
    assert lib.hipDeviceSynchronize() == 700


def test_dynamic_lds():
    m = Module(assemble("v_lshlrev_b32_e32 v1, 2, v0\n ds_write_b32 v1, v0\n s_waitcnt lgkmcnt(0)\n", lds=0))
    out = Buffer(64)
    launch(m.function("k"), [1], [64], [out], lds=256)
    with pytest.raises(HipError, match="past the workgroup's 252 bytes"):
        launch(m.function("k"), [1], [64], [out], lds=252)


def test_waves_that_do_not_fit():
    m, out = Module(assemble("s_nop 0\n", vgprs=512, accum=256)), Buffer(64)
    launch(m.function("k"), [1], [256], [out])
    with pytest.raises(HipError, match="5 waves of 512 registers do not fit"):
        launch(m.function("k"), [1], [257], [out])


def test_unsupported_kernel_loads_but_does_not_launch():
    source = SOURCE + "KERNEL void dispatch(GLB int *o) { o[0] = *(const int *)__builtin_amdgcn_dispatch_ptr(); }"
    m, out = Module(compile_c(source)), Buffer(256)
    launch(m.function("fill"), [1], [64], [out, 1])
    with pytest.raises(HipError, match=r"hipErrorNotSupported.*only the kernarg pointer"):
        launch(m.function("dispatch"), [1], [64], [out])


def test_preloaded_arguments():
    """Arguments that arrive in SGPRs: execution starts 256 bytes past the entry."""
    m = Module(compile_c(SOURCE, "-mllvm", "-amdgpu-kernarg-preload-count=8"))
    out = Buffer(256)
    launch(m.function("fill"), [1], [64], [out, 77])
    assert (out.read(np.int32) == 77).all()
    assert counter("s_load_dwordx2") == 0
