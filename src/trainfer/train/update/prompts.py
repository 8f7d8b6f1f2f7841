"""A forward over prompts alone: what an update is when the step is only watched.

Takes a mini-batch and the model that trains; runs the forward that the update would make over the prompts of its
micro-batches, in training's own mode and with autograd's graph, and throws the result away. No loss, no backward, no
optimizer step. Ranks make as many forwards as in the update itself.
"""

import torch

from trainfer.exact.packed import ROW_MULTIPLE, CausalModel, forward_logits, pack_prompts
from trainfer.exact.ulysses import SequenceShard, slice_rows
from trainfer.train.update.batch import NOTHING_TO_LEARN, MiniBatch
from trainfer.train.update.logprob import ForwardLimit


def prompts_of(mini_batch: MiniBatch) -> list[tuple[int, ...]]:
    """Each prompt once, in the order of the sequences."""
    return list(
        dict.fromkeys(sequence.token_ids[: sequence.prompt_length] for sequence in mini_batch.sequences)
    )


def forward_prompts(
    model: CausalModel,
    mini_batch: MiniBatch,
    *,
    limit: ForwardLimit,
    device: torch.device | str,
    shard: SequenceShard | None,
) -> None:
    """Run the forwards; a prompt that several sequences of a micro-batch share is computed once in it."""
    sequences = mini_batch.sequences
    prompts = [sequence.token_ids[: sequence.prompt_length] for sequence in sequences]
    parts = mini_batch.micro_batches
    if parts is None:
        parts = limit.split([len(sequence.token_ids) for sequence in sequences], prompts)
    row_multiple = ROW_MULTIPLE if shard is None else shard.row_multiple
    for indices in parts:
        members = dict.fromkeys(prompts[index] for index in indices) or [NOTHING_TO_LEARN.token_ids]
        batch = pack_prompts(list(members), device=device, row_multiple=row_multiple)
        with torch.enable_grad():
            forward_logits(model, batch if shard is None else slice_rows(batch, shard).packed)
