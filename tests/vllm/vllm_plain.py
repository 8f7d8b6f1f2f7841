"""A ``vllm.LLM`` as its user starts it, and Transformers beside it."""

import torch

import trainfer
from trainfer.engines.vllm.environment import prepare_process, undisturbed
from trainfer.integrations.transformers.load import load_model


def plain_llm(folder, **changes):
    """Steps of 32 tokens, so that prompts come in chunks; blocks of 32 tokens in the prefix cache."""
    prepare_process("cpu")
    arguments = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 32,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    with undisturbed():  # its import warns of what torch has deprecated
        from vllm import LLM

        return LLM(model=str(folder), **{**arguments, **changes})


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def answers(llm, prompts, *, temperature=0.8, tokens=8):
    with undisturbed():
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=tokens, temperature=temperature, logprobs=0, ignore_eos=True, detokenize=False
        )
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def eager_model(folder):
    return load_model(folder, dtype=torch.float32, device="cpu", attention="sdpa")


def train_side(model, path, outputs, *, temperature=0.8, version=None):
    """What training would compute of the sampled sequences, one by one."""
    with (
        trainfer.capture(
            model, path, side="train", pass_name="old_log_prob", weights_version=version
        ) as capture,
        torch.no_grad(),
    ):
        for output in outputs:
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            length, ids = len(output.prompt_token_ids), torch.tensor([tokens])
            rows = (model(input_ids=ids).logits.float() / temperature).log_softmax(-1)[0, length - 1 : -1]
            chosen = rows.gather(-1, ids[0, length:, None])[:, 0]
            capture.record_logprobs(
                sequences=[tokens],
                prompt_lengths=[length],
                logprobs=[chosen.tolist()],
                sampling={"temperature": temperature},
            )
