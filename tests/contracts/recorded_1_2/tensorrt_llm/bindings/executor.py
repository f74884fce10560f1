"""The C++ executor, as nanobind presents it.

sources:
    cpp/tensorrt_llm/nanobind/executor/request.cpp @ ac456dcad7e63b0ee6387ebb2ee2ef330d142ebe
    cpp/tensorrt_llm/nanobind/executor/executor.cpp @ 1dd50d0741fa3bdae3ffd2f54e53547cbe1a043d
    cpp/tensorrt_llm/nanobind/executor/executorConfig.cpp @ c40f1157d276de8e38bbff9958a2da8e6078a1f6
    cpp/tensorrt_llm/nanobind/executor/bindings.cpp @ a35c38f32e0ed726a47971fe18ea73a5e5583ca4
"""

from __future__ import annotations

import enum
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

from tests.contracts import engine


class ModelType(enum.Enum):
    ENCODER_ONLY = 0
    DECODER_ONLY = 1
    ENCODER_DECODER = 2


class FinishReason(enum.Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class SamplingConfig:
    def __init__(
        self,
        beam_width: int = 1,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        top_p_min: float | None = None,
        top_p_reset_ids: int | None = None,
        top_p_decay: float | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        min_tokens: int | None = None,
        beam_search_diversity_rate: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        length_penalty: float | None = None,
        early_stopping: int | None = None,
        no_repeat_ngram_size: int | None = None,
        num_return_sequences: int | None = None,
        min_p: float | None = None,
        beam_width_array: list[int] | None = None,
    ) -> None:
        self.beam_width, self.top_k, self.top_p = beam_width, top_k, top_p
        self.temperature, self.seed = temperature, seed


class OutputConfig:
    def __init__(
        self,
        return_log_probs: bool = False,
        return_context_logits: bool = False,
        return_generation_logits: bool = False,
        exclude_input_from_output: bool = False,
        return_encoder_output: bool = False,
        return_perf_metrics: bool = False,
        additional_model_outputs: list[Any] | None = None,
    ) -> None:
        self.exclude_input_from_output = exclude_input_from_output
        self.return_perf_metrics = return_perf_metrics


class Request:
    def __init__(
        self,
        input_token_ids: list[int],
        max_tokens: int,
        *,
        streaming: bool = False,
        sampling_config: SamplingConfig = SamplingConfig(),  # noqa: B008
        output_config: OutputConfig = OutputConfig(),  # noqa: B008
        end_id: int | None = None,
        pad_id: int | None = None,
        position_ids: list[int] | None = None,
        bad_words: list[list[int]] | None = None,
        stop_words: list[list[int]] | None = None,
        embedding_bias: Any = None,
        external_draft_tokens_config: Any = None,
        prompt_tuning_config: Any = None,
        multimodal_input: Any = None,
        multimodal_embedding: Any = None,
        mrope_config: Any = None,
        lora_config: Any = None,
        lookahead_config: Any = None,
        kv_cache_retention_config: Any = None,
        logits_post_processor_name: str | None = None,
        logits_post_processor: Any = None,
        encoder_input_token_ids: list[int] | None = None,
        client_id: int | None = None,
        return_all_generated_tokens: bool = False,
        priority: float = 0.5,
        type: Any = None,
        context_phase_params: Any = None,
        encoder_input_features: Any = None,
        encoder_output_length: int | None = None,
        cross_attention_mask: Any = None,
        num_return_sequences: int = 1,
        eagle_config: Any = None,
        skip_cross_attn_blocks: Any = None,
        guided_decoding_params: Any = None,
        language_adapter_uid: int | None = None,
        allotted_time_ms: timedelta | None = None,
        cache_salt_id: int | None = None,
    ) -> None:
        self.input_token_ids, self.max_tokens = input_token_ids, max_tokens
        self.streaming, self.sampling_config = streaming, sampling_config
        self.output_config, self.end_id, self.pad_id = output_config, end_id, pad_id
        self.position_ids, self.stop_words = position_ids, stop_words
        self.cache_salt_id = cache_salt_id


class TimingMetrics:
    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta
    last_token_time: timedelta


class RequestPerfMetrics:
    timing_metrics: TimingMetrics


class Result:
    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    sequence_index: int
    is_sequence_final: bool
    decoding_iter: int
    request_perf_metrics: RequestPerfMetrics | None


class Response:
    request_id: int
    client_id: int | None
    error_msg: str
    result: Result

    def has_error(self) -> bool:
        return bool(self.error_msg)


class KvCacheConfig:
    def __init__(
        self,
        enable_block_reuse: bool = True,
        max_tokens: int | None = None,
        max_attention_window: list[int] | None = None,
        sink_token_length: int | None = None,
        free_gpu_memory_fraction: float | None = None,
        host_cache_size: int | None = None,
        onboard_blocks: bool = True,
        cross_kv_cache_fraction: float | None = None,
        secondary_offload_min_priority: int | None = None,
        event_buffer_max_size: int = 0,
        *,
        enable_partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        use_uvm: bool = False,
        attention_dp_events_gather_period_ms: int = 5,
        runtime_defaults: Any = None,
        max_gpu_total_bytes: int = 0,
    ) -> None:
        self.enable_block_reuse, self.max_tokens = enable_block_reuse, max_tokens


class ExecutorConfig:
    def __init__(
        self,
        max_beam_width: int = 1,
        scheduler_config: Any = None,
        kv_cache_config: KvCacheConfig = KvCacheConfig(),  # noqa: B008
        enable_chunked_context: bool = False,
        normalize_log_probs: bool = True,
        iter_stats_max_iterations: int = 1000,
        request_stats_max_iterations: int = 0,
        batching_type: Any = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        parallel_config: Any = None,
        peft_cache_config: Any = None,
        logits_post_processor_config: Any = None,
        decoding_config: Any = None,
        use_gpu_direct_storage: bool = False,
        gpu_weights_percent: float = 1.0,
        max_queue_size: int | None = None,
        extended_runtime_perf_knob_config: Any = None,
        debug_config: Any = None,
        recv_poll_period_ms: int = 0,
        max_seq_idle_microseconds: int = 180_000_000,
        spec_dec_config: Any = None,
        guided_decoding_config: Any = None,
        additional_model_outputs: list[Any] | None = None,
        cache_transceiver_config: Any = None,
        gather_generation_logits: bool = False,
        mm_embedding_offloading: bool = False,
        enable_trt_overlap: bool = False,
        fail_fast_on_attention_window_too_large: bool = False,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.enable_chunked_context = enable_chunked_context


class Executor:
    def __init__(
        self, model_path: Path, model_type: ModelType, executor_config: ExecutorConfig
    ) -> None:
        cache = executor_config.kv_cache_config
        self._engine = engine.started(cache.enable_block_reuse, cache.max_tokens)

    def shutdown(self) -> None:
        self._engine.stop()

    def enqueue_request(self, request: Request) -> int:
        end = [] if request.end_id is None else [[request.end_id]]
        stops = [*(request.stop_words or []), *end]
        return self._engine.enqueue(
            engine.Job(
                tuple(request.input_token_ids),
                None if request.position_ids is None else tuple(request.position_ids),
                request.max_tokens,
                tuple(word[0] for word in stops),
                request.sampling_config,
                request.cache_salt_id,
            )
        )

    @overload
    def await_responses(self, *, timeout: timedelta | None = None) -> list[Response]: ...

    @overload
    def await_responses(self, id: int, timeout: timedelta | None = None) -> list[Response]: ...

    def await_responses(
        self,
        id: int | None = None,
        timeout: timedelta | None = None,
    ) -> list[Response]:
        assert id is not None
        events = self._engine.wait(id, None if timeout is None else timeout.total_seconds())
        return [_response(id, event) for event in events]

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return self._engine.ready(id)

    def cancel_request(self, id: int | None = None) -> None:
        assert id is not None
        self._engine.cancel(id)

    def can_enqueue_requests(self) -> bool:
        return self._engine.leader


_REASONS = {
    None: FinishReason.NOT_FINISHED,
    "end_id": FinishReason.END_ID,
    "stop_words": FinishReason.STOP_WORDS,
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.TIMED_OUT,
    "cancelled": FinishReason.CANCELLED,
}


def _response(identity: int, event: engine.Event) -> Response:
    response, result = Response(), Result()
    response.request_id, response.client_id, response.error_msg = identity, None, event.error
    result.is_final = event.finish is not None
    result.output_token_ids = [list(event.tokens)]
    result.finish_reasons = [_REASONS[event.finish]]
    result.sequence_index, result.decoding_iter = 0, event.number
    result.is_sequence_final = result.is_final
    result.request_perf_metrics = None
    if result.is_final:
        result.request_perf_metrics = RequestPerfMetrics()
        timing = result.request_perf_metrics.timing_metrics = TimingMetrics()
        timing.arrival_time, timing.first_token_time = timedelta(0), timedelta(seconds=event.number)
    response.result = result
    return response
