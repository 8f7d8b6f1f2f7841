"""The probe changes no forward value, no gradient and no random state, whatever it captures."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

import trainfer
from trainfer.check.dump.reader import Dump


def step(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach().clone(), gradients, torch.get_rng_state()


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("task", "level"), [("tensor", "mix"), ("statistics", "L0"), ("sketch", "L0")])
def test_ten_architectures_train_bit_identically(architecture: str, dump_folder: Path, task: str, level: str):
    model = tiny(architecture)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    logits, gradients, rng = step(model, ids)
    with trainfer.capture(model, dump_folder, side="train", task=task, level=level, backward=True):
        seen_logits, seen_gradients, seen_rng = step(model, ids)
    after_logits, after_gradients, _ = step(model, ids)
    assert bits(seen_logits) == bits(logits) == bits(after_logits)
    assert torch.equal(seen_rng, rng)
    assert seen_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert bits(seen_gradients[name]) == bits(gradient) == bits(after_gradients[name]), name
    dump = Dump(dump_folder)
    assert dump.complete, dump.manifest.incomplete_reasons
    assert dump.manifest.counts["rows"] == 24


def test_ten_architectures_generate_bit_identically(architecture: str, dump_folder: Path):
    model = tiny(architecture)
    ids = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def generate() -> tuple[Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(5)
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, max_new_tokens=6, min_new_tokens=6, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        return out.sequences, out.logits

    sequences, logits = generate()
    with trainfer.capture(model, dump_folder, side="rollout"):
        seen_sequences, seen_logits = generate()
    assert torch.equal(sequences, seen_sequences)
    assert [bits(x) for x in logits] == [bits(x) for x in seen_logits]
    dump = Dump(dump_folder)
    assert dump.complete, dump.manifest.incomplete_reasons
    assert dump.manifest.counts["rows"] == 8 + 2 * 5
    assert {call.pass_name for call in dump.calls(0).values()} == {"prefill", "decode"}
    assert dump.manifest.counts["padding"] == 2


def test_no_hook_stays_on_the_model(dump_folder: Path):
    model = tiny("llama")
    with trainfer.capture(model, dump_folder, side="train", backward=True):
        model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
