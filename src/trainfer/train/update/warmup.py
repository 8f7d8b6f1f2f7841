"""Supervised warm-up: a model learns answers by next-token training, before any reward.

Takes a causal LM and (prompt, answer) token pairs; changes the weights and reports the loss. The
demonstration uses it to make a policy out of random weights; it is no general fine-tuning tool: one
process, one learning-rate shape, no checkpoint. Deterministic: the same model, examples and settings give
the same weights. The loss is the mean over answer tokens of the batch, cross entropy in nats.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from trainfer.errors import ConfigError, DataError
from trainfer.exact.logprobs import token_logprobs
from trainfer.exact.packed import PackedBatch, forward_logits, pack
from trainfer.types import Prompt

DEMONSTRATIONS = "demonstrations"
"""Key of a row's ``extra_info``: a list of texts, each an answer to learn."""
RAMP_SHARE = 0.05
"""Share of the steps over which the learning rate rises; afterwards it falls linearly."""
FINAL_RATIO = 0.05
"""Learning rate of the last step over the highest."""
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One answer to learn.

    Example: ``prompt_ids=(5, 6)``, ``answer_ids=(7, 1)`` trains the model to follow 5 6 with 7 and then 1.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """The end token included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupSettings:
    """How long and how fast; names as ``trainfer.warmup.*``."""

    steps: int
    """Optimizer steps; 0 leaves the model as it is."""
    batch_size: int
    """Examples per step, drawn with replacement."""
    lr: float
    weight_decay: float = 0.0
    seed: int = 0
    """Decides which examples a step takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupReport:
    """What the warm-up did."""

    losses: tuple[float, ...]
    """One per step, before that step's update."""


def demonstration_examples(
    prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]], *, end_token_id: int
) -> list[Example]:
    """Pair each prompt with each of the texts in its ``extra_info["demonstrations"]``.

    Args:
        prompts: rows of the data, in any order.
        encode: text to token ids, without special tokens.
        end_token_id: appended to every answer, so that the model learns to stop.

    Raises:
        DataError: a row has no such list, or something else than text in it.
    """
    examples = []
    for prompt in prompts:
        texts = prompt.extra_info.get(DEMONSTRATIONS)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"row {prompt.index}: extra_info.{DEMONSTRATIONS} is {texts!r:.80}; the warm-up needs a list of texts, "
                "the answers to learn. Set trainfer.warmup.steps=0 to go without."
            )
        examples += [
            Example(prompt_ids=prompt.token_ids, answer_ids=(*encode(text), end_token_id)) for text in texts
        ]
    return examples


def warm_up(
    model: nn.Module,
    examples: Sequence[Example],
    settings: WarmupSettings,
    *,
    on_step: Callable[[int, float], None] | None = None,
) -> WarmupReport:
    """Train ``model`` in place with AdamW; it comes back in the mode it came in, without gradients.

    Args:
        model: a causal LM that ``exact.packed.forward_logits`` runs.
        examples: what to learn.
        settings: how long and how fast.
        on_step: called after each step with its number, from 1, and its loss.

    Raises:
        DataError: there are no examples.
        ConfigError: the loss is no longer finite.
    """
    if settings.steps and not examples:
        raise DataError("the warm-up has no examples; set trainfer.warmup.steps=0 to go without.")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    device = parameters[0].device if parameters else torch.device("cpu")
    was_training = model.training
    model.train()
    losses = []
    for step in range(settings.steps):
        batch = _batch(examples, settings, step, device)
        loss = -token_logprobs(
            forward_logits(model, batch), batch.targets_S, torch.ones(batch.num_scored, device=device)
        ).mean()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ConfigError(
                f"the warm-up's loss is {losses[-1]} in step {step + 1}; lower trainfer.warmup.lr={settings.lr}."
            )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step is not None:
            on_step(step + 1, losses[-1])
    model.train(was_training)
    return WarmupReport(losses=tuple(losses))


def learning_rate(settings: WarmupSettings, step: int) -> float:
    """Learning rate of a step, from 0: a ramp over the first twentieth, then down to a twentieth."""
    ramp = max(1, round(settings.steps * RAMP_SHARE))
    if step < ramp:
        return settings.lr * (step + 1) / ramp
    share_left = (settings.steps - 1 - step) / max(1, settings.steps - ramp)
    return settings.lr * (FINAL_RATIO + (1.0 - FINAL_RATIO) * share_left)


def _batch(
    examples: Sequence[Example], settings: WarmupSettings, step: int, device: torch.device
) -> PackedBatch:
    # Raw words of a counter-based generator: the same in every release, and step by step without state.
    key = np.array([settings.seed % 2**64, step], dtype=np.uint64)
    words = np.random.Philox(counter=0, key=key).random_raw(settings.batch_size)
    chosen = [examples[int(word) % len(examples)] for word in words]
    return pack(
        [example.prompt_ids + example.answer_ids for example in chosen],
        [len(example.prompt_ids) for example in chosen],
        device=device,
    )
