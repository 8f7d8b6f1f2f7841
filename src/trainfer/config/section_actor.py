"""The sections ``actor_rollout_ref.model``, ``.actor`` and ``.ref``: what trains, and how."""

from typing import Annotated, Literal

from msgspec import Meta

from trainfer.config.fields import (
    LONG_DTYPES,
    Count,
    CountOrAll,
    CountOrZero,
    DType,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
    ShareBelowAll,
    Text,
    Texts,
)

LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlLossType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"
]


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model that is trained: a local Hugging Face folder."""

    path: Annotated[
        Text | None,
        Meta(
            description="Local Hugging Face folder with config.json, safetensors and tokenizer. "
            "Required, unless trainfer.warmup makes a tiny model on the spot."
        ),
    ] = None
    tokenizer_path: Annotated[
        Text | None, Meta(description="Local folder of the tokenizer. null: the model's folder.")
    ] = None
    custom_chat_template: Annotated[
        Text | None, Meta(description="Jinja chat template used instead of the tokenizer's own.")
    ] = None
    use_remove_padding: Annotated[
        Literal[True],
        Meta(description="Always true: trainfer packs sequences by token and never pads a row."),
    ] = True
    enable_gradient_checkpointing: Annotated[
        bool,
        Meta(
            description="Recompute each layer's activations in the backward pass: less memory, about a third more time."
        ),
    ] = True
    trust_remote_code: Annotated[
        Literal[False], Meta(description="Always false: code from a model folder is never executed.")
    ] = False
    lora_rank: Annotated[
        CountOrZero,
        Meta(
            description="Rank of a LoRA adapter that is trained instead of the weights (needs trainfer[lora]); the reference "
            "model is then the base without adapter. 0: all weights are trained."
        ),
    ] = 0
    lora_alpha: Annotated[
        Positive, Meta(description="The adapter's output is scaled by lora_alpha / lora_rank.")
    ] = 16
    target_modules: Annotated[
        Text | Texts,
        Meta(
            description="Linear layers that are adapted: all-linear (all but the head), a list of last parts of their names, "
            "or one regular expression over whole names."
        ),
    ] = "all-linear"
    exclude_modules: Annotated[
        Text | Texts | None,
        Meta(description="Layers left out of target_modules, as a list or a regular expression. null: none."),
    ] = None
    lora_adapter_path: Annotated[
        Text | None,
        Meta(
            description="Folder of a PEFT adapter (safetensors) to go on from; it decides rank, alpha and layers. null: a new "
            "one, which changes nothing before its first update."
        ),
    ] = None

    @property
    def trains_adapter(self) -> bool:
        """True where an adapter is trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def __post_init__(self) -> None:
        """Fill in what follows another key."""
        if self.tokenizer_path is None and self.path is not None:
            self._resolve("tokenizer_path", self.path)


class OptimConfig(Section, frozen=True, kw_only=True):
    """AdamW and its learning-rate schedule; the schedule counts steps of the loop, as in verl."""

    lr: Annotated[Positive, Meta(description="Peak learning rate of AdamW.")] = 1e-6
    lr_warmup_steps: Annotated[
        CountOrAll,
        Meta(description="Steps over which lr grows linearly from 0. -1: use lr_warmup_steps_ratio."),
    ] = -1
    lr_warmup_steps_ratio: Annotated[
        Share,
        Meta(description="Share of total_training_steps spent on warm-up, where lr_warmup_steps is -1."),
    ] = 0.0
    lr_scheduler_type: Annotated[
        Literal["constant", "cosine"], Meta(description="Course of the learning rate after warm-up.")
    ] = "constant"
    min_lr_ratio: Annotated[
        Share, Meta(description="Lowest learning rate of the cosine schedule, as a share of lr.")
    ] = 0.0
    num_cycles: Annotated[
        Positive, Meta(description="Cosine waves over the training; 0.5 falls once from lr to the minimum.")
    ] = 0.5
    weight_decay: Annotated[
        NonNegative, Meta(description="AdamW's decoupled weight decay per optimizer step.")
    ] = 0.01
    betas: Annotated[
        tuple[ShareBelowAll, ShareBelowAll],
        Meta(description="AdamW's decay rates of the first and second moment."),
    ] = (0.9, 0.999)
    total_training_steps: Annotated[
        CountOrAll, Meta(description="Steps that the schedule spans. -1: the number of steps of this run.")
    ] = -1


