"""The GPU launcher (csrc/gpu.c, csrc/gfx950.c) on a libamdhip64 that only writes down its calls (fake_hip.c).

It is the product's own source, compiled with the names of the dynamic loader's functions replaced. No GPU, and no
kernel: what is tested is which calls reach the driver, in which order, on which device, and what becomes of a failure.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU_ONLY = -1
ERROR = "hipErrorTest (text of {})"
CODE = 7


class Exec(ctypes.Structure):
    _fields_ = [("workspace", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("device", ctypes.c_int32),
                ("threads", ctypes.c_int32), ("parallel_for", ctypes.c_void_p)]  # fmt: skip


class Error(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 512)]


class Quantize(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("x", "offs", "row_data", "row_scale", "col_data", "col_scale")] + [
        (n, ctypes.c_int64) for n in ("batch", "rows", "cols", "groups", "row_k", "col_k")
    ] + [("x_type", ctypes.c_int32), ("rounding", ctypes.c_int32)]  # fmt: skip


class Rows(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("a", "a_scale", "b", "b_scale", "offs", "bias", "out")] + [
        (n, ctypes.c_int64) for n in ("m", "n", "k", "groups")
    ] + [("out_type", ctypes.c_int32)]  # fmt: skip


class Depth(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("a", "a_scale", "b", "b_scale", "offs", "out")] + [
        (n, ctypes.c_int64) for n in ("n", "k", "depth", "groups")
    ] + [(n, ctypes.c_int32) for n in ("out_type", "accumulate", "plain")]  # fmt: skip


class Padding(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("data", "scale", "offs")] + [
        (n, ctypes.c_int64) for n in ("rows", "depth", "groups")
    ]  # fmt: skip


def operation(args: type[ctypes.Structure]) -> type[ctypes._CFuncPtr]:
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(args), ctypes.POINTER(Exec), ctypes.POINTER(Error))


class Backend(ctypes.Structure):
    """struct mx_backend (csrc/mxfp8.h), up to its operations."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("place", ctypes.c_int32), ("alignment", ctypes.c_int32),
        ("available", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(Error))),
        ("quantize", operation(Quantize)), ("gemm_rows", operation(Rows)), ("gemm_depth", operation(Depth)),
        ("zero_padding", operation(Padding)),
    ]  # fmt: skip


def rows_args(**changes: int) -> Rows:
    """Sizes of a call of gemm_rows; pointers are never followed here."""
    sizes = {"a": 4096, "a_scale": 4096, "b": 4096, "b_scale": 4096, "offs": 4096, "out": 4096, "m": 300, "n": 520,
             "k": 256, "groups": 2}  # fmt: skip
    return Rows(**(sizes | changes))


def depth_args(**changes: int) -> Depth:
    sizes = {"a": 4096, "a_scale": 4096, "b": 4096, "b_scale": 4096, "offs": 4096, "out": 4096, "n": 260, "k": 520,
             "depth": 640, "groups": 3}  # fmt: skip
    return Depth(**(sizes | changes))


def quantize_args(**changes: int) -> Quantize:
    """quantize_both of bfloat16 tokens."""
    sizes = {"x": 4096, "offs": 4096, "row_data": 4096, "row_scale": 4096, "col_data": 4096, "col_scale": 4096,
             "batch": 1, "rows": 300, "cols": 200, "groups": 2, "row_k": 224, "col_k": 512}  # fmt: skip
    return Quantize(**(sizes | changes))


class Launch(NamedTuple):
    kernel: str
    of: str  # device of its module
    on: str  # device that was current
    grid: str
    block: str
    stream: str
    plan: str  # a GEMM's blocks: prepare's, its own


