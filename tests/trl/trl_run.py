"""Runs in TRL's environment: the page's snippet on a real GRPOTrainer, or the same training without the callback.

usage: trl_run.py OUT_JSON CODE_FILE CONFIG_JSON PROMPTS_JSON [ARCHITECTURE]

Executes CODE_FILE with ``GRPOTrainer, model, reward, config, prompts, tokenizer`` defined, in an empty working directory;
writes what came of it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trainfer.integrations.transformers.load import byte_tokenizer


def tiny(architecture):
    torch.manual_seed(0)
    shared = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if architecture == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **shared, **none))
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2, **shared,
        )
    )  # fmt: skip


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


def digest(model):
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main(out, code, config, prompts, architecture="qwen2"):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    asked = {
        "output_dir": "trainer", "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
        "max_steps": 2, "learning_rate": 1e-3, "beta": 0.0, "report_to": [], "use_cpu": True, "bf16": False,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1000, "seed": 1,
    }  # fmt: skip
    names = {
        "GRPOTrainer": GRPOTrainer,
        "model": tiny(architecture),
        "reward": reward,
        "config": GRPOConfig(**{**asked, **json.loads(config)}),
        "prompts": Dataset.from_list([{"prompt": text} for text in json.loads(prompts)]),
        "tokenizer": tokenizer,
    }
    exec(compile(Path(code).read_text(), code, "exec"), names)
    callbacks = names["trainer"].callback_handler.callbacks
    ours = [item for item in callbacks if type(item).__name__ == "CaptureCallback"]
    results = {step: json.loads(result.json()) for item in ours for step, result in item.results.items()}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps({"results": results, "weights": digest(names["model"])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
