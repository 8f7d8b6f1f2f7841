"""msProbe's recipes run on our debugger with only the import line changed, and what they ask for is what they get."""

import errno
import json
import math
import warnings
import zlib
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import trainfer
from trainfer import PrecisionDebugger, module_dump, module_dump_end, seed_all
from trainfer.check.probe.sink import CaptureWarning
from trainfer.errors import CaptureError, DumpError
from trainfer.integrations.msprobe import leaf as leaf_module
from trainfer.integrations.msprobe.options import load_options
from trainfer.integrations.msprobe.reader import MsprobeSide

GOLDEN = Path(__file__).parents[2] / "golden" / "msprobe"
IDS = torch.arange(8)[None] + 5


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(autouse=True)
def one_debugger():
    yield
    PrecisionDebugger.close()


def dumped(folder: Path, step: int = 0, rank: int = 0) -> dict[str, dict]:
    return json.loads((folder / f"step{step}/rank{rank}/dump.json").read_text())["data"]


def config(folder: Path, **options: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), **options}))
    return path


def shape_of(value: object) -> object:
    """A record without its numbers."""
    if isinstance(value, dict) and value.get("type") == "torch.Tensor":
        return (value["dtype"], tuple(value["shape"]), value["requires_grad"], value.get("data_name"))
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return value


def run(model: nn.Module, *, backward: bool = True) -> None:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    if backward:
        loss.backward()


def test_the_records_are_msprobes_own(tmp_path: Path):
    """Name by name, file by file what msProbe 26.2.0 wrote of the same model (its golden dump)."""
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    model = tiny_qwen3()
    debugger.start(model=model)
    run(model)
    debugger.stop()
    debugger.step()
    ours, theirs = dumped(tmp_path), dumped(GOLDEN / "tensor_L0_a")
    assert set(theirs) <= set(ours)  # the golden dump is cut to one layer and the ends
    forward = [name for name in theirs if ".forward." in name]
    assert [name for name in ours if name in forward] == forward
    for name in forward:
        for part in ("input_args", "parameters"):
            assert shape_of(ours[name][part]) == shape_of(theirs[name][part]), name
        if "Attention" not in name and "Decoder" not in name and "Qwen3Model" not in name:
            assert shape_of(ours[name]) == shape_of(theirs[name]), (
                name
            )  # those take other keywords by version
    parents = json.loads((tmp_path / "step0/rank0/construct.json").read_text())
    golden_parents = json.loads((GOLDEN / "tensor_L0_a/step0/rank0/construct.json").read_text())
    assert {name: parents[name] for name in forward} == {name: golden_parents[name] for name in forward}
    stacks = json.loads((tmp_path / "step0/rank0/stack.json").read_text())
    assert any("in run" in line for names, lines in stacks.values() for line in lines)


def test_the_values_are_those_of_the_call(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    debugger.start(model)
    y = model(x)
    y.sum().backward()
    y = y.detach()
    debugger.stop()
    record = dumped(tmp_path)["Module.2.Linear.forward.0"]
    files = tmp_path / "step0/rank0/dump_tensor_data"
    saved = torch.load(files / record["output"][0]["data_name"], weights_only=True)
    assert torch.equal(saved, y)
    leaf = record["output"][0]
    assert (leaf["Max"], leaf["Min"]) == (float(y.max()), float(y.min()))
    assert leaf["Norm"] == pytest.approx(float(y.norm()), rel=1e-6)
    weight = torch.load(files / record["parameters"]["weight"]["data_name"], weights_only=True)
    assert torch.equal(weight, model[2].weight.detach())
    gradient = dumped(tmp_path)["Module.2.Linear.parameters_grad.0"]["weight"][0]
    assert torch.equal(torch.load(files / gradient["data_name"], weights_only=True), model[2].weight.grad)
    assert not (tmp_path / ".trainfer").exists()


def test_the_published_verl_recipe_runs(tmp_path: Path):
    """Its lines for update_actor and generate_sequences, two phases under one debugger."""
    seed_all(mode=True)
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=str(tmp_path), step=[0])
    prefix = debugger.config.dump_path
    model = tiny_qwen3()
    for _ in range(2):
        debugger.service.config.dump_path = f"{prefix}/generate_sequences"
        debugger.start(model=model, token_range=[0, 0])
        prefill = model(input_ids=IDS, use_cache=True)
        model(input_ids=torch.tensor([[1]]), past_key_values=prefill.past_key_values)  # a decode step
        debugger.stop()
        debugger.service._reset_status()
        debugger.service.config.dump_path = f"{prefix}/update_actor"
        debugger.start(model=model)
        run(model)
        debugger.stop()
        debugger.step()
    torch.use_deterministic_algorithms(mode=False)
    rollout, train = tmp_path / "generate_sequences", tmp_path / "update_actor"
    assert sorted(path.name for path in rollout.iterdir()) == ["step0"]
    assert sorted(path.name for path in train.iterdir()) == ["step0"]
    names = dumped(rollout)
    assert "Module.lm_head.Linear.forward.0" in names
    assert not any(name.endswith("forward.1") for name in names)  # the prefill alone
    assert "Module.lm_head.Linear.backward.0" in dumped(train)
    assert trainfer.compare(rollout, train).verdict in ("equal", "rounding")


