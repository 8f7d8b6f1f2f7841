"""verl's sharded checkpoints are merged exactly, without running a pickle: a real FSDP2 and FSDP1 wrote these files."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from trainfer.cli.main import main
from trainfer.integrations.transformers.load import byte_tokenizer, load_model, save_model, tiny_model
from trainfer.train.update.checkpoint_verl import VerlShards

WRITER = """
import os, sys, json, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, ShardedStateDictConfig, fully_shard
from trainfer.integrations.transformers.load import load_model

folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

def keep(state, name):
    out = folder / name / "actor"
    out.mkdir(parents=True, exist_ok=True)
    torch.save(state, out / f"model_world_size_{ranks}_rank_{rank}.pt")

for model in ("base", "tied"):
    for name, shape in (("fsdp2", (ranks,)), ("hsdp", (ranks // 2, 2))):
        module = load_model(folder / model, dtype=torch.float32, device="cpu")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape):])
        for layer in module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        keep(module.state_dict(), f"{model}-{name}")
for name, mesh in (("fsdp1", init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))), ("old-fsdp1", None)):
    module = load_model(folder / "base", dtype=torch.float32, device="cpu")
    module = FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        keep(module.state_dict(), f"base-{name}")
dist.barrier()
os._exit(0)
"""
RANKS = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints ``MODEL-KIND`` of models ``base`` and ``tied``, written by four ranks."""
    folder = tmp_path_factory.mktemp("verl")
    for name, seed in (("base", 1), ("tied", 2)):
        model = tiny_model("qwen3", seed=seed, vocab_size=270, hidden_size=32, intermediate_size=40)
        if name == "tied":
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        save_model(model, folder / name, tokenizer=byte_tokenizer())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(rank), str(RANKS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, outputs[0][-2000:]
    for checkpoint in folder.glob("*-*"):
        actor, model = checkpoint / "actor", checkpoint.name.split("-")[0]
        (actor / "huggingface").mkdir()
        for file in (folder / model).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, actor / "huggingface")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    return folder


def trained(folder):
    """What the ranks held, as one model."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def copied(written, name, tmp_path):
    shutil.copytree(written / name, tmp_path / "global_step_7")
    return tmp_path / "global_step_7"


def export(checkpoint, out):
    return main(["export", str(checkpoint), str(out)])


@pytest.mark.parametrize(
    "kind", ["base-fsdp2", "base-hsdp", "base-fsdp1", "base-old-fsdp1", "tied-fsdp2", "tied-hsdp"]
)
def test_merged_is_trained_exactly(written, kind, tmp_path):
    assert export(copied(written, kind, tmp_path), tmp_path / "out") == 0
    merged, wanted = load_file(tmp_path / "out" / "model.safetensors"), trained(written / kind.split("-")[0])
    assert merged.keys() == wanted.keys()  # a tied head once, an untied one too
    for name, tensor in wanted.items():
        assert torch.equal(merged[name], tensor), name
    for name, tensor in trained(tmp_path / "out").items():  # Transformers loads it, and it is the same model
        assert torch.equal(tensor, wanted[name]), name


def test_fsdp_config_is_not_needed_but_must_agree(written, tmp_path):
    checkpoint = copied(written, "base-fsdp2", tmp_path)
    (checkpoint / "actor" / "fsdp_config.json").write_text('{"world_size": 8}')
    assert export(checkpoint, tmp_path / "out") == 2
    (checkpoint / "actor" / "fsdp_config.json").unlink()
    assert export(checkpoint, tmp_path / "out") == 0


def test_a_missing_rank_file_is_named(written, tmp_path, capsys):
    checkpoint = copied(written, "base-fsdp2", tmp_path)
    (checkpoint / "actor" / "model_world_size_4_rank_2.pt").unlink()
    assert export(checkpoint, tmp_path / "out") == 2
    assert "lacks model_world_size_4_rank_2.pt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_model_files_the_message_says_what_to_copy(written, tmp_path, capsys):
    checkpoint = copied(written, "base-fsdp2", tmp_path)
    shutil.rmtree(checkpoint / "actor" / "huggingface")
    assert export(checkpoint, tmp_path / "out") == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_a_run_of_verl_means_the_checkpoint_that_its_note_names(written, tmp_path):
    copied(written, "base-fsdp2", tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert export(tmp_path, tmp_path / "out") == 0


def test_a_head_that_is_tied_but_differs_is_refused(written, tmp_path, capsys):
    checkpoint = copied(written, "base-fsdp2", tmp_path)
    config = checkpoint / "actor" / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    assert export(checkpoint, tmp_path / "out") == 2
    assert "their values differ" in capsys.readouterr().err


def test_a_pickle_that_would_run_code_is_refused_unopened(written, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    checkpoint = copied(written, "base-fsdp2", tmp_path)
    torch.save({"model.norm.weight": Evil()}, checkpoint / "actor" / "model_world_size_4_rank_0.pt")
    assert export(checkpoint, tmp_path / "out") == 2
    assert "could run code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_cut_file_is_an_error_that_names_it(written, tmp_path, capsys):
    checkpoint = copied(written, "base-fsdp2", tmp_path)
    path = checkpoint / "actor" / "model_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-200])
    assert export(checkpoint, tmp_path / "out") == 2
    assert "model_world_size_4_rank_1.pt cannot be read" in capsys.readouterr().err


def test_torchs_own_list_of_safe_classes_is_left_as_it_was(written):
    before = set(map(str, torch.serialization.get_safe_globals()))
    VerlShards.open(written / "base-fsdp2" / "actor")
    assert set(map(str, torch.serialization.get_safe_globals())) == before
