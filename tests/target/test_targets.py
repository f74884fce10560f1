"""What holds of every target that can be given positions, whatever runs it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.strategies import WORDS
from tests.target.conftest import Maker, never_ending
from tests.test_judges import Spelling, random_model
from trtllm_specprefill.draft.torch import TorchDraft
from trtllm_specprefill.errors import ContextTooLong, TargetFailed, UnsupportedPositions
from trtllm_specprefill.pipeline import SpecPrefill
from trtllm_specprefill.plan import PrunePlan, Reason, resolve_positions
from trtllm_specprefill.settings import Sampling
from trtllm_specprefill.target.base import Step, Target
from trtllm_specprefill.target.torch import TorchTarget

VOCABULARY = 211


def plan_of(kept: int, of: int, positions: Any = "original", rng: Any = None) -> PrunePlan:
    """A pruned plan of random ids at random places."""
    rng = rng or np.random.default_rng()
    ids = rng.integers(2, VOCABULARY, kept).astype(np.int32)
    places = np.sort(rng.choice(of - 1, kept - 1, replace=False))
    at = np.append(places, of - 1).astype(np.int32)
    if positions == "contiguous":
        return PrunePlan(ids, np.arange(kept, dtype=np.int32), kept, positions, of, Reason.PRUNED)
    return PrunePlan(ids, at, of, "original", of, Reason.PRUNED)


def dense(plan: PrunePlan) -> PrunePlan:
    """The same ids as a dense prompt."""
    n = plan.input_ids.size
    return PrunePlan(
        plan.input_ids, np.arange(n, dtype=np.int32), n, "original", n, Reason.DISABLED
    )


def tokens_of(target: Target, plan: PrunePlan, **sampling: Any) -> list[int]:
    steps = target.stream(plan, Sampling(**{"max_tokens": 8, **sampling}))
    return [token for step in steps for token in step.token_ids]


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def test_answers_are_those_of_torch_at_any_positions(maker: Maker) -> None:
    model = never_ending(random_model("qwen3", Spelling()))
    target, judge = maker(model).target, TorchTarget(model)
    for positions in ("original", "contiguous"):
        plan = plan_of(60, 400, positions)
        steps = list(target.stream(plan, Sampling(max_tokens=12)))
        expected = list(judge.stream(plan, Sampling(max_tokens=12)))
        assert [s.token_ids for s in steps] == [s.token_ids for s in expected]
        assert text_of(steps) == text_of(expected)
        assert [s.finish_reason for s in steps] == [None] * 11 + ["length"]


def test_tokens_come_one_by_one(maker: Maker) -> None:
    made = maker()
    stream = made.target.stream(plan_of(20, 60), Sampling(max_tokens=500))
    first = next(stream)
    assert len(first.token_ids) == 1
    if made.setup:
        made.setup.hold.clear()
        assert made.engine.jobs[-1].max_tokens == 500
        made.setup.hold.set()
    assert len(next(stream).token_ids) == 1
    stream.close()


def test_original_positions_are_honoured_and_found_out_at_load(maker: Maker) -> None:
    target = maker().target
    assert target.position_support.honoured
    plan = plan_of(60, 3000)
    near = replace(plan, position_ids=np.arange(60, dtype=np.int32), next_position=60)
    assert tokens_of(target, plan) != tokens_of(target, near)


def test_every_end_id_ends_the_answer(maker: Maker) -> None:
    model = never_ending(random_model("llama", Spelling()))
    plan = plan_of(30, 90)
    made = tokens_of(TorchTarget(model), plan)
    ends = {made[2], made[4]}  # two of them: an engine takes one, the other is a stop word
    ending = replace(model, eos_token_ids=frozenset(ends))
    steps = list(maker(ending).target.stream(plan, Sampling(max_tokens=8)))
    judge = list(TorchTarget(ending).stream(plan, Sampling(max_tokens=8)))
    assert steps[-1].finish_reason == "stop"
    assert text_of(steps) == text_of(judge)
    first = min(made.index(end) for end in ends)
    shown = [token for step in steps for token in step.token_ids]
    assert shown[:first] == made[:first]
    assert len(shown) <= first + 1


def test_stop_texts_end_the_answer_and_the_work(maker: Maker) -> None:
    made = maker()
    plan = plan_of(30, 90)
    words = "".join(f"{token} " for token in tokens_of(made.target, plan))
    stop = words[5:9]
    steps = list(made.target.stream(plan, Sampling(max_tokens=400, stop=(stop,))))
    assert text_of(steps) == words[: words.index(stop)]
    assert steps[-1].finish_reason == "stop"
    if made.setup:
        assert made.engine.cancelled == [len(made.engine.jobs)]


def test_closing_an_answer_cancels_it_while_decoding(maker: Maker) -> None:
    made = maker()
    stream = made.target.stream(plan_of(30, 90), Sampling(max_tokens=100_000 // 64))
    next(stream)
    stream.close()
    if made.setup:
        assert made.engine.cancelled == [len(made.engine.jobs)]
        assert not made.engine._runs
    with pytest.raises(StopIteration):
        next(stream)


def test_an_answer_that_is_let_go_of_is_cancelled_too(maker: Maker) -> None:
    made = maker()
    stream = made.target.stream(plan_of(30, 90), Sampling(max_tokens=1500))
    next(stream)
    del stream
    gc.collect()
    if made.setup:
        assert made.engine.cancelled == [len(made.engine.jobs)]


def test_giving_up_in_prefill_stops_reading(engine_maker: Maker) -> None:
    made = engine_maker()
    assert made.setup is not None
    setup = made.setup

    def hold_after_a_chunk(job: Any, step: int) -> str:
        setup.hold.clear()
        return ""

    setup.fail = hold_after_a_chunk
    # Nothing comes within the wait: the request is given up, and with it its prefill.
    made.target._timeout = 1.0  # type: ignore[attr-defined]
    before = made.engine.steps
    with pytest.raises(TargetFailed, match="no token within 1 s"):
        next(made.target.stream(plan_of(400, 1200), Sampling()))
    assert made.engine.cancelled == [len(made.engine.jobs)]
    setup.fail = lambda job, step: ""
    made.target._timeout = 60.0  # type: ignore[attr-defined]
    setup.hold.set()
    assert tokens_of(made.target, plan_of(16, 40), max_tokens=2)
    assert made.engine.steps - before <= 1 + 2  # of 25 chunks one, and the short request


@pytest.mark.parametrize("at", [-1, 3])
def test_an_error_inside_a_request_is_a_target_failure(engine_maker: Maker, at: int) -> None:
    made = engine_maker()
    assert made.setup is not None
    made.setup.fail = lambda job, step: "CUDA error 700" if step == at else ""
    stream = made.target.stream(plan_of(30, 90), Sampling(max_tokens=8))
    got: list[Step] = []
    with pytest.raises(TargetFailed, match="CUDA error 700"):
        got.extend(stream)
    made.setup.fail = lambda job, step: ""
    assert len(tokens_of(made.target, plan_of(30, 90))) == 8  # the engine goes on


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
def test_an_engine_that_gives_up_is_a_target_failure(engine_maker: Maker, how: Any) -> None:
    made = engine_maker()
    assert made.setup is not None
    made.setup.end = lambda job, step: how if step == 3 else None
    with pytest.raises(TargetFailed, match=r"ended the request: (TIMED_OUT|\w+)"):
        tokens_of(made.target, plan_of(30, 90))


def test_many_requests_in_flight_each_get_their_own_answer(maker: Maker) -> None:
    made = maker()
    rng = np.random.default_rng()
    plans = [
        plan_of(int(rng.integers(10, 60)), 300, ("original", "contiguous")[i % 2], rng)
        for i in range(32)
    ]
    alone = [tokens_of(made.target, plan, max_tokens=5) for plan in plans]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: tokens_of(made.target, p, max_tokens=5), plans))
    assert together == alone


def test_drawing_is_reproducible_by_seed_and_random_without_limits(maker: Maker) -> None:
    made, plan = maker(), plan_of(30, 90)
    draw = {"temperature": 1.5, "max_tokens": 12}
    once = tokens_of(made.target, plan, seed=7, **draw)
    assert once == tokens_of(made.target, plan, seed=7, **draw)
    # A top_p left out would be greedy to the engine: another seed must give another answer.
    assert once != tokens_of(made.target, plan, seed=8, **draw)
    assert tokens_of(made.target, plan, seed=7, top_k=1, **draw) == tokens_of(
        made.target, plan, max_tokens=12
    )


def test_a_prompt_beyond_the_kv_length_is_refused_in_words(engine_maker: Maker) -> None:
    target = engine_maker(manifest={"kv_tokens": 64}).target
    assert len(tokens_of(target, plan_of(56, 4000), max_tokens=8)) == 8
    with pytest.raises(ContextTooLong, match=r"57 tokens.*64"):
        tokens_of(target, plan_of(57, 4000), max_tokens=8)


@pytest.mark.parametrize("kind", ["trtllm_llm of 1.2", "trtllm_llm of 1.4"])
def test_a_prompt_longer_than_a_step_of_the_llm_api_is_read_in_several(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, model = Maker(kind, monkeypatch), never_ending(random_model("llama", Spelling()))
    made, plan = maker(model), plan_of(60, 900)
    made.target._llm.args.max_num_tokens = 32  # type: ignore[attr-defined]
    assert tokens_of(made.target, plan) == tokens_of(TorchTarget(model), plan)
    made.target._llm.args.enable_chunked_prefill = False  # type: ignore[attr-defined]
    with pytest.raises(TargetFailed, match="max_num_tokens"):
        tokens_of(made.target, plan)
    maker.stop()


def test_a_failed_request_that_the_llm_api_says_nothing_of_is_a_target_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1.4 calls a request with an error finished, and raises only while its executor lives."""
    maker = Maker("trtllm_llm of 1.4", monkeypatch)
    made = maker(setup={"fail": lambda job, step: "CUDA error 700" if step == 3 else ""})
    from tensorrt_llm.executor import result

    monkeypatch.setattr(result, "_raise", lambda words: None)
    with pytest.raises(TargetFailed, match="CUDA error 700"):
        tokens_of(made.target, plan_of(30, 90))
    maker.stop()


