"""The peer of ``benchmarks/grpo_step.py``: TRL's GRPOTrainer, one step per line of standard input.

Runs in TRL's own environment and imports nothing of trainfer. Prints ``ready`` before each step and, after it, one
JSON line with the CPU and wall seconds of that step and the mean response length.

usage: trl_grpo.py MODEL_FOLDER STEPS PROMPTS GROUP NEW_TOKENS
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):
    """Wait for the driver before a step, report after it."""

    def on_step_begin(self, args, state, control, **kwargs):
        print("ready", flush=True)
        sys.stdin.readline()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        cpu, wall = time.process_time() - self.cpu, time.perf_counter() - self.wall
        print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)


def share_of_digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def main(folder: str, steps: int, prompts: int, group: int, new_tokens: int) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [f"What is {i} + {i + 1}? The answer is " for i in range(256)]
    config = GRPOConfig(
        output_dir=str(Path(folder) / "trl_out"),
        per_device_train_batch_size=prompts * group,
        num_generations=group,
        max_completion_length=new_tokens,
        max_steps=steps,
        learning_rate=1e-4,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=10**6,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:6]))