class MixedPrecisionConfig(Section, frozen=True, kw_only=True):
    """Number formats of FSDP2's mixed precision; null follows fsdp_config.dtype (reduce: float32)."""

    param_dtype: Annotated[
        DType | None, Meta(description="Format of gathered parameters in forward and backward.")
    ] = None
    reduce_dtype: Annotated[
        DType | None, Meta(description="Format in which gradients are summed over several ranks.")
    ] = None

    def __post_init__(self) -> None:
        """Write the long dtype names."""
        for name, value in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if value is not None:
                self._resolve(name, LONG_DTYPES[value])


class FsdpConfig(Section, frozen=True, kw_only=True):
    """How the model is sharded over ranks (PyTorch FSDP2), and its number formats."""

    fsdp_size: Annotated[
        CountOrAll,
        Meta(
            description="Ranks per shard group; more ranks are replicas. -1, or as many as there are: one group."
        ),
    ] = -1
    param_offload: Annotated[
        bool, Meta(description="Keep parameters in host memory while the engine generates.")
    ] = False
    optimizer_offload: Annotated[
        bool, Meta(description="Keep the optimizer state in host memory outside the update.")
    ] = False
    reshard_after_forward: Annotated[
        bool,
        Meta(
            description="Free parameters gathered from other ranks between forward and backward: less memory, one more gather."
        ),
    ] = True
    model_dtype: Annotated[
        DType, Meta(description="Format of the stored (master) weights: float32 or bfloat16 (fp32, bf16).")
    ] = "float32"
    dtype: Annotated[
        DType, Meta(description="Format of forward and backward; equal to rollout.dtype for exact agreement.")
    ] = "bfloat16"
    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()

    def __post_init__(self) -> None:
        """Write the long dtype names and let mixed precision follow ``dtype``."""
        self._resolve("model_dtype", LONG_DTYPES[self.model_dtype])
        self._resolve("dtype", LONG_DTYPES[self.dtype])
        param, reduce = self.mixed_precision.param_dtype, self.mixed_precision.reduce_dtype
        self._resolve(
            "mixed_precision",
            MixedPrecisionConfig(param_dtype=param or self.dtype, reduce_dtype=reduce or "float32"),
        )


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """How the actor's checkpoints are written."""

    async_save: Annotated[
        bool,
        Meta(
            description="Copy the state to host memory and write it while training goes on (verl: Megatron only). At most one "
            "save is under way; the last one of a run is waited for."
        ),
    ] = False


