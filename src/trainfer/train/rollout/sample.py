"""Prompts × group -> requests with a seed each; their completions -> sequences.

Takes the prompts of a step and what to sample; gives requests in the order prompt by prompt, and turns
the engine's answers into ``SampledSequence`` records. A sequence's seed follows from (run seed, purpose,
step, row of the prompt, sample number) alone, so its tokens do not depend on ranks, batch or slots, and a
resumed run draws the same. It runs no engine.
"""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trainfer.errors import EngineError
from trainfer.types import Completion, GenerationRequest, Prompt, SampledSequence, SamplingParams


class Purpose(enum.Enum):
    """What a sequence is sampled for; the draws of the two never coincide."""

    TRAIN = "train"
    """To train on."""
    VALIDATION = "val"
    """To measure."""


class Decoder(Protocol):
    """What is asked of a tokenizer here; a Transformers tokenizer has it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]:
        """Text of the tokens; one text for one flat list."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """What one generation samples.

    Example: 2 prompts with 3 samples each make 6 requests; request 4 is sample 1 of prompt (group) 1.
    """

    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    requests: tuple[GenerationRequest, ...]


def sequence_seed(*, run_seed: int, purpose: Purpose, step: int, prompt_index: int, sample_index: int) -> int:
    """64-bit seed of one sequence: BLAKE2b of the five numbers, the same on every machine.

    ``prompt_index`` is the prompt's row in its data (``Prompt.index``), not its place in the step.
    """
    text = f"{run_seed}/{purpose.value}/{step}/{prompt_index}/{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"trainfer").digest(), "big")


def plan_rollout(
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: SamplingParams,
    run_seed: int,
    step: int,
    purpose: Purpose = Purpose.TRAIN,
) -> RolloutPlan:
    """Lay out the requests of one generation, prompt by prompt.

    Args:
        prompts: those of the step; each makes one group.
        samples_per_prompt: sequences of a group.
        sampling: the distribution of every token.
        run_seed: the run's seed.
        step: number of the step; a validation that is to be comparable over time passes a fixed one.
        purpose: train or validation.
    """
    assert samples_per_prompt >= 1, samples_per_prompt
    requests = tuple(
        GenerationRequest(
            request_id=f"{purpose.value}-{step}-{prompt.index}-{sample_index}",
            prompt_ids=prompt.token_ids,
            seed=sequence_seed(
                run_seed=run_seed,
                purpose=purpose,
                step=step,
                prompt_index=prompt.index,
                sample_index=sample_index,
            ),
            sampling=sampling,
        )
        for prompt in prompts
        for sample_index in range(samples_per_prompt)
    )
    return RolloutPlan(prompts=tuple(prompts), samples_per_prompt=samples_per_prompt, requests=requests)


def collect(plan: RolloutPlan, completions: Sequence[Completion], decoder: Decoder) -> list[SampledSequence]:
    """Pair the completions with the plan's requests; special tokens are left out of the text.

    Raises:
        EngineError: too few or too many completions, one that answers another request, one without tokens
            or with another number of log-probs than tokens.
    """
    if len(completions) != len(plan.requests):
        raise EngineError(
            f"the engine gave {len(completions)} completions for {len(plan.requests)} requests; it must answer each once."
        )
    sequences = []
    for position, (request, completion) in enumerate(zip(plan.requests, completions, strict=True)):
        _check_answer(request, completion)
        group, sample_index = divmod(position, plan.samples_per_prompt)
        text = decoder.decode(list(completion.token_ids), skip_special_tokens=True)
        assert isinstance(text, str), "one list of tokens decodes to one text"
        sequences.append(
            SampledSequence(
                prompt=plan.prompts[group],
                sample_index=sample_index,
                group=group,
                seed=request.seed,
                sampling=request.sampling,
                response_ids=completion.token_ids,
                response_text=text,
                rollout_logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                weights_version=completion.weights_version,
            )
        )
    return sequences


def _check_answer(request: GenerationRequest, completion: Completion) -> None:
    if completion.request_id != request.request_id:
        raise EngineError(
            f"the engine answered {completion.request_id!r} where {request.request_id!r} was asked; completions must "
            "come in the order of the requests."
        )
    if not completion.token_ids or len(completion.token_ids) != len(completion.logprobs):
        raise EngineError(
            f"the engine gave {len(completion.token_ids)} tokens and {len(completion.logprobs)} log-probs for "
            f"{request.request_id!r}; it must give at least one token and one log-prob for each."
        )
