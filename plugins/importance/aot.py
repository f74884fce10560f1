"""The kernels compiled ahead of time: PTX and cubin for a GPU that need not be present.

TensorRT takes PTX and launches it with a plugin's input pointers, its int32 scalars and its
output pointers, in that order and nothing else. Triton adds pointers to scratch memory at the end
of every kernel's parameters; `parameters` reads them off the PTX, and `compile_kernel` takes them
off, after checking that the kernel uses none of them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plugins.importance import kernels
from plugins.importance.launch import Kernel, Problem

#: Compute capabilities, as `10 * major + minor`.
TARGETS = (80, 86, 89, 90, 100, 120)

#: PTX 8.7 is the oldest that knows sm_120; TensorRT 10.14's own compiler and drivers read it.
PTX_VERSION = 87

#: A kernel gets this much shared memory without an opt-in, in bytes.
SHARED_MEMORY_LIMIT = 49_152

_ENTRY = re.compile(r"(\.visible\s+\.entry\s+(\w+)\s*\()(.*?)(\n\))", re.DOTALL)


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one target.

    name: entry point. ptx: text, with just the parameters that TensorRT passes. cubin: machine
    code of the same. threads: per program. shared_memory: dynamic, in bytes per program.
    registers: per thread. stack: bytes per thread of local memory that the compiler had to use;
    0 means that nothing spilled.
    """

    name: str
    target: int
    ptx: str
    cubin: bytes
    threads: int
    shared_memory: int
    registers: int
    stack: int


def compile_kernel(problem: Problem, kernel: Kernel, target: int) -> CompiledKernel:
    """Compile one kernel of `problem` for compute capability `target`, with or without a GPU.

    Raises `ValueError` for an unknown target or a kernel that needs more shared memory than a
    plugin may rely on, and `RuntimeError` when Triton's interpreter is on or the compiler's
    output is not what TensorRT can launch.
    """
    if target not in TARGETS:
        raise ValueError(f"target: sm_{target} must be one of {TARGETS}")
    function = getattr(kernels, kernel)
    if not isinstance(function, triton.runtime.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: unset it before importing to compile kernels")
    arguments = problem.signature(kernel)
    # Pointers come from allocators that align to 256 bytes; 16 let the compiler load vectors.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, type_ in enumerate(arguments.values())
        if type_.startswith("*")
    }
    source = ASTSource(
        function,
        {name: arguments.get(name, "constexpr") for name in function.arg_names},
        problem.constants(kernel),
        aligned,
    )
    options = problem.options(kernel) | {"ptx_version": PTX_VERSION}
    found = _compile(source, options, len(arguments), target)
    if found.stack:
        # The assembler spills a few bytes where one more program then fits a processor; told that
        # a thread may have all the registers there are, it does not.
        found = _compile(source, options | {"maxnreg": 255}, len(arguments), target)
    if found.shared_memory > SHARED_MEMORY_LIMIT:
        raise ValueError(
            f"{kernel} for {problem.query_type}, D = {problem.dim} needs {found.shared_memory} "
            f"bytes of shared memory, more than the {SHARED_MEMORY_LIMIT} that a plugin may rely on"
        )
    return found


def _compile(
    source: ASTSource, options: dict[str, Any], arguments: int, target: int
) -> CompiledKernel:
    """One kernel with these options and its first `arguments` parameters."""
    with triton.knobs.compilation.scope():
        # Line tables would carry the build machine's paths into every engine.
        triton.knobs.compilation.disable_line_info = True
        built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    ptx = _without_scratch(built.asm["ptx"], arguments)
    cubin = _assemble(ptx, target)
    registers, stack = _resources(cubin)
    return CompiledKernel(
        name=built.metadata.name,
        target=target,
        ptx=ptx,
        cubin=cubin,
        threads=32 * options["num_warps"],
        shared_memory=built.metadata.shared,
        registers=registers,
        stack=stack,
    )


def parameters(ptx: str) -> list[str]:
    """Types of the entry point's parameters in order, `u64` for pointers and `u32` for int32."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise RuntimeError("the PTX has no entry point")
    return re.findall(r"\.param\s+\.(\w+)", entry.group(3))


def _without_scratch(ptx: str, count: int) -> str:
    """The PTX with its first `count` parameters only. Raises `RuntimeError` if others are used."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise RuntimeError("the PTX has no entry point")
    declared = [line.strip().rstrip(",") for line in entry.group(3).strip().splitlines()]
    body = ptx[entry.end() :]
    for line in declared[count:]:
        name = line.split()[-1]
        if re.search(rf"\b{re.escape(name)}\b", body):
            raise RuntimeError(f"the kernel uses scratch memory ({name}), which TensorRT has not")
    kept = ",\n".join(f"\t{line}" for line in declared[:count])
    return f"{ptx[: entry.start()]}{entry.group(1)}\n{kept}{entry.group(4)}{body}"


def _tool(name: str) -> str:
    """Path of one of the CUDA tools that Triton carries."""
    path: str = getattr(triton.knobs.nvidia, name).path
    return path


def _assemble(ptx: str, target: int) -> bytes:
    """Machine code of the PTX as it is handed out."""
    suffix = "a" if target >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_tool("ptxas" if target < 100 else "ptxas_blackwell"), "-O3"]
        command += [f"--gpu-name=sm_{target}{suffix}", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the PTX for sm_{target}: {done.stderr.strip()}")
        return result.read_bytes()


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, as the assembler counted them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        listing = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError("cuobjdump reported no resource usage")
    return int(found.group(1)), int(found.group(2))
