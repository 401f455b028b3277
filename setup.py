"""Builds libmxfp8.so (the ops, plain C) and, where Python's headers are, the inspection module `_inspect` (pybind11).

The compiler is clang from the `ziglang` wheel, a build requirement, so no compiler, torch or header of the machine is
needed. The GPU kernels are compiled with the same clang and become part of libmxfp8.so. Environment: CC names another
clang (19 or later) for the library, MXFP8_CLANG another for the kernels, whose instruction counts the tests hold to the
pinned one; CFLAGS and LDFLAGS are appended to every command for the library.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CLANG_MIN = 19
GLIBC_MIN = "2.17"
IMAGES = ROOT / "build" / "kernels"  # of the GPU kernels, as csrc/<gpu>.c embeds them
CFLAGS = ["-std=gnu23", "-O3", "-fPIC", "-fvisibility=hidden", "-fexceptions", "-Wall", "-Wextra", "-Werror"]
CFLAGS += [f"--embed-dir={IMAGES}"]
CXXFLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]]

# One line per instruction-set level of MX_CPU_LEVELS (csrc/mxfp8.h): the flags its objects are compiled with.
CPU_LEVELS = {"portable": [], "avx2": AVX2, "avx512": AVX512} if platform.machine() == "x86_64" else {"portable": []}
ONCE_SOURCES = ["csrc/backends.c", "csrc/gfx950.c", "csrc/gpu.c", "csrc/shim.c", "csrc/sm90.c"]
LEVEL_SOURCES = ["csrc/cpu.c", "kernels/gemm_cpu.c", "kernels/quantize_cpu.c"]
# One line per GPU: suffix of the names of its sources in kernels/; flags that choose it; suffix of the images.
# PTX 8.0 is CUDA 12.0's. clang would say the version of whatever CUDA toolkit it finds, or without one 4.2: none is to
# be found.
GPUS = {
    "gfx950": (["--target=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-nogpulib", "-c"], ".hsaco"),
    "sm90": (
        [
            "--target=nvptx64-nvidia-cuda",
            "-march=sm_90a",
            "--cuda-path=/nonexistent",
            "-Xclang",
            "-target-feature",
            "-Xclang",
            "+ptx80",
            "-S",
        ],
        ".ptx",
    ),
}
GPU_CFLAGS = ["-O3", "-std=gnu23", "-ffreestanding", "-Wall", "-Wextra", "-Werror"]
EMU_SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "emu").glob("*.c"))  # for Tidy: make builds it


def compiler(language):
    """The command that compiles C ("cc") or C++ ("c++")."""
    chosen = os.environ.get("CC")
    if not chosen:
        target = f"{platform.machine()}-linux-gnu.{GLIBC_MIN}"
        return [sys.executable, "-m", "ziglang", language, "-target", target, "-fno-sanitize=undefined"]
    command = shlex.split(chosen)
    try:
        probe = subprocess.run(
            [*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"CC is '{chosen}', which could not be run: {error}") from None
    macros = dict(re.findall(r"^#define (\w+) (.*)$", probe.stdout, re.MULTILINE))
    if int(macros.get("__clang_major__", 0)) < CLANG_MIN:
        found = macros.get("__VERSION__", "an unknown compiler")
        raise SystemExit(
            f"CC is '{chosen}' ({found}); expected clang {CLANG_MIN} or later, or CC unset for the pinned one"
        )
    return [*command, "--driver-mode=g++"] if language == "c++" else command


def gpu_compiler():
    """The command that compiles GPU kernels, with the include path of its own headers."""
    chosen = os.environ.get("MXFP8_CLANG")
    if chosen:
        return shlex.split(chosen)
    import ziglang

    include = str(Path(ziglang.__file__).parent / "lib" / "include")
    return [sys.executable, "-m", "ziglang", "clang", "-nostdinc", "-isystem", include]


def finish_ptx(ptx):
    """Sets launch bounds, from the comments that KERNEL of kernels/device_sm90.h leaves; drops a tenth of the text."""
    ptx = re.sub(r"^\t// (begin|end) inline asm\n", "", ptx, flags=re.MULTILINE)
    for name, threads, blocks in re.findall(r"^// launch bounds (\w+) (\d+) (\d+)$", ptx, re.MULTILINE):
        entry = re.compile(rf"(\.entry {name}\([^)]*\))[^{{]*\{{")
        ptx, count = entry.subn(rf"\1\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n{{", ptx)
        if count != 1:
            raise ValueError(f"{count} entries named {name}")
    return ptx


def build_image(source, gpu):
    """Compiles one GPU source into build/kernels, unless the same command has made it of the same sources."""
    flags, suffix = GPUS[gpu]
    image = IMAGES / f"{source.stem}{suffix}"
    compiled, record = image.with_suffix(".o"), image.with_suffix(".command")
    command = [*gpu_compiler(), *flags, *GPU_CFLAGS, str(source), "-o", str(compiled)]
    newest = max(path.stat().st_mtime for path in [source, *(ROOT / "kernels").glob("*.h")])
    current = image.exists() and record.exists() and image.stat().st_mtime > newest
    if current and record.read_text() == shlex.join(command):
        return
    IMAGES.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)

    def finish(partial):
        if suffix == ".ptx":
            partial.write_text(finish_ptx(compiled.read_text()))
        else:
            linker = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", str(compiled), "-o", str(partial)]
            subprocess.run(linker, check=True)

    replace_file(image, finish)
    compiled.unlink()
    record.write_text(shlex.join(command))


def build_images():
    """The GPU kernels, which csrc/<gpu>.c embeds."""
    sources = [(source, gpu) for gpu in GPUS for source in sorted((ROOT / "kernels").glob(f"*_{gpu}.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build_image, *zip(*sources, strict=True)))


def has_python_headers():
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


def replace_file(path, make):
    """Has `make` write another file, then renames it: an interruption leaves no half-written one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    make(partial)
    os.replace(partial, path)


