"""The section ``actor_rollout_ref.rollout``: how sequences are sampled."""

from typing import Annotated, Literal

from msgspec import Meta

from trainfer.config.fields import (
    LONG_DTYPES,
    Count,
    DType,
    NonNegative,
    Positive,
    PositiveShare,
    Section,
    Share,
)

TopK = Annotated[int, Meta(ge=-1)]
ALL_TOKENS = -1
"""No top-k. verl writes 0 for its hf engine, and means the same."""


class ValKwargsConfig(Section, frozen=True, kw_only=True):
    """How validation samples."""

    n: Annotated[Count, Meta(description="Sequences sampled per validation prompt.")] = 1
    temperature: Annotated[
        NonNegative, Meta(description="Sampling temperature of validation. 0: greedy.")
    ] = 0.0
    top_k: Annotated[TopK, Meta(description="Tokens kept by top-k in validation. -1 or 0: all.")] = ALL_TOKENS
    top_p: Annotated[
        PositiveShare, Meta(description="Probability mass kept by top-p in validation. 1: all.")
    ] = 1.0
    do_sample: Annotated[
        bool, Meta(description="Sample in validation. false: greedy decoding, whatever the temperature says.")
    ] = False

    def __post_init__(self) -> None:
        """One way to say that there is no top-k."""
        if self.top_k == 0:
            self._resolve("top_k", ALL_TOKENS)


class AgentConfig(Section, frozen=True, kw_only=True):
    """verl's agent loop; trainfer has none, the key is accepted and changes nothing that is computed."""

    num_workers: Annotated[
        Count,
        Meta(
            description="verl's number of agent-loop processes. trainfer starts none: accepted, without effect."
        ),
    ] = 8


class RolloutConfig(Section, frozen=True, kw_only=True):
    """The engine that samples, and the distribution it samples from."""

    name: Annotated[
        Literal["builtin", "hf", "scripted", "vllm"],
        Meta(
            description="Engine: builtin (the trained module itself), hf (plain generate), vllm, scripted (tests)."
        ),
    ] = "builtin"
    n: Annotated[Count, Meta(description="Sequences sampled per prompt: the size of a group.")] = 1
    temperature: Annotated[
        Positive,
        Meta(
            description="Divides the logits before sampling and in the loss. Above 0: greedy samples of one prompt "
            "are all equal, and nothing could be learnt from them."
        ),
    ] = 1.0
    top_k: Annotated[TopK, Meta(description="Most probable tokens that may be drawn. -1 or 0: all.")] = (
        ALL_TOKENS
    )
    top_p: Annotated[
        PositiveShare, Meta(description="Probability mass of the tokens that may be drawn. 1: all.")
    ] = 1.0
    min_p: Annotated[
        Share, Meta(description="Least probability of a token, relative to the most probable. 0: none.")
    ] = 0.0
    dtype: Annotated[
        DType, Meta(description="Format in which the engine computes: float32 or bfloat16 (fp32, bf16).")
    ] = "bfloat16"
    tensor_model_parallel_size: Annotated[
        Count, Meta(description="GPUs that share one copy of the engine's model. Default 1 (verl: 2).")
    ] = 1
    max_num_seqs: Annotated[Count, Meta(description="Most sequences that one engine decodes at a time.")] = (
        256
    )
    max_num_batched_tokens: Annotated[
        Count,
        Meta(
            description="Most tokens that one engine computes in a single forward, prefill and decode together."
        ),
    ] = 8192
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Compute a prompt shared by several sequences once and share its key-value cache."),
    ] = True
    enable_chunked_prefill: Annotated[
        bool,
        Meta(
            description="Let vllm split long prompts over several forwards, mixed with decoding. Builtin splits prompts above `max_num_batched_tokens` on a CPU, whatever this says, and hf none."
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        PositiveShare,
        Meta(
            description="Share of a GPU's memory that vllm may take for weights and cache; other engines take what they need."
        ),
    ] = 0.5
    calculate_log_probs: Annotated[
        Literal[True],
        Meta(
            description="Always true: the engine returns the log-prob of every sampled token, and agreement is measured."
        ),
    ] = True
    log_prob_micro_batch_size_per_gpu: Annotated[
        Count | None, Meta(description="Sequences per old-log-prob forward on one rank.")
    ] = None
    log_prob_use_dynamic_bsz: Annotated[
        bool | None,
        Meta(
            description="Fill old-log-prob forwards up to a token budget. null: unless the micro-batch size is given."
        ),
    ] = None
    log_prob_max_token_len_per_gpu: Annotated[
        Count | None,
        Meta(
            description="Most tokens per old-log-prob forward on one rank. null: actor.ppo_max_token_len_per_gpu."
        ),
    ] = None
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    agent: AgentConfig = AgentConfig()

    def __post_init__(self) -> None:
        """Write the long dtype name and fill in what follows another key."""
        self._resolve("dtype", LONG_DTYPES[self.dtype])
        if self.top_k == 0:
            self._resolve("top_k", ALL_TOKENS)
        if self.log_prob_use_dynamic_bsz is None:
            self._resolve("log_prob_use_dynamic_bsz", self.log_prob_micro_batch_size_per_gpu is None)
