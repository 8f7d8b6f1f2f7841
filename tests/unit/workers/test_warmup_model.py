import torch
from worker_cases import config

from trainfer.integrations.transformers.load import load_model, load_tokenizer
from trainfer.types import Message, Prompt
from trainfer.workers.warmup import warmed_up_model

WARMUP = (
    "trainfer.warmup.hidden_size=16",
    "trainfer.warmup.intermediate_size=32",
    "trainfer.warmup.num_heads=2",
    "trainfer.warmup.num_kv_heads=1",
    "trainfer.warmup.vocabulary=byte",
    "trainfer.warmup.batch_size=4",
)


def made(folder, *overrides, prompts=None, on_step=None):
    from trainfer.integrations.transformers.load import byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = tuple(tokenizer.encode("ab", add_special_tokens=False))
    prompt = Prompt(
        index=0,
        data_source="trainfer/letters",
        messages=(Message(role="user", content="ab"),),
        token_ids=ids,
        ground_truth="ba",
        extra_info={"demonstrations": ["ba"]},
    )
    warmup = config(*WARMUP, *overrides).trainfer.warmup
    assert warmup is not None
    return warmed_up_model(folder, warmup, tokenizer, prompts or [prompt], max_positions=32, on_step=on_step)


def test_the_warm_up_teaches_and_leaves_a_folder_that_loads(tmp_path):
    losses = []
    folder = made(tmp_path, "trainfer.warmup.steps=60", on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[-1] < 0.5 * losses[0]
    assert load_model(folder, dtype=torch.float32, device="cpu").config.max_position_embeddings == 32
    assert load_tokenizer(folder).eos_token_id is not None


def test_the_same_settings_make_it_once_and_others_make_it_anew(tmp_path):
    calls = []

    def count(step, loss):
        calls.append(step)

    made(tmp_path, "trainfer.warmup.steps=2", on_step=count)
    made(tmp_path, "trainfer.warmup.steps=2", on_step=count)
    assert len(calls) == 2
    made(tmp_path, "trainfer.warmup.steps=3", on_step=count)
    assert len(calls) == 5


def test_a_folder_without_its_mark_is_made_again(tmp_path):
    folder = made(tmp_path, "trainfer.warmup.steps=1")
    (folder / "made_from.json").write_text("{")
    calls = []
    made(tmp_path, "trainfer.warmup.steps=1", on_step=lambda step, loss: calls.append(step))
    assert calls == [1]