def test_the_length_of_the_kv_cache_reaches_the_engine(engine_maker: Maker) -> None:
    # 26 (vLLM V1 port): at its own choice the engine left no memory for the draft.
    assert engine_maker(kv_cache_tokens=4096).engine.kv_cache_tokens == 4096
    assert engine_maker().engine.kv_cache_tokens is None


# --- what users of such systems reported


def test_decoding_after_pruning_takes_no_more_steps_than_after_a_dense_prompt(
    engine_maker: Maker,
) -> None:
    # 15, 16 (omlx 1262, vllm-mlx 247): decoding slowed down after a pruned prefill.
    made = engine_maker()
    plan = plan_of(64, 900)

    def steps(asked: PrunePlan) -> int:
        before = made.engine.steps
        tokens_of(made.target, asked, max_tokens=20)
        return made.engine.steps - before

    assert steps(plan) == steps(dense(plan)) == 64 // 16 + 19


def test_decoding_with_torch_costs_after_pruning_what_it_does_after_as_short_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """15, 16: one pass a token, over the keys that were kept and no others."""
    model = never_ending(random_model("llama", Spelling()))
    target, plan = TorchTarget(model), plan_of(64, 900)
    keys: list[int] = []
    forward = target._forward

    def counted(ids: Any, positions: Any, cache: Any) -> Any:
        logits = forward(ids, positions, cache)
        keys.append(cache.get_seq_length())
        return logits

    monkeypatch.setattr(target, "_forward", counted)
    for asked in (plan, dense(plan)):
        keys.clear()
        tokens_of(target, asked, max_tokens=20)
        assert keys == list(range(64, 84))


