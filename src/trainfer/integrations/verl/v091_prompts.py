"""The prompts-only recipe in verl 0.9.1: responses are cut off the training input, and nothing is learnt from that step.

Inference runs one prefill over the prompt; cutting the response makes a training forward of the same shape. The loss of such a
step means nothing, so its optimizer step is skipped, aloud. trainfer needs none of this: it is here for those who have the habit.
"""

from collections.abc import Generator
from typing import Any

import torch

from trainfer.integrations.verl.session import Session, session
from trainfer.integrations.verl.v091_batch import read_micro_batch
from trainfer.integrations.verl.wrapping import Call

Steps = Generator[None, Any, None]


def trims_now(state: Session) -> bool:
    """True while the update pass of a prompts-only step runs."""
    return state.settings.prompts_only and state.open_pass is not None and state.open_pass.name == "update"


def trim(call: Call) -> None:
    """Replace the micro-batch of a ``forward_step`` by its prompts, and the loss by one that needs no response."""
    batch = call.argument("micro_batch")
    positions = batch["position_ids"]
    if positions.dim() != 2:
        raise NotImplementedError("position ids of several dimensions (images, video) are not trimmed")
    whole = read_micro_batch(batch)
    lengths = whole.prompt_lengths
    trimmed = batch.copy()
    ids = [part[:length] for part, length in zip(batch["input_ids"].unbind(), lengths, strict=True)]
    places = [part[:length] for part, length in zip(positions.unbind(), lengths, strict=True)]
    trimmed["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    trimmed["position_ids"] = torch.nested.as_nested_tensor(places, layout=torch.jagged)
    call.args = (call.args[0],)
    call.kwargs = {
        "micro_batch": trimmed,
        "loss_function": _mean_logprob,
        "forward_only": call.kwargs.get("forward_only", False),
    }


def _mean_logprob(*, model_output: dict[str, Any], **_others: object) -> tuple[Any, dict[str, Any]]:
    """A loss that backward can run through: minus the mean log-prob of the prompt, every token counting as one."""
    return -model_output["log_probs"].values().float().mean(), {}


def optimizer_step(call: Call) -> Steps:
    """``optimizer_step``: the weights are others now; in a prompts-only step it is skipped."""
    state = session()
    if trims_now(state):
        state.journal.note(
            f"step {state.step}: prompts only, so this optimizer step is SKIPPED and the policy does not change"
        )
        call.skip(0.0)
        yield
        return
    yield
    if state.open_pass is not None:
        state.open_pass.stepped()
