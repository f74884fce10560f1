"""The kernels in the interpreter against float64, over all their axes and at their edges."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.importance.launch import LSE, POOL, Problem, next_power_of_two
from tests.plugins.layers import NAN, Layer, interpreted, relative_error, run_programs
from trtllm_specprefill.importance import reference_importance
from trtllm_specprefill.importance_op import MAX_TOKENS

FP8 = torch.float8_e4m3fn
TYPES = {
    "fp32": (torch.float32, torch.float32, 1e-5),
    "fp16": (torch.float16, torch.float16, 1e-2),
    "bf16": (torch.bfloat16, torch.bfloat16, 1e-2),
    "fp16-fp8": (torch.float16, FP8, 1e-2),
    "bf16-fp8": (torch.bfloat16, FP8, 1e-2),
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@st.composite
def layers(draw: st.DrawFn, query_type: torch.dtype, key_type: torch.dtype) -> Layer:
    """Any layer the kernels take, small; contents from a drawn seed."""
    kv_heads = draw(st.integers(1, 2))
    query_heads = kv_heads * draw(st.integers(1, 7 if kv_heads == 1 else 3))
    d = draw(st.sampled_from((64, 80, 96, 128, 256)))
    small = query_type == torch.float32 or d == 256
    pool = draw(st.sampled_from((1, 3, 5, 13, 17) if small else (1, 3, 5, 13, 17, 33)))
    # The interpreter runs one program after the other: two tiles of keys and a rest, and at most
    # three blocks of queries, meet all that the kernels do at a tile's edges.
    n = draw(st.integers(1, 75 if small else 140))
    b = draw(st.integers(1, 2))
    block = 32 // next_power_of_two(query_heads // kv_heads)
    w = draw(st.one_of(st.integers(1, 5), st.integers(6, min(3 * block, 64))))
    lengths = draw(st.lists(st.integers(0, n), min_size=b, max_size=b))
    heads = draw(
        st.none() | st.sets(st.integers(0, query_heads - 1), min_size=1).map(sorted).map(tuple)
    )
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return Layer(
        normal(b, query_heads, w, d).to(query_type),
        (normal(b, kv_heads, n, d) * draw(st.sampled_from((0.1, 1.0, 3.0)))).to(key_type),
        pool=pool,
        causal=draw(st.booleans()),
        lengths=lengths,
        heads=heads,
        running=normal(b, w, n).abs() / n * draw(st.sampled_from((0.0, 1.0))),
        key_scale=0.5 + torch.rand(kv_heads),
    )


# Five kinds of forty make two hundred.
@pytest.mark.parametrize("kind", TYPES)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_kernels_agree_with_float64_on_any_layer(kind: str, data: st.DataObject) -> None:
    query_type, key_type, tolerance = TYPES[kind]
    layer = data.draw(layers(query_type, key_type))
    assert relative_error(layer.kernels(), layer.float64()) <= tolerance


@pytest.mark.parametrize("causal", [False, True])
def test_last_layers_rows_average_to_the_definition_of_importance(causal: bool) -> None:
    torch.manual_seed(1)
    stack = [Layer(normal(1, 6, 4, 64), normal(1, 2, 90, 64), causal=causal) for _ in range(3)]
    expected = reference_importance(
        [layer.queries[0].numpy() for layer in stack],
        [layer.keys[0].numpy() for layer in stack],
        stack[0].scale,
        causal=causal,
    )
    for layer, before in zip(stack[1:], stack[:-1], strict=True):
        layer.running = before.kernels()
    got = stack[-1].kernels()[0].double().mean(0)
    assert relative_error(got, torch.from_numpy(expected)) <= 1e-5


@pytest.mark.parametrize("poison", [NAN, float("inf"), -1.0])
def test_result_does_not_depend_on_what_the_outputs_held(poison: float) -> None:
    torch.manual_seed(2)
    layer = Layer(normal(2, 4, 3, 80), normal(2, 2, 70, 80), lengths=[70, 9], causal=True)
    assert torch.equal(layer.kernels(poison), layer.kernels(0.0))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_precision_picks_the_same_tenth_of_chunks_as_float64(kind: str) -> None:
    query_type, key_type, error = TYPES[kind]
    torch.manual_seed(3)
    chunk, same, counted = 16, 0, 0
    for _ in range(3):
        # Queries aligned with some keys, as attention is: a few chunks stand out.
        keys = normal(1, 2, 1600, 64)
        queries = normal(1, 4, 4, 64) + keys[:, :, ::400].repeat_interleave(2, 1) * 0.5
        layer = Layer(queries.to(query_type), keys.to(key_type))
        got = layer.kernels()[0].double().mean(0).reshape(-1, chunk).mean(1)
        expected = layer.float64()[0].mean(0).reshape(-1, chunk).mean(1)
        kept = len(expected) // 10
        edge = expected.sort(descending=True).values[kept - 1 : kept + 1].mean()
        untied = (expected - edge).abs() > error * edge
        chosen = [torch.isin(torch.arange(len(x)), x.topk(kept).indices) for x in (got, expected)]
        same += int((chosen[0] == chosen[1])[untied].sum())
        counted += int(untied.sum())
    assert counted > 200
    assert same / counted >= 0.99


@pytest.mark.parametrize(
    ("n", "w"), [(1, 1), (1, 3), (2, 1), (12, 5), (5, 5), (13, 13), (64, 64), (52, 2), (53, 2)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_shorter_than_pool_window_and_tile(n: int, w: int, causal: bool) -> None:
    torch.manual_seed(4)
    layer = Layer(normal(1, 2, w, 64), normal(1, 1, n, 64), causal=causal)
    assert relative_error(layer.kernels(), layer.float64()) <= 1e-5


def test_equal_logits_weigh_all_keys_alike() -> None:
    torch.manual_seed(5)
    keys = normal(1, 1, 1, 64).expand(1, 1, 100, 64).contiguous()
    got = Layer(normal(1, 2, 2, 64), keys, pool=5).kernels()
    assert torch.allclose(got[..., 2:-2], torch.tensor(0.01), rtol=1e-5)
    assert torch.allclose(got[..., 0], torch.tensor(0.006), rtol=1e-5)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_logits_of_ten_thousand_stay_finite_and_right(kind: str) -> None:
    query_type, key_type, tolerance = TYPES[kind]
    torch.manual_seed(6)
    keys = torch.nn.functional.normalize(normal(1, 2, 80, 64), dim=-1)
    # Opposite keys, so that logits reach both 1e4 and -1e4; apart enough that fp32 logits, good
    # to 1e-3 at this size, leave each row's weights as they are.
    keys[:, :, 40:] = -keys[:, :, :40]
    queries = torch.stack([keys[0, :, 7], keys[0, :, 55]], 1)[None] * 8e4
    layer = Layer(queries.to(query_type), keys.to(key_type), pool=3)
    logits = layer.scale * layer.queries[0].double() @ layer.keys[0].double().transpose(1, 2)
    assert logits.max() > 9.9e3
    assert logits.min() < -9.9e3
    assert relative_error(layer.kernels(), layer.float64()) <= max(tolerance, 1e-3)


def test_one_sharp_key_takes_all_the_weight() -> None:
    torch.manual_seed(7)
    keys = normal(1, 1, 60, 64)
    keys[0, 0, 30] *= 100
    layer = Layer(keys[:, :, 30:31].repeat(1, 2, 1, 1), keys, pool=5)
    assert torch.allclose(layer.kernels()[0, 0, 28:33], torch.tensor(0.2))


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_a_bad_key_makes_every_row_of_its_sequence_nan_and_no_other(value: float) -> None:
    torch.manual_seed(8)
    layer = Layer(normal(3, 4, 3, 64), normal(3, 2, 90, 64), lengths=[90, 80, 90])
    clean = layer.kernels()
    layer.keys[1, 0, 17, 5] = value
    got = layer.kernels()
    assert got[1, :, :80].isnan().all()
    assert (got[1, :, 80:] == 0).all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_a_bad_query_makes_its_own_row_nan_and_no_other() -> None:
    torch.manual_seed(9)
    layer = Layer(normal(2, 4, 3, 64), normal(2, 2, 90, 64))
    clean = layer.kernels()
    layer.queries[1, 2, 1, 0] = NAN
    got = layer.kernels()
    assert got[1, 1].isnan().all()
    got[1, 1] = clean[1, 1]
    assert torch.equal(got, clean)


def test_a_bad_key_past_the_length_or_of_a_silent_head_or_unseen_counts_for_nothing() -> None:
    torch.manual_seed(10)
    layer = Layer(
        normal(1, 4, 3, 64), normal(1, 2, 90, 64), lengths=[80], heads=(0, 1), causal=True
    )
    clean = layer.kernels()
    layer.keys[0, 0, 85] = NAN
    layer.keys[0, 1, 20] = NAN
    layer.keys[0, 0, 79] = NAN  # seen by the last query only
    got = layer.kernels()
    assert torch.equal(got[0, :2], clean[0, :2])
    assert got[0, 2, :80].isnan().all()
    assert (got[0, :, 80:] == 0).all()


def test_a_nan_of_an_earlier_layer_is_kept() -> None:
    torch.manual_seed(11)
    layer = Layer(normal(1, 2, 2, 64), normal(1, 1, 70, 64))
    layer.running[0, 1, 33] = -torch.tensor(NAN)
    got = layer.kernels()
    assert got[0, 1, 33].isnan()
    assert int(got.isnan().sum()) == 1


@pytest.mark.parametrize(("kind", "causal"), [("fp32", True), ("bf16-fp8", False)])
def test_eight_ragged_sequences_equal_eight_single_runs(kind: str, causal: bool) -> None:
    query_type, key_type, _ = TYPES[kind]
    torch.manual_seed(12)
    lengths = [1, 7, 31, 32, 52, 64, 99, 130]
    queries, keys = normal(8, 4, 5, 64).to(query_type), normal(8, 2, 130, 64).to(key_type)
    together = Layer(queries, keys, lengths=lengths, causal=causal).kernels()
    for i, n in enumerate(lengths):
        alone = Layer(queries[i : i + 1], keys[i : i + 1, :, :n].clone(), causal=causal).kernels()
        assert torch.equal(together[i, :, :n], alone[0])
        assert (together[i, :, n:] == 0).all()


def test_every_e4m3_byte_is_read_as_torch_reads_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = every[~every.float().isnan()].reshape(1, 1, 127, 2)
    keys = torch.zeros(1, 1, 127, 64).to(FP8)
    keys[..., :2] = finite
    queries = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    queries[0, 0, 0, 0] = queries[0, 0, 1, 1] = 2.0**-6
    as_bytes = Layer(queries, keys, pool=1, scale=1.0)
    as_bf16 = Layer(queries, keys.to(torch.bfloat16), pool=1, scale=1.0)
    assert torch.equal(as_bytes.kernels(), as_bf16.kernels())
    for bad in every[every.float().isnan()]:
        as_bytes.keys[0, 0, 3, 0] = bad
        assert as_bytes.kernels()[0, 0].isnan().all()


def sparse(folder: Path, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros that take neither memory nor disk until they are written."""
    size = math.prod(shape)
    return torch.from_file(str(folder / name), shared=True, size=size, dtype=dtype).view(shape)


