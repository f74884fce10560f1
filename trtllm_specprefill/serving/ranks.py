"""What runs on which rank of a target on several GPUs, and how much memory is left there.

One tritonserver a rank, as TensorRT-LLM's launcher has it
(triton_backend/scripts/launch_triton_server.py @ 0a2e2c1 in NVIDIA/TensorRT-LLM): rank 0 has every
model, those above it load the target's alone. They answer nobody, so here they open no ports.
The LLM API starts the other ranks itself: on one node there is one server, and on several
`trtllm-llmapi-launch` turns all processes but the first into workers
(tensorrt_llm/llmapi/trtllm-llmapi-launch @ 020c89e).

A rank is a server of many threads, so none is bound to a core, as mpirun would have it. And the
end of one rank is the end of all, however it came: mpirun by itself goes on when one ends well.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from trtllm_specprefill.capacity import GPUS, NOBODY, Guest, Memory, Served, memory_of
from trtllm_specprefill.draft.footprint import footprint_of
from trtllm_specprefill.draft.manifest import DraftManifest
from trtllm_specprefill.draft.onnx import chosen_device
from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.models import first_layers, load_config
from trtllm_specprefill.serving.repository import MODELS
from trtllm_specprefill.serving.settings import ServeSettings
from trtllm_specprefill.target.manifest import Manifest

Launcher = Literal["mpirun", "srun"]
WORKER = "worker of the LLM API"
_WITHOUT_PORTS = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")
_PROGRAMS = "ranks.conf"  # what `srun --multi-prog` reads
# Runs its arguments, hands signals on to them, and never ends well.
_ALL_OR_NONE = (
    "sh",
    "-c",
    'trap "kill \\$!" INT TERM; "$@" & wait $!; s=$?;'
    " while kill -0 $! 2>/dev/null; do wait $!; s=$?; done; exit $((s ? s : 1))",
    "rank",
)
_LAST_SECONDS = 20  # that srun gives the others when one has ended


@dataclass(frozen=True)
class World:
    """Where the ranks of a target are.

    size: how many. nodes: names of the hosts, each with as many ranks; none: this one.
    """

    size: int = 1
    nodes: tuple[str, ...] = ()
    launcher: Launcher = "mpirun"

    @property
    def per_node(self) -> int:
        """Ranks on one node; each has the GPU of its number there."""
        return self.size // max(len(self.nodes), 1)

    def node(self, rank: int) -> str:
        """Name of the host of a rank; empty for this one."""
        return self.nodes[rank // self.per_node] if self.nodes else ""


@dataclass(frozen=True)
class Rank:
    """What one rank runs.

    models: those it loads; none for a worker of the LLM API. command: none where rank 0 starts it.
    """

    number: int
    node: str
    gpu: int
    models: tuple[str, ...]
    command: tuple[str, ...]

    def line(self) -> str:
        """Where and what, in words."""
        where = f"{self.node or 'here'}, GPU {self.gpu}"
        return f"rank {self.number} ({where}): {', '.join(self.models) or WORKER}"


def world_of(
    settings: ServeSettings,
    size: int | None = None,
    nodes: Sequence[str] = (),
    launcher: str = "mpirun",
) -> World:
    """The world of a target; as many ranks as it was built for, which `size` may only confirm.

    Raises `InputError` for ranks that the target has not, or that do not fit the nodes.
    """
    built = manifest_of(settings)
    ranks = 1 if built is None else built.ranks
    target = settings.target
    if size not in (None, ranks):
        what = f"{ranks}, the ranks of target {target.model} on {target.backend}"
        raise InputError("world_size", size, what)
    if len(set(nodes)) != len(nodes) or (nodes and ranks % len(nodes)):
        raise InputError("nodes", ",".join(nodes), f"different hosts that share {ranks} ranks")
    for known in get_args(Launcher):
        if launcher == known:
            return World(ranks, tuple(nodes), known)
    raise InputError("launcher", launcher, "one of " + ", ".join(get_args(Launcher)))


def manifest_of(settings: ServeSettings) -> Manifest | None:
    """What was built into the target; None for one that is no engine."""
    if not settings.target.backend.startswith("trtllm"):
        return None
    return Manifest.read(settings.target.model)


def ranks_of(
    world: World, settings: ServeSettings, server: Sequence[str], leader: Sequence[str]
) -> tuple[Rank, ...]:
    """Every rank of the target.

    server: tritonserver's call without models and ports. leader: the options that add both.
    """
    first = Rank(0, world.node(0), 0, MODELS, (*server, *leader))
    if world.size == 1:
        return (first,)
    others = range(1, world.size)

    def rank(number: int, models: Sequence[str], command: Sequence[str]) -> Rank:
        gpu = number % world.per_node
        return Rank(number, world.node(number), gpu, tuple(models), tuple(command))

    if settings.target.backend == "trtllm_llm":
        spread = len(world.nodes) > 1
        command = ("trtllm-llmapi-launch", *first.command) if spread else ()
        leading = rank(0, MODELS, command or first.command)
        return (leading, *(rank(number, (), command) for number in others))

    def apart(number: int) -> str:
        return f"--backend-config=python,shm-region-prefix-name=prefix{number}_"

    follower = (*server, "--load-model=target", *_WITHOUT_PORTS)
    return (
        rank(0, MODELS, (*first.command, apart(0))),
        *(rank(number, ("target",), (*follower, apart(number))) for number in others),
    )


def started_by(
    world: World, ranks: Sequence[Rank], folder: Path, environment: Iterable[str] = ()
) -> tuple[str, ...]:
    """The one command that starts all ranks. For srun, writes a file into `folder`.

    environment: names of variables that a server needs; mpirun takes them along to other nodes.
    """
    if not any(rank.command for rank in ranks[1:]):
        return ranks[0].command
    if world.launcher == "srun":
        lines = [f"{rank.number} {shlex.join(rank.command)}\n" for rank in ranks]
        (folder / _PROGRAMS).write_text("".join(lines), "utf-8")
        placed = (f"--nodelist={','.join(world.nodes)}",) if world.nodes else ()
        return (
            *("srun", "--mpi=pmix", f"--nodes={max(len(world.nodes), 1)}", *placed),
            *(f"--ntasks={world.size}", f"--ntasks-per-node={world.per_node}"),
            *("--distribution=block", "--cpu-bind=none"),
            *("--kill-on-bad-exit=1", f"--wait={_LAST_SECONDS}"),
            *("--multi-prog", str(folder / _PROGRAMS)),
        )
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    if world.nodes:
        command += [word for name in environment for word in ("-x", name)]
    for rank in ranks:
        command += [":"] if rank.number else []
        place = ("--host", rank.node) if rank.node else ()
        command += ["-n", "1", *place, *_ALL_OR_NONE, *rank.command]
    return tuple(command)


def end_with_this_process() -> subprocess.Popen[bytes]:
    """What ends the tritonserver above this process when it dies, and with that all ranks.

    Triton itself goes on without a model's process, and the other ranks wait for it for ever.
    Keep it: letting go of it ends them too.
    """
    watch = ["sh", "-c", f"read nothing; kill {os.getppid()}"]  # nothing comes before the end
    return subprocess.Popen(watch, stdin=subprocess.PIPE)


@dataclass(frozen=True)
class Budget:
    """Memory of the first node's GPUs that the target is on, in order, and of the draft's own.

    longest: tokens of the longest kept prompt and its answer. draft_gpu: where the draft is, if
    not with the target; draft: what that GPU holds.
    """

    gpus: tuple[Memory, ...]
    longest: int
    draft_gpu: int | None
    draft: Memory | None

    @property
    def kv_tokens(self) -> int:
        """Tokens of the KV cache: every rank holds its part of each, so the fullest GPU decides."""
        return min(gpu.kv_tokens for gpu in self.gpus)

    def lines(self) -> list[str]:
        """The same in words."""
        said = []
        for gpu, alike in groupby(enumerate(self.gpus), key=lambda pair: pair[1]):
            numbers = [number for number, _ in alike]
            which = f"GPU {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
            guest = "" if gpu.draft == NOBODY else f" + {_parts(gpu.draft)}"
            said.append(
                f"{which}: {_gb(gpu.usable)} usable = {_gb(gpu.target)} target{guest}"
                f" + {_gb(gpu.kv)} KV cache"
            )
        if self.draft is not None:
            own = self.draft
            said.append(
                f"GPU {self.draft_gpu}: {_gb(own.usable)} usable, of which {_parts(own.draft)}"
            )
        fit = self.kv_tokens // self.longest
        return [*said, f"KV cache: {self.kv_tokens} tokens, {fit} requests of {self.longest}"]


def budget_of(settings: ServeSettings, world: World, gpu_memory: float) -> Budget | None:
    """What draft and target leave for the KV cache; None for a target that is no engine.

    gpu_memory: bytes of each GPU. Raises `InputError` when the models, and one request of the
    greatest length, do not fit together.
    """
    manifest = manifest_of(settings)
    if manifest is None:
        return None
    described = load_config(manifest.described_in(settings.target.model))
    target = Served.of(described, manifest.precision, world.size)
    config = load_config(settings.draft.model)
    longest = min(manifest.positions, int(config.max_position_embeddings))
    draft, place = _guest(settings, config, longest)
    gpus = tuple(
        memory_of(gpu_memory, target, draft if number == place else NOBODY)
        for number in range(world.per_node)
    )
    own = None
    if place is not None and place >= world.per_node:
        own = replace(memory_of(gpu_memory, target, draft), target=0.0)
        if own.kv < 0:
            need = _gb(draft.bytes)
            allowed = f"a GPU of its own with {need}; it has {_gb(own.usable)} usable"
            raise InputError("draft.device", settings.draft.device, allowed)
    budget = Budget(gpus, manifest.kv_tokens, place if own else None, own)
    asked = settings.target.kv_cache_tokens or manifest.kv_tokens
    if max(asked, manifest.kv_tokens) > budget.kv_tokens:
        raise InputError(
            "target.kv_cache_tokens",
            asked,
            f"at least {manifest.kv_tokens}, which one request may need, and at most the"
            f" {budget.kv_tokens} that fit: {'; '.join(budget.lines())}",
        )
    return budget


def _guest(settings: ServeSettings, config: Any, longest: int) -> tuple[Guest, int | None]:
    """What the draft, or what stands in the place of an engine that is not there, takes, and where.

    The number of a GPU, or None for a CPU.
    """
    draft = settings.draft
    if draft.backend != "torch":
        try:
            found = footprint_of(draft.path, DraftManifest.read(draft.path), config)
            device = chosen_device(draft.device) if draft.backend == "onnx" else draft.device
        except SpecPrefillError:  # no engine, or nothing to run it
            if draft.fallback == "none":
                raise
            if draft.fallback == "dense":
                return NOBODY, None
        else:
            return found, draft_gpu(device)
    if draft.layers is not None:
        config = first_layers(config, min(draft.layers, int(config.num_hidden_layers)))
    served = Served(config, "fp32" if draft.dtype == "float32" else "bf16", 1)
    return Guest.of(served, longest), draft_gpu(draft.device)


def draft_gpu(device: str) -> int | None:
    """Number of the draft's GPU on the first node; None when it is on a CPU."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return None
    return int(number or 0)


def gpu_memory_of(name: str | None) -> float | None:
    """Bytes of a GPU, by name or of this machine's first; None when there is neither."""
    if name is not None:
        if name not in GPUS:
            raise InputError("gpu", name, "one of " + ", ".join(GPUS))
        return GPUS[name].memory
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)


def _parts(draft: Guest) -> str:
    said = [f"{_gb(draft.weights)} draft"]
    said += [f"{_gb(draft.kv)} its KV"] if draft.kv else []
    said += [f"about {_gb(draft.work)} its workspace"] if draft.work else []
    return " + ".join(said)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
