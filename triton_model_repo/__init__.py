"""Templates of the Triton model repository; `trtllm_specprefill.serving.repository` renders them.

draft              token ids in, importance out
orchestrator       a client's request in, a plan for the target out
target             a plan in, text out, step by step
specprefill        the ensemble of the last two: what clients stream from
specprefill_infer  the same in one response, for plain `infer` calls
"""
