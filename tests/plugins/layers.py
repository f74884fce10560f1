"""One layer's inputs, the kernels run on them in the interpreter, and the float64 judge.

Triton decides whether to interpret when it is first imported, and other tests import it too. So
kernels run in one child process that starts with TRITON_INTERPRET set.
"""

import atexit
import functools
import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perf import gpu_check
from plugins.importance.launch import INPUTS, LSE, OUTPUTS, POOL, SCALARS, Problem
from plugins.importance.torch_op import launch, problem_of
from trtllm_specprefill.importance_op import head_table

ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")
SPLITS = 2  # the interpreter runs one program after the other


@dataclass
class Layer:
    queries: torch.Tensor
    keys: torch.Tensor
    pool: int = 13
    causal: bool = False
    lengths: list[int] = field(default_factory=list)
    heads: tuple[int, ...] | None = None
    running: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    scale: float = 0.0

    def __post_init__(self) -> None:
        (b, _, w, d), (_, kv_heads, n, _) = self.queries.shape, self.keys.shape
        self.lengths = self.lengths or [n] * b
        if self.running is None:
            self.running = torch.zeros(b, w, n)
        if self.key_scale is None:
            self.key_scale = torch.ones(kv_heads)
        self.scale = self.scale or d**-0.5

    @property
    def table(self) -> torch.Tensor:
        rows = head_table(self.queries.shape[1], self.keys.shape[1], self.heads)
        return torch.tensor(rows, dtype=torch.int32)

    def problem(self) -> Problem:
        problem = problem_of(
            self.queries, self.keys, self.table, self.scale, self.pool, self.causal
        )
        return replace(problem, splits=SPLITS)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        sizes = torch.tensor(self.lengths, dtype=torch.int32)
        return self.queries, self.keys, sizes, self.table, self.key_scale, self.running

    def kernels(self, poison: float = NAN) -> torch.Tensor:
        """Both kernels' result `[B, W, N]`; whatever they do not write stays `poison`."""
        return interpreted(run_kernels, self, poison)

    def plain(self) -> torch.Tensor:
        """The torch op's CPU form."""
        return torch.ops.specprefill.importance_layer(
            *self.inputs(), self.scale, self.pool, self.causal
        )

    def float64(self) -> torch.Tensor:
        """The definition, row by row."""
        return gpu_check.reference(
            self.queries,
            self.keys,
            self.running,
            self.lengths,
            self.scale,
            self.pool,
            self.causal,
            self.heads,
            self.key_scale,
        )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest elementwise relative error; weights below 1e-30 count by their difference."""
    assert not got.isnan().any(), "an element is NaN or was never written"
    return float(((got.double() - expected).abs() / expected.clamp(min=1e-30)).max())


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module in the process where kernels are interpreted."""
    return _load(_interpreter_process().submit(_call, _save((function, arguments))).result())


def run_kernels(layer: Layer, poison: float) -> torch.Tensor:
    problem = layer.problem()
    b, _, w, _ = layer.queries.shape
    parts = torch.full(problem.parts_shape(b, w), poison)
    out = torch.full_like(layer.running, poison)
    launch(problem, *layer.inputs(), parts, out)
    return out


def run_grids(
    layer: Layer,
    problem: Problem,
    grids: dict[str, tuple[int, ...]],
    scalars: dict[str, tuple[int, ...]],
) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    """Launch both kernels with given grids and scalars.

    Returns the result and, for each kernel, the fewest and the most times that any element of
    its output was stored; a store outside the output raises `IndexError`.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    from plugins.importance import kernels

    store = InterpreterBuilder.create_masked_store
    addresses: list[torch.Tensor] = []

    def recorded(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses.append(torch.from_numpy(pointers.data[mask.data].astype("int64")))
        return store(builder, pointers, value, mask, *rest)

    def stores_of(tensor: torch.Tensor) -> tuple[int, int]:
        places = (torch.cat(addresses) - tensor.data_ptr()) // tensor.element_size()
        addresses.clear()
        if places.min() < 0 or places.max() >= tensor.numel():
            raise IndexError("a program stored outside the output")
        counts = torch.bincount(places, minlength=tensor.numel())
        return int(counts.min()), int(counts.max())

    b, _, w, _ = layer.queries.shape
    queries, keys, sizes, table, key_scale, running = layer.inputs()
    keys = keys.view(torch.uint8) if keys.dtype == torch.float8_e4m3fn else keys
    inputs = (queries, keys, sizes, table, key_scale)
    parts = torch.full(problem.parts_shape(b, w), NAN)
    out = torch.full_like(running, NAN)
    counts = {}
    InterpreterBuilder.create_masked_store = recorded
    try:
        kernels.lse_kernel[grids[LSE]](*inputs, *scalars[LSE], parts, **problem.constants(LSE))
        counts[LSE] = stores_of(parts)
        kernels.pool_kernel[grids[POOL]](
            *inputs, parts, running, *scalars[POOL], out, **problem.constants(POOL)
        )
        counts[POOL] = stores_of(out)
    finally:
        InterpreterBuilder.create_masked_store = store
    return out, counts


def run_programs(
    kernel: str,
    programs: list[tuple[int, ...]],
    grid: tuple[int, ...],
    arguments: dict[str, Any],
) -> None:
    """Run some programs of a kernel's grid, and no others; an int32 that overflows is an error."""
    from triton.runtime import interpreter

    from plugins.importance import kernels

    builder = interpreter.interpreter_builder
    options, function = builder.options, getattr(kernels, kernel)
    scope = interpreter._patch_lang(function.fn)
    builder.options = replace(options, debug=True, sanitize_overflow=True)
    run_time = (*INPUTS[kernel], *SCALARS, *OUTPUTS[kernel])
    given = {
        name: interpreter._implicit_cvt(value) if name in run_time else value
        for name, value in arguments.items()
    }
    try:
        builder.set_grid_dim(*grid)
        for program in programs:
            builder.set_grid_idx(*program)
            function.rewrite()(**given)
    finally:
        builder.options = options
        scope.restore()


@functools.cache
def _interpreter_process() -> ProcessPoolExecutor:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(_call, _save((_leave_out_what_is_done_in_vain, ()))).result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    atexit.register(pool.shutdown)
    return pool


def _leave_out_what_is_done_in_vain() -> None:
    """Make the interpreter two times faster.

    It patches Triton's language at every call of a device function, not only at its first, and
    computes for every sum and product whether it overflows, which only `debug` asks for.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _call(blob: bytes) -> bytes:
    function, arguments = _load(blob)
    return _save(function(*arguments))


# Saved here, not by multiprocessing, which would pass tensors as shared memory.
def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(blob: bytes) -> Any:
    return torch.load(io.BytesIO(blob), weights_only=False)