class Launcher:
    """One copy of the library, with state of its own: nothing loaded, nothing failed yet."""

    def __init__(self, path: Path, emulator: bool = False):
        lib = ctypes.CDLL(str(path))
        lib.fake_log.restype = ctypes.c_char_p
        lib.fake_backend.restype = ctypes.POINTER(Backend)
        self.lib, self.backend = lib, lib.fake_backend(int(emulator)).contents
        self.library(present=True)

    def library(self, present: bool, missing: str = "") -> None:
        self.lib.fake_library(int(not present), missing.encode())

    def devices(self, count: int, architecture: str = "gfx950:sramecc+:xnack-") -> None:
        self.lib.fake_devices(count, architecture.encode())

    def fail(self, function: str, nth: int = 1, code: int = CODE) -> None:
        self.lib.fake_fail(function.encode(), nth, code)

    def available(self, device: int = 0) -> str | None:
        """None, or the reason why not."""
        error = Error()
        return error.text.decode() if self.backend.available(device, ctypes.byref(error)) else None

    def call(self, op: str, args: ctypes.Structure, device: int = 0, stream: int = 0) -> str | None:
        """None, or the error's text. As the ops do, asks first whether the backend runs there."""
        reason = self.available(device)
        if reason is not None:
            return reason
        error, where = Error(), Exec(workspace=8192, stream=stream, device=device)
        failed = getattr(self.backend, op)(ctypes.byref(args), ctypes.byref(where), ctypes.byref(error))
        return error.text.decode() if failed else None

    def log(self, function: str = "") -> list[str]:
        """The calls so far, of one function or all, without its name."""
        lines = self.lib.fake_log().decode().splitlines()
        return [
            line.removeprefix(function).strip() for line in lines if line.startswith(f"{function} ") or not function
        ]

    def launches(self) -> list[Launch]:
        pattern = r"(\w+) of (\d+) on (\d+) grid (.+) block (.+) stream (\d+) plan (.+)"
        return [Launch(*re.fullmatch(pattern, line).groups()) for line in self.log("hipModuleLaunchKernel")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher with images that hold their own names in place of code."""
    pytest.importorskip("ziglang", reason="the launcher is compiled anew by the pinned clang")
    folder = tmp_path_factory.mktemp("launcher")
    for image in re.findall(r'#embed "(.+)"', (ROOT / "csrc/gfx950.c").read_text()):
        (folder / image).write_bytes(image.encode().ljust(64, b"\0"))
    renamed = [f"-D{name}=fake_{name}" for name in ("dlopen", "dlsym", "dlerror")]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-std=gnu23", "-O1", "-fPIC", "-fvisibility=hidden",
                "-fno-sanitize=undefined", "-Wall", "-Wextra", "-Werror", f"--embed-dir={folder}"]  # fmt: skip
    objects = []
    for source, flags in (("csrc/gpu.c", renamed), ("csrc/gfx950.c", []), ("tests/fake_hip.c", [])):
        objects.append(str(folder / (Path(source).stem + ".o")))
        subprocess.run([*compiler, *flags, "-c", str(ROOT / source), "-o", objects[-1]], check=True)
    library = folder / "launcher.so"
    subprocess.run([*compiler, "-shared", *objects, "-o", str(library), "-lpthread"], check=True)
    return library


@pytest.fixture
def new(built: Path, tmp_path: Path) -> Callable[..., Launcher]:
    """Makes a launcher that nothing has used: the loader takes a library under another name for another one."""

    def make(emulator: bool = False) -> Launcher:
        path = tmp_path / f"launcher{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(built, path)
        return Launcher(path, emulator)

    return make


def test_absent_library_is_a_reason_and_is_looked_for_once(new) -> None:
    launcher = new()
    launcher.library(present=False)
    for _ in range(2):
        assert "libamdhip64.so" in launcher.available()
        assert "cannot open shared object file" in launcher.available()
    names = [line.split()[0] for line in launcher.log("dlopen")]
    assert names == ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"] * 2, "loaded ones first, then any"
    assert launcher.log("dlsym") == []


HIP = ("hipInit", "hipGetDevice", "hipSetDevice", "hipGetDevicePropertiesR0600", "hipModuleLoadData",
       "hipModuleGetFunction", "hipModuleLaunchKernel", "hipGetErrorName", "hipGetErrorString")  # fmt: skip


@pytest.mark.parametrize("symbol", HIP)
def test_absent_symbol_is_a_reason(new, symbol: str) -> None:
    launcher = new()
    launcher.library(present=True, missing=symbol)
    assert launcher.available() == f"undefined symbol: {symbol}"
    launcher.library(present=True)
    assert launcher.available() == f"undefined symbol: {symbol}", "what came of the search is kept"


def test_what_a_driver_is_asked_for_neither_allocates_nor_waits(new) -> None:
    launcher = new()
    assert launcher.call("gemm_rows", rows_args()) is None
    assert launcher.call("quantize", quantize_args()) is None
    assert sorted(launcher.log("dlsym")) == sorted(HIP)
    assert launcher.log("forbidden") == []


def test_a_loaded_library_comes_first(new) -> None:
    launcher = new()
    assert launcher.available() is None
    rtld_noload, rtld_now = 4, 2
    assert launcher.log("dlopen") == [f"libamdhip64.so {rtld_now | rtld_noload}"]


def test_init_failure_is_a_reason(new) -> None:
    launcher = new()
    launcher.fail("hipInit")
    assert launcher.available() == f"hipInit: {ERROR.format(CODE)}"
    assert launcher.call("gemm_rows", rows_args()) == f"hipInit: {ERROR.format(CODE)}"
    assert launcher.launches() == []


@pytest.mark.parametrize("architecture", ["gfx942:sramecc+:xnack-", "gfx9500", "gfx95", ""])
def test_other_architectures_are_refused(new, architecture: str) -> None:
    launcher = new()
    launcher.devices(2, architecture)
    assert launcher.available(1) == f"device 1 is {architecture.split(':')[0]}, expected gfx950"
    assert launcher.log("hipModuleLoadData") == []


def test_architecture_without_features_is_taken(new) -> None:
    launcher = new()
    launcher.devices(1, "gfx950")
    assert launcher.available() is None


@pytest.mark.parametrize("index", [CPU_ONLY, 64])
def test_device_index_out_of_range(new, index: int) -> None:
    launcher = new()
    launcher.devices(100)
    assert launcher.available(index) == f"device index {index}, expected less than 64"


def test_a_device_is_asked_for_its_architecture_once(new) -> None:
    launcher = new()
    launcher.devices(4)
    for device in (0, 3, 3, 0):
        assert launcher.available(device) is None
    assert launcher.log("hipGetDevicePropertiesR0600") == ["0", "3"]
    assert launcher.available(4) == "hipGetDevicePropertiesR0600: hipErrorInvalidDevice (text of 101)"


# Operation, arguments, the kind of kernel.
GEMMS = [
    ("rows", rows_args(), "bf16"),
    ("rows", rows_args(out_type=1, bias=64), "f32"),
    ("rows", rows_args(n=521), "bf16"),
    ("rows", rows_args(m=3000, k=4352), "bf16"),
    ("depth", depth_args(), "bf16"),
    ("depth", depth_args(out_type=1), "f32"),
    ("depth", depth_args(out_type=1, accumulate=1), "add"),
]


@pytest.mark.parametrize(("op", "args", "kind"), GEMMS)
def test_gemm_is_prepare_then_gemm(new, op: str, args: ctypes.Structure, kind: str) -> None:
    launcher = new()
    launcher.devices(4)
    assert launcher.call(f"gemm_{op}", args, device=2, stream=0xABCDEF12345) is None
    prepare, gemm = launcher.launches()
    assert prepare.kernel == f"mx_prepare_{op}_gfx950"
    assert re.fullmatch(rf"mx_gemm_{op}_gfx950_\d+x\d+_{kind}(_bias|_any)?", gemm.kernel)
    for launch in (prepare, gemm):
        assert (launch.of, launch.on, launch.block, launch.stream) == ("2", "2", "256 1 1", str(0xABCDEF12345))
        assert launch.plan == prepare.plan, "both get the same plan"
    prepare_blocks, blocks = prepare.plan.split()
    assert int(prepare_blocks) > 0
    assert int(blocks) > 0
    assert prepare_blocks != blocks, "or a test that mixes them up would pass"
    assert (prepare.grid, gemm.grid) == (f"{prepare_blocks} 1 1", f"{blocks} 1 1")
    images = dict(line.split(" of ") for line in launcher.log("hipModuleGetFunction"))
    assert images[prepare.kernel] == "prepare_gfx950.h on 2", "the image's first 16 bytes, and its device"
    assert images[gemm.kernel] == "gemm_gfx950.hsac on 2"


# Quantizers: column tiles of 128, token tiles of 128 (both: as many as hold the groups and the tail), 32768 an axis.
QUANTIZERS = [
    (quantize_args(), "mx_quantize_both_bf16_gfx950", "2 5 1"),
    (quantize_args(x_type=1), "mx_quantize_both_f32_gfx950", "2 5 1"),
    (quantize_args(row_data=0, row_scale=0), "mx_quantize_cols_bf16_gfx950", "2 4 1"),
    (quantize_args(col_data=0, col_scale=0, offs=0), "mx_quantize_rows_bf16_gfx950", "2 3 1"),
    (quantize_args(offs=0, batch=3), "mx_quantize_both_bf16_gfx950", "2 9 1"),
    (quantize_args(col_data=0, col_scale=0, offs=0, rows=128 * 40000), "mx_quantize_rows_bf16_gfx950", "2 32768 2"),
]


@pytest.mark.parametrize(("args", "kernel", "grid"), QUANTIZERS)
def test_quantize_is_one_launch(new, args, kernel: str, grid: str) -> None:
    launcher = new()
    assert launcher.call("quantize", args, stream=5) is None
    assert launcher.launches() == [Launch(kernel, "0", "0", grid, "256 1 1", "5", "0 0")]


def test_zero_padding_is_one_launch(new) -> None:
    launcher = new()
    assert launcher.call("zero_padding", Padding(4096, 4096, 4096, 10, 40000, 2)) is None
    assert launcher.launches() == [Launch("mx_zero_padding_gfx950", "0", "0", "3 3 1", "256 1 1", "0", "0 0")]


EMPTY = [
    ("gemm_rows", rows_args(n=0)),
    ("gemm_rows", rows_args(m=0, groups=0)),
    ("gemm_depth", depth_args(groups=0)),
    ("gemm_depth", depth_args(k=0)),
    ("quantize", quantize_args(rows=0, col_data=0, offs=0)),
    ("quantize", quantize_args(cols=0)),
    ("quantize", quantize_args(batch=0, offs=0)),
    ("zero_padding", Padding(4096, 4096, 4096, 0, 32, 2)),
    ("zero_padding", Padding(4096, 4096, 4096, 32, 0, 2)),
]


@pytest.mark.parametrize(("op", "args"), EMPTY)
def test_empty_grids_launch_nothing(new, op: str, args: ctypes.Structure) -> None:
    launcher = new()
    assert launcher.call(op, args) is None
    assert launcher.launches() == []


LIMITS = [
    ("gemm_rows", rows_args(m=2**31), "2^31 - 1 tokens on gfx950, got 2147483648"),
    ("gemm_rows", rows_args(k=2**23), "last axis must have at most 8388480 elements on gfx950, got 8388608"),
    ("gemm_rows", rows_args(n=2**21 + 8), "output's last axis must have at most 2097152 elements on gfx950, got"),
    ("gemm_rows", rows_args(m=2**31 - 1, n=2**11, k=32), "blocks of 256 threads, more than a grid holds"),
    ("gemm_depth", depth_args(depth=2**23), "last axis must have at most 8388480 elements"),
    ("gemm_depth", depth_args(k=2**21 + 8), "output's last axis must have at most 2097152 elements"),
    ("gemm_depth", depth_args(groups=2**24), "blocks of 256 threads, more than a grid holds"),
]


@pytest.mark.parametrize(("op", "args", "text"), LIMITS)
def test_limits_raise_before_any_launch(new, op: str, args: ctypes.Structure, text: str) -> None:
    launcher = new()
    assert text in launcher.call(op, args)
    assert launcher.launches() == []
    assert launcher.lib.fake_current() == 0


@pytest.mark.parametrize("sizes", [{"k": 2**23 - 128}, {"n": 2**21, "k": 32}, {"m": 2**31 - 1, "n": 256, "k": 32}])
def test_limits_themselves_are_allowed(new, sizes: dict[str, int]) -> None:
    launcher = new()
    assert launcher.call("gemm_rows", rows_args(**sizes)) is None
    assert len(launcher.launches()) == 2


@pytest.mark.parametrize("previous", [0, 1, 3])
def test_current_device_is_restored(new, previous: int) -> None:
    launcher = new()
    launcher.devices(4)
    launcher.lib.fake_set_current(previous)
    for device in range(4):
        assert launcher.call("gemm_rows", rows_args(), device=device, stream=100 + device) is None
        assert launcher.lib.fake_current() == previous
    launched = [(launch.of, launch.on, launch.stream) for launch in launcher.launches()]
    assert launched == [(str(d), str(d), str(100 + d)) for d in range(4) for _ in range(2)]
    switches = [f"{d}" for device in range(4) if device != previous for d in (device, previous)]
    assert launcher.log("hipSetDevice") == switches, "a device that is current already is left alone"


# Function, which of its calls: all that a first call on another device than the current one makes, up to the launches.
FAILURES = [
    ("hipGetDevicePropertiesR0600", 1), ("hipGetDevice", 1), ("hipSetDevice", 1), ("hipModuleLoadData", 1),
    ("hipModuleLoadData", 2), ("hipModuleGetFunction", 1), ("hipModuleGetFunction", 9), ("hipModuleLaunchKernel", 1),
    ("hipModuleLaunchKernel", 2),
]  # fmt: skip


@pytest.mark.parametrize(("function", "nth"), FAILURES)
def test_failure_is_told_and_the_next_call_works(new, function: str, nth: int) -> None:
    launcher = new()
    launcher.devices(4)
    launcher.lib.fake_set_current(1)
    launcher.fail(function, nth)
    assert launcher.call("gemm_rows", rows_args(), device=2) == f"{function}: {ERROR.format(CODE)}"
    assert launcher.lib.fake_current() == 1
    assert len(launcher.launches()) == (nth if function == "hipModuleLaunchKernel" else 0)
    launcher.lib.fake_clear()
    assert launcher.call("gemm_rows", rows_args(), device=2) is None
    assert len(launcher.launches()) == 2
    assert launcher.lib.fake_current() == 1
    loaded = function == "hipModuleLaunchKernel"
    assert bool(launcher.log("hipModuleLoadData")) != loaded, "loading is repeated if and only if it had failed"


@pytest.mark.parametrize("function", ["hipGetDevice", "hipSetDevice"])
def test_failure_to_go_back_is_told(new, function: str) -> None:
    launcher = new()
    launcher.devices(4)
    launcher.fail(function, nth=2)
    assert launcher.call("gemm_rows", rows_args(), device=2) == f"{function}: {ERROR.format(CODE)}"
    assert len(launcher.launches()) == 2


def test_first_failure_is_the_one_told(new) -> None:
    launcher = new()
    launcher.devices(1)
    assert launcher.available(0) is None
    launcher.lib.fake_set_current(5)  # no such device: it cannot be made current again
    launcher.fail("hipModuleLaunchKernel")
    assert launcher.call("gemm_rows", rows_args()) == f"hipModuleLaunchKernel: {ERROR.format(CODE)}"
    assert launcher.call("gemm_rows", rows_args()) is None
    launcher.lib.fake_set_current(5)
    assert "hipSetDevice: hipErrorInvalidDevice" in launcher.call("gemm_rows", rows_args())


def test_modules_are_loaded_once_per_device_by_many_threads(new) -> None:
    launcher = new()
    launcher.devices(4)
    barrier, failures = threading.Barrier(8), []

    def work(thread: int) -> None:
        barrier.wait()
        for turn in range(20):
            device, stream = (thread + turn) % 4, 1000 * thread + turn
            failures.extend(filter(None, [launcher.call("gemm_depth", depth_args(), device=device, stream=stream)]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    images = len(re.findall("#embed", (ROOT / "csrc/gfx950.c").read_text()))
    loads = launcher.log("hipModuleLoadData")
    assert len(loads) == len(set(loads)) == 4 * images
    functions = launcher.log("hipModuleGetFunction")
    assert len(functions) == len(set(functions))
    launched = launcher.launches()
    assert len(launched) == 8 * 20 * 2
    for launch in launched:
        wanted = str((int(launch.stream) // 1000 + int(launch.stream) % 1000) % 4)
        assert (launch.of, launch.on) == (wanted, wanted), "a function of the call's device, which is made current"


# The emulator's way: the same launches, around which the host's memory is shown to it.


@pytest.fixture
def emulator(new, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("MXFP8_EMU_LIBRARY", "/given/path.so")
    return new(emulator=True)


def test_emulator_path_must_be_given(new, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXFP8_EMU_LIBRARY", raising=False)
    assert new(emulator=True).available(CPU_ONLY) == "MXFP8_EMU_LIBRARY must be the emulator's path, and is not set"
    monkeypatch.setenv("MXFP8_EMU_LIBRARY", "/nowhere.so")
    launcher = new(emulator=True)
    launcher.library(present=False)
    assert launcher.available(CPU_ONLY).endswith("/nowhere.so: cannot open shared object file")


def test_emulator_sees_each_operand_once(emulator: Launcher) -> None:
    args = rows_args(a=0x10000, a_scale=0x20000, b=0x30000, b_scale=0x40000, offs=0x50000, out=0x60000)
    args.b_scale = args.a_scale  # one tensor twice, of one size
    args.k, args.m, args.n, args.groups = 256, 520, 520, 1
    assert emulator.call("gemm_rows", args, device=CPU_ONLY) is None
    registered = emulator.log("hipHostRegister")
    read, write = "8", "0"
    assert registered[:5] == [
        f"{0x10000} {520 * 256} {read}", f"{0x20000} {520 * 8} {read}", f"{0x30000} {520 * 256} {read}",
        f"{0x50000} 4 {read}", f"{0x60000} {520 * 520 * 2} {write}",
    ]  # fmt: skip
    workspace = registered[5].split()
    assert (workspace[0], workspace[2]) == ("8192", write)
    assert emulator.log("hipHostUnregister") == [line.split()[0] for line in reversed(registered)]
    lines = [line.split()[0] for line in emulator.log()]
    end = lines.index("hipHostUnregister")
    assert lines[end - 1] == "hipDeviceSynchronize"


@pytest.mark.parametrize("nth", [1, 3])
def test_emulator_lets_go_of_operands_after_a_failure(emulator: Launcher, nth: int) -> None:
    emulator.fail("hipHostRegister", nth)
    args = depth_args(a=0x10000, a_scale=0x20000, b=0x30000, b_scale=0x40000)
    told = f"hipHostRegister: {ERROR.format(CODE)}: what the emulator says"
    assert emulator.call("gemm_depth", args, device=CPU_ONLY) == told
    registered = [line.split()[0] for line in emulator.log("hipHostRegister")]
    assert emulator.log("hipHostUnregister") == registered[: nth - 1][::-1]
    assert emulator.launches() == []
    assert emulator.call("gemm_depth", args, device=CPU_ONLY) is None


def test_emulator_kernel_error_is_the_calls(emulator: Launcher) -> None:
    emulator.fail("hipDeviceSynchronize")
    told = f"hipDeviceSynchronize: {ERROR.format(CODE)}: what the emulator says"
    assert emulator.call("quantize", quantize_args(), device=CPU_ONLY) == told
    assert len(emulator.log("emu_clear_error")) == 1
    assert sorted(emulator.log("hipHostUnregister")) == sorted(
        line.split()[0] for line in emulator.log("hipHostRegister")
    )
