"""Builds libmxfp8.so (the ops, plain C) and, where Python's headers are, the inspection module `_inspect` (pybind11).

The compiler is clang from the `ziglang` wheel, a build requirement, so no compiler, torch or header of the machine is
needed. Environment: CC names another clang (19 or later) for the library, MXFP8_CLANG another for device kernels, whose
instruction counts the tests hold to the pinned one; CFLAGS and LDFLAGS are appended to every command for the library.

The library is all of csrc/, and of each folder in kernels/ what its build.cfg says:
  [device]    `sources`, each compiled by `flags` for a GPU to an `image` (hsaco or ptx): build/kernels/<folder>/
              <source>.<image>, for the folder's host sources to embed.
  [host ...]  `sources`, compiled into the library by `flags`. A section each for several ways to compile the same
              sources; `machines` names the processors that it is for, where it is not for all.
"""

import configparser
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
IMAGES = ROOT / "build" / "kernels"  # of the device kernels, as the host sources of kernels/ embed them
CFLAGS = ["-std=gnu23", "-O3", "-fPIC", "-fvisibility=hidden", "-fexceptions", "-Wall", "-Wextra", "-Werror"]
CFLAGS += [f"--embed-dir={IMAGES}"]
CXXFLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
DEVICE_CFLAGS = ["-O3", "-std=gnu23", "-ffreestanding", "-Wall", "-Wextra", "-Werror"]
CORE_SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.c"))
EMU_SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "emu").glob("*.c"))  # for Tidy: make builds it


def folder_sections(kind):
    """The sections of this kind, "device" or "host", of each folder's build.cfg in kernels/, with the folder."""
    for path in sorted((ROOT / "kernels").glob("*/build.cfg")):
        config = configparser.ConfigParser()
        config.read(path)
        for name, section in config.items():
            if name.split()[0] == kind and platform.machine() in section.get("machines", platform.machine()).split():
                yield path.parent, section


def host_objects():
    """What the library is compiled from: source, flags, stem of the object's name."""
    yield from ((source, [], Path(source).stem) for source in CORE_SOURCES)
    for folder, section in folder_sections("host"):
        for source in section["sources"].split():
            stem = "_".join([folder.name, *section.name.split()[1:], Path(source).stem])
            yield str((folder / source).relative_to(ROOT)), section.get("flags", "").split(), stem


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


def device_compiler():
    """The command that compiles device kernels, with the include path of its own headers."""
    chosen = os.environ.get("MXFP8_CLANG")
    if chosen:
        return shlex.split(chosen)
    import ziglang

    include = str(Path(ziglang.__file__).parent / "lib" / "include")
    return [sys.executable, "-m", "ziglang", "clang", "-nostdinc", "-isystem", include]


def finish_ptx(ptx):
    """Sets launch bounds, from the comments that the KERNEL macro leaves in the text; drops a tenth of the text."""
    ptx = re.sub(r"^\t// (begin|end) inline asm\n", "", ptx, flags=re.MULTILINE)
    for name, threads, blocks in re.findall(r"^// launch bounds (\w+) (\d+) (\d+)$", ptx, re.MULTILINE):
        entry = re.compile(rf"(\.entry {name}\([^)]*\))[^{{]*\{{")
        ptx, count = entry.subn(rf"\1\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n{{", ptx)
        if count != 1:
            raise ValueError(f"{count} entries named {name}")
    return ptx


def build_image(source, section):
    """Compiles a device source into build/kernels, unless the same command has made it of the same sources."""
    image = IMAGES / source.parent.name / f"{source.stem}.{section['image']}"
    compiled, record = image.with_suffix(".o"), image.with_suffix(".command")
    emit = "-S" if section["image"] == "ptx" else "-c"
    flags = [*section["flags"].split(), emit, *DEVICE_CFLAGS]
    command = [*device_compiler(), *flags, str(source), "-o", str(compiled)]
    included = [path for folder in (source.parent, ROOT / "kernels") for path in folder.glob("*.[hd]*")]
    newest = max(path.stat().st_mtime for path in [source, *included])
    current = image.exists() and record.exists() and image.stat().st_mtime > newest
    if current and record.read_text() == shlex.join(command):
        return
    image.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)

    def finish(partial):
        if emit == "-S":
            partial.write_text(finish_ptx(compiled.read_text()))
        else:
            linker = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", str(compiled), "-o", str(partial)]
            subprocess.run(linker, check=True)

    replace_file(image, finish)
    compiled.unlink()
    record.write_text(shlex.join(command))


def build_images():
    """The device kernels, which the host sources of kernels/ embed."""
    jobs = [
        (folder / source, section)
        for folder, section in folder_sections("device")
        for source in section["sources"].split()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build_image, *zip(*jobs, strict=True)))


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

        def compile_one(job):
            source, flags, stem = job
            result = self.temp / f"{stem}.o"
            self.spawn_checked(
                [*command, *CFLAGS, *flags, *env_flags("CFLAGS"), "-c", str(ROOT / source), "-o", str(result)]
            )
            return str(result)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, host_objects()))
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
    """Runs clang-tidy (checks: .clang-tidy) over every C source, with each of the flags that it is compiled with."""

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
        sources_of = {(): EMU_SOURCES}
        for source, flags, _ in host_objects():
            sources_of.setdefault(tuple(flags), []).append(source)
        for flags, sources in sources_of.items():
            compile_flags = ["-std=gnu23", f"--embed-dir={IMAGES}", *flags, "-nostdinc", *includes]
            tidy = ["clang-tidy", "--quiet", *sources, "--", *compile_flags]
            subprocess.run([str(Path(sys.executable).with_name(tidy[0])), *tidy[1:]], cwd=ROOT, check=True)


def env_flags(name):
    return shlex.split(os.environ.get(name, ""))


setup(
    ext_modules=[
        Extension("mxfp8_moe.libmxfp8", [source for source, _, _ in host_objects()]),
        Extension("mxfp8_moe._inspect", ["csrc/inspect.cpp"]),
    ],
    cmdclass={"build_ext": BuildExt, "tidy": Tidy},
)
