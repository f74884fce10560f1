"""Compiles kernels and prints what they use, as JSON lines.

    python -m tests.plugins.compile_problems < problems.jsonl

Runs in a process of its own, since kernels are compiled here and interpreted elsewhere. A line
holds the axes of one problem and the targets to compile it for.
"""

import json
import sys
from typing import Any

from plugins.importance import aot
from plugins.importance.launch import FP8, LSE, POOL, Problem, default_splits
from trtllm_specprefill.importance_op import head_table


def problem_of(axes: dict[str, Any]) -> Problem:
    """types: of queries and keys. pool: 0 for the widest that the kernels take."""
    query_type, key_type = axes["types"]
    table = head_table(axes["kv_heads"] * axes["group"], axes["kv_heads"])
    widest = 17 if axes["dim"] == 256 else 33
    return Problem(
        query_heads=axes["kv_heads"] * axes["group"],
        kv_heads=axes["kv_heads"],
        rows=len(table),
        group=len(table[0]) - 1,
        dim=axes["dim"],
        query_type=query_type,
        key_type=FP8 if key_type == "fp8" else key_type,
        scale=axes["dim"] ** -0.5,
        pool=axes["pool"] or widest,
        causal=axes["causal"],
        max_queries=axes["queries"],
        splits=default_splits(len(table)),
    )


if __name__ == "__main__":
    for line in sys.stdin:
        axes = json.loads(line)
        for target in axes["sm"]:
            for kernel in (LSE, POOL):
                built = aot.compile_kernel(problem_of(axes), kernel, target)
                found = {"stack": built.stack, "shared_memory": built.shared_memory}
                print(json.dumps({"kernel": kernel, **axes, "sm": target, **found}), flush=True)
