"""What one GPU has to hold, from the sizes in the model's ``config.json``; formulas beside the numbers.

Counted: sharded weights, gradients and Adam states, the largest gathered layer, activations of one
micro-batch (with or without checkpointing), logits, and the engine's weights and key-value cache per
1,000 tokens. Left out: fragmentation, communication buffers, CUDA context, vision towers, experts
(a mixture of experts is counted as its dense part), and whatever an engine reserves beyond these.
"""

from trainfer.plan import keys
from trainfer.plan.asked import Asked, NotKnown
from trainfer.plan.question import ModelShape
from trainfer.plan.records import MemoryEstimate, MemoryPart
from trainfer.plan.verl_sizes import engine_gpus, gpus, longest, sequence_parallel

GIB = 2**30
UNCERTAINTY = (
    "weights, gradients and optimizer within 5 %; activations and logits within a factor of 1.5; "
    "allow 2 to 4 GiB a GPU for what is left out"
)


def estimate(model: ModelShape | None, asked: Asked) -> MemoryEstimate | None:
    """The estimate, or None where the model's sizes or the batch's are not known."""
    if model is None:
        return None
    try:
        return _estimate(model, asked)
    except NotKnown:
        return None


def _estimate(model: ModelShape, asked: Asked) -> MemoryEstimate:
    layer, embedding = _layer(model), _known(model.vocabulary) * _known(model.width)
    layers = _known(model.layers)
    parameters = layers * layer + embedding * (1 if model.tied_embeddings else 2) + _known(model.width)
    size = asked.whole(keys.FSDP_SIZE, -1)
    shards = gpus(asked) if size < 1 else min(size, gpus(asked))
    width = _known(model.width)
    dynamic = asked.flag(keys.DYNAMIC)
    rows = 0 if dynamic else asked.count(keys.MICRO)
    tokens = (
        asked.count(keys.TOKENS, 16384) if dynamic else -(-rows * longest(asked) // sequence_parallel(asked))
    )
    checkpointed = asked.flag(keys.CHECKPOINTING, default=True)
    inside = tokens * (16 * width + 6 * _known(model.inner_width))
    kept = layers * tokens * width * 2 + inside if checkpointed else layers * inside
    key_values = 2 * layers * _known(model.key_value_heads) * _known(model.head_size) * 2
    engine = engine_gpus(asked)
    parts = (
        _part("weights, fp32, sharded", 4 * parameters / shards, f"4 B x {parameters:,} / {shards} GPUs"),
        _part("gradients, fp32, sharded", 4 * parameters / shards, f"4 B x {parameters:,} / {shards} GPUs"),
        _part("Adam, fp32, sharded", 8 * parameters / shards, f"8 B x {parameters:,} / {shards} GPUs"),
        _part("largest gathered unit, bf16", 2 * max(layer, embedding), "2 B x max(a layer, the embedding)"),
        _part(
            "activations of a micro-batch, bf16",
            kept,
            f"{layers} layers x {tokens:,} tokens x {width} x 2 B, and one layer's inside"
            if checkpointed
            else f"{layers} layers x {tokens:,} tokens x (16 x {width} + 6 x inner width)",
        ),
        _part(
            "logits, fp32 and gradient",
            8 * tokens * _known(model.vocabulary),
            f"8 B x {tokens:,} tokens x vocabulary",
        ),
        _part(
            "engine: weights, bf16",
            2 * parameters / engine,
            f"2 B x {parameters:,} / {engine} GPUs of an engine",
        ),
        _part(
            "engine: key-value cache per 1,000 tokens",
            1000 * key_values / asked.count(keys.TP, 2),
            "1,000 x 2 x layers x kv heads x head size x 2 B / tensor-parallel size",
        ),
    )
    return MemoryEstimate(parameters=parameters, parts=parts, uncertainty=UNCERTAINTY)


def _layer(model: ModelShape) -> int:
    """Parameters of one decoder layer: attention, gated feed-forward, two norms."""
    width, head = _known(model.width), _known(model.head_size)
    queries, key_values = _known(model.heads) * head, _known(model.key_value_heads) * head
    return 2 * width * queries + 2 * width * key_values + 3 * width * _known(model.inner_width) + 2 * width


def _part(name: str, size: float, formula: str) -> MemoryPart:
    return MemoryPart(name=name, gib=round(size / GIB, 3), formula=formula)


def _known(value: int | None) -> int:
    if value is None:
        raise NotKnown("config.json")
    return value
