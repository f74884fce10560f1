"""A model -> what `trtllm_executor` or `trtllm_llm` serves: limits, commands, manifest.

Two lengths are easily taken for one. The KV cache holds what is kept, M tokens and the answer;
positions run to the end of the whole prompt, N tokens and the answer. `trtllm-build` is given
the first as `max_seq_len`; the rotary table inside the network has rows for the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_build.commands import Command
from engine_build.rotary_config import MROPE_BY_CONFIG
from trtllm_specprefill.errors import InputError
from trtllm_specprefill.target.manifest import Backend, Manifest, Precision
from trtllm_specprefill.target.rotary import ROPE_TYPES, rope_type

TENSORRT_LLM = "1.2.1"  # that builds engines, where none is installed
CHECKPOINTS = "1.2"  # the first whose LLM API serves what is built for the PyTorch backend
ENGINE_ENVIRONMENT = "SPECPREFILL_ENGINE"  # tells the model class where the manifest is

# Model types whose attention `rotated_models` rotates, and its class for each.
ROTATED = {"llama": "RotatedLlama", "qwen2": "RotatedQwen", "qwen3": "RotatedQwen"}


@dataclass(frozen=True)
class TargetBuild:
    """What to build. Lengths are in tokens.

    model: directory of a model in Hugging Face format. out: where the engine goes. kept: longest
    prompt that is read, M; prompt: longest one that is asked, N; output: longest answer.
    examples: TensorRT-LLM's folder `examples`, of the same version. calibration: data set for
    FP8, a hub id or a directory. record_probes: let torch answer the probes of the start-up check.
    """

    model: str
    out: Path
    backend: Backend
    precision: Precision
    tensor_parallel: int
    pipeline_parallel: int
    kept: int
    prompt: int
    output: int
    batch_size: int
    chunk: int
    examples: str
    calibration: str
    record_probes: bool

    def check(self, config: Any) -> None:
        """Raise `InputError` for a limit that the model or TensorRT-LLM cannot hold."""
        for name in ("kept", "prompt", "output", "batch_size", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "a whole number >= 1")
        if self.kept > self.prompt:
            raise InputError("kept", self.kept, f"at most the prompt's length ({self.prompt})")
        positions, most = self.prompt + self.output, int(config.max_position_embeddings)
        if positions > most:
            allowed = f"with output ({self.output}) at most the model's {most} positions"
            raise InputError("prompt", self.prompt, allowed)
        heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        tp, pp, layers = (
            self.tensor_parallel,
            self.pipeline_parallel,
            int(config.num_hidden_layers),
        )
        if tp < 1 or heads % tp or (kv_heads % tp and tp % kv_heads):
            raise InputError("tp", tp, f"a divisor of {heads} heads that fits {kv_heads} KV heads")
        if pp < 1 or layers % pp:
            raise InputError("pp", pp, f"a divisor of {layers} layers")
        if self.backend == "tensorrt":
            self._check_rotation(config)

    def _check_rotation(self, config: Any) -> None:
        if config.model_type not in ROTATED:
            raise InputError("model", config.model_type, "one of " + ", ".join(ROTATED))
        if rope_type(config) not in ROPE_TYPES:
            raise InputError("model", rope_type(config), "a rope_type of " + ", ".join(ROPE_TYPES))
        if self.pipeline_parallel > 1:
            # The engine input `position_ids` exists on the first pipeline rank alone.
            allowed = "1 for the TensorRT backend: later pipeline ranks get no position ids"
            raise InputError("pp", self.pipeline_parallel, allowed)

    def original_positions(self, config: Any) -> bool:
        """Whether what is built rotates by position ids."""
        if self.backend == "tensorrt":
            return True
        return config.model_type in MROPE_BY_CONFIG and rope_type(config) == "default"

    def manifest(self, config: Any) -> Manifest:
        """What the target is told of it."""
        return Manifest(
            model=self.model,
            backend=self.backend,
            precision=self.precision,
            tensorrt_llm=_builder() if self.backend == "tensorrt" else CHECKPOINTS,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            original_positions=self.original_positions(config),
            kv_tokens=self.kept + self.output,
            positions=self.prompt + self.output,
            batch_size=self.batch_size,
        )

    def commands(self, config: Any) -> list[Command]:
        """Every command of the build, in order; the manifest is written before the first."""
        made = [_own("the model's config and tokenizer beside the engine", "describe", self.out)]
        if self.backend == "tensorrt":
            made.append(self._checkpoint(self.out / "checkpoint", "tensorrt_llm"))
            made.append(self._engine(config))
        elif self.precision == "fp8":
            made.append(self._checkpoint(self.out, "hf"))
        else:
            copy = ("cp", "-rL", f"{self.model}/.", str(self.out))
            made.append(Command("the checkpoint as it is", copy))
        if self.backend == "pytorch":
            rotates = self.original_positions(config)
            why = "rotation from position ids, by config" if rotates else "a config for any version"
            made.append(_own(why, "positions", self.out))
        if self.record_probes:
            made.append(_own("torch answers the probes of the start-up check", "probes", self.out))
        return made

    def check_examples(self) -> None:
        """Raise `InputError` where `examples` lacks the program that quantises."""
        needed = self.backend == "tensorrt" or self.precision == "fp8"
        if needed and not self._quantize.is_file():
            later = (
                "; what it makes for the PyTorch backend 1.3 and 1.4 serve too, and"
                " --precision bf16 does without"
            )
            raise InputError(
                "examples",
                self.examples,
                "TensorRT-LLM's folder examples with quantization/quantize.py in it, which versions"
                " up to 1.3.0rc20 have" + (later if self.backend == "pytorch" else ""),
            )

    @property
    def _quantize(self) -> Path:
        return Path(self.examples) / "quantization" / "quantize.py"

    def _checkpoint(self, folder: Path, form: str) -> Command:
        quantised = self.precision == "fp8"
        arguments = [
            "python",
            str(self._quantize),
            *("--model_dir", self.model),
            *("--dtype", "bfloat16"),
            *("--qformat", "fp8" if quantised else "full_prec"),
            *("--export_format", form),
            *("--output_dir", str(folder)),
            *("--tp_size", str(self.tensor_parallel)),
            *("--pp_size", str(self.pipeline_parallel)),
        ]
        if quantised:
            arguments += [
                *("--kv_cache_dtype", "fp8"),
                *("--calib_dataset", self.calibration),
                *("--calib_size", "512"),
            ]
        return Command("modelopt: weights to " + self.precision, tuple(arguments))

    def _engine(self, config: Any) -> Command:
        classes = Path(__file__).with_name("model_classes.py")
        return Command(
            "the engine, rotating by position ids inside the network",
            (
                "trtllm-build",
                *("--checkpoint_dir", str(self.out / "checkpoint")),
                *("--model_cls_file", str(classes)),
                *("--model_cls_name", ROTATED[config.model_type]),
                *("--output_dir", str(self.out)),
                *("--max_batch_size", str(self.batch_size)),
                *("--max_input_len", str(self.kept)),
                *("--max_seq_len", str(self.kept + self.output)),
                *("--max_num_tokens", str(self.chunk)),
                *("--max_beam_width", "1"),
                *("--gemm_plugin", "auto"),
                *("--use_paged_context_fmha", "enable"),
                *("--workers", str(self.tensor_parallel)),
            ),
            # The model classes are imported from this checkout, and read the manifest.
            {"PYTHONPATH": str(classes.parents[1]), ENGINE_ENVIRONMENT: str(self.out)},
        )


def _builder() -> str:
    """The version of TensorRT-LLM that builds."""
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return TENSORRT_LLM


def _own(why: str, name: str, out: Path) -> Command:
    return Command(why, ("python", "-m", "engine_build", name, "--engine", str(out)))
