"""Several ranks compute what one process computes: losses, gradients, weights after three steps, samples (fp32)."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import rank_cases
import torch
from rank_cases import ACTOR, run_cases, setup_of, spawn, three_steps
from safetensors.torch import load_file

from trainfer.integrations.transformers.load import load_model, save_model, tiny_model
from trainfer.train.update.checkpoint_export import write_model_folder
from trainfer.workers.build_rank import build_actor, build_ref, load_engine
from trainfer.workers.local_group import LocalGroup
from trainfer.workers.rollout import RolloutWorker

TOLERANCE = 1e-6
BATCH = "trainer.balance_batch=false"
SP = f"{ACTOR}.ulysses_sequence_parallel_size"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"

MODELS = {
    "qwen3": {"architecture": "qwen3"},
    "one kv head": {"architecture": "qwen3", "num_kv_heads": 1},
    "tied gpt2": {"architecture": "gpt2"},
}
SINGLE = {
    # What one process is told; the case's own overrides come on top. Everything else must not matter.
    "plain": (),
    "many steps": (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true"),
    "kl": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01"),
    "lora": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", "actor_rollout_ref.model.lora_rank=4"),
}
CASES = {
    # name: (model, single-process configuration, overrides of several ranks, masked sequences)
    "fsdp": ("qwen3", "plain", (), 0),
    "sp gpt2": (
        "tied gpt2",
        "plain",
        (f"{SP}=2", "actor_rollout_ref.model.enable_gradient_checkpointing=false"),
        0,
    ),
    "dynamic": ("qwen3", "plain", (f"{TOKENS}=64",), 0),
    "one a forward": ("qwen3", "many steps", (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",), 0),
    "kept gathered": (
        "qwen3",
        "kl",
        (f"{ACTOR}.fsdp_config.reshard_after_forward=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"),
        0,
    ),
    "offload": (
        "qwen3",
        "plain",
        (f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"),
        0,
    ),
    "a rank trains nothing": ("qwen3", "plain", (BATCH,), 4),
    "lora": ("qwen3", "lora", (), 0),
    "sp": ("qwen3", "plain", (f"{SP}=2",), 0),
    "sp dynamic": ("qwen3", "kl", (f"{SP}=2", f"{TOKENS}=40"), 0),
    "sp, kv head shared": ("one kv head", "plain", (f"{SP}=2",), 0),
}
CASES_OF_4 = {
    "fsdp": CASES["fsdp"],
    "hsdp": ("qwen3", "many steps", (f"{ACTOR}.fsdp_config.fsdp_size=2", f"{TOKENS}=50"), 0),
    "hsdp sp": ("qwen3", "plain", (f"{ACTOR}.fsdp_config.fsdp_size=2", f"{SP}=2"), 0),
    "sp 4, kv heads shared": ("qwen3", "plain", (f"{SP}=4",), 0),
    "a rank trains nothing": ("qwen3", "plain", (BATCH, f"{TOKENS}=64"), 2),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        save_model(tiny_model(hidden_size=32, intermediate_size=64, **sizes), folder / name)
    return folder


@pytest.fixture(scope="session")
def one_process(models, tmp_path_factory):
    """Runs a configuration in this process, once."""
    done = {}

    def run(model, single, masked):
        key = (model, single, masked)
        if key not in done:
            folder = tmp_path_factory.mktemp("one")
            setup = setup_of(models / model, SINGLE[single], 1)
            done[key] = three_steps(local_group(setup), setup, folder, masked=masked), folder
        return done[key]

    return run


def local_group(setup):
    device, config, plan = torch.device("cpu"), setup.config, setup.plan
    actor = config.actor_rollout_ref.actor
    trains = build_actor(config, plan, setup.model_folder, device, total_steps=setup.total_steps, meshes=None)
    return LocalGroup(
        actor=trains,
        rollout=RolloutWorker(load_engine(config, setup.model_folder, device, torch.float32)),
        ref=build_ref(config, plan, setup.model_folder, device, meshes=None, actor=trains),
        rollout_dtype=torch.float32,
        mini_batch_sequences=plan.mini_batch_sequences,
        epochs=plan.ppo_epochs,
        shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
        model_folder=setup.model_folder,
    )


def write_cases(folder, models, cases):
    listed = [
        {
            "name": name,
            "model": str(models / model),
            "overrides": [*SINGLE[single], *overrides],
            "masked": masked,
        }
        for name, (model, single, overrides, masked) in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(listed))


def under_torchrun(models, folder, cases, num_ranks):
    write_cases(folder, models, cases)
    ended = spawn([sys.executable, rank_cases.__file__, str(folder)], num_ranks)
    assert [process.returncode for process in ended] == [0] * num_ranks, (
        ended[0].stdout[-3000:] + ended[1].stdout[-3000:]
    )
    return json.loads((folder / "told.json").read_text()), folder


@pytest.fixture(scope="session")
def torchrun2(models, tmp_path_factory):
    return under_torchrun(models, tmp_path_factory.mktemp("torchrun2"), CASES, 2)


@pytest.fixture(scope="session")
def torchrun4(models, tmp_path_factory):
    return under_torchrun(models, tmp_path_factory.mktemp("torchrun4"), CASES_OF_4, 4)


def under_ray(models, folder, cases, num_ranks):
    from trainfer.workers.ray_group import start_ray

    write_cases(folder, models, cases)
    model, single, overrides, _ = next(iter(cases.values()))
    path = f"ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={Path(__file__).parent}"
    setup = setup_of(models / model, [*SINGLE[single], *overrides, f"+{path}"], num_ranks)
    transport = start_ray(setup, folder)
    try:
        return run_cases(transport, folder, num_ranks), folder
    finally:
        transport.close()


@pytest.fixture(scope="session")
def ray2(models, tmp_path_factory):
    return under_ray(
        models, tmp_path_factory.mktemp("ray2"), {n: CASES[n] for n in ("fsdp", "sp", "dynamic")}, 2
    )


@pytest.fixture(scope="session")
def ray4(models, tmp_path_factory):
    return under_ray(models, tmp_path_factory.mktemp("ray4"), CASES_OF_4, 4)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_under_torchrun(name, torchrun2, one_process):
    check(name, CASES[name], torchrun2, one_process)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", ["fsdp", "sp", "dynamic"])
def test_two_ranks_under_ray(name, ray2, one_process):
    check(name, CASES[name], ray2, one_process)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_OF_4)
def test_four_ranks_under_torchrun(name, torchrun4, one_process):
    check(name, CASES_OF_4[name], torchrun4, one_process)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", CASES_OF_4)
def test_four_ranks_under_ray(name, ray4, one_process):
    check(name, CASES_OF_4[name], ray4, one_process)


def check(name, case, several, one_process):
    model, single, _, masked = case
    told, folder = several
    ours, (theirs, single_folder) = told[name], one_process(model, single, masked)
    ours_folder = folder / name
    # The weights are the same before any update, so every sampled token is.
    assert ours["completions"] == theirs["completions"]
    assert ours["version"] == theirs["version"]
    for step in range(rank_cases.STEPS):
        for key, value in theirs["metrics"][step].items():
            found = ours["metrics"][step][key]
            assert math.isclose(found, value, rel_tol=TOLERANCE, abs_tol=1e-7), (step, key, found, value)
        for found, wanted in zip(ours["scores"][step], theirs["scores"][step], strict=True):
            assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=TOLERANCE, atol=2e-6)
    assert gradient_difference(ours_folder, single_folder) <= TOLERANCE
    if (
        model != "tied gpt2"
    ):  # its key biases have no gradient but rounding, which AdamW makes as large as any other
        assert weight_difference(ours_folder, single_folder) <= TOLERANCE


def stored(folder, prefix):
    """Tensors of a checkpoint, put together from the shards."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainfer.train.update.checkpoint import quiet_single_process, read_state

    entries = {n: e for n, e in read_state(folder / "actor").tensors.items() if n.startswith(prefix)}
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    with quiet_single_process():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder / "actor")), no_dist=True)
    return tensors