class BuildExt(build_ext):
    def finalize_options(self):
        super().finalize_options()
        if not has_python_headers():
            self.announce("Python.h is not installed: building without mxfp8_moe._inspect", level=3)
            self.extensions = [extension for extension in self.extensions if extension.name != "mxfp8_moe._inspect"]

    def get_ext_filename(self, fullname):
        filename = super().get_ext_filename(fullname)
        # ctypes loads libmxfp8; it is no Python module, so it carries no ABI suffix.
        return str(Path(filename).with_name("libmxfp8.so")) if fullname.endswith("libmxfp8") else filename

    def build_extension(self, ext):
        self.temp = Path(self.build_temp).resolve()
        self.temp.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(self.temp / "zig-cache"))
        output = Path(self.get_ext_fullpath(ext.name))
        if ext.name == "mxfp8_moe._inspect":
            self.build_inspect(output)
        else:
            self.build_library(output)

    def copy_extensions_to_source(self):
        """For builds in place. Renames into place, as linking does: a process may be running the old library."""
        for extension in self.extensions:
            filename = self.get_ext_filename(extension.name)
            replace_file(
                ROOT / filename, lambda partial, name=filename: shutil.copy2(Path(self.build_lib, name), partial)
            )

    def build_library(self, output):
        command = compiler("cc")
        build_images()
        jobs = [(source, [], "") for source in ONCE_SOURCES]
        for level, flags in CPU_LEVELS.items():
            jobs += [(source, [*flags, f"-DMX_LEVEL={level}"], level) for source in LEVEL_SOURCES]

        def compile_one(job):
            source, flags, level = job
            result = self.temp / f"{Path(source).stem}{'.' + level if level else ''}.o"
            self.spawn_checked(
                [*command, *CFLAGS, *flags, *env_flags("CFLAGS"), "-c", str(ROOT / source), "-o", str(result)]
            )
            return str(result)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        self.link([*command, "-shared", "-Wl,-soname,libmxfp8.so", *objects, "-lm"], output)

    def build_inspect(self, output):
        import pybind11

        includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        core = Path(self.get_ext_fullpath("mxfp8_moe.libmxfp8"))
        source = str(ROOT / "csrc/inspect.cpp")
        flags = [*CXXFLAGS, *env_flags("CFLAGS"), *includes, "-shared", source, str(core), "-Wl,-rpath,$ORIGIN"]
        self.link([*compiler("c++"), *flags], output)

    def link(self, command, output):
        strip = [] if os.environ.get("CC") else ["-Wl,--strip-all"]
        flags = [*env_flags("CFLAGS"), *strip, *env_flags("LDFLAGS")]
        replace_file(output, lambda partial: self.spawn_checked([*command, *flags, "-o", str(partial)]))

    def spawn_checked(self, command):
        self.announce(shlex.join(command), level=2)
        subprocess.run(command, check=True)


class Tidy(Command):
    """Runs clang-tidy (checks: .clang-tidy) over every C source as each level compiles it."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        build_images()
        search = subprocess.run([*compiler("cc"), "-E", "-v", "-x", "c", os.devnull], capture_output=True, text=True)
        listed = search.stderr.split("search starts here:")[-1].split("End of search list")[0]
        includes = [word for path in listed.split() for word in ("-isystem", path)]
        for flags, sources in [([], ONCE_SOURCES), ([], EMU_SOURCES)] + [
            ([*flags, f"-DMX_LEVEL={level}"], LEVEL_SOURCES) for level, flags in CPU_LEVELS.items()
        ]:
            compile_flags = ["-std=gnu23", f"--embed-dir={IMAGES}", *flags, "-nostdinc", *includes]
            tidy = ["clang-tidy", "--quiet", *sources, "--", *compile_flags]
            subprocess.run([str(Path(sys.executable).with_name(tidy[0])), *tidy[1:]], cwd=ROOT, check=True)


def env_flags(name):
    return shlex.split(os.environ.get(name, ""))


setup(
    ext_modules=[
        Extension("mxfp8_moe.libmxfp8", [*ONCE_SOURCES, *LEVEL_SOURCES]),
        Extension("mxfp8_moe._inspect", ["csrc/inspect.cpp"]),
    ],
    cmdclass={"build_ext": BuildExt, "tidy": Tidy},
)