def test_a_plan_for_other_positions_than_the_engine_has_is_an_error_at_start(
    engine_maker: Maker,
) -> None:
    # 20 (omlx 1233, vllm-mlx 711): a combination that cannot work was dropped silently.
    support = engine_maker(manifest={"original_positions": False}).target.position_support
    assert not support.honoured
    with pytest.raises(UnsupportedPositions, match="does not honour position ids"):
        resolve_positions(
            "original", support, prompt_tokens=100, max_tokens=10, shared_tokenizer=True
        )


def test_an_engine_that_ignores_positions_is_refused_for_original_ones(
    engine_maker: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    # 28 (TensorRT-LLM 1797): the attention plugin takes positions from the cache index.
    support = engine_maker(setup={"honours_positions": False}).target.position_support
    assert not support.honoured
    assert "answered alike at any positions" in caplog.text
    plan = {"prompt_tokens": 100, "max_tokens": 10, "shared_tokenizer": True}
    assert resolve_positions("auto", support, **plan) == "contiguous"
    with pytest.raises(UnsupportedPositions):
        resolve_positions("original", support, **plan)


def test_a_dense_prompt_after_a_pruned_one_is_answered_as_if_alone(maker: Maker) -> None:
    # 8, 29 (omlx 766, 2484): what a sparse request left behind changed the next one.
    model = never_ending(random_model("llama", Spelling()))
    made, pruned = maker(model), plan_of(64, 2000)
    whole = dense(pruned)
    alone = tokens_of(TorchTarget(model), whole)
    stream = made.target.stream(pruned, Sampling(max_tokens=50))
    next(stream)  # under way
    assert tokens_of(made.target, whole) == alone
    stream.close()
    assert tokens_of(made.target, whole) == alone


@pytest.mark.parametrize("pruned_first", [True, False])
def test_blocks_of_a_pruned_prompt_never_meet_a_dense_one(
    engine_maker: Maker, pruned_first: bool
) -> None:
    # 29 (TensorRT-LLM 8813, 8274): KV reuse mixed prompts; blocks are known by their tokens alone.
    model = never_ending(random_model("llama", Spelling()))
    pruned = plan_of(64, 2000)
    whole = dense(pruned)
    other = replace(plan_of(64, 3000), input_ids=pruned.input_ids)
    order = [pruned, other, whole] if pruned_first else [whole, pruned, other]
    reusing = engine_maker(model, block_reuse=True)
    judge = TorchTarget(model)
    for plan in order:
        assert tokens_of(reusing.target, plan) == tokens_of(judge, plan)
    salts = [job.salt for job in reusing.engine.jobs[-3:]]
    assert salts[2 if pruned_first else 0] is None
    assert len(set(salts)) == 3
    off = engine_maker(model)
    assert not off.engine._reuse


def test_what_was_pruned_to_contiguous_positions_shares_its_blocks(engine_maker: Maker) -> None:
    """A system prompt that begins pruned and dense prompts is read once."""
    model = never_ending(random_model("llama", Spelling()))
    head = plan_of(32, 900).input_ids
    order = [
        replace(kept, input_ids=np.concatenate([head, kept.input_ids[32:]]))
        for kept in (plan_of(64, 2000, "contiguous"), dense(plan_of(80, 400)))
    ]
    reusing, judge = engine_maker(model, block_reuse=True), TorchTarget(model)
    for plan in (*order, *order):
        assert tokens_of(reusing.target, plan) == tokens_of(judge, plan)
    assert [job.salt for job in reusing.engine.jobs[-4:]] == [None] * 4
    assert (None, tuple(head.tolist())) in reusing.engine._blocks


def test_the_engine_of_these_tests_does_mix_blocks_without_salts(engine_maker: Maker) -> None:
    """The test above can fail: without the salt the answers differ."""
    model = never_ending(random_model("llama", Spelling()))
    pruned = plan_of(64, 4000)
    reusing = engine_maker(model, block_reuse=True)
    reusing.target._salted = False  # type: ignore[attr-defined]
    assert tokens_of(reusing.target, pruned) == tokens_of(TorchTarget(model), pruned)
    assert tokens_of(reusing.target, dense(pruned)) != tokens_of(TorchTarget(model), dense(pruned))


def test_ranks_above_0_hold_their_executor_and_take_no_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker = Maker("trtllm_executor", monkeypatch)
    made = maker(setup={"leader": False})
    assert not made.engine.jobs  # not even the probes
    with pytest.raises(TargetFailed, match="only rank 0"):
        tokens_of(made.target, plan_of(10, 20))
    maker.stop()


def test_the_engines_own_ttft_is_logged(
    engine_maker: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine_maker().target
    with caplog.at_level("INFO"):
        tokens_of(target, plan_of(10, 20))
    assert caplog.text.count("engine TTFT") == 1


def test_the_pipeline_prunes_for_an_engine_as_for_torch(
    engine_maker: Maker, byte_level: PreTrainedTokenizerFast
) -> None:
    model = never_ending(random_model("llama", byte_level, vocab_size=len(byte_level)))
    text = " ".join(np.random.default_rng().choice(WORDS, size=500)) + ". Where is the key?"
    knobs: dict[str, Any] = {"threshold": 100, "min_keep_tokens": 0, "keep": 0.3, "max_tokens": 6}
    made = engine_maker(model)
    draft = TorchDraft(model)
    got = SpecPrefill(draft, made.target).generate(text, **knobs)
    expected = SpecPrefill(draft, TorchTarget(model)).generate(text, **knobs)
    assert got.plan.reason is Reason.PRUNED
    assert got.plan.positions == expected.plan.positions == "original"
    assert (got.text, got.token_ids) == (expected.text, expected.token_ids)

    # The engine fails on the pruned prompt: the full one is answered, and says why.
    assert made.setup is not None
    whole = len(byte_level.encode(text))
    made.setup.fail = lambda job, step: "CUDA error" if len(job.tokens) < whole else ""
    fallen = SpecPrefill(draft, made.target).generate(text, **knobs)
    assert fallen.plan.reason is Reason.UNSUPPORTED_TARGET
    assert "CUDA error" in fallen.plan.detail
    dense_answer = SpecPrefill(None, TorchTarget(model)).generate(text, max_tokens=6)
    assert fallen.text == dense_answer.text