def test_capturing_changes_no_gradient(tmp_path: Path):
    """msProbe's own L0 changes 19 of 25 of them: its full backward hooks change the order of accumulation."""
    plain, watched = tiny_qwen3(), tiny_qwen3()
    run(plain)
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=tmp_path)
    debugger.start(watched)
    run(watched)
    debugger.stop()
    for (name, one), (_, other) in zip(plain.named_parameters(), watched.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_calls_are_counted_on_through_a_step_and_anew_in_the_next(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=tmp_path, step=["0-1"])
    for _ in range(3):
        for _ in range(2):
            debugger.start(model)
            model(torch.ones(1, 2))
            debugger.stop()
        debugger.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1"]
    for step in (0, 1):
        forward = [name for name in dumped(tmp_path, step) if "forward" in name]
        assert forward == ["Module.0.Linear.forward.0", "Module.0.Linear.forward.1"]


def test_functions_have_one_count_each(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), nn.SiLU(), nn.Linear(2, 2), nn.SiLU())
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=tmp_path)
    debugger.start(model)
    model(torch.ones(1, 2))
    debugger.stop()
    names = dumped(tmp_path)
    assert {"Functional.silu.0.forward", "Functional.silu.1.forward", "Functional.linear.1.forward"} <= set(
        names
    )
    parents = json.loads((tmp_path / "step0/rank0/construct.json").read_text())
    assert parents["Functional.silu.1.forward"] == "Module.3.SiLU.forward.0"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"list": ["1.Linear"]}, {"Module.1.Linear.forward.0", "Module.1.Linear.backward.0", "Module.1.Linear.parameters_grad.0"}),
        ({"scope": ["Module.1.Linear.forward.0", "Module.2.Linear.forward.0"], "data_mode": ["forward"]}, {"Module.1.Linear.forward.0", "Module.2.Linear.forward.0"}),
        ({"data_mode": ["backward"], "list": ["0.Linear"]}, {"Module.0.Linear.backward.0", "Module.0.Linear.parameters_grad.0"}),
    ],
)  # fmt: skip
def test_list_scope_and_data_mode(tmp_path: Path, options: dict, wanted: set[str]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    path = config(tmp_path, task="tensor", level="L0", tensor=options)
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    model(torch.ones(1, 2)).sum().backward()
    debugger.stop()
    data = dumped(tmp_path / "dump")
    assert set(data) == wanted
    named = {leaf["data_name"] for record in data.values() for leaf in leaves(record)}
    assert named == {file.name for file in (tmp_path / "dump/step0/rank0/dump_tensor_data").iterdir()}


def leaves(value: object) -> list[dict]:
    if isinstance(value, dict) and value.get("type") == "torch.Tensor":
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [leaf for item in items for leaf in leaves(item)]


def test_input_alone_is_inputs_alone(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    path = config(tmp_path, task="statistics", level="L0", statistics={"data_mode": ["forward", "input"]})
    PrecisionDebugger(str(path)).start(model)
    model(torch.ones(1, 2))
    PrecisionDebugger.stop()
    (record,) = dumped(tmp_path / "dump").values()
    assert (len(record["input_args"]), record["output"]) == (1, [])


def test_md5_is_the_crc_of_the_bytes_and_tensor_list_keeps_values(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    path = config(
        tmp_path, task="statistics", level="L0", statistics={"summary_mode": "md5", "tensor_list": ["Tanh"]}
    )
    PrecisionDebugger(str(path)).start(model)
    y = model(torch.ones(1, 2))
    PrecisionDebugger.stop()
    data = dumped(tmp_path / "dump")
    leaf = data["Module.1.Tanh.forward.0"]["output"][0]
    assert leaf["md5"] == f"{zlib.crc32(y.detach().numpy().tobytes()):08x}"
    assert "data_name" in leaf
    assert "data_name" not in data["Module.0.Linear.forward.0"]["output"][0]


def test_one_request_of_a_packed_batch(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    x = torch.arange(10.0).reshape(5, 2)
    path = config(tmp_path, task="tensor", level="L0", tensor={"request_id": "b"})
    debugger = PrecisionDebugger(str(path))
    debugger.start(model, scheduled_tokens={"a": 5})  # not in this batch
    model(x)
    debugger.stop()
    assert not (tmp_path / "dump").exists()
    debugger.start(model, scheduled_tokens={"a": 2, "b": 3}, rank_id=7)
    y = model(x)
    debugger.stop()
    leaf = dumped(tmp_path / "dump", rank=7)["Module.0.Linear.forward.0"]["output"][0]
    saved = torch.load(tmp_path / "dump/step0/rank7/dump_tensor_data" / leaf["data_name"], weights_only=True)
    assert torch.equal(saved, y[2:].detach())


def test_structure_has_names_and_no_numbers(tmp_path: Path):
    model = tiny_qwen3()
    debugger = PrecisionDebugger(task="structure", level="L0", dump_path=tmp_path)
    debugger.start(model)
    run(model)
    debugger.stop()
    assert dumped(tmp_path) == {}
    parents = json.loads((tmp_path / "step0/rank0/construct.json").read_text())
    assert (
        parents["Module.model.layers.1.mlp.up_proj.Linear.forward.0"]
        == "Module.model.layers.1.mlp.Qwen3MLP.forward.0"
    )


def test_several_models_and_single_values_and_boxes(tmp_path: Path):
    one, two = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=tmp_path)
    debugger.start([one, two])
    two(one(torch.ones(1, 2)))
    debugger.stop()
    debugger.step()
    module_dump(one, "whole")
    one(torch.ones(1, 2))
    module_dump_end()
    assert {"Module.0.0.Linear.forward.0", "Module.1.0.Linear.forward.0"} <= set(dumped(tmp_path))
    assert list(dumped(tmp_path, 1)) == ["Module.whole.Sequential.forward.0"]


def test_saved_values_and_their_gradients(tmp_path: Path):
    debugger = PrecisionDebugger(task="tensor", level="debug", dump_path=tmp_path)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    debugger.save({"x": x, "n": 3}, "mine")
    (x * x).sum().backward()
    debugger.step()
    data = json.loads((tmp_path / "step0/rank0/debug.json").read_text())["data"]
    assert data["mine.0.debug"]["n"] == {"type": "int", "value": 3}
    assert data["mine_grad.0.debug.x"]["Max"] == 4.0
    files = tmp_path / "step0/rank0/dump_tensor_data"
    assert torch.equal(torch.load(files / "mine.0.debug.x.pt", weights_only=True), x.detach())


def test_a_switch_in_the_file(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    path = config(tmp_path, task="statistics", level="L0", dump_enable=False)
    debugger = PrecisionDebugger(str(path))
    debugger.start(model)
    model(torch.ones(1, 2))
    debugger.stop()
    assert not (tmp_path / "dump").exists()
    config(tmp_path, task="statistics", level="L0", dump_enable=True)
    debugger.start(model)
    model(torch.ones(1, 2))
    debugger.stop()
    assert "Module.0.Linear.forward.0" in dumped(tmp_path / "dump")


def test_our_own_format(tmp_path: Path):
    model = tiny_qwen3()
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path, format="trainfer")
    debugger.start(model)
    run(model)
    debugger.stop()
    assert (tmp_path / "step0/manifest.json").is_file()
    assert trainfer.compare(tmp_path / "step0", tmp_path / "step0").verdict == "equal"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dump_pth": "x"}, "'dump_pth' is not known; the nearest is 'dump_path'"),
        ({"stepp": [0]}, "the nearest is 'step'"),
        ({"statistics": {"data_modes": ["all"]}}, "the nearest is 'data_mode'"),
        ({"task": "statistic"}, "the nearest is 'statistics'"),
        ({"task": "nan_check"}, "it needs an NPU"),
        ({"level": "L2"}, "Ascend kernels"),
        ({"level": "L3"}, "Known: L0, L1, mix, debug"),
        ({"step": [-1]}, "no number from 0 on"),
        ({"rank": ["6-4"]}, "'6-4' is no number"),
        ({"statistics": {"bench_path": "x"}}, "trainfer compare"),
        ({"statistics": {"scope": ["a"]}}, "first and the last"),
        ({"statistics": {"data_mode": ["all", "input"]}}, "stands alone"),
        ({"statistics": {"slice": [{"dim": 0}]}}, "dim, size, begin and end"),
        ({"extra_info": "yes"}, "true or false"),
    ],
)
def test_what_cannot_be_is_one_message(tmp_path: Path, options: dict, said: str):
    with pytest.raises(CaptureError, match=said):
        PrecisionDebugger(str(config(tmp_path, **options)))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_one_message(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DumpError, match=r"config\.json"):
        PrecisionDebugger(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "options",
    [
        {"async_dump": True},
        {"precision": "low"},
        {"risk_level": "ALL"},
        {"custom_op_namespaces": ["npu"]},
        {"statistics": {"summary_mode": "xor"}},
        {"statistics": {"diff_nums": 3}},
    ],
)
def test_what_has_no_meaning_here_is_said(tmp_path: Path, options: dict):
    with pytest.warns(CaptureWarning, match="has no meaning here"):
        PrecisionDebugger(str(config(tmp_path, **options)))


def test_the_shipped_config_of_msprobe_is_accepted(tmp_path: Path):
    shipped = {
        "task": "statistics", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1", "extra_info": True,
        "async_dump": False, "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
        "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shipped))
    options = load_options(path, task=None, level=None, dump_path=None, step=None, format=None)
    assert (options.task, options.level, options.notes) == ("statistics", "L1", ())


def test_one_debugger_serves_a_process_and_says_so(tmp_path: Path):
    first = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    assert PrecisionDebugger() is first
    assert PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path) is first
    with pytest.raises(CaptureError, match="one serves a process"):
        PrecisionDebugger(task="statistics", dump_path=tmp_path)
    PrecisionDebugger.close()
    with pytest.raises(CaptureError, match="no PrecisionDebugger yet"):
        PrecisionDebugger.start(nn.Linear(1, 1))


def test_a_used_folder_is_refused(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    for attempt in range(2):
        debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=tmp_path)
        if attempt:
            with pytest.raises(DumpError, match="used before"):
                debugger.start(model)
            break
        debugger.start(model)
        model(torch.ones(1, 2))
        PrecisionDebugger.close()


def test_a_full_disk_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Under msProbe the exception comes up inside the training step."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = nn.Sequential(nn.Linear(2, 2))
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    monkeypatch.setattr(leaf_module.torch, "save", full)
    debugger.start(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(CaptureWarning, match="No space left"):
        debugger.stop()
    (kept,) = (tmp_path / ".trainfer").iterdir()
    assert trainfer.compare(kept, kept).verdict == "equal"


def test_nothing_ran_is_said(tmp_path: Path):
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    debugger.start(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(CaptureWarning, match="0 of 2 modules fired"):
        debugger.stop()


def test_not_finite_numbers_are_shown(tmp_path: Path):
    debugger = PrecisionDebugger(task="statistics", level="L0", dump_path=tmp_path)
    model = nn.Sequential(nn.Identity())
    debugger.start(model)
    model(torch.tensor([[1.0, math.nan]]))
    model(torch.tensor([[1.0, math.inf]]))
    debugger.stop()
    data = dumped(tmp_path)
    assert math.isnan(data["Module.0.Identity.forward.0"]["output"][0]["Max"])
    assert data["Module.0.Identity.forward.1"]["output"][0]["Norm"] == math.inf
    assert MsprobeSide(tmp_path).problems == ()


def test_wrong_starts_are_one_message(tmp_path: Path):
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=tmp_path)
    for arguments, said in (
        ({"model": "model"}, "give an nn.Module"),
        ({}, "give an nn.Module"),
        ({"model": nn.Linear(1, 1), "token_range": [1, 0]}, "prefill alone"),
        ({"model": nn.Linear(1, 1), "rank_id": -1}, "from 0 on"),
    ):
        with pytest.raises(CaptureError, match=said):
            debugger.start(**arguments)
    with pytest.warns(CaptureWarning, match="does nothing at level L0"):
        debugger.save(1, "x")


def test_seed_all_repeats_and_can_remove_dropout():
    seed_all(7)
    first = torch.rand(3)
    seed_all(7)
    assert torch.equal(first, torch.rand(3))
    with pytest.raises(CaptureError, match="4294967295"):
        seed_all(2**32)
    dropout, rand = nn.functional.dropout, torch.rand
    try:
        seed_all(7, rm_dropout=True, is_enhanced=True)
        ones = torch.ones(64)
        assert torch.equal(nn.functional.dropout(ones, p=0.9, training=True), ones)
        assert torch.equal(torch.rand(3), torch.rand(3))
    finally:
        undo_frozen(dropout, rand)


def undo_frozen(dropout: object, rand: object) -> None:
    for module in (nn.functional, torch):
        for name, function in vars(module).copy().items():
            if isinstance(function, FunctionType) and function.__code__.co_filename.endswith(
                "msprobe/seeds.py"
            ):
                setattr(module, name, function.__wrapped__)
    assert (nn.functional.dropout, torch.rand) == (dropout, rand)


def test_no_warning_in_a_plain_run(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        debugger = PrecisionDebugger(task="tensor", level="mix", dump_path=tmp_path)
        model = tiny_qwen3()
        debugger.start(model)
        run(model, backward=False)
        debugger.stop()
        debugger.step()
