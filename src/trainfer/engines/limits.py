"""How much an engine may do at once; plain integers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Limits of one engine on one rank. None of them changes what is sampled, only how fast and in how much memory."""

    max_num_seqs: int = 256
    """Sequences that decode together."""
    max_num_batched_tokens: int = 8192
    """Tokens of one prefill pass; a longer prompt is prefilled alone, on a CPU in chunks of no more (but of at least 16)."""
    block_size: int = 16
    """Tokens of one cache block."""
    cache_tokens: int | None = None
    """Tokens that the cache may hold, rounded down to blocks; None: as many as a call can use."""
    share_prefixes: bool = True
    """Compute equal prompts of one call once."""

    def __post_init__(self) -> None:
        assert self.max_num_seqs >= 1
        assert self.max_num_batched_tokens >= 1
        assert self.block_size >= 1
        assert self.cache_tokens is None or self.cache_tokens >= 1
