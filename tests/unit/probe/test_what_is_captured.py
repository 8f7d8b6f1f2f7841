"""The values in the dump are the ones that stood in the model, however it is built and called."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainfer
from trainfer.check.dump.reader import Dump
from trainfer.check.dump.records import Role, TensorRecord
from trainfer.check.dump.tensors import load_tensor
from trainfer.check.probe.sink import CaptureWarning
from trainfer.check.probe.statistics import StatisticsTaker

IDS = torch.tensor([[7, 8, 9, 10]])


def records(folder: Path, module: str, role: Role) -> list[TensorRecord]:
    return [t for t in Dump(folder).tensors(0) if t.module == module and t.role is role]


def value(folder: Path, module: str, role: Role, place: int = 0) -> Tensor:
    return load_tensor(Dump(folder), 0, records(folder, module, role)[place])


class Overwriting(nn.Module):
    """Changes its input in place, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(3)
        z = self.second(y)
        y.zero_()
        return z


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_survive_writes_after_the_hook(dump_folder: Path, mode):
    torch.manual_seed(0)
    model, x = Overwriting(), torch.randn(2, 4)
    with mode(), trainfer.capture(model, dump_folder, side="train"):
        model(x)
        x.zero_()
        model(x)
    with torch.no_grad():
        first = value(dump_folder, "first", Role.OUTPUT)
        assert torch.equal(value(dump_folder, "first", Role.OUTPUT, 1), model.first(torch.zeros(2, 4)))
        assert torch.equal(value(dump_folder, "second", Role.INPUT), first * 3)
        assert torch.equal(value(dump_folder, "second", Role.OUTPUT), model.second(first * 3))
        assert first.abs().min() > 0


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.training else layer(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_recorded_once_and_their_gradients_too(tmp_path: Path, reentrant: bool):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant=reentrant), torch.randn(3, 4, requires_grad=True)
    for training in (True, False):
        model.train(training)
        model.zero_grad()
        with trainfer.capture(model, tmp_path / str(training), side="train", backward=True):
            model(x).square().sum().backward()
    for role in (Role.OUTPUT, Role.OUTPUT_GRADIENT, Role.PARAMETER_GRADIENT):
        for name in (
            ("layers.0", "layers.0.0", "layers.1.1")
            if role is not Role.PARAMETER_GRADIENT
            else ("layers.0.0",)
        ):
            with_recompute = records(tmp_path / "True", name, role)
            without = records(tmp_path / "False", name, role)
            assert len(with_recompute) == len(without) > 0, (name, role)
            assert torch.equal(value(tmp_path / "True", name, role), value(tmp_path / "False", name, role))
    assert Dump(tmp_path / "True").manifest.counts["calls"] == 1


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = nn.Linear(4, 4)
        self.again = self.rotary

    def forward(self, *, hidden: Tensor, scale: float) -> tuple[Tensor, dict[str, Tensor], None]:
        return self.rotary(hidden) * scale, {"twice": self.again(hidden + 1)}, None


def test_shared_modules_keywords_tuples_and_mappings(dump_folder: Path):
    model = Shared()
    with trainfer.capture(model, dump_folder, side="train"):
        model(hidden=torch.ones(2, 4), scale=2.0)
    dump = Dump(dump_folder)
    assert dump.complete
    root = [t for t in dump.tensors(0) if t.module == ""]
    assert [(t.role, t.name) for t in root] == [
        (Role.INPUT, "hidden"),
        (Role.OUTPUT, "0"),
        (Role.OUTPUT, "1.twice"),
    ]
    assert [t.occurrence for t in records(dump_folder, "rotary", Role.OUTPUT)] == [0, 1]
    assert next(m for m in dump.manifest.modules if m.name == "rotary").aliases == ("again",)


@dataclasses.dataclass
class Answer:
    logits: Tensor
    extra: object = None


class Odd:
    """No container that anybody knows."""


class Returning(nn.Module):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.answer = [answer]

    def forward(self, x: Tensor) -> object:
        return Answer(self.inner(x), self.answer[0])


