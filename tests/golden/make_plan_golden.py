"""Write what verl's own functions answer to a fixed list of batch sizes.

Run by an interpreter that has the wheel installed (verl 0.6.1 or 0.9.1; nothing of trainfer):

    PYTHON_OF_VERL tests/golden/make_plan_golden.py tests/golden

writes ``verl_plan_VERSION.json``. Used of verl: ``validate_config`` and the configuration data classes; for 0.6.1 the
constructor of ``ActorRolloutRefWorker`` (its normalisation of sizes, under PyTorch's fake process group of the wanted
world size), ``DataProto.chunk`` and ``split``, ``rearrange_micro_batches``, ``get_seqlen_balanced_partitions``; for
0.9.1 ``PPOTrainer._get_required_batch_multiple``, ``TrainingWorker.train_mini_batch`` (its check of the mini-batch),
``prepare_micro_batches`` and ``rearrange_micro_batches``. Nothing is trained and no model is loaded.
"""

import contextlib
import io
import json
import math
import os
import random
import sys
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.utils.config import validate_config

A = "actor_rollout_ref"
SHORT = {
    "T": "data.train_batch_size",
    "n": f"{A}.rollout.n",
    "G": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "M": f"{A}.actor.ppo_mini_batch_size",
    "m": f"{A}.actor.ppo_micro_batch_size_per_gpu",
    "m_all": f"{A}.actor.ppo_micro_batch_size",
    "L": f"{A}.rollout.log_prob_micro_batch_size_per_gpu",
    "L_all": f"{A}.rollout.log_prob_micro_batch_size",
    "Lref": f"{A}.ref.log_prob_micro_batch_size_per_gpu",
    "Lref_all": f"{A}.ref.log_prob_micro_batch_size",
    "SP": f"{A}.actor.ulysses_sequence_parallel_size",
    "packed": f"{A}.model.use_remove_padding",
    "dynamic": f"{A}.actor.use_dynamic_bsz",
    "kl": f"{A}.actor.use_kl_loss",
    "agg": f"{A}.actor.loss_agg_mode",
    "adv": "algorithm.adv_estimator",
    "lora": f"{A}.model.lora_rank",
    "name": f"{A}.rollout.name",
}


def cases():
    """A fixed list: near-misses of every kind, then random sizes."""
    base = {"T": 60, "n": 12, "G": 6, "M": 60, "m": 8, "L": 8, "adv": "grpo"}
    yield base
    for change in (
        {"T": 1024, "n": 5, "G": 8, "M": 256, "m": 80, "L": 160}, {"T": 10, "n": 5, "G": 8, "M": 10, "m": 1, "L": 1},
        {"T": 32, "n": 8, "G": 8, "M": 64}, {"T": 64, "n": 5, "G": 8, "M": 32}, {"L": 16}, {"M": 40},
        {"T": 10, "n": 2, "G": 4, "M": 5, "m": 1, "L": 1}, {"T": 4, "n": 2, "G": 4, "M": 1, "m": 1, "L": 1},
        {"m": None}, {"m_all": 16}, {"m": None, "m_all": 60}, {"m": None, "m_all": 4}, {"m": None, "m_all": 7},
        {"L": None}, {"L_all": 12}, {"L": None, "L_all": 12}, {"kl": True}, {"kl": True, "Lref": 4},
        {"kl": True, "Lref": 4, "Lref_all": 6}, {"kl": True, "Lref_all": 6}, {"agg": "nonsense"}, {"agg": "token-sum"},
        {"SP": 2, "packed": False}, {"SP": 2, "packed": True}, {"SP": 3, "packed": True, "m": 4}, {"dynamic": True},
        {"dynamic": True, "m": None, "L": None}, {"dynamic": True, "T": 32, "M": 64, "m": None}, {"nodes": 2},
        {"lora": 1024, "name": "vllm"}, {"lora": 64, "name": "vllm"}, {"adv": "gae"},
    ):  # fmt: skip
        yield {**base, **change}
    draw = random.Random(7)
    for _ in range(150):
        yield {
            "T": draw.randint(1, 64), "n": draw.randint(1, 8), "G": draw.choice([1, 2, 3, 4, 6, 8]),
            "M": draw.randint(1, 64), "m": draw.randint(1, 12), "L": draw.randint(1, 12), "adv": "grpo",
            **({"SP": 2, "packed": True} if draw.random() < 0.2 else {}),
        }  # fmt: skip


def composed(sizes):
    overrides = [f"{SHORT[name]}={'null' if value is None else value}" for name, value in sizes.items()]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides)


