"""Is this the same run? Compares the configuration of a run folder with the one just given.

Takes two YAML mappings; gives the dotted keys that differ with both values. Keys in ``MAY_CHANGE`` alter how
long a run goes, what it leaves behind or where it is computed, not what it computes (the loss does not depend
on ranks or micro-batches); everything else must be equal, or the resumed run would be neither the one nor
the other. Key names are not checked here: ``config`` has done so.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from trainfer.errors import RunFolderError

MAY_CHANGE = (
    # how long
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "actor_rollout_ref.actor.optim.total_training_steps",
    # what is validated, saved and logged
    "data.val_*",
    "actor_rollout_ref.rollout.val_kwargs.*",
    "trainer.val_*",
    "trainer.test_freq",
    "trainer.save_freq",
    "actor_rollout_ref.actor.checkpoint.async_save",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainfer.consistency.*",
    # where and in which portions it is computed
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.device",
    "trainer.balance_batch",
    "ray_kwargs.*",
    "reward.num_workers",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "*_micro_batch_size_per_gpu",
    "*_max_token_len_per_gpu",
    "*use_dynamic_bsz",
    "*.ulysses_sequence_parallel_size",
    "*.fsdp_config.fsdp_size",
    "*.fsdp_config.param_offload",
    "*.fsdp_config.optimizer_offload",
    "*.fsdp_config.reshard_after_forward",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.agent.num_workers",
    "trainfer.builtin_engine.*",
)
"""Shell-style patterns over dotted keys. A learning-rate schedule that spans the run follows the new length."""
_SHOWN = 8
_ABSENT = "(not set)"


def check_same_run(stored: Path, config_text: str) -> None:
    """Raise unless ``config_text`` continues the run whose configuration is in ``stored``.

    Raises:
        RunFolderError: names each differing key with both values.
    """
    try:
        before = yaml.safe_load(stored.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise RunFolderError(
            f"Cannot read {stored}: {error}. Without it the run cannot be resumed; use another folder."
        ) from error
    after = yaml.safe_load(config_text)
    assert isinstance(after, dict), "the effective configuration is a mapping"
    if not isinstance(before, dict):
        raise RunFolderError(f"{stored} is damaged: not a mapping. Restore it or use another folder.")
    differing = [difference for difference in differences(before, after) if not may_change(difference[0])]
    if not differing:
        return
    lines = [f"  {key}: {old} in the folder, {new} now" for key, old, new in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    listing = "\n".join(lines)
    raise RunFolderError(
        f"{stored.parent} holds a run with another configuration:\n{listing}\n"
        "Resume with the values of the folder, or start a new run with another trainer.default_local_dir."
    )


def may_change(key: str) -> bool:
    """True when a resumed run may have another value under this dotted key."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def differences(before: dict, after: dict) -> list[tuple[str, str, str]]:
    """(dotted key, old value, new value) of every leaf that differs, in the order of the keys."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        (key, _shown(old, key), _shown(new, key))
        for key in sorted(old.keys() | new.keys())
        if (key in old) != (key in new) or old[key] != new[key]
    ]


def _shown(leaves: dict[str, object], key: str) -> str:
    return str(leaves[key])[:200] if key in leaves else _ABSENT


def _leaves(node: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