class ActorConfig(Section, frozen=True, kw_only=True):
    """The update: batch sizes, loss, optimizer, sharding."""

    ppo_mini_batch_size: Annotated[
        Count, Meta(description="Prompts per optimizer step over all ranks (times rollout.n: sequences).")
    ] = 256
    ppo_micro_batch_size_per_gpu: Annotated[
        Count | None,
        Meta(
            description="Sequences per forward and backward on one rank. It changes memory and time, never the gradient."
        ),
    ] = None
    use_dynamic_bsz: Annotated[
        bool | None,
        Meta(
            description="Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of a fixed number of "
            "sequences. null: true exactly when ppo_micro_batch_size_per_gpu is not given (verl: false)."
        ),
    ] = None
    ppo_max_token_len_per_gpu: Annotated[
        Count,
        Meta(
            description="Most tokens per micro-batch on one rank, with use_dynamic_bsz; times the Ulysses size."
        ),
    ] = 16384
    ppo_epochs: Annotated[Count, Meta(description="Passes over a step's sequences.")] = 1
    shuffle: Annotated[
        bool, Meta(description="Draw the sequences of each mini-batch anew for every pass.")
    ] = False
    data_loader_seed: Annotated[Seed, Meta(description="Seed of that shuffle.")] = 42
    clip_ratio: Annotated[
        NonNegative, Meta(description="PPO's clip range of the probability ratio, both sides.")
    ] = 0.2
    clip_ratio_low: Annotated[
        Share | None,
        Meta(description="Clip range below 1. null: clip_ratio (verl: 0.2 whatever clip_ratio says)."),
    ] = None
    clip_ratio_high: Annotated[
        NonNegative | None,
        Meta(description="Clip range above 1. null: clip_ratio (verl: 0.2 whatever clip_ratio says)."),
    ] = None
    clip_ratio_c: Annotated[
        float,
        Meta(gt=1, description="Bound of the dual clip: the ratio's cap where the advantage is negative."),
    ] = 3.0
    loss_agg_mode: Annotated[
        LossAggMode,
        Meta(
            description="How token losses become one number; always over the whole mini-batch of all ranks."
        ),
    ] = "token-mean"
    loss_scale_factor: Annotated[
        Count | None,
        Meta(
            description="Divisor of each sequence's sum in seq-mean-token-sum-norm. null: data.max_response_length."
        ),
    ] = None
    entropy_coeff: Annotated[float, Meta(description="Weight of the entropy bonus in the loss. 0: none.")] = (
        0.0
    )
    use_kl_loss: Annotated[
        bool, Meta(description="Add the KL divergence to the reference model to the loss.")
    ] = False
    kl_loss_coef: Annotated[NonNegative, Meta(description="Weight of that KL term.")] = 0.001
    kl_loss_type: Annotated[
        KlLossType,
        Meta(
            description="Estimator of that KL per token: kl = k1, abs, mse = k2, low_var_kl = k3. A trailing + keeps the "
            "value and takes the gradient of k2."
        ),
    ] = "low_var_kl"
    grad_clip: Annotated[
        Positive, Meta(description="Largest norm of the gradient of one optimizer step.")
    ] = 1.0
    ulysses_sequence_parallel_size: Annotated[
        Count, Meta(description="Ranks that share one sequence (Ulysses); divides the number of ranks.")
    ] = 1
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        """Fill in what follows another key."""
        if self.use_dynamic_bsz is None:
            self._resolve("use_dynamic_bsz", self.ppo_micro_batch_size_per_gpu is None)
        if self.clip_ratio_low is None:
            self._resolve("clip_ratio_low", self.clip_ratio)
        if self.clip_ratio_high is None:
            self._resolve("clip_ratio_high", self.clip_ratio)


class RefFsdpConfig(Section, frozen=True, kw_only=True):
    """Sharding of the reference model; its number formats are the actor's."""

    param_offload: Annotated[
        bool, Meta(description="Keep the reference model in host memory while it is not used.")
    ] = False


class RefConfig(Section, frozen=True, kw_only=True):
    """The frozen reference model; it exists only where a KL term needs it."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        Count | None, Meta(description="Sequences per reference log-prob forward on one rank.")
    ] = None
    log_prob_use_dynamic_bsz: Annotated[
        bool | None,
        Meta(
            description="Fill reference forwards up to a token budget. null: unless the micro-batch size is given."
        ),
    ] = None
    log_prob_max_token_len_per_gpu: Annotated[
        Count | None,
        Meta(
            description="Most tokens per reference forward on one rank. null: actor.ppo_max_token_len_per_gpu."
        ),
    ] = None
    fsdp_config: RefFsdpConfig = RefFsdpConfig()

    def __post_init__(self) -> None:
        """Fill in what follows another key."""
        if self.log_prob_use_dynamic_bsz is None:
            self._resolve("log_prob_use_dynamic_bsz", self.log_prob_micro_batch_size_per_gpu is None)
