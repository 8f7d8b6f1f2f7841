"""The prompts-only recipe in verl 0.6.1: responses are cut off the training input, and nothing is learnt from that step.

See ``v091_prompts``: the optimizer step is skipped, aloud. trainfer needs none of this.
"""

from collections.abc import Generator
from typing import Any

import torch

from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.v061_batch import prompts_of
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]


def trims_now(state: Session) -> bool:
    """True while the update pass of a prompts-only step runs."""
    return state.settings.prompts_only and state.open_pass is not None and state.open_pass.name == "update"


def forward_prompts(call: Call) -> None:
    """Run ``_forward_micro_batch`` on the prompts, and answer in the shape that the loss expects."""
    batch = call.argument("micro_batch")
    width = batch["responses"].shape[-1]
    entropy, log_probs = call.function(
        call.owner,
        prompts_of(batch),
        temperature=call.argument("temperature"),
        calculate_entropy=call.argument("calculate_entropy", default=False),
    )
    call.skip(
        (None if entropy is None else entropy.expand(-1, width), log_probs.expand(-1, width)),
    )


def optimizer_step(call: Call) -> Steps:
    """``_optimizer_step`` of a prompts-only step: skipped."""
    state = session()
    if trims_now(state):
        state.journal.note(
            f"step {state.step}: prompts only, so this optimizer step is SKIPPED and the policy does not change"
        )
        call.skip(torch.zeros(()))
    yield
