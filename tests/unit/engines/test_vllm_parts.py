"""What surrounds vLLM and needs none: transfers, pieces, the process, the registry."""

import importlib.metadata
import os

import pytest
import torch

from trainfer.engines.registry import make_engine
from trainfer.engines.vllm import environment
from trainfer.engines.vllm.pieces import Piece, whole_fingerprints
from trainfer.engines.vllm.settings import VllmSettings
from trainfer.engines.vllm.transfer import Transfer, layer_of, read_back_equivalents
from trainfer.errors import EngineError, WeightSyncError
from trainfer.exact.fingerprint import fingerprint, partial_fingerprint

SHAPES = {
    "embed.weight": (4, 2),
    "layers.0.a.weight": (2, 2),
    "layers.0.b.weight": (2, 2),
    "head.weight": (4, 2),
}


def transfer(ties=None):
    return Transfer(shapes=SHAPES, ties=ties or {}, reads_by_product=False)


def weights():
    return {name: torch.full(shape, float(index)) for index, (name, shape) in enumerate(SHAPES.items())}


def names(buckets):
    return [[name for name, _ in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("transformer.h.11.ln_1.bias", "transformer.h.11"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_a_layer_or_else_a_module_is_the_unit_of_a_bucket(name, layer):
    assert layer_of(name) == layer


def test_a_bucket_never_splits_a_layer():
    assert names(transfer().buckets(weights().items(), max_bytes=1)) == [
        ["embed.weight"],
        ["layers.0.a.weight", "layers.0.b.weight"],
        ["head.weight"],
    ]
    assert names(transfer().buckets(weights().items(), max_bytes=1 << 20)) == [list(SHAPES)]


def test_a_bucket_is_filled_before_the_next_tensor_is_made():
    made = []

    def stream():
        for name, value in weights().items():
            made.append(name)
            yield name, value

    next(transfer().buckets(stream(), max_bytes=1))
    assert made == ["embed.weight", "layers.0.a.weight"]


def test_a_tied_name_is_compared_and_not_sent():
    tied = weights()
    tied["head.weight"] = tied["embed.weight"].clone()
    ties = {"head.weight": "embed.weight"}
    assert names(transfer(ties).buckets(tied.items(), max_bytes=1 << 20)) == [list(SHAPES)[:3]]
    with pytest.raises(WeightSyncError, match=r"'head\.weight' is tied .* values differ"):
        list(transfer(ties).buckets(weights().items(), max_bytes=1))
    without = {name: value for name, value in tied.items() if name != "head.weight"}
    assert list(transfer(ties).buckets(without.items(), max_bytes=1))


def test_rotary_buffers_are_set_aside():
    moved = transfer()
    inv_freq = torch.ones(4)
    list(moved.buckets([*weights().items(), ("model.rotary_emb.inv_freq", inv_freq)], max_bytes=1))
    assert list(moved.rotary) == ["model.rotary_emb.inv_freq"]


def test_a_tensor_without_negative_zeros_reads_back_as_it_is():
    assert read_back_equivalents(torch.tensor([[0.0, 1.0], [-1.0, 2.0]])) == {}


@pytest.mark.parametrize("value", [-0.0, 1e-39, -1e-39])
def test_what_a_product_loses_is_told_from_what_changed(value):
    tensor = torch.tensor([[value, 1.0]])
    equivalents = read_back_equivalents(tensor)
    product = torch.nn.functional.linear(torch.eye(2), tensor).t().contiguous()
    assert equivalents[fingerprint(product)] == fingerprint(tensor)
    assert equivalents[fingerprint(torch.tensor([[0.0, 1.0]]))] == fingerprint(tensor)
    assert fingerprint(torch.tensor([[0.0, 1.5]])) not in equivalents


def piece(whole, rows, columns):
    part = torch.zeros_like(whole)
    part[slice(*rows), slice(*columns)] = whole[slice(*rows), slice(*columns)]
    first, second = partial_fingerprint(part, 0).tolist()
    return Piece(
        name="w",
        shape=tuple(whole.shape),
        region=(*rows, *columns),
        dtype=whole.dtype,
        sums=(first, second),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_rows_and_of_columns_add_up_to_the_whole(dtype):
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_rows = [piece(whole, (0, 2), (0, 4)), piece(whole, (2, 6), (0, 4))]
    by_columns = [piece(whole, (0, 6), (0, 1)), piece(whole, (0, 6), (1, 4))]
    assert whole_fingerprints(by_rows) == whole_fingerprints(by_columns) == {"w": fingerprint(whole)}


def test_replicas_count_once_and_must_be_equal():
    whole = torch.arange(8.0).view(2, 4)
    other = whole + 1
    same = piece(whole, (0, 2), (0, 4))
    assert whole_fingerprints([same, same]) == {"w": fingerprint(whole)}
    assert "differ" in whole_fingerprints([same, piece(other, (0, 2), (0, 4))])["w"]


def test_a_hole_is_no_fingerprint():
    whole = torch.arange(8.0).view(2, 4)
    assert whole_fingerprints([piece(whole, (0, 1), (0, 4))]) == {
        "w": "the engine's workers hold 4 of 8 elements"
    }


def settings(tmp_path):
    return VllmSettings(model_folder=tmp_path, dtype="float32", device="cpu", max_sequence_tokens=8)


def test_without_vllm_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    def nowhere(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nowhere)
    before = dict(os.environ)
    with pytest.raises(EngineError, match=r"vLLM is not installed: .*make setup-vllm.*trainfer\[vllm\]"):
        make_engine("vllm", vllm=settings(tmp_path))
    assert dict(os.environ) == before


def test_an_old_vllm_is_refused_with_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.2")
    with pytest.raises(EngineError, match=r"vllm 0\.9\.2 is installed; .* at least 0\.25"):
        make_engine("vllm", vllm=settings(tmp_path))


def test_a_vllm_without_a_folder_is_refused():
    with pytest.raises(EngineError, match="VllmSettings"):
        make_engine("vllm")


def test_what_vllm_does_to_the_process_is_undone(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    set_num_threads, state = torch.set_num_threads, torch.get_rng_state()
    with environment.undisturbed():
        os.environ.update(LOCAL_WORLD_SIZE="1", LD_PRELOAD="x")
        torch.manual_seed(1)
        torch.set_num_threads = lambda _: None
    assert os.environ["LOCAL_WORLD_SIZE"] == "8"
    assert "LD_PRELOAD" not in os.environ
    assert torch.set_num_threads is set_num_threads
    assert torch.equal(torch.get_rng_state(), state)