def last_of_the_largest(
    folder: Path, keys: torch.Tensor, queries: torch.Tensor, b: int
) -> tuple[float, torch.Tensor]:
    """The kernels on the last keys of the last of `b` sequences of 1,048,576 tokens.

    keys: e4m3 `[n, D]`, the sequence's last; all others are zeros. queries: its own `[W, D]`.
    Returns the last query's log2 of the sum of 2**x over the last tile of keys, and the output
    at the last `n` positions, where each query's log-sum-exp over all keys is said to be 2.
    """
    (n, d), w, many = keys.shape, queries.shape[0], MAX_TOKENS
    splits = many // 64  # a tile of keys each
    all_keys = sparse(folder, "keys", torch.uint8, b, 1, many, d)
    all_keys[-1, 0, -n:] = keys.view(torch.uint8)
    all_queries = torch.zeros(b, 1, w, d, dtype=queries.dtype)
    all_queries[-1, 0] = queries
    problem = Problem(1, 1, 1, 1, d, "bf16", "u8", d**-0.5, 5, False, w, splits)
    assert problem.key_block == 64
    given = {
        "q_ptr": all_queries,
        "k_ptr": all_keys,
        "lengths_ptr": torch.full((b,), many, dtype=torch.int32),
        "heads_ptr": torch.tensor([[0, 0]], dtype=torch.int32),
        "key_scale_ptr": torch.ones(1),
        "n": many,
        "w": w,
    }
    parts = sparse(folder, "parts", torch.float32, *problem.parts_shape(b, w))
    grid = problem.grid(LSE, b, w, many)
    last = (grid[0] - 1, 0, b - 1)
    run_programs(LSE, [last], grid, {**given, "parts_ptr": parts, **problem.constants(LSE)})
    lse = float(parts[-1, 0, 0, -1, -1])

    problem = replace(problem, splits=1)
    grid = problem.grid(POOL, b, w, many)
    parts = torch.full(problem.parts_shape(b, w), 2.0)
    running = sparse(folder, "running", torch.float32, b, w, many)
    out = sparse(folder, "out", torch.float32, b, w, many)
    chunks = -(-w // problem.query_block)
    tiles = [(x, b - 1, 0) for x in range(grid[0] - 3 * chunks, grid[0])]
    ends = {"parts_ptr": parts, "running_ptr": running, "out_ptr": out}
    run_programs(POOL, tiles, grid, {**given, **ends, **problem.constants(POOL)})
    return lse, out[-1, :, -n:].clone()


def test_offsets_beyond_31_bits_are_right(tmp_path: Path) -> None:
    """B H N D and B W N of more than 2**31 elements, at the longest N: the last places of all."""
    torch.manual_seed(13)
    b, w, d, n = 33, 64, 64, 100
    assert b * MAX_TOKENS * min(w, d) > 2**31
    keys = normal(n, d).to(FP8)
    queries = normal(w, d).to(torch.bfloat16)
    lse, out = interpreted(last_of_the_largest, tmp_path, keys, queries, b)
    x = queries.double() @ keys.double().t() * d**-0.5 * math.log2(math.e)
    assert lse == pytest.approx(float(torch.logsumexp(x[-1, -64:] * math.log(2), 0)) / math.log(2))
    weights = torch.nn.functional.pad((x - 2).exp2(), (0, 2))
    pooled = sum(weights[:, 10 + i : n + i] for i in range(-2, 3)) / 5
    assert relative_error(out[:, 10:], pooled) <= 1e-2
