"""The section ``trainfer``: the keys that verl does not have."""

from typing import Annotated, Literal

from msgspec import Meta

from trainfer.config.fields import Count, CountOrZero, NonNegative, Positive, Section, Seed, Text, Texts


class ConsistencyConfig(Section, frozen=True, kw_only=True):
    """Which steps also capture activations of both sides; log-prob agreement is measured at every step.

    The captured passes are the rollout's prefill and decode and the update's own forward (of its first optimizer step);
    the two dumps are compared in the background. ``DUMP_ON=1`` in the environment captures the first step where no step is
    configured, ``PROMPTS_ONLY=1`` sets prompts_only.
    """

    steps: Annotated[
        tuple[CountOrZero, ...],
        Meta(
            description="Steps whose rollout and training passes are captured, counted from 1; 0 is the untrained policy, so "
            "step 1. Empty: none."
        ),
    ] = ()
    every: Annotated[
        CountOrZero, Meta(description="Capture every so many steps. 0: only those listed in steps.")
    ] = 0
    level: Annotated[
        Literal["L0", "L1", "mix"],
        Meta(description="What is captured: modules (L0), operators (L1) or both (mix)."),
    ] = "L0"
    task: Annotated[
        Literal["tensor", "statistics", "sketch"],
        Meta(
            description="What is kept of each tensor: its values, a few numbers, or a projection of each row, by which rows "
            "can still be compared (68 bytes a row)."
        ),
    ] = "sketch"
    modules: Annotated[
        Texts | None,
        Meta(description='Modules that are captured, by name or pattern ("model.layers.0.*"). null: all.'),
    ] = None
    prompts_only: Annotated[
        bool,
        Meta(
            description="As msProbe's recipe: a captured step's training pass sees prompts alone, and its optimizer steps are "
            "skipped; dumps lie in generate_sequences/ and update_actor/."
        ),
    ] = False
    max_bytes: Annotated[
        Count | None,
        Meta(
            description="Most bytes written per captured step, over all ranks and both sides; a dump that reaches its share is "
            "incomplete. null: half of the free disk."
        ),
    ] = None


class WarmupConfig(Section, frozen=True, kw_only=True):
    """A tiny model made on the spot by a short supervised training on data.train_files; for the demo."""

    architecture: Annotated[
        Literal["qwen2", "qwen3", "llama", "gpt2"],
        Meta(description="Transformers architecture of the model."),
    ] = "qwen3"
    hidden_size: Annotated[
        Count, Meta(description="Width of the residual stream; a multiple of twice num_heads.")
    ] = 64
    intermediate_size: Annotated[Count, Meta(description="Width inside the feed-forward layer.")] = 128
    num_layers: Annotated[Count, Meta(description="Decoder layers of the model.")] = 2
    num_heads: Annotated[Count, Meta(description="Query heads per layer.")] = 4
    num_kv_heads: Annotated[Count, Meta(description="Key-value heads per layer; divides num_heads.")] = 2
    vocabulary: Annotated[
        Literal["byte", "character"],
        Meta(description="Tokens are bytes, or the characters of the training files."),
    ] = "character"
    steps: Annotated[
        CountOrZero, Meta(description="Optimizer steps of the supervised warm-up. 0: random weights.")
    ] = 200
    batch_size: Annotated[Count, Meta(description="Examples per warm-up step.")] = 32
    lr: Annotated[Positive, Meta(description="Learning rate of the warm-up (AdamW).")] = 3e-3
    weight_decay: Annotated[NonNegative, Meta(description="Weight decay of the warm-up.")] = 0.0
    seed: Annotated[
        Seed | None, Meta(description="Seed of weights and order of the warm-up. null: trainfer.seed.")
    ] = None

    def __post_init__(self) -> None:
        """Refuse heads that make no model."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}, so the query heads make no "
                "equal groups; set num_kv_heads to a divisor"
            )
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of 2 x num_heads={2 * self.num_heads}: each head needs an "
                "even width, because rotary positions turn pairs; change one of them"
            )


class BuiltinEngineConfig(Section, frozen=True, kw_only=True):
    """The builtin engine's paged key-value cache."""

    kv_block_tokens: Annotated[Count, Meta(description="Tokens per block of the cache.")] = 16
    kv_cache_tokens: Annotated[
        Count | None,
        Meta(
            description="Tokens that the cache of one engine holds. null: enough for max_num_seqs longest sequences."
        ),
    ] = None


class TrainferConfig(Section, frozen=True, kw_only=True):
    """Keys of trainfer's own."""

    seed: Annotated[
        Seed,
        Meta(description="Seed from which all others follow: weights, prompt order, each sequence's draws."),
    ] = 42
    exact: Annotated[
        Literal["auto", "true", "false"] | bool,
        Meta(
            description="Bitwise equal log-probs of engine and trainer. auto: where the engine can; true: insist, "
            "or fail; false: fastest kernels."
        ),
    ] = "auto"
    consistency: ConsistencyConfig = ConsistencyConfig()
    warmup: Annotated[
        WarmupConfig | None,
        Meta(
            description="Make a tiny model on the spot instead of reading actor_rollout_ref.model.path. null: no."
        ),
    ] = None
    builtin_engine: BuiltinEngineConfig = BuiltinEngineConfig()
    scripted_responses: Annotated[
        Text | None,
        Meta(description="JSONL file that the scripted engine answers from, one response a line."),
    ] = None

    def __post_init__(self) -> None:
        """Write ``exact`` as a word."""
        if isinstance(self.exact, bool):
            self._resolve("exact", "true" if self.exact else "false")
