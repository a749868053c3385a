"""Makes a CUDA build of torch work without CUDA's libraries, for an image without a GPU.

The lock's torch is the CUDA build. Its Python library links to ``libtorch_cuda.so``, cuDNN and cuFile, so that
``import torch`` fails where these 3.5 GB are missing, although nothing on a CPU calls them. This program puts a small
library in the place of each: it has the same name and the symbols that the remaining libraries ask for, and every
function in it ends the process with a message. The CPU's arithmetic is in ``libtorch_cpu.so``, which stays as it is.

Runs in the image's build only, on x86-64, with the standard library, ``nm``, ``readelf`` and a C compiler.

::

    python3 deploy/cpu_torch.py /opt/fedcross/lib/python3.11/site-packages
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

#: The library of torch that only a GPU needs; it is replaced even though it is there.
GPU = "libtorch_cuda.so"
#: What nothing links to, because torch opens it only when there is a GPU.
OPENED_LATER = ("libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
#: Called when torch is imported: each returns a reference to a variable of its own, into which torch puts a pointer.
VARIABLES = ("_ZN4c10d15get_gil_checkerEv",)
#: Constructors that run when torch is imported, for default arguments of functions that only a GPU has, and the type
#: that they make. Theirs is an object whose methods do nothing.
INERT = {"_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb": "_ZTIN4c10d16ProcessGroupNCCL7OptionsE"}
#: Where torch's Python says that it was built for CUDA; by these it decides what it registers.
EDITS = (
    ("backends/cuda/__init__.py", r"return torch\._C\._has_cuda\b", "return False"),
    ("version.py", r"cuda: Optional\[str\] = .*", "cuda: Optional[str] = None"),
)
_PREAMBLE = """
#include <stdio.h>
#include <stdlib.h>
void fedcross_no_gpu(const char *name) {
    fprintf(stderr, "This image holds no CUDA (build it with ACCELERATOR=gpu), but %s was called.\\n", name);
    abort();
}
__asm__(
"""


def run(*command: str | Path) -> str:
    """Return what a program prints."""
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def symbols(library: Path, which: str) -> dict[str, tuple[str, int]]:
    """Return the dynamic symbols, ``defined`` or ``undefined``: name -> kind (a letter of ``nm``) and size in bytes."""
    found = {}
    for line in run("nm", "-D", "-S", f"--{which}-only", library).splitlines():
        # "value size kind name", "value kind name" or "kind name"
        *numbers, kind, name = line.split()
        found[name.partition("@")[0]] = (kind, int(numbers[1], 16) if len(numbers) == 2 else 0)
    return found


def needed(library: Path) -> list[str]:
    """Return the names of the libraries that this one links to."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", "-W", library))


def assembler(wanted: dict[str, tuple[str, int]]) -> Iterator[str]:
    """Yield assembler lines that define the symbols; data is zero, but for the descriptions of types."""
    for name, (kind, size) in sorted(wanted.items()):
        if kind in "TtWwiU" and not name.startswith("_ZT"):
            yield f".text; .globl {name}; .type {name}, @function; {name}:"
            yield from _body(name)
            continue
        size = max(size, 16)
        yield f".data; .balign 16; .globl {name}; .type {name}, @object; .size {name}, {size}; {name}:"
        if name.startswith("_ZTI"):  # a type's description has its name, by which torch registers it as a class
            yield f".quad _ZTVN10__cxxabiv117__class_type_infoE + 16; .quad .Lname{name}; .zero {size - 16}"
            yield f'.Lname{name}: .asciz \\"{name[4:]}\\"'
        else:
            yield f".zero {size}"


def _body(name: str) -> Iterator[str]:
    """Yield the instructions of a function."""
    if name in VARIABLES:
        yield f"lea .Lvariable{name}(%rip), %rax; ret"
        yield f".bss; .balign 16; .Lvariable{name}: .zero 64"
    elif name in INERT:
        yield f"lea 16+.Lvtable{name}(%rip), %rax; mov %rax, (%rdi); ret; .Lnothing{name}: xor %eax, %eax; ret"
        yield f".data; .balign 16; .Lvtable{name}: .quad 0; .quad {INERT[name]}"
        yield f".rept 64; .quad .Lnothing{name}; .endr"
    else:
        yield f"lea .Lname{name}(%rip), %rdi; jmp fedcross_no_gpu@PLT"
        yield f'.section .rodata; .Lname{name}: .asciz \\"{name}\\"'


def build(target: Path, wanted: dict[str, tuple[str, int]]) -> None:
    """Compile a library that defines the symbols."""
    body = "".join(f'"{line}\\n"\n' for line in assembler(wanted))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stub.c")
        source.write_text(_PREAMBLE + body + '".text\\n");\n', encoding="utf-8")
        target.unlink(missing_ok=True)
        run("gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{target.name}", "-o", target, source)


def strip_gpu(packages: Path) -> list[str]:
    """Replace what a GPU needs below `packages` and return the names of the libraries that were made.

    Parameters
    ----------
    packages : Path
        The folder ``site-packages``.
    """
    folder = packages / "torch" / "lib"
    if not (folder / GPU).exists():
        return []  # this torch is a build for CPUs already
    gpu = {}
    for name in (*OPENED_LATER, GPU):
        gpu.update(symbols(folder / name, "defined"))
        (folder / name).unlink()
    users = _libraries(packages)
    there = {path.name for path in users}
    missing = {name for path in users for name in needed(path) if _is_cuda(name) and name not in there} | {GPU}
    asked = {name: value for path in users for name, value in symbols(path, "undefined").items()}
    has = {name for path in users for name in symbols(path, "defined")}
    open_ = {name for name in asked if name not in has}
    stubs = {GPU: {name: gpu[name] for name in open_ if name in gpu}}
    for library in missing - {GPU}:
        # NVIDIA's functions begin with the name of their library: cuFileRead is libcufile's.
        prefix = re.split(r"[.-]", library)[0].removeprefix("lib")
        own = {name for name in open_ if name.lower().startswith(prefix) and name not in gpu}
        stubs[library] = dict.fromkeys(own, ("T", 0))
    for library, wanted in stubs.items():
        build(folder / library, wanted)
    for file, before, after in EDITS:
        path = packages / "torch" / file
        text = path.read_text(encoding="utf-8")
        if not re.search(before, text):
            raise SystemExit(f"{path}: no {before!r} in it. This torch needs another treatment.")
        path.unlink()
        path.write_text(re.sub(before, after, text), encoding="utf-8")
    return sorted(stubs)


def _libraries(packages: Path) -> list[Path]:
    """Return the libraries of torch and torchvision, and of NVIDIA as far as they are installed."""
    patterns = ("torch/lib/*.so*", "torchvision/*.so", "torchvision.libs/*.so*", "nvidia/**/*.so*")
    return [path for pattern in patterns for path in sorted(packages.glob(pattern)) if path.is_file()]


def _is_cuda(name: str) -> bool:
    return name == GPU or name.startswith(("libcu", "libnv", "libnccl"))


def main(arguments: Iterable[str]) -> int:
    """Strip the folders in `arguments`."""
    for folder in arguments:
        print(*strip_gpu(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
