"""A draft that was built ahead: windows, look-ahead, limits and checks over an `Engine`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_specprefill.draft.engine import Engine, look_ahead, read
from trtllm_specprefill.draft.manifest import DraftManifest, EngineRefused
from trtllm_specprefill.draft.reading import ReadingDraft
from trtllm_specprefill.draft.windows import Windows
from trtllm_specprefill.errors import ContextTooLong, DraftFailed, SpecPrefillError
from trtllm_specprefill.importance import Importance
from trtllm_specprefill.models import EngineModel
from trtllm_specprefill.operations import layer_windows
from trtllm_specprefill.settings import Settings


class GraphDraft(ReadingDraft):
    """Scores prompts with a built draft, as the manifest says it was built.

    Depth, scoring heads, pooling and the kind of queries are in the graph: settings that ask for
    others make `score` raise `DraftFailed`, which names them. Before it is used, it must be for
    the model's tokenizer and reproduce the manifest's probe; else `EngineRefused`.
    """

    def __init__(
        self, folder: str | Path, manifest: DraftManifest, model: EngineModel, engine: Engine
    ) -> None:
        """Check that all belongs together, and score the probe.

        folder: where the engine lies, for messages. model: the one it was built from.
        """
        self.name, self.tokenizer, self.config = model.name, model.tokenizer, model.config
        self.manifest, self._engine, self._folder = manifest, engine, str(folder)
        self._end_ids = model.end_ids
        own = int(model.config.max_position_embeddings)
        self.context_length = min(own, manifest.max_tokens)
        self._windows = layer_windows(model.config)[: manifest.layers]
        check_model(manifest, model)
        self.probe_error = self._check_probe()

    @property
    def limit(self) -> str:
        """See `ReadingDraft.limit`."""
        if self.context_length < self.manifest.max_tokens:
            return super().limit
        return f"max_tokens of the engine in {self._folder}"

    def depth(self, settings: Settings) -> int:
        """The layers that are in the graph."""
        return self.manifest.layers

    def score(
        self,
        ids: NDArray[np.int32],
        settings: Settings,
        question: NDArray[np.int64] | None = None,
    ) -> Importance:
        """See `Draft.score`."""
        return self.score_batch([ids], settings, [question])[0]

    def score_batch(
        self,
        prompts: Sequence[NDArray[np.int32]],
        settings: Settings,
        questions: Sequence[NDArray[np.int64] | None] | None = None,
    ) -> list[Importance]:
        """Importance of several prompts of any lengths, read together as the engine can.

        Raises what `Draft.score` raises when one of them cannot be scored.
        """
        settings = settings.in_force()
        self._check_settings(settings)
        if self.manifest.mode == "lookahead":
            size = self._engine.batch
            parts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
            return [one for part in parts for one in self._look_ahead(part, settings)]
        asked = questions or [None] * len(prompts)
        return self._read_windows(prompts, settings, asked)

    def close(self) -> None:
        """Give back the engine."""
        self._engine.close()

    def _look_ahead(
        self, prompts: Sequence[NDArray[np.int32]], settings: Settings
    ) -> list[Importance]:
        most = max(len(ids) for ids in prompts)
        if most + settings.look_ahead > self.context_length:
            raise ContextTooLong(
                "prompt",
                f"{most} draft tokens and {settings.look_ahead} look-ahead tokens",
                f"at most {self.context_length}, {self.limit}",
            )
        layers = [self._voting(len(ids)) for ids in prompts]
        prefill: list[float] = []
        begin = time.perf_counter()
        found = look_ahead(
            self._engine,
            [ids.astype(np.int64) for ids in prompts],
            settings.look_ahead,
            self.manifest.votes,
            ends=self._end_ids,
            sees=self._sees,
            told=prefill.append,
        )
        seconds = {"draft_prefill": prefill[0]}
        seconds["look_ahead"] = time.perf_counter() - begin - prefill[0]
        return [
            Importance(one.scores, one.queries, self._heads(), voting, seconds)
            for one, voting in zip(found, layers, strict=True)
        ]

    def _read_windows(
        self,
        prompts: Sequence[NDArray[np.int32]],
        settings: Settings,
        questions: Sequence[NDArray[np.int64] | None],
    ) -> list[Importance]:
        begin = time.perf_counter()
        plans: list[Windows] = []
        rows: list[NDArray[np.int64]] = []
        voters: list[int] = []
        for ids, question in zip(prompts, questions, strict=True):
            windows = self.windows(int(ids.size), settings, question)
            self._voting(windows.tokens.shape[1])
            plans.append(windows)
            rows += [*ids.astype(np.int64)[windows.tokens]]
            voters += [min(settings.window, windows.tail)] * len(windows.tokens)
        scores = iter(read(self._engine, rows, voters))
        gathered = [
            windows.gather(np.stack([next(scores) for _ in windows.tokens]), int(ids.size))
            for windows, ids in zip(plans, prompts, strict=True)
        ]
        seconds = {"draft_prefill": time.perf_counter() - begin}
        return [
            Importance(
                one,
                min(settings.window, windows.tail),
                self._heads(),
                self._voting(windows.tokens.shape[1]),
                seconds,
            )
            for one, windows in zip(gathered, plans, strict=True)
        ]

    def _check_settings(self, settings: Settings) -> None:
        manifest = self.manifest
        built = {"scoring": manifest.mode, "pool": manifest.pool, "votes": manifest.votes}
        asked = {name: getattr(settings, name) for name in built}
        if manifest.mode == "window":
            built["draft_layers"] = manifest.layers
            asked["draft_layers"] = settings.draft_layers or manifest.layers
        for name, value in built.items():
            if asked[name] != value:
                raise DraftFailed(
                    f"{name} {asked[name]!r} is asked of the engine in {self._folder},"
                    f" which was built with {value!r}"
                )
        most = manifest.queries if manifest.mode == "window" else manifest.queries - 1
        name = "window" if manifest.mode == "window" else "look_ahead"
        if getattr(settings, name) > most:
            raise DraftFailed(
                f"{name} {getattr(settings, name)} is asked of the engine in {self._folder},"
                f" which was built for at most {most}"
            )

    def _voting(self, tokens: int) -> tuple[int, ...]:
        """Layers that vote when `tokens` tokens have been read; `DraftFailed` when none does."""
        layers = tuple(i for i in self._scoring_layers() if self._reaches(i, tokens))
        if not layers:
            raise DraftFailed(f"no layer of draft {self.name} attends to all of {tokens} tokens")
        return layers

    def _sees(self, tokens: int) -> bool:
        return any(self._reaches(i, tokens) for i in self._scoring_layers())

    def _reaches(self, layer: int, tokens: int) -> bool:
        window = self._windows[layer]
        return window is None or tokens <= window

    def _scoring_layers(self) -> list[int]:
        heads = self.manifest.heads
        return [i for i in range(self.manifest.layers) if heads is None or heads[i]]

    def _heads(self) -> int:
        heads = self.manifest.heads
        if heads is None:
            return int(self.config.num_attention_heads)
        return max(len(some) for some in heads)

    def _check_probe(self) -> float:
        """Largest difference from the manifest's figures, in units of the largest of them.

        Raises `EngineRefused` when it is more than the manifest lets through.
        """
        probe, manifest = self.manifest.probe, self.manifest
        ids = np.array(probe.ids, dtype=np.int64)
        expected = np.array(probe.importance, dtype=np.float32)
        try:
            if manifest.mode == "window":
                (found,) = read(self._engine, [ids], [min(manifest.queries, ids.size)])
                tokens: tuple[int, ...] = ()
            else:
                (one,) = look_ahead(
                    self._engine,
                    [ids],
                    len(probe.next_tokens),
                    manifest.votes,
                    sees=self._sees,
                    forced=probe.next_tokens,
                )
                found, tokens = one.scores, one.tokens
        except SpecPrefillError:
            raise
        except Exception as error:  # foreign code: whatever it raises, the engine is not usable
            words = f"{type(error).__name__}: {error}"
            raise EngineRefused(
                "engine", self._folder, f"one that runs its probe ({words})"
            ) from error
        off = np.abs(found - expected) / expected.max()
        worst = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
        if not float(off[worst]) <= probe.tolerance:
            raise EngineRefused(
                "probe.importance",
                f"{found[worst]:.6g} at token {worst}",
                f"{expected[worst]:.6g}, which the build recorded, off by at most"
                f" {probe.tolerance:.2g} of the largest score ({expected.max():.6g});"
                f" it is off by {off[worst]:.2g}",
            )
        if manifest.precision == "fp32" and tokens != probe.next_tokens:
            raise EngineRefused(
                "probe.next_tokens", tokens, f"{probe.next_tokens}, which the build recorded"
            )
        return float(off[worst])


def check_model(manifest: DraftManifest, model: EngineModel) -> None:
    """Raise `EngineRefused`, naming the field, unless an engine was built from this model."""
    manifest.check_tokenizer(model.tokenizer, model.name)
    layers = int(model.config.num_hidden_layers)
    if manifest.layers > layers:
        raise EngineRefused("layers", manifest.layers, f"at most {layers}, those of {model.name}")
    if manifest.cache is not None:
        heads = int(model.config.num_attention_heads)
        kv_heads = int(getattr(model.config, "num_key_value_heads", None) or heads)
        if manifest.cache.kv_heads != kv_heads:
            raise EngineRefused(
                "cache.kv_heads", manifest.cache.kv_heads, f"{kv_heads}, those of {model.name}"
            )
