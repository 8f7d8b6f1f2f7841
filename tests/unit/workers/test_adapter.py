"""An adapter is what trains: PEFT's own gradients, a base that stays, a ref that is the base, names that are proven."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from worker_cases import planned, sampled

from trainfer.engines.registry import make_engine
from trainfer.errors import CheckpointError, ConfigError, ModelError, WeightSyncError
from trainfer.integrations.peft.adapter import AdapterSettings, adapter_disabled, add_adapter
from trainfer.integrations.transformers.load import byte_tokenizer, load_model, save_model, tiny_model
from trainfer.train.update.batch import training_sequences
from trainfer.types import GenerationRequest, SamplingParams
from trainfer.workers.adapter import check_adapter
from trainfer.workers.build_rank import build_actor, build_ref, load_engine
from trainfer.workers.local_group import LocalGroup
from trainfer.workers.rollout import RolloutWorker

CPU = torch.device("cpu")
MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8")
KL = "actor_rollout_ref.actor.use_kl_loss=true"
SEQUENCES = [
    sampled(prompt_ids=(5, 6, 9)[: 1 + i % 3], response_ids=tuple(range(10, 12 + i % 4)), group=i // 2)
    for i in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    save_model(tiny_model("qwen3", hidden_size=32, intermediate_size=64), path, tokenizer=byte_tokenizer())
    return path


def group(folder, *overrides, dtype="fp32", engine=None, merged=False):
    config, plan = planned(
        *(LORA if not any("lora" in o for o in overrides) else ()),
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        KL,
        *overrides,
    )
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    actor = build_actor(config, plan, folder, CPU, total_steps=10, meshes=None)
    return LocalGroup(
        actor=actor,
        rollout=RolloutWorker(engine or load_engine(config, folder, CPU, kind)),
        ref=build_ref(config, plan, folder, CPU, meshes=None, actor=actor),
        rollout_dtype=kind,
        sends_merged=merged,
        mini_batch_sequences=plan.mini_batch_sequences,
        epochs=1,
        shuffle_seed=None,
        model_folder=folder,
    )


def training(subject):
    old = [scored.logprobs for scored in subject.old_logprobs(SEQUENCES)]
    advantages = [(-1.0) ** i * (1 + i / 7) for i in range(len(SEQUENCES))]
    ref = [scored.logprobs for scored in subject.ref_logprobs(SEQUENCES)]
    return training_sequences(SEQUENCES, advantages, old_logprobs=old, ref_logprobs=ref, rollout_weights=None)


def trained(folder, *overrides, steps=2, **options):
    subject = group(folder, *overrides, **options)
    for _ in range(steps):
        subject.update(training(subject))
    return subject


def parameters(subject):
    return dict(subject._actor.weights.master.named_parameters())


def test_only_the_adapter_trains_and_the_optimizer_holds_nothing_else(folder):
    subject = group(folder)
    before = {name: tensor.detach().clone() for name, tensor in parameters(subject).items()}
    subject.update(training(subject))
    after = parameters(subject)
    own = {name for name in before if ".lora_" in name}
    assert {name for name in before if not torch.equal(before[name], after[name])} == own
    optimizer = subject._actor.trainer.optimizer
    assert {id(p) for p in optimizer.state} == {id(parameters(subject)[name]) for name in own}


def test_gradients_are_those_of_pefts_own_model_on_the_same_loss(folder):
    from peft import LoraConfig, get_peft_model

    from trainfer.exact.logprobs import token_logprobs
    from trainfer.exact.packed import forward_logits, pack

    settings = AdapterSettings(
        rank=4, alpha=8, target_modules="all-linear", exclude_modules=None, folder=None, seed=3
    )
    ours = load_model(folder, dtype=torch.float32, device="cpu")
    add_adapter(ours, settings, base_folder=folder)
    theirs = get_peft_model(
        load_model(folder, dtype=torch.float32, device="cpu", attention="sdpa"),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    with torch.no_grad():
        values = dict(ours.named_parameters())
        for name, parameter in theirs.named_parameters():
            own = values[name.removeprefix("base_model.model.")]
            if ".lora_B." in name:
                own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
            parameter.copy_(own)
    ids = [5, 6, 9, 10, 11, 12, 13]
    batch = pack([ids], [3], device="cpu")
    loss = token_logprobs(forward_logits(ours, batch), batch.targets_S, torch.ones(4)).sum()
    loss.backward()
    logits = theirs(input_ids=torch.tensor([ids])).logits[0, 2:-1]
    expected = torch.log_softmax(logits, -1)[range(4), ids[3:]].sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    compared = 0
    for name, parameter in theirs.named_parameters():
        own = dict(ours.named_parameters())[name.removeprefix("base_model.model.")]
        assert own.requires_grad == parameter.requires_grad == (".lora_" in name)
        if parameter.requires_grad:
            assert torch.allclose(own.grad, parameter.grad, rtol=1e-4, atol=1e-6), name
            compared += 1
    assert compared == 2 * 7 * 2  # two layers of seven linears, A and B


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_ref_is_the_base_model_bit_for_bit_before_and_after_training(folder, dtype):
    frozen = group(folder, f"{MODEL}.lora_rank=0", dtype=dtype)
    expected = frozen.ref_logprobs(SEQUENCES)
    subject = group(folder, dtype=dtype)
    assert subject.ref_logprobs(SEQUENCES) == expected
    for _ in range(2):
        subject.update(training(subject))
    assert subject.ref_logprobs(SEQUENCES) == expected
    assert subject.old_logprobs(SEQUENCES) != expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_engine_and_trainer_agree_bitwise_after_training_and_a_sync(folder, dtype):
    subject = trained(folder, dtype=dtype)
    assert subject.sync_weights().matches
    requests = [
        GenerationRequest(
            request_id=str(i), prompt_ids=(5, 6, 9), seed=i, sampling=SamplingParams(max_new_tokens=8)
        )
        for i in range(6)
    ]
    completions = subject.generate(requests)
    scored = subject.old_logprobs(
        [
            sampled(prompt_ids=(5, 6, 9), response_ids=c.token_ids, rollout_logprobs=c.logprobs)
            for c in completions
        ]
    )
    assert [s.logprobs for s in scored] == [c.logprobs for c in completions]


def test_the_proof_covers_base_and_adapter_by_name(folder):
    subject = trained(folder)
    proof = subject.sync_weights()
    names = set(subject._rollout.weight_fingerprints())
    assert proof.tensors == len(names)
    assert "model.layers.1.mlp.up_proj.lora_B.default.weight" in names
    assert "model.layers.1.mlp.up_proj.base_layer.weight" in names


def test_an_engine_without_the_adapter_fails_at_the_sync_by_the_parameters_name(folder):
    plain = make_engine("builtin", model=load_model(folder, dtype=torch.float32, device="cpu"))
    subject = trained(folder, engine=plain)
    with pytest.raises(WeightSyncError, match=r"self_attn\.q_proj\.base_layer\.weight"):
        subject.sync_weights()


def test_an_adapter_of_another_name_in_the_engine_fails_at_the_sync(folder):
    from peft import LoraConfig, inject_adapter_in_model

    model = load_model(folder, dtype=torch.float32, device="cpu")
    inject_adapter_in_model(
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), model, adapter_name="other"
    )
    subject = trained(folder, engine=make_engine("builtin", model=model))
    with pytest.raises(WeightSyncError, match=r"lora_A\.default\.weight"):
        subject.sync_weights()


def test_an_engine_that_keeps_an_old_adapter_is_named_by_the_proof(folder):
    class Stale(RolloutWorker):
        def load_weights(self, named_tensors, *, version):
            old = dict(self.engine.module.named_parameters())
            kept = {n: (old[n].detach().clone() if "up_proj.lora_B" in n else t) for n, t in named_tensors}
            super().load_weights(kept.items(), version=version)

    subject = trained(folder)
    subject._rollout = Stale(subject._rollout.engine)
    with pytest.raises(WeightSyncError, match=r"2 of \d+ tensors .*up_proj\.lora_B\.default\.weight"):
        subject.sync_weights()


def test_merged_weights_are_pefts_merge_and_the_engine_then_gives_the_actors_log_probs(folder):
    engine = make_engine("builtin", model=load_model(folder, dtype=torch.float32, device="cpu"))
    subject = trained(folder, engine=engine, merged=True)
    assert subject.sync_weights().matches
    arrived = dict(engine.module.named_parameters())
    for name, module in subject._actor.weights.master.named_modules():
        if hasattr(module, "get_delta_weight"):
            expected = module.base_layer.weight + module.get_delta_weight("default")
            assert torch.equal(arrived[f"{name}.weight"], expected), name
    request = GenerationRequest(
        request_id="0", prompt_ids=(5, 6, 9), seed=1, sampling=SamplingParams(max_new_tokens=8)
    )
    (completion,) = subject.generate([request])
    (scored,) = subject.old_logprobs(
        [
            sampled(
                prompt_ids=(5, 6, 9),
                response_ids=completion.token_ids,
                rollout_logprobs=completion.logprobs,
            )
        ]
    )
    assert scored.logprobs == pytest.approx(completion.logprobs, abs=2e-5)


def test_a_merged_weight_that_did_not_arrive_is_named(folder):
    class Forgetful(RolloutWorker):
        def load_weights(self, named_tensors, *, version):
            sent = {name: tensor.clone() for name, tensor in named_tensors}
            sent["model.layers.0.mlp.down_proj.weight"] = base
            super().load_weights(sent.items(), version=version)

    model = load_model(folder, dtype=torch.float32, device="cpu")
    base = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    subject = trained(folder, engine=make_engine("builtin", model=model), merged=True)
    subject._rollout = Forgetful(subject._rollout.engine)
    with pytest.raises(WeightSyncError, match=r"1 of \d+ tensors .*layers\.0\.mlp\.down_proj\.weight"):
        subject.sync_weights()


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bit_for_bit(folder, tmp_path):
    straight = trained(folder, steps=1)
    straight.save_checkpoint(tmp_path)
    stored = [name for file in (tmp_path / "actor").glob("*.safetensors") for name in load_file(file)]
    assert stored
    assert all(".lora_" in name for name in stored)
    batch = training(straight)
    later = straight.update(batch)
    resumed = group(folder)
    resumed.load_checkpoint(tmp_path)
    assert resumed.weights_version == 1
    assert training(resumed) == batch
    assert resumed.update(batch).metrics == later.metrics
    for name, tensor in parameters(straight).items():
        assert torch.equal(tensor, parameters(resumed)[name]), name


def test_a_checkpoint_on_another_base_is_refused_by_the_weights_name(folder, tmp_path):
    trained(folder, steps=1).save_checkpoint(tmp_path / "checkpoint")
    other = load_model(folder, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-3
    save_model(other, tmp_path / "other", tokenizer=byte_tokenizer())
    with pytest.raises(CheckpointError, match=r"1 of \d+ differ now or are missing: model\.norm\.weight"):
        group(tmp_path / "other").load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{MODEL}.lora_rank=0"], "holds an adapter, but this run trains all weights"),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=4"], "is scaled by 2 there and by 1 here"),
        ([f"{MODEL}.lora_rank=2", f"{MODEL}.lora_alpha=4"], "differ in shape"),
        ([*LORA, f"{MODEL}.target_modules=[q_proj]"], "belong to another model"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(folder, tmp_path, overrides, words):
    trained(folder, steps=1).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        group(folder, *overrides).load_checkpoint(tmp_path)


def test_an_adapter_folder_of_pefts_is_where_training_begins(folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(
        load_model(folder, dtype=torch.float32, device="cpu"),
        LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)
    subject = group(folder, f"{MODEL}.lora_adapter_path={tmp_path}")
    ours = parameters(subject)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours[name.removeprefix("base_model.model.")], parameter), name
    assert set(subject._actor.adapter.scalings.values()) == {3.0}
    assert subject.sync_weights().matches
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        group(folder, f"{MODEL}.lora_adapter_path={tmp_path}")


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        ("[q_proj,wrong]", ConfigError, "target_modules names wrong, but no layer"),
        ("[wrong]", ConfigError, "PEFT cannot adapt such layers"),
        ("[embed_tokens]", ModelError, "embed_tokens is a Embedding, and only"),
    ],
)
def test_layers_that_are_not_there_or_cannot_be_adapted_are_refused(folder, targets, error, words):
    with pytest.raises(error, match=words):
        group(folder, *LORA, f"{MODEL}.target_modules={targets}")


def test_without_peft_the_run_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config, _ = planned(*LORA)
    assert "pip install 'trainfer[lora]'" in check_adapter(config)
    assert check_adapter(planned()[0]) is None


def test_switching_the_adapter_off_leaves_what_trains_as_it_is(folder):
    model = load_model(folder, dtype=torch.float32, device="cpu", attention="sdpa")
    base = copy.deepcopy(model)
    settings = AdapterSettings(
        rank=2, alpha=2, target_modules=("v_proj",), exclude_modules=None, folder=None, seed=0
    )
    layout = add_adapter(model, settings, base_folder=folder)
    assert json.dumps(layout.config)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.lora_B["default"].weight.normal_()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad(), adapter_disabled(model):
        off = model(input_ids=ids).logits
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    with torch.no_grad():
        assert torch.equal(off, base(input_ids=ids).logits)
        assert not torch.equal(off, model(input_ids=ids).logits)
