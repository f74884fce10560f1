"""Command line: `python -m plugins.importance build --sm 90 --out build/`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from plugins.importance import aot
from plugins.importance.launch import (
    FP8,
    HEAD_DIMS,
    LSE,
    POOL,
    QUERY_TYPES,
    Problem,
    default_splits,
)
from trtllm_specprefill.importance_op import head_table


def main(arguments: list[str] | None = None) -> None:
    """Compile both kernels and write PTX, cubin and a JSON file of what they use."""
    parser = argparse.ArgumentParser(prog="python -m plugins.importance", description=__doc__)
    build = parser.add_subparsers(required=True).add_parser("build", help=main.__doc__)
    build.add_argument("--sm", type=int, nargs="+", default=[90], choices=aot.TARGETS)
    build.add_argument("--out", type=Path, default=Path("build/importance"))
    build.add_argument("--query-heads", type=int, default=32)
    build.add_argument("--kv-heads", type=int, default=8)
    build.add_argument("--dim", type=int, default=64, choices=HEAD_DIMS)
    build.add_argument("--queries", type=int, default=8, help="the largest W to expect")
    build.add_argument("--query-type", default="bf16", choices=QUERY_TYPES)
    build.add_argument("--fp8-keys", action="store_true", help="keys are e4m3 bytes")
    build.add_argument("--pool", type=int, default=13)
    build.add_argument("--scale", type=float, help="default: 1 / sqrt(dim)")
    build.add_argument("--causal", action="store_true", help="the queries end the sequence")
    chosen = parser.parse_args(arguments)

    table = head_table(chosen.query_heads, chosen.kv_heads)
    problem = Problem(
        query_heads=chosen.query_heads,
        kv_heads=chosen.kv_heads,
        rows=len(table),
        group=len(table[0]) - 1,
        dim=chosen.dim,
        query_type=chosen.query_type,
        key_type=FP8 if chosen.fp8_keys else chosen.query_type,
        scale=chosen.scale or chosen.dim**-0.5,
        pool=chosen.pool,
        causal=chosen.causal,
        max_queries=chosen.queries,
        splits=default_splits(len(table)),
    )
    chosen.out.mkdir(parents=True, exist_ok=True)
    figures = []
    for target in chosen.sm:
        for kernel in (LSE, POOL):
            compiled = aot.compile_kernel(problem, kernel, target)
            stem = chosen.out / f"{compiled.name}.sm_{target}"
            stem.with_suffix(stem.suffix + ".ptx").write_text(compiled.ptx)
            stem.with_suffix(stem.suffix + ".cubin").write_bytes(compiled.cubin)
            figures.append(
                {
                    "kernel": compiled.name,
                    "sm": target,
                    "threads": compiled.threads,
                    "registers_per_thread": compiled.registers,
                    "shared_memory_bytes": compiled.shared_memory,
                    "spilled_bytes_per_thread": compiled.stack,
                    "parameters": aot.parameters(compiled.ptx),
                }
            )
            print(
                f"{compiled.name} sm_{target}: {compiled.registers} registers, "
                f"{compiled.shared_memory} bytes of shared memory, {compiled.stack} bytes spilled"
            )
    (chosen.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
