import json
import random
import resource
import signal
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trainfer.errors import CheckpointError
from trainfer.train.journal.checkpoints import CheckpointStore
from trainfer.train.update import checkpoint as checkpoint_module
from trainfer.train.update.checkpoint import load_training_state, save_training_state

V, D = 11, 6


class Tied(torch.nn.Module):
    """A head tied to the embedding, a buffer, a frozen parameter, bfloat16 beside float32, dropout."""

    def __init__(self, *, width=D):
        super().__init__()
        self.embed = torch.nn.Embedding(V, width)
        self.norm = torch.nn.LayerNorm(width, dtype=torch.bfloat16)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(width, V, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("cache", torch.zeros(7), persistent=False)

    def forward(self, ids):
        return self.head(self.drop(self.norm(self.embed(ids).bfloat16()).float()))


def make(*, width=D, seed=0, **options):
    torch.manual_seed(seed)
    model = Tied(width=width)
    decay = [model.embed.weight]
    plain = list(model.norm.parameters())
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05, **options)


def train(model, optimizer, steps):
    """Every step draws from torch's generator: ids and dropout."""
    for _ in range(steps):
        ids = torch.randint(0, V, (4, 5))
        loss = model(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def bits(model, optimizer):
    tensors = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in state.items()}
    return tensors


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}, {"fused": True}])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, options):
    model, optimizer = make(**options)
    train(model, optimizer, 3)
    save_training_state(tmp_path / "actor", model, optimizer, {"weights_version": 3, "lr_step": 3})
    loss = train(model, optimizer, 4)
    other, other_optimizer = make(seed=99, **options)
    train(other, other_optimizer, 1)  # state of another course is replaced, not mixed
    state = load_training_state(tmp_path / "actor", other, other_optimizer)
    assert state.counters == {"weights_version": 3, "lr_step": 3}
    assert state.rng_restored
    assert other.head.weight is other.embed.weight
    assert train(other, other_optimizer, 4) == loss
    assert_same_bits(bits(model, optimizer), bits(other, other_optimizer))


def test_saving_changes_nothing(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 2)
    before = {name: value.clone() for name, value in bits(model, optimizer).items()}
    rng = torch.get_rng_state()
    save_training_state(tmp_path / "actor", model, optimizer, {})
    assert torch.equal(rng, torch.get_rng_state())
    assert_same_bits(before, bits(model, optimizer))


def test_equal_states_give_equal_files(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    for name in ("a", "b"):
        save_training_state(tmp_path / name, model, optimizer, {})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 3
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_every_generator_is_restored(tmp_path):
    model, optimizer = make()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.normal()  # both keep a spare number
    save_training_state(tmp_path / "actor", model, optimizer, {})

    def draw():
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.normal(),
            np.random.rand(),
            torch.rand(3).tolist(),
        ]

    first = draw()
    load_training_state(tmp_path / "actor", model, optimizer)
    assert draw() == first


def test_a_tied_head_is_stored_once_and_a_non_persistent_buffer_never(tmp_path):
    model, optimizer = make()
    save_training_state(tmp_path / "actor", model, optimizer, {})
    (shard,) = (tmp_path / "actor").glob("*.safetensors")
    assert sorted(load_file(shard)) == [
        "model.count", "model.embed.weight", "model.frozen", "model.norm.bias", "model.norm.weight",
    ]  # fmt: skip


def test_large_states_are_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "MAX_FILE_BYTES", 300)
    model, optimizer = make()
    train(model, optimizer, 1)
    save_training_state(tmp_path / "actor", model, optimizer, {})
    assert len(list((tmp_path / "actor").glob("*.safetensors"))) >= 3
    other, other_optimizer = make(seed=5)
    load_training_state(tmp_path / "actor", other, other_optimizer)
    assert_same_bits(bits(model, optimizer), bits(other, other_optimizer))


def saved(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 1)
    folder = tmp_path / "actor"
    save_training_state(folder, model, optimizer, {})
    return folder


def rewritten(folder, change):
    (shard,) = folder.glob("*.safetensors")
    from safetensors import safe_open

    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata=metadata)


