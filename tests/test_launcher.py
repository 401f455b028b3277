"""The GPU launcher (csrc/gpu.c, each chip's launch.c) on drivers that only write down their calls (fake_driver.c).

It is the product's own source, compiled with the names of the dynamic loader's functions replaced. No GPU, and no
kernel: what is tested is which calls reach the driver, in which order, on which device, and what becomes of a failure.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from abi.args import Depth, Padding, Quantize, Rows

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parent.parent
CPU_ONLY = -1
CODE = 7


class Driver(NamedTuple):
    """A backend and the driver below it. The functions are those of one purpose in each driver."""

    backend: str
    source: str
    suffix: str  # of kernels' names
    architecture: str  # as the driver gives it
    error: str  # what it says of CODE
    invalid_device: str  # what it says of a device that is not there
    libraries: list[str]
    init: str
    describe: str  # the first of what a device is asked for its architecture
    get_current: str
    set_current: str
    load: str
    function: str
    launch: str
    launch_early: str  # of a kernel that may start before the one before has ended; it is the same where there is none
    others: list[str]

    @property
    def symbols(self) -> list[str]:
        """All functions of the driver that are used."""
        launches = dict.fromkeys([self.launch, self.launch_early])
        return [self.init, self.describe, self.get_current, self.set_current, self.load, self.function, *launches,
                *self.others]  # fmt: skip

    @property
    def images(self) -> list[str]:
        return re.findall(r'#embed "(.+?)"', (ROOT / self.source).read_text())


HIP = Driver(
    backend="gfx950",
    source="kernels/gfx950/launch.c",
    suffix="gfx950",
    architecture="gfx950:sramecc+:xnack-",
    error=f"hipErrorTest (text of {CODE})",
    invalid_device="hipErrorInvalidDevice (text of 101)",
    libraries=["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"],
    init="hipInit",
    describe="hipGetDevicePropertiesR0600",
    get_current="hipGetDevice",
    set_current="hipSetDevice",
    load="hipModuleLoadData",
    function="hipModuleGetFunction",
    launch="hipModuleLaunchKernel",
    launch_early="hipModuleLaunchKernel",
    others=["hipGetErrorName", "hipGetErrorString"],
)
EMULATOR = HIP._replace(backend="gfx950-emu")
CUDA = Driver(
    backend="sm_90",
    source="kernels/sm90/launch.c",
    suffix="sm90",
    architecture="9.0",
    error=f"CUDA_ERROR_TEST (text of {CODE})",
    invalid_device="CUDA_ERROR_INVALID_DEVICE (text of 101)",
    libraries=["libcuda.so.1"],
    init="cuInit",
    describe="cuDeviceGet",
    get_current="cuCtxGetCurrent",
    set_current="cuCtxSetCurrent",
    load="cuModuleLoadData",
    function="cuModuleGetFunction",
    launch="cuLaunchKernel",
    launch_early="cuLaunchKernelEx",
    others=["cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuFuncSetAttribute", "cuTensorMapEncodeTiled",
            "cuGetErrorName", "cuGetErrorString"],
)  # fmt: skip
DRIVERS = [HIP, CUDA]
NO_CONTEXT, OTHER_CONTEXT = -1, 1000  # current in a thread, instead of a device (CUDA)


def per_driver(**cases: list[tuple[object, ...]]) -> list[object]:
    """Parameters of a test: each of a driver's cases, behind the driver."""
    return [
        pytest.param(driver, *case, id=f"{driver.suffix}-{i}")
        for driver in DRIVERS
        for i, case in enumerate(cases[driver.suffix])
    ]


class Exec(ctypes.Structure):
    _fields_ = [("workspace", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("device", ctypes.c_int32),
                ("threads", ctypes.c_int32), ("parallel_for", ctypes.c_void_p)]  # fmt: skip


class Error(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 512)]


ROWS, COLS = 1, 2  # enum mx_wants


def operation(args: type[ctypes.Structure]) -> type[ctypes._CFuncPtr]:
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(args), ctypes.POINTER(Exec), ctypes.POINTER(Error))


def workspace(args: type[ctypes.Structure]) -> type[ctypes._CFuncPtr]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(args), ctypes.POINTER(Exec))


