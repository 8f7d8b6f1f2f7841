"""``--explain KEY``: what a key counts, per what, and what divides it, in a paragraph."""

import difflib

from trainfer.errors import ConfigError
from trainfer.plan import keys

PARAGRAPHS: dict[str, str] = {
    keys.TRAIN: "Prompts a step, over all GPUs. A step samples rollout.n sequences of each, so sequences = this x n. verl "
    "wants sequences to be a multiple of all GPUs (not of data-parallel ranks) unless batches are dynamic, and this "
    "to be at least ppo_mini_batch_size. In no release is it checked that the mini-batch divides it: 0.6 then makes a "
    "short last mini-batch with too small a gradient, 0.9 pads with synthetic sequences. trainfer wants a multiple of it.",
    keys.GEN: "Prompts per fetch from the data loader. In verl 0.6 it silently replaces train_batch_size as the prompts "
    "of a step; in 0.9 train_batch_size must be a multiple of it, and some trainer modes override it by 1.",
    keys.N: "Sequences sampled per prompt: the size of a group. Multiplies train_batch_size and ppo_mini_batch_size, which "
    "count prompts; micro-batch sizes count sequences already.",
    keys.MINI: "Prompts of one optimizer step, over all ranks; x n = sequences. Each data-parallel rank takes its share: "
    "verl 0.6 rounds the share down in silence, 0.9 and trainfer want it whole.",
    keys.MICRO: "Sequences of one forward and backward on one rank. It is not compared with ppo_mini_batch_size as typed "
    "(that counts prompts over all ranks), but with a rank's share of the mini-batch, ppo_mini_batch_size x n / "
    "data-parallel size, which it must divide in verl; in trainfer it need not. Memory and time only: the gradient "
    "accumulates over share / this micro-batches (rounded up, and as even as they can be, in trainfer).",
    keys.MICRO_GLOBAL: "Deprecated: sequences of one forward and backward over all ranks. verl 0.6 divides it by the "
    "data-parallel size; 0.9 accepts it in its configuration check and then fails. Use the key ending in _per_gpu.",
    keys.DYNAMIC: "Fill micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by a number of sequences. verl then "
    "skips its checks of the total and of the mini-batch, and ignores the micro-batch size.",
    keys.TOKENS: "Most tokens of one micro-batch on one GPU, with use_dynamic_bsz. Times the sequence-parallel size it must "
    "hold the longest sequence, max_prompt_length + max_response_length. verl 0.6 divides all tokens by it and may "
    "exceed it in single micro-batches; 0.9 and trainfer keep it.",
    keys.EPOCHS: "Passes over a step's sequences: optimizer steps = this x mini-batches. The learning rate still steps "
    "once a step.",
    keys.SP: "GPUs that share one sequence (Ulysses). Divides the GPUs: data-parallel size = GPUs / this. The model's "
    "attention heads must be a multiple of it, its key-value heads a multiple or a divisor. Needs use_remove_padding. "
    "Token budgets are multiplied by it.",
    keys.FSDP_SIZE: "GPUs of one shard group; more GPUs are replicas (hybrid sharding). It changes the mesh and the memory, "
    "never the batch: the data-parallel size stays GPUs / sequence-parallel size. -1, or as many as there are or more, is one "
    "group.",
    keys.TP: "GPUs of one rollout engine (times its data- and pipeline-parallel sizes). Divides the GPUs: engines = GPUs / "
    "this. verl's default is 2, trainfer's 1: there each of several ranks hosts an engine of its own, and only a run of one rank "
    "can drive a vLLM of several GPUs.",
    keys.WORKERS: "Processes that drive generation in verl, 8 by default. In 0.6 with rollout.mode=async they must divide "
    "prompts x n; in 0.6 sync they play no part; in 0.9 a ragged split is allowed. The number of GPUs has nothing to do "
    "with it.",
    keys.LOG_PROB: "Sequences of one forward of the old-log-prob pass on one rank. Forwards = sequences per rank / this, "
    "rounded up in verl 0.6 and trainfer; in 0.9 it must divide. trainfer makes the pass only where the update's own "
    "forward cannot give the old log-probs: with several optimizer steps a step, sampling filters, importance weights or "
    "a KL in the reward.",
    keys.REF: "Sequences of one forward of the reference model on one rank, where a KL term uses one. Divides as the "
    "old-log-prob size does.",
    keys.LOG_PROB_TOKENS: "Most tokens of one old-log-prob forward on one GPU, with dynamic batches; follows the actor's "
    "budget. Times the sequence-parallel size it must hold the longest sequence.",
    keys.REF_TOKENS: "The same for the reference model.",
    keys.GPUS: "GPUs of one node; x nnodes = all GPUs. On CPU, trainfer counts worker processes by it.",
    keys.NODES: "Nodes; x n_gpus_per_node = all GPUs.",
    keys.PROMPT_TOKENS: "Most tokens of a prompt. In verl 0.6 prompts are padded to it on the left.",
    keys.RESPONSE_TOKENS: "Most tokens of a response. In verl 0.6 responses are padded to it on the right.",
    keys.BALANCE: "Deal sequences to ranks by token count. In verl 0.6 it needs sequences to be a multiple of all GPUs; the "
    "V1 trainer of 0.9 always does it, whatever the key says. It changes no gradient, only which rank holds which row.",
    keys.SYNC_EVERY: "Local updates between two weight syncs in 0.9's separate_async mode; train_batch_size must be a "
    "multiple of it, and each update has its own padding.",
    keys.VAL_N: "Sequences sampled per validation prompt. Validation is padded to the number of generation workers and "
    "cut again.",
    keys.LOSS_AGG: "How token losses become one number. verl 0.6 aggregates inside each micro-batch, so token-mean depends "
    "on the micro-batch size; 0.9 and trainfer normalise over the whole mini-batch of all ranks. In 0.9 synthetic "
    "padding dilutes the seq-mean modes.",
}  # fmt: skip


def explain(key: str) -> str:
    """The paragraph of a key, given by its full name or by its last parts.

    Raises:
        ConfigError: no such key; names the nearest, or the candidates of an ambiguous end.
    """
    matches = [name for name in PARAGRAPHS if name == key or name.endswith(f".{key}")]
    if len(matches) == 1 or key in PARAGRAPHS:
        name = key if key in PARAGRAPHS else matches[0]
        return f"{name}\n{PARAGRAPHS[name]}"
    if matches:
        raise ConfigError(f"{key}: several keys end so: {', '.join(matches)}.")
    near = difflib.get_close_matches(key, [*PARAGRAPHS, *map(keys.short, PARAGRAPHS)], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(PARAGRAPHS)}."
    raise ConfigError(f"{key}: not a key of batch arithmetic.{hint}")