def load_fails(folder, match, **options):
    model, optimizer = make(seed=7, **options)
    before = {name: value.clone() for name, value in bits(model, optimizer).items()}
    with pytest.raises(CheckpointError, match=match):
        load_training_state(folder, model, optimizer)
    assert_same_bits(before, bits(model, optimizer))


def test_a_missing_tensor_is_named_and_the_model_is_left_as_it_was(tmp_path):
    folder = saved(tmp_path)
    rewritten(folder, lambda tensors: tensors.pop("model.norm.weight"))
    load_fails(folder, r"are missing: model\.norm\.weight")


def test_another_width_is_named_with_both_shapes(tmp_path):
    load_fails(
        saved(tmp_path), r"model\.embed\.weight \(\[11, 6\] float32 instead of \[11, 8\] float32\)", width=8
    )


def test_another_dtype_is_not_cast_in_silence(tmp_path):
    folder = saved(tmp_path)
    model, optimizer = make()
    model.norm.float()
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight \(\[6\] bfloat16 instead of \[6\] float32\)"
    ):
        load_training_state(folder, model, optimizer)


def test_other_parameter_groups_are_refused(tmp_path):
    folder = saved(tmp_path)
    model, _ = make()
    with pytest.raises(CheckpointError, match="optimizer groups"):
        load_training_state(folder, model, torch.optim.AdamW([model.embed.weight]))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("training_state.json", b""),
        ("training_state.json", b"[]"),
        ("training_state.json", b'{"schema": "trainfer.training_state/1"}'),
        ("rng_rank_0.json", b'{"schema": "trainfer.rng/1"}'),
        ("rng_rank_0.json", b"\xff"),
        ("shard-00001-model-00001-of-00001.safetensors", b"\xff" * 100),
        ("shard-00001-model-00001-of-00001.safetensors", b""),
    ],
)
def test_damaged_files_are_errors_in_words(tmp_path, file, damage):
    folder = saved(tmp_path)
    assert (folder / file).is_file()
    (folder / file).write_bytes(damage)
    model, optimizer = make()
    with pytest.raises(CheckpointError):
        load_training_state(folder, model, optimizer)


def test_a_missing_folder_is_an_error_in_words(tmp_path):
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=r"training_state\.json"):
        load_training_state(tmp_path / "none", model, optimizer)


def test_no_file_is_a_pickle(tmp_path):
    folder = saved(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    for path in folder.glob("*.json"):
        json.loads(path.read_bytes())


def test_a_rank_that_did_not_exist_has_no_generators(tmp_path):
    folder = saved(tmp_path)
    (folder / "rng_rank_0.json").unlink()
    model, optimizer = make()
    assert not load_training_state(folder, model, optimizer).rng_restored


def test_a_full_disk_leaves_the_older_checkpoint_and_a_clear_warning(tmp_path, caplog):
    model, optimizer = make()
    train(model, optimizer, 1)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)

    def write(folder):
        save_training_state(folder / "actor", model, optimizer, {"weights_version": 1})

    store.save(1, write, required=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        assert store.save(2, write, required=False) is None
        with pytest.raises(CheckpointError, match="File too large"):
            store.save(2, write, required=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "step 2 was not written" in caplog.text
    assert [path.name for path in store.folder.iterdir()] == ["global_step_1"]
    load_training_state(store.newest().folder / "actor", *make())


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_fills_up_keeps_what_was_whole(small_disk, caplog):
    model, optimizer = make()
    train(model, optimizer, 1)
    store = CheckpointStore(small_disk / "checkpoints", keep=None)
    saved_steps = 0
    while store.save(
        saved_steps + 1,
        lambda folder: save_training_state(folder / "actor", model, optimizer, {}),
        required=False,
    ):
        saved_steps += 1
    assert saved_steps >= 1
    assert "No space left on device" in caplog.text
    assert "0.00 GB are free there" in caplog.text
    assert store.newest().step == saved_steps
    assert len(list(store.folder.iterdir())) == saved_steps
    load_training_state(store.newest().folder / "actor", *make())