class Backend(ctypes.Structure):
    """struct mx_backend (csrc/mxfp8.h)."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("place", ctypes.c_int32), ("alignment", ctypes.c_int32),
        ("kernel_count", ctypes.c_int32), ("kernels", ctypes.c_void_p),
        ("available", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(Error))),
        ("quantize", operation(Quantize)), ("gemm_rows", operation(Rows)), ("gemm_depth", operation(Depth)),
        ("zero_padding", operation(Padding)), ("quantize_workspace", workspace(Quantize)),
        ("gemm_rows_workspace", workspace(Rows)), ("gemm_depth_workspace", workspace(Depth)),
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


def padding_args(**changes: int) -> Padding:
    sizes = {"data": 4096, "scale": 4096, "offs": 4096, "rows": 10, "depth": 40000, "groups": 2}
    return Padding(**(sizes | changes))


def quantize_args(**changes: int) -> Quantize:
    """quantize_both of bfloat16 tokens."""
    sizes = {"x": 4096, "offs": 4096, "row_data": 4096, "row_scale": 4096, "col_data": 4096, "col_scale": 4096,
             "batch": 1, "rows": 300, "cols": 200, "groups": 2, "row_k": 224, "col_k": 512, "wants": ROWS | COLS,
             "grouped": 1}  # fmt: skip
    return Quantize(**(sizes | changes))


class Launch(NamedTuple):
    kernel: str
    of: str  # device of its module
    on: str  # device that was current
    grid: str
    block: str
    shared: str
    stream: str
    plan: str = "0 0"  # a GEMM's blocks: prepare's, its own
    maps: str = "0 0"  # bases of P and Q, as the encoded tensor maps have them
    function: str = ""  # of the driver


class Launcher:
    """One copy of the library, with state of its own: nothing loaded, nothing failed yet."""

    def __init__(self, path: Path, driver: Driver):
        lib = ctypes.CDLL(str(path))
        lib.fake_log.restype = ctypes.c_char_p
        lib.fake_backend.restype = ctypes.POINTER(Backend)
        self.lib, self.driver = lib, driver
        self.backend = lib.fake_backend(driver.backend.encode()).contents
        self.library(present=True)
        self.devices(1)

    def library(self, present: bool, missing: str = "") -> None:
        self.lib.fake_library(int(not present), missing.encode())

    def devices(self, count: int, architecture: str | None = None) -> None:
        self.lib.fake_devices(count, (self.driver.architecture if architecture is None else architecture).encode())

    def current(self) -> int:
        """The thread's current device, or none, or one past OTHER_CONTEXT."""
        return int(self.lib.fake_current(int(self.driver is CUDA)))

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
        pattern = (
            r"(\w+) of (\d+) on (-?\d+) grid (.+) block (.+) shared (\d+) stream (\d+) plan (\d+ \d+) maps (\d+ \d+)"
        )
        functions = self.driver.launch, self.driver.launch_early
        lines = [line.split(" ", 1) for line in self.log() if line.split(" ", 1)[0] in functions]
        return [Launch(*re.fullmatch(pattern, line).groups(), function) for function, line in lines]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher with images that hold their own names in place of code."""
    pytest.importorskip("ziglang", reason="the launcher is compiled anew by the pinned clang")
    folder = tmp_path_factory.mktemp("launcher")
    for image in HIP.images + CUDA.images:
        (folder / image).parent.mkdir(exist_ok=True)
        (folder / image).write_bytes(image.encode().ljust(64, b"\0"))
    renamed = [f"-D{name}=fake_{name}" for name in ("dlopen", "dlsym", "dlerror")]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-std=gnu23", "-O1", "-fPIC", "-fvisibility=hidden",
                "-fno-sanitize=undefined", "-Wall", "-Wextra", "-Werror", f"--embed-dir={folder}"]  # fmt: skip
    objects = []
    sources = {"csrc/gpu.c": renamed, HIP.source: [], CUDA.source: [], "tests/fake_driver.c": []}
    for source, flags in sources.items():
        objects.append(str(folder / (source.replace("/", "_") + ".o")))
        subprocess.run([*compiler, *flags, "-c", str(ROOT / source), "-o", objects[-1]], check=True)
    library = folder / "launcher.so"
    subprocess.run([*compiler, "-shared", *objects, "-o", str(library), "-lpthread"], check=True)
    return library


@pytest.fixture
def new(built: Path, tmp_path: Path) -> Callable[..., Launcher]:
    """Makes a launcher that nothing has used: the loader takes a library under another name for another one."""

    def make(driver: Driver) -> Launcher:
        path = tmp_path / f"launcher{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(built, path)
        return Launcher(path, driver)

    return make


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.suffix)
def launcher(request: pytest.FixtureRequest, new) -> Launcher:
    return new(request.param)


def test_absent_library_is_a_reason_and_is_looked_for_once(launcher: Launcher) -> None:
    launcher.library(present=False)
    libraries = launcher.driver.libraries
    for _ in range(2):
        assert launcher.available() == f"{libraries[-1]}: cannot open shared object file"
    names = [line.split()[0] for line in launcher.log("dlopen")]
    assert names == libraries * 2, "loaded ones first, then any"
    assert launcher.log("dlsym") == []


@pytest.mark.parametrize(
    ("driver", "symbol"), per_driver(gfx950=[(s,) for s in HIP.symbols], sm90=[(s,) for s in CUDA.symbols])
)
def test_absent_symbol_is_a_reason(new, driver: Driver, symbol: str) -> None:
    launcher = new(driver)
    launcher.library(present=True, missing=symbol)
    assert launcher.available() == f"undefined symbol: {symbol}"
    launcher.library(present=True)
    assert launcher.available() == f"undefined symbol: {symbol}", "what came of the search is kept"


def test_what_a_driver_is_asked_for_neither_allocates_nor_waits(launcher: Launcher) -> None:
    assert launcher.call("gemm_rows", rows_args()) is None
    assert launcher.call("gemm_depth", depth_args()) is None
    assert launcher.call("quantize", quantize_args()) is None
    assert launcher.call("zero_padding", padding_args()) is None
    assert sorted(launcher.log("dlsym")) == sorted(launcher.driver.symbols)
    assert launcher.log("forbidden") == []


def test_a_loaded_library_comes_first(launcher: Launcher) -> None:
    assert launcher.available() is None
    rtld_noload, rtld_now = 4, 2
    assert launcher.log("dlopen") == [f"{launcher.driver.libraries[0]} {rtld_now | rtld_noload}"]


def test_init_failure_is_a_reason(launcher: Launcher) -> None:
    driver = launcher.driver
    launcher.fail(driver.init)
    assert launcher.available() == f"{driver.init}: {driver.error}"
    assert launcher.call("gemm_rows", rows_args()) == f"{driver.init}: {driver.error}"
    assert launcher.launches() == []


def test_code_without_a_name_is_told(new) -> None:
    launcher = new(CUDA)
    launcher.fail("cuInit", code=-5)
    assert launcher.available() == "cuInit: an unknown error (-5)"


@pytest.mark.parametrize(
    ("driver", "architecture", "name"),
    per_driver(
        gfx950=[("gfx942:sramecc+:xnack-", "gfx942"), ("gfx9500", "gfx9500"), ("gfx95", "gfx95"), ("", "")],
        sm90=[("8.9", "sm_89"), ("10.0", "sm_100"), ("12.0", "sm_120"), ("9.1", "sm_91")],
    ),
)
def test_other_architectures_are_refused(new, driver: Driver, architecture: str, name: str) -> None:
    launcher = new(driver)
    launcher.devices(2, architecture)
    assert launcher.available(1) == f"device 1 is {name}, expected {driver.backend}"
    assert launcher.log(driver.load) == []


def test_architecture_without_features_is_taken(new) -> None:
    launcher = new(HIP)
    launcher.devices(1, "gfx950")
    assert launcher.available() is None


@pytest.mark.parametrize("index", [CPU_ONLY, 64])
def test_device_index_out_of_range(launcher: Launcher, index: int) -> None:
    launcher.devices(100)
    assert launcher.available(index) == f"device index {index}, expected less than 64"


def test_a_device_is_asked_for_its_architecture_once(launcher: Launcher) -> None:
    driver = launcher.driver
    launcher.devices(4)
    for device in (0, 3, 3, 0):
        assert launcher.available(device) is None
    assert launcher.log(driver.describe) == ["0", "3"]
    assert launcher.available(4) == f"{driver.describe}: {driver.invalid_device}"


# Operation, arguments, the GEMM's kernel, threads of prepare and of the GEMM, bytes of the GEMM's shared memory.
GEMMS = per_driver(
    gfx950=[
        (op, args, rf"mx_gemm_{op}_gfx950_\d+x\d+_{kind}(_bias|_any)?", 256, 256, 0)
        for op, args, kind in (
            ("rows", rows_args(), "bf16"),
            ("rows", rows_args(out_type=1, bias=64), "f32"),
            ("rows", rows_args(n=521), "bf16"),
            ("rows", rows_args(m=3000, k=4352), "bf16"),
            ("depth", depth_args(), "bf16"),
            ("depth", depth_args(out_type=1), "f32"),
            ("depth", depth_args(out_type=1, accumulate=1), "add"),
        )
    ],
    sm90=[
        (op, args, f"mx_gemm_{op}_sm90{swapped}", 256, 512, 220 * 1024)
        for op, args, swapped in (
            ("rows", rows_args(), ""),
            ("rows", rows_args(out_type=1, bias=64), ""),
            ("rows", rows_args(n=512, groups=9), "_swapped"),
            ("rows", rows_args(m=30000, k=4352), ""),
            ("depth", depth_args(), ""),
            ("depth", depth_args(out_type=1, accumulate=1), ""),
            ("depth", depth_args(n=9000), ""),
        )
    ],
)


@pytest.mark.parametrize(("driver", "op", "args", "kernel", "prepare_threads", "threads", "shared"), GEMMS)
def test_gemm_is_prepare_then_gemm(new, driver, op, args, kernel, prepare_threads, threads, shared) -> None:
    launcher = new(driver)
    launcher.devices(4)
    assert launcher.call(f"gemm_{op}", args, device=2, stream=0xABCDEF12345) is None
    prepare, gemm = launcher.launches()
    assert prepare.kernel == f"mx_prepare_{op}_{driver.suffix}"
    assert re.fullmatch(kernel, gemm.kernel)
    assert (prepare.function, gemm.function) == (driver.launch, driver.launch_early), "only the GEMM waits by itself"
    assert (prepare.block, gemm.block) == (f"{prepare_threads} 1 1", f"{threads} 1 1")
    assert (prepare.shared, gemm.shared) == ("0", str(shared))
    for launch in (prepare, gemm):
        assert (launch.of, launch.on, launch.stream) == ("2", "2", str(0xABCDEF12345))
        assert (launch.plan, launch.maps) == (prepare.plan, prepare.maps), "both get the same parameters"
    prepare_blocks, blocks = prepare.plan.split()
    assert int(prepare_blocks) > 0
    assert int(blocks) > 0
    assert prepare_blocks != blocks, "or a test that mixes them up would pass"
    assert (prepare.grid, gemm.grid) == (f"{prepare_blocks} 1 1", f"{blocks} 1 1")
    images = dict(line.split(" of ") for line in launcher.log(driver.function))
    image_of = {Path(name).stem: name[:16] for name in driver.images}  # the image's first 16 bytes
    assert images[prepare.kernel] == f"{image_of['prepare']} on 2"
    assert images[gemm.kernel] == f"{image_of['gemm']} on 2"


# Quantizers: column tiles of 128, token tiles of 128 (both: as many as hold the groups and the tail), 32768 an axis.
QUANTIZERS = [
    (quantize_args(), "both_bf16", "2 5 1"),
    (quantize_args(x_type=1), "both_f32", "2 5 1"),
    (quantize_args(wants=COLS), "cols_bf16", "2 4 1"),
    (quantize_args(wants=COLS, x_type=1), "cols_f32", "2 4 1"),
    (quantize_args(wants=ROWS, grouped=0), "rows_bf16", "2 3 1"),
    (quantize_args(wants=ROWS, grouped=0, x_type=1), "rows_f32", "2 3 1"),
    (quantize_args(grouped=0, batch=3), "both_bf16", "2 9 1"),
    (quantize_args(wants=ROWS, grouped=0, rows=128 * 40000), "rows_bf16", "2 32768 2"),
    (quantize_args(offs=0, groups=0, col_k=256), "both_bf16", "2 3 1"),  # empty arrays have no address
    (quantize_args(wants=COLS, offs=0, groups=0, col_k=256), "cols_bf16", "2 2 1"),
]


@pytest.mark.parametrize(("args", "kernel", "grid"), QUANTIZERS)
def test_quantize_is_one_launch(launcher: Launcher, args, kernel: str, grid: str) -> None:
    name = f"mx_quantize_{kernel}_{launcher.driver.suffix}"
    assert launcher.call("quantize", args, stream=5) is None
    launched = Launch(name, "0", "0", grid, "256 1 1", "0", "5", function=launcher.driver.launch)
    assert launcher.launches() == [launched]
    assert launcher.backend.quantize_workspace(ctypes.byref(args), ctypes.byref(Exec(device=0))) == 0


def test_zero_padding_is_one_launch(launcher: Launcher) -> None:
    name = f"mx_zero_padding_{launcher.driver.suffix}"
    assert launcher.call("zero_padding", padding_args(), stream=5) is None
    launched = Launch(name, "0", "0", "3 3 1", "256 1 1", "0", "5", function=launcher.driver.launch)
    assert launcher.launches() == [launched]


EMPTY = [
    ("gemm_rows", rows_args(n=0)),
    ("gemm_rows", rows_args(m=0, groups=0)),
    ("gemm_depth", depth_args(groups=0)),
    ("gemm_depth", depth_args(n=0)),
    ("gemm_depth", depth_args(k=0)),
    ("gemm_depth", depth_args(n=2**30, k=0, depth=0, groups=2**18)),
    ("quantize", quantize_args(rows=0, wants=ROWS, grouped=0)),
    ("quantize", quantize_args(rows=40, wants=COLS, offs=0, groups=0, col_k=0, col_data=0, col_scale=0)),
    ("quantize", quantize_args(cols=0)),
    ("quantize", quantize_args(batch=0, grouped=0)),
    ("zero_padding", padding_args(rows=0)),
    ("zero_padding", padding_args(depth=0)),
]


@pytest.mark.parametrize(("op", "args"), EMPTY)
def test_empty_grids_launch_nothing(launcher: Launcher, op: str, args: ctypes.Structure) -> None:
    assert launcher.call(op, args) is None
    assert launcher.launches() == []


ZERO_EXTENTS = [
    (op, dict(zip(names, sizes, strict=True)))
    for op, names in (("rows", ("m", "n", "k", "groups")), ("depth", ("n", "k", "depth", "groups")))
    for sizes in itertools.product((0, 160), repeat=4)
]


@pytest.mark.parametrize(("op", "sizes"), ZERO_EXTENTS, ids=str)
def test_every_output_element_is_written_whatever_extent_is_zero(launcher: Launcher, op: str, sizes) -> None:
    args = rows_args(**sizes) if op == "rows" else depth_args(**sizes)
    reserve = getattr(launcher.backend, f"gemm_{op}_workspace")
    assert launcher.available() is None
    assert reserve(ctypes.byref(args), ctypes.byref(Exec(device=0))) >= 0
    assert launcher.call(f"gemm_{op}", args) is None
    launches = launcher.launches()
    if all(sizes[axis] for axis in (("m", "n") if op == "rows" else ("n", "k", "groups"))):
        assert [launch.kernel.split("_")[1] for launch in launches] == ["prepare", "gemm"]
    for launch in launches:
        assert 0 < int(launch.grid.split()[0]) <= 160 * 160, "few more blocks than rows of all operands"


LIMITS = per_driver(
    gfx950=[
        ("gemm_rows", rows_args(m=2**31), "2^31 - 1 tokens on gfx950, got 2147483648"),
        ("gemm_rows", rows_args(k=2**23), "last axis must have at most 8388480 elements on gfx950, got 8388608"),
        ("gemm_rows", rows_args(n=2**21 + 8), "output's last axis must have at most 2097152 elements on gfx950, got"),
        ("gemm_rows", rows_args(m=2**31 - 1, n=2**11, k=32), "blocks of 256 threads, more than a grid holds"),
        ("gemm_depth", depth_args(depth=2**23), "last axis must have at most 8388480 elements"),
        ("gemm_depth", depth_args(k=2**21 + 8), "output's last axis must have at most 2097152 elements"),
        ("gemm_depth", depth_args(groups=2**24), "blocks of 256 threads, more than a grid holds"),
        ("zero_padding", padding_args(rows=2**26), "need 16777216 blocks of 256 threads, more than a grid holds"),
    ],
    sm90=[
        (op, args, f"at most 2147483391 rows and elements a row on sm_90, got {got}")
        for op, args, got in (
            ("gemm_rows", rows_args(m=2**31 - 256), "2147483392 and 1040 rows of 256"),
            ("gemm_rows", rows_args(n=2**30 - 128), "300 and 2147483392 rows of 256"),
            ("gemm_rows", rows_args(k=2**31 - 256), "300 and 1040 rows of 2147483392"),
            ("gemm_depth", depth_args(n=2**31 - 256), "2147483392 and 520 rows of 640"),
            ("gemm_depth", depth_args(k=2**31 - 256), "260 and 2147483392 rows of 640"),
            ("gemm_depth", depth_args(depth=2**31 - 256), "260 and 520 rows of 2147483392"),
        )
    ]
    + [
        ("gemm_depth", depth_args(groups=2**32 + 1), "fewer than 2147483647 tiles of 256 x 128 on sm_90"),
        ("gemm_rows", rows_args(m=2**31 - 257, n=2**31 - 257, k=0, groups=1), "fewer than 2147483647 tiles"),
        ("gemm_rows", rows_args(m=0, n=2**48, k=0, groups=1), "got 0 and 281474976710656 rows of 0"),
        ("zero_padding", padding_args(rows=2**26), "need 16777216 blocks of 256 threads, more than a grid holds"),
    ],
)


@pytest.mark.parametrize(("driver", "op", "args", "text"), LIMITS)
def test_limits_raise_before_any_launch(new, driver: Driver, op: str, args: ctypes.Structure, text: str) -> None:
    launcher = new(driver)
    before = launcher.current()
    assert text in launcher.call(op, args)
    assert launcher.launches() == []
    assert launcher.current() == before


@pytest.mark.parametrize(
    ("driver", "op", "args"),
    per_driver(
        gfx950=[
            ("gemm_rows", rows_args(k=2**23 - 128)),
            ("gemm_rows", rows_args(n=2**21, k=32)),
            ("gemm_rows", rows_args(m=2**31 - 1, n=256, k=32)),
        ],
        sm90=[
            ("gemm_rows", rows_args(m=2**31 - 257, n=256, k=32)),
            ("gemm_rows", rows_args(n=2**31 - 257, k=32, groups=1)),
            ("gemm_rows", rows_args(k=2**31 - 288)),
            ("gemm_depth", depth_args(n=2**31 - 257, k=32)),
            ("gemm_depth", depth_args(n=32, k=2**31 - 257)),
            ("gemm_depth", depth_args(depth=2**31 - 384)),
        ],
    ),
)
def test_limits_themselves_are_allowed(new, driver: Driver, op: str, args: ctypes.Structure) -> None:
    launcher = new(driver)
    assert launcher.call(op, args) is None
    assert len(launcher.launches()) == 2


@pytest.mark.parametrize(
    ("driver", "previous"),
    per_driver(gfx950=[(0,), (1,), (3,)], sm90=[(0,), (3,), (NO_CONTEXT,), (OTHER_CONTEXT,), (OTHER_CONTEXT + 2,)]),
)
def test_current_device_is_restored(new, driver: Driver, previous: int) -> None:
    launcher = new(driver)
    launcher.devices(4)
    launcher.lib.fake_set_current(previous)
    for device in range(4):
        assert launcher.call("gemm_rows", rows_args(), device=device, stream=100 + device) is None
        assert launcher.current() == previous
    launched = [(launch.of, launch.on, launch.stream) for launch in launcher.launches()]
    assert launched == [(str(d), str(d), str(100 + d)) for d in range(4) for _ in range(2)]
    switches = [f"{d}" for device in range(4) if device != previous for d in (device, previous)]
    assert launcher.log(driver.set_current) == switches, "a device that is current already is left alone"


# What was current, a function, which of its calls: all that a first call on device 2 makes, up to the launches.
FAILURES = per_driver(
    gfx950=[
        (1, function, nth)
        for function, nth in (
            ("hipGetDevicePropertiesR0600", 1), ("hipGetDevice", 1), ("hipSetDevice", 1), ("hipModuleLoadData", 1),
            ("hipModuleLoadData", 2), ("hipModuleGetFunction", 1), ("hipModuleGetFunction", 9),
            ("hipModuleLaunchKernel", 1), ("hipModuleLaunchKernel", 2),
        )
    ],
    sm90=[
        (previous, function, nth)
        for previous in (1, NO_CONTEXT, OTHER_CONTEXT + 2)
        for function, nth in (
            ("cuDeviceGet", 1), ("cuDeviceGet", 2), ("cuDeviceGetAttribute", 1), ("cuDeviceGetAttribute", 2),
            ("cuDeviceGetAttribute", 3), ("cuDevicePrimaryCtxRetain", 1), ("cuCtxGetCurrent", 1),
            ("cuCtxSetCurrent", 1), ("cuModuleLoadData", 1), ("cuModuleLoadData", 3), ("cuModuleGetFunction", 1),
            ("cuModuleGetFunction", 12), ("cuFuncSetAttribute", 1), ("cuFuncSetAttribute", 3),
            ("cuTensorMapEncodeTiled", 1), ("cuTensorMapEncodeTiled", 2), ("cuLaunchKernel", 1),
            ("cuLaunchKernelEx", 1),
        )
    ],
)  # fmt: skip


@pytest.mark.parametrize(("driver", "previous", "function", "nth"), FAILURES)
def test_failure_is_told_and_the_next_call_works(new, driver: Driver, previous: int, function: str, nth: int) -> None:
    launcher = new(driver)
    launcher.devices(4)
    launcher.lib.fake_set_current(previous)
    launcher.fail(function, nth)
    assert launcher.call("gemm_rows", rows_args(), device=2) == f"{function}: {driver.error}"
    assert launcher.current() == previous
    queued = [driver.launch, driver.launch_early]  # in this order; what failed is there as well
    assert len(launcher.launches()) == (max(nth, queued.index(function) + 1) if function in queued else 0)
    launcher.lib.fake_clear()
    assert launcher.call("gemm_rows", rows_args(), device=2) is None
    assert [(launch.of, launch.on) for launch in launcher.launches()] == [("2", "2")] * 2
    assert launcher.current() == previous
    loaded = function in (*queued, "cuTensorMapEncodeTiled")
    assert bool(launcher.log(driver.load)) != loaded, "loading is repeated if and only if it had failed"


@pytest.mark.parametrize("which", ["get_current", "set_current"])
def test_failure_to_go_back_is_told(launcher: Launcher, which: str) -> None:
    function = getattr(launcher.driver, which)
    launcher.devices(4)
    launcher.fail(function, nth=2)
    assert launcher.call("gemm_rows", rows_args(), device=2) == f"{function}: {launcher.driver.error}"
    assert len(launcher.launches()) == 2


def test_first_failure_is_the_one_told(launcher: Launcher) -> None:
    driver = launcher.driver
    assert launcher.available(0) is None
    launcher.lib.fake_set_current(5)  # no such device: it cannot be made current again
    launcher.fail(driver.launch)
    assert launcher.call("gemm_rows", rows_args()) == f"{driver.launch}: {driver.error}"
    assert launcher.call("gemm_rows", rows_args()) is None
    launcher.lib.fake_set_current(5)
    assert launcher.call("gemm_rows", rows_args()) == f"{driver.set_current}: {driver.invalid_device}"


def test_modules_are_loaded_once_per_device_by_many_threads(launcher: Launcher) -> None:
    driver = launcher.driver
    launcher.devices(4)
    barrier, failures = threading.Barrier(8), []

    def work(thread: int) -> None:
        before = launcher.current()
        barrier.wait()
        for turn in range(20):
            device, stream = (thread + turn) % 4, 1000 * thread + turn
            failures.extend(filter(None, [launcher.call("gemm_depth", depth_args(), device=device, stream=stream)]))
            if launcher.current() != before:
                failures.append(f"{launcher.current()} is current, before it was {before}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    loads = launcher.log(driver.load)
    assert len(loads) == len(set(loads)) == 4 * len(driver.images)
    functions = launcher.log(driver.function)
    assert len(functions) == len(set(functions))
    retained = launcher.log("cuDevicePrimaryCtxRetain")
    assert sorted(retained) == (["0", "1", "2", "3"] if driver is CUDA else [])
    launched = launcher.launches()
    assert len(launched) == 8 * 20 * 2
    for launch in launched:
        wanted = str((int(launch.stream) // 1000 + int(launch.stream) % 1000) % 4)
        assert (launch.of, launch.on) == (wanted, wanted), "a function of the call's device, which is made current"


# CUDA's own: contexts, shared memory, tensor maps.


@pytest.mark.parametrize("previous", [NO_CONTEXT, OTHER_CONTEXT + 3, 1])
def test_cuda_works_in_the_devices_primary_context(new, previous: int) -> None:
    launcher = new(CUDA)
    launcher.devices(4)
    launcher.lib.fake_set_current(previous)
    for op, args in (("gemm_rows", rows_args()), ("gemm_depth", depth_args()), ("quantize", quantize_args())):
        assert launcher.call(op, args, device=3) is None
        assert launcher.current() == previous
    functions = "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuTensorMapEncodeTiled"
    lines = {function: launcher.log(function) for function in (*functions, "cuLaunchKernel", "cuLaunchKernelEx")}
    assert {function: len(of) for function, of in lines.items()} == dict(zip(lines, (3, 12, 3, 4, 3, 2), strict=True))
    assert {re.search(r"\bon (-?\d+)", line)[1] for of in lines.values() for line in of} == {"3"}
    assert launcher.log("cuDevicePrimaryCtxRetain") == ["3"], "once, not once a call"


def test_cuda_shared_memory_is_asked_for_before_the_first_launch(new) -> None:
    launcher = new(CUDA)
    assert launcher.call("quantize", quantize_args()) is None
    kernels = "mx_gemm_depth_sm90", "mx_gemm_rows_sm90", "mx_gemm_rows_sm90_swapped"
    assert launcher.log("cuFuncSetAttribute") == [f"{kernel} of 0 on 0: 8 {220 * 1024}" for kernel in kernels]
    names = [line.split()[0] for line in launcher.log()]
    assert names.index("cuLaunchKernel") > max(i for i, name in enumerate(names) if name == "cuFuncSetAttribute")


A, B = 0x10000, 0x20000


def encoded(base: int, rows: int, row_bytes: int) -> str:
    """A tensor map of bytes (type 0): boxes of 128 rows of 64, swizzled by 64 (2), L2 promotion 128 (2), zeros."""
    return (
        f"on 0 base {base} type 0 rank 2 sizes {row_bytes} {rows} stride {row_bytes} box 64 128 steps 1 1 "
        "interleave 0 swizzle 2 promotion 2 fill 0"
    )


# Operation, arguments, bases of P's and Q's maps, what is encoded.
MAPS = [
    ("rows", rows_args(a=A, b=B), (A, B), [encoded(A, 300, 256), encoded(B, 1040, 256)]),
    ("rows", rows_args(a=A, b=B, n=512, groups=9), (B, A), [encoded(B, 4608, 256), encoded(A, 300, 256)]),
    ("depth", depth_args(a=A, b=B), (A, B), [encoded(A, 260, 640), encoded(B, 520, 640)]),
    ("rows", rows_args(a=A + 1, b=B), (0, 0), []),
    ("rows", rows_args(a=A, b=B + 8), (0, 0), []),
    ("depth", depth_args(a=A + 15, b=B), (0, 0), []),
    ("depth", depth_args(a=A, b=B + 4), (0, 0), []),
    ("rows", rows_args(a=A, b=B, groups=0), (A, 0), [encoded(A, 300, 256)]),
    ("rows", rows_args(a=A, b=B, m=0), (B, 0), [encoded(B, 1040, 256)]),
    ("rows", rows_args(a=A, b=B, k=0), (0, 0), []),
    ("depth", depth_args(a=A, b=B, depth=0), (0, 0), []),
]


@pytest.mark.parametrize(("op", "args", "bases", "maps"), MAPS)
def test_cuda_tensor_maps(new, op: str, args: ctypes.Structure, bases: tuple[int, int], maps: list[str]) -> None:
    launcher = new(CUDA)
    assert launcher.call(f"gemm_{op}", args) is None
    assert launcher.log("cuTensorMapEncodeTiled") == maps
    assert [launch.maps for launch in launcher.launches()] == [f"{bases[0]} {bases[1]}"] * 2


# Arguments and, of device 2 with 134 multiprocessors, blocks of prepare: of tiles, then of scales; and of the GEMM.
GRIDS = [
    ("rows", rows_args(), 1 + 2 + 5, 4 * 5),
    ("rows", rows_args(n=512, groups=9), 1 + 6 + 18, 12 * 2),
    ("rows", rows_args(m=30000), 3 + 118 + 5, 134),
    ("depth", depth_args(), 1 + 3 * (2 + 3), 3 * 2 * 5),
    ("depth", depth_args(n=9000), 3 + 3 * (36 + 3), 134),
    ("depth", depth_args(n=90000), 21 + (3 * 352 + 3 * 3) // 3, 134),
]


@pytest.mark.parametrize(("op", "args", "prepare_blocks", "blocks"), GRIDS)
def test_cuda_grids(new, op: str, args: ctypes.Structure, prepare_blocks: int, blocks: int) -> None:
    launcher = new(CUDA)
    launcher.devices(4)
    assert launcher.call(f"gemm_{op}", args, device=2) is None
    assert [launch.grid for launch in launcher.launches()] == [f"{prepare_blocks} 1 1", f"{blocks} 1 1"]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("rows", rows_args(m=16384, n=7168, k=2048, groups=32)),
        ("depth", depth_args(n=2048, k=1024, depth=131072, groups=32)),
    ],
)
def test_hip_persistent_kernels_have_a_block_a_cu(new, op: str, args: ctypes.Structure) -> None:
    launcher = new(HIP)
    assert launcher.call(f"gemm_{op}", args) is None
    gemm = launcher.launches()[1]
    assert (gemm.kernel, gemm.grid) == (f"mx_gemm_{op}_gfx950_256x256_bf16_persistent", "256 1 1")


# The emulator's way: the same launches, around which the host's memory is shown to it.


@pytest.fixture
def emulator(new, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("MXFP8_EMU_LIBRARY", "/given/path.so")
    return new(EMULATOR)


def test_emulator_path_must_be_given(new, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXFP8_EMU_LIBRARY", raising=False)
    assert new(EMULATOR).available(CPU_ONLY) == "MXFP8_EMU_LIBRARY must be the emulator's path, and is not set"
    monkeypatch.setenv("MXFP8_EMU_LIBRARY", "/nowhere.so")
    launcher = new(EMULATOR)
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
    told = f"hipHostRegister: {HIP.error}: what the emulator says"
    assert emulator.call("gemm_depth", args, device=CPU_ONLY) == told
    registered = [line.split()[0] for line in emulator.log("hipHostRegister")]
    assert emulator.log("hipHostUnregister") == registered[: nth - 1][::-1]
    assert emulator.launches() == []
    assert emulator.call("gemm_depth", args, device=CPU_ONLY) is None


def test_emulator_kernel_error_is_the_calls(emulator: Launcher) -> None:
    emulator.fail("hipDeviceSynchronize")
    told = f"hipDeviceSynchronize: {HIP.error}: what the emulator says"
    assert emulator.call("quantize", quantize_args(), device=CPU_ONLY) == told
    assert len(emulator.log("emu_clear_error")) == 1
    assert sorted(emulator.log("hipHostUnregister")) == sorted(
        line.split()[0] for line in emulator.log("hipHostRegister")
    )
