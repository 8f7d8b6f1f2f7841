"""Records that cross the stages of a training step; frozen, plain Python, no torch.

prompt -> sequence (prompt + response) -> scored sequence -> training sequence -> report.
Log-probs are natural logarithms. Floats that came from float32 tensors are exact.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a response ended."""

    STOP = "stop"
    """A stop token was sampled; it is the response's last token."""
    LENGTH = "length"
    """``max_new_tokens`` was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message, e.g. ``Message(role="user", content="2 + 2?")``."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a data file, tokenised."""

    index: int
    """Row number in the data set as read (files in order, before filtering): stable across runs."""
    data_source: str
    """Names the scorer, as in verl."""
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    """The chat template applied, generation prompt included, truncation done."""
    ground_truth: str
    ability: str = ""
    extra_info: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The distribution that tokens are drawn from.

    Order of application as in vLLM: temperature, then top-k, top-p and min-p on the scaled
    distribution; the survivors are renormalised. No filter is top_k -1, top_p 1.0, min_p 0.0.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def filters(self) -> bool:
        """True when some tokens of the vocabulary cannot be drawn."""
        return self.top_k != -1 or self.top_p != 1.0 or self.min_p != 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One sequence to sample. Equal prompts of a group are equal ``prompt_ids``."""

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    """Alone decides the draws: not the batch, the slot or the rank. 64 bits."""
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine answers to a request."""

    request_id: str
    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included when one was sampled."""
    logprobs: tuple[float, ...]
    """One per sampled token, of the distribution that was sampled (temperature and filters applied)."""
    finish_reason: FinishReason
    weights_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSequence:
    """Prompt + response: verl's trajectory."""

    prompt: Prompt
    sample_index: int
    """0..G-1 within its group."""
    group: int
    """Number of its prompt within the step, 0..P-1: equal for the G sequences of one group."""
    seed: int
    sampling: SamplingParams
    response_ids: tuple[int, ...]
    response_text: str
    rollout_logprobs: tuple[float, ...]
    """One per response token, of the sampled distribution."""
    finish_reason: FinishReason
    weights_version: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt.token_ids + self.response_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """A log-prob pass over one sequence: one float per response token in each field."""

    logprobs: tuple[float, ...]
    """Temperature applied, no filter: what the loss uses."""
    sampled_logprobs: tuple[float, ...]
    """Temperature and filters applied: comparable with the engine's. Equal to ``logprobs`` without filters."""
    entropies: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """What the update needs to know about one sequence.

    Example: prompt [5, 6], response [7, 1] with advantage 0.5 has ``token_ids=(5, 6, 7, 1)``,
    ``prompt_length=2``, ``advantages=(0.5, 0.5)``, ``loss_mask=(True, True)``.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    temperature: float
    old_logprobs: tuple[float, ...] | None
    """Log-probs of the policy at the start of the step (or the rollout's, in bypass mode). None: those of the
    update's own forward, which are the same where the step has a single optimizer step."""
    ref_logprobs: tuple[float, ...] | None
    advantages: tuple[float, ...]
    loss_mask: tuple[bool, ...]
    """True where a response token trains."""
    rollout_weights: tuple[float, ...] | None = None
    """Importance weights old policy / rollout policy per token; None is 1."""