def relative(ours, theirs):
    assert ours.keys() == theirs.keys()
    difference = math.sqrt(sum((ours[name] - theirs[name]).double().square().sum().item() for name in ours))
    return difference / math.sqrt(sum(tensor.double().square().sum().item() for tensor in theirs.values()))


def gradient_difference(ours, theirs):
    """Of the first update, read off AdamW's first moment."""
    moments = [
        {
            name: tensor
            for name, tensor in stored(folder / "first", "optimizer.").items()
            if name.endswith(".exp_avg")
        }
        for folder in (ours, theirs)
    ]
    assert moments[0]
    return relative(*moments)


def weight_difference(ours, theirs):
    return relative(stored(ours / "last", "model."), stored(theirs / "last", "model."))


def test_a_weight_that_one_ranks_engine_misses_is_named_with_the_rank(torchrun2):
    told, _ = torchrun2
    assert re.search(r"1 of \d+ tensors .*: model\.norm\.weight \(rank 1\)\.", told["forgotten"])


def test_ranks_that_train_an_adapter_store_nothing_else(torchrun2):
    folder = torchrun2[1] / "lora" / "last"
    assert stored(folder, "model.")
    assert all(".lora_" in name for prefix in ("model.", "optimizer.") for name in stored(folder, prefix))


def test_sharded_checkpoints_are_exported_bit_for_bit(torchrun2, tmp_path):
    checkpoint = torchrun2[1] / "sp gpt2" / "last"
    write_model_folder(checkpoint, tmp_path, dtype=None)
    exported, trained = load_file(tmp_path / "model.safetensors"), stored(checkpoint, "model.")
    assert {f"model.{name}" for name in exported} == trained.keys()
    assert "lm_head.weight" not in exported  # tied: stored once
    for name, tensor in exported.items():
        assert torch.equal(tensor, trained[f"model.{name}"]), name
    load_model(tmp_path, dtype=torch.float32, device="cpu")