def message_of(call):
    """None, or the message of whatever verl raises; Hydra's wrapper around it is taken off."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:  # noqa: BLE001 - whatever verl raises is the answer
        while type(error).__name__ == "InstantiationException" and error.__cause__ is not None:
            error = error.__cause__
        return str(error)
    return None


def world_of(config):
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def rows(number):
    return TensorDict({"x": torch.zeros(number, 1)}, batch_size=[number])


def answers_061(config, sizes):
    from verl import DataProto
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    world, sp = world_of(config), sizes.get("SP", 1)
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=world)
    section = config[A]
    OmegaConf.set_struct(section, False)
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    init = None
    if world % sp == 0:
        init = message_of(
            lambda: ActorRolloutRefWorker.__init__(worker, config=section, role="actor_rollout_ref")
        )
    dist.destroy_process_group()
    answer = {"init": init}
    total = sizes["T"] * sizes["n"]
    answer["chunk_8"] = message_of(lambda: DataProto(batch=rows(total)).chunk(8))
    if world % sp == 0 and init is None:
        mini = section.actor.ppo_mini_batch_size
        answer["mini_rows"] = mini
        answer["micro_rows"] = section.actor.ppo_micro_batch_size_per_gpu
        answer["log_prob_rows"] = section.rollout.log_prob_micro_batch_size_per_gpu
        ranks = world // sp
        if total % ranks == 0:
            rank = DataProto(batch=rows(total // ranks))
            answer["mini_batches"] = [len(part) for part in rank.split(mini)]
            if answer["log_prob_rows"]:
                answer["log_prob_forwards"] = len(rank.split(answer["log_prob_rows"]))
    return answer


def answers_091(config, sizes):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.workers.engine.utils import prepare_micro_batches
    from verl.workers.engine_workers import TrainingWorker

    world, sp = world_of(config), sizes.get("SP", 1)
    if world % sp:
        return {}
    ranks, total = world // sp, sizes["T"] * sizes["n"]
    trainer = SimpleNamespace(use_critic=False, config=config, global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, ranks)
    padded = math.ceil(total / multiple) * multiple
    engine = SimpleNamespace(get_data_parallel_size=lambda: ranks)
    data = TensorDict({"x": torch.zeros(padded // ranks, 1)}, batch_size=[padded // ranks])
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, mini_batch_size=sizes["M"] * sizes["n"])
    found = message_of(
        lambda: TrainingWorker.train_mini_batch.__wrapped__(SimpleNamespace(engine=engine), data)
    )
    answer = {"multiple": multiple, "padding": padded - total, "rows": padded // ranks}
    answer["mini"] = found if found and found.startswith("Got mini_batch_size") else None
    for name, number, size in (
        ("micro", sizes["M"] * sizes["n"] // ranks, sizes.get("m")),
        ("log_prob", padded // ranks, sizes.get("L")),
    ):
        if size and answer["mini"] is None and not sizes.get("dynamic"):
            batch = TensorDict({"x": torch.zeros(number, 1)}, batch_size=[number])
            tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=size)
            parts = []
            answer[name] = message_of(lambda: parts.extend(prepare_micro_batches(batch)[0]))  # noqa: B023
            answer[f"{name}_batches"] = len(parts)
    return answer


def dynamic_splits():
    """Micro-batch counts of verl's token packing, and its refusal of a budget that is too small."""
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    draw = random.Random(11)
    for width, budget, number in (
        (2048, 3000, 160),
        (1536, 24000, 160),
        (64, 64, 10),
        (64, 63, 10),
        (100, 250, 31),
        (100, 1000, 40),
    ):
        for full in (True, False):
            lengths = [width if full else draw.randint(2, width) for _ in range(number)]
            lengths[0] = width
            mask = torch.zeros(number, width, dtype=torch.long)
            for row, length in enumerate(lengths):
                mask[row, :length] = 1
            batch = TensorDict({"input_ids": mask.clone(), "attention_mask": mask}, batch_size=[number])
            parts = []
            found = message_of(lambda: parts.extend(rearrange_micro_batches(batch, max_token_len=budget)[1]))  # noqa: B023
            yield {
                "lengths": lengths, "width": width, "budget": budget, "message": found,
                "micro_batches": len(parts), "fullest": max((sum(lengths[i] for i in part) for part in parts), default=0),
            }  # fmt: skip


def main():
    release = version("verl")
    os.environ.update(
        RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999"
    )
    answers = answers_061 if release.startswith("0.6") else answers_091
    documents = []
    for sizes in cases():
        config = composed(sizes)
        uses_ref, uses_critic = bool(sizes.get("kl")), sizes["adv"] == "gae"
        validated = message_of(partial(validate_config, config, uses_ref, uses_critic))
        documents.append({"sizes": sizes, "validate": validated, **answers(config, sizes)})
    document = {
        "made_by": {"verl": release, "torch": torch.__version__},
        "cases": documents,
        "dynamic": list(dynamic_splits()),
    }
    path = Path(sys.argv[1]) / f"verl_plan_{release}.json"
    path.write_text(
        json.dumps(document, indent=None, separators=(",", ":")).replace('{"sizes"', '\n{"sizes"') + "\n"
    )
    print(path, len(documents))


if __name__ == "__main__":
    main()
