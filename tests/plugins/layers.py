"""One layer's inputs, the kernels run on them in the interpreter, and the float64 judge."""

from dataclasses import dataclass, field, replace

import gpu_check
import torch

from plugins.importance.launch import head_table
from plugins.importance.torch_op import launch, problem_of

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

    def problem(self):
        problem = problem_of(
            self.queries, self.keys, self.table, self.scale, self.pool, self.causal
        )
        return replace(problem, splits=SPLITS)

    def inputs(self):
        sizes = torch.tensor(self.lengths, dtype=torch.int32)
        return self.queries, self.keys, sizes, self.table, self.key_scale, self.running

    def kernels(self, poison: float = NAN) -> torch.Tensor:
        """Both kernels' result `[B, W, N]`; whatever they do not write stays `poison`."""
        problem = self.problem()
        b, _, w, _ = self.queries.shape
        parts = torch.full(problem.parts_shape(b, w), poison)
        out = torch.full_like(self.running, poison)
        launch(problem, *self.inputs(), parts, out)
        return out

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