def test_dataclass_outputs_are_entered_and_unknown_types_told(tmp_path: Path):
    model = Returning(None)
    with trainfer.capture(model, tmp_path / "a", side="train"):
        model(torch.ones(2, 3))
    assert [t.name for t in records(tmp_path / "a", "", Role.OUTPUT)] == ["logits"]
    model = Returning(Odd())

    def program() -> None:
        with trainfer.capture(model, tmp_path / "b", side="train"):
            model(torch.ones(2, 3))
            model(torch.ones(2, 3))

    with pytest.warns(CaptureWarning, match=r"Odd cannot be captured"):
        program()
    dump = Dump(tmp_path / "b")
    assert [t.name for t in records(tmp_path / "b", "", Role.OUTPUT)] == ["logits"] * 2
    assert not dump.complete
    assert len(dump.capture_problems(0)) == 1


def test_a_sparse_tensor_is_told_and_the_rest_is_kept(dump_folder: Path):
    model = Returning(torch.eye(3).to_sparse())
    with (
        pytest.warns(CaptureWarning, match="sparse"),
        trainfer.capture(model, dump_folder, side="train"),
    ):
        model(torch.ones(2, 3))
    assert [t.name for t in records(dump_folder, "", Role.OUTPUT)] == ["logits"]


def test_autocast_is_seen_and_not_disturbed(dump_folder: Path):
    model = tiny("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(IDS).logits
        with trainfer.capture(model, dump_folder, side="train", task="tensor", backward=True):
            seen = model(IDS).logits
    assert torch.equal(seen, expected)
    assert records(dump_folder, "model.layers.0.mlp.gate_proj", Role.OUTPUT)[0].dtype == "BF16"
    assert Dump(dump_folder).calls(0)[0].autocast == "bfloat16"


def test_gradients_are_those_of_autograd(dump_folder: Path):
    model = tiny("qwen3")
    with trainfer.capture(model, dump_folder, side="train", backward=True):
        hidden: list[Tensor] = []
        handle = model.model.layers[0].register_forward_hook(
            lambda _m, _a, out: out.retain_grad() or hidden.append(out)
        )
        model(input_ids=IDS, labels=IDS).loss.backward()
        handle.remove()
    assert hidden[0].grad is not None
    assert torch.equal(value(dump_folder, "model.layers.0", Role.OUTPUT_GRADIENT), hidden[0].grad)
    assert torch.equal(value(dump_folder, "model.layers.1", Role.INPUT_GRADIENT), hidden[0].grad)
    gradients = {
        f"{t.module}.{t.name}": t for t in Dump(dump_folder).tensors(0) if t.role is Role.PARAMETER_GRADIENT
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(load_tensor(Dump(dump_folder), 0, gradients[name]), parameter.grad), name


def test_functions_are_recorded_in_the_module_that_asked(dump_folder: Path):
    model = tiny("llama")
    with trainfer.capture(model, dump_folder, side="train", level="L1"):
        logits = model(IDS).logits
    dump = Dump(dump_folder)
    found = {(t.module, t.function) for t in dump.tensors(0)}
    assert ("model.layers.0.mlp.act_fn", "torch.nn.functional.silu") in found
    assert ("model.layers.1.mlp.down_proj", "torch.nn.functional.linear") in found
    assert not any(name and name.endswith((".view", ".transpose", ".size")) for _, name in found)
    head = next(t for t in dump.tensors(0) if t.module == "lm_head" and t.role is Role.OUTPUT)
    assert torch.equal(load_tensor(dump, 0, head), logits)


def test_a_function_that_writes_in_place_is_recorded_before_and_after(dump_folder: Path):
    torch.manual_seed(0)
    model, x = Overwriting(), torch.randn(2, 4)
    with torch.no_grad(), trainfer.capture(model, dump_folder, side="train", level="L1"):
        model(x)
        first = model.first(x)
    dump = Dump(dump_folder)
    multiplied = [t for t in dump.tensors(0) if t.function == "torch.Tensor.mul_"]
    assert torch.equal(load_tensor(dump, 0, multiplied[0]), first)
    assert torch.equal(load_tensor(dump, 0, multiplied[1]), first * 3)


def test_identical_storages_are_written_once(dump_folder: Path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad(), trainfer.capture(model, dump_folder, side="train"):
        model(torch.ones(100, 64))
    dump = Dump(dump_folder)
    blobs = {(t.blob.shard, t.blob.offset) for t in dump.tensors(0) if t.blob}
    assert sum(1 for _ in dump.tensors(0)) == 6
    assert len(blobs) == 3


def test_weights_are_fingerprinted_again_when_an_optimizer_has_stepped(dump_folder: Path):
    model = tiny("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainfer.capture(model, dump_folder, side="train", backward=True):
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dump = Dump(dump_folder)
    versions = {call.weights_version for call in dump.calls(0).values()}
    assert versions == {0, 1}
    by_version = {v: {w.name: w for w in dump.weights(0) if w.weights_version == v} for v in versions}
    assert (
        by_version[0].keys()
        == by_version[1].keys()
        == {*model.state_dict()} | {n for n, _ in model.named_buffers()}
    )
    assert (
        by_version[0]["transformer.wte.weight"].fingerprint
        != by_version[1]["transformer.wte.weight"].fingerprint
    )
    assert by_version[0]["lm_head.weight"].tied_to == "transformer.wte.weight"


def test_full_weights_come_back(dump_folder: Path):
    model = tiny("llama")
    with trainfer.capture(model, dump_folder, side="train", weights="full"):
        model(IDS)
    dump = Dump(dump_folder)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for record in dump.weights(0):
        assert torch.equal(load_tensor(dump, 0, record), state[record.name])


def test_the_manifest_holds_what_decides_the_maths(dump_folder: Path):
    model = tiny("gemma2")
    model.train()
    with trainfer.capture(model, dump_folder, side="train") as cap:
        model(IDS)
        cap.describe_run({"actor": {"lr": 1e-6}, "odd": float("nan")})
    manifest = Dump(dump_folder).manifest
    modules = {entry.name: entry for entry in manifest.modules}
    assert modules["model.norm"].attributes["eps"] == model.model.norm.eps
    assert modules["model.layers.0.self_attn"].attributes["sliding_window"] == 8
    assert modules["model.layers.0.self_attn"].attributes["attn_logit_softcapping"] == 50.0
    assert modules["model.rotary_emb"].attributes["attention_scaling"] == 1.0
    assert modules["model.layers.0.mlp"].training
    assert manifest.model_config["final_logit_softcapping"] == 30.0
    assert manifest.config == {"actor": {"lr": 1e-6}, "odd": "nan"}
    assert manifest.model_dtype == "F32"


@pytest.mark.parametrize(
    "values",
    [
        [1.0, -2.5, 0.15625],
        [math.nan, 1.0, math.inf, -3.0],
        [],
        [0.0, 0.0, -0.0, 5.0],
        [1e30, -1e30, 1e20],
        [1e-30, 1e-31],
        [math.nan],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_statistics_are_those_of_float64(values: list[float], dtype: torch.dtype):
    tensor = torch.tensor(values, dtype=dtype)
    taken = StatisticsTaker().take(tensor)
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    assert (taken.count, taken.nan, taken.inf) == (
        len(values),
        int(wide.isnan().sum()),
        int(wide.isinf().sum()),
    )
    assert taken.zeros == int((wide == 0).sum())
    if not finite.numel():
        assert (taken.min, taken.max, taken.mean, taken.norm, taken.quantiles) == (None,) * 5
        return
    assert (taken.min, taken.max) == (finite.min().item(), finite.max().item())
    assert taken.mean == pytest.approx(finite.mean().item(), rel=1e-6, abs=1e-6 * finite.abs().max().item())
    assert taken.norm == pytest.approx(finite.norm().item(), rel=1e-6)


def test_statistics_of_integers_booleans_views_and_large_tensors():
    taker = StatisticsTaker()
    assert taker.take(torch.tensor([3, -7])).mean == -2
    assert taker.take(torch.tensor([True, False])).mean == 0.5
    assert taker.take(torch.tensor(2.0)).norm == 2
    large = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    large[::7] = 0
    for view in (large, large.t(), large[::2, 3:], large[None].expand(3, 300, 200)):
        taken = taker.take(view)
        assert taken.zeros == int((view == 0).sum())
        assert taken.norm == pytest.approx(view.double().norm().item(), rel=1e-6)
        assert taken.quantiles is not None
        assert taken.quantiles[3] == pytest.approx(view.median().item(), abs=0.2)
