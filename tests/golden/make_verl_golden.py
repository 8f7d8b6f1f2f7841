"""Runs verl's own functions on fixed inputs and writes what they answer as JSON.

Run it in an environment of its own, since verl's pins differ from trainfer's::

    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch==2.13.0 verl==0.9.1
    cd /tmp && /tmp/verl/bin/python /path/to/tests/golden/make_verl_golden.py

Writes ``verl_core.json`` and ``verl_gsm8k.json`` beside itself; README.md explains the fields.
Nothing here is trainfer's code: the numbers are somebody else's.
"""

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import verl
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional as verl_torch
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.reward_score import default_compute_score, gsm8k

HERE = Path(__file__).parent
DTYPES = {"float32": torch.float32, "float64": torch.float64}
AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+")
LENGTHS = (5, 1, 7, 3)
"""Response lengths of the four sequences; padded to the longest."""

GSM8K_STRINGS = [
    ("a", "Each box holds 12, six boxes hold 72.\n#### 72", "72"),
    ("b", "#### 72.", "72"),
    ("c", "#### $72", "72"),
    ("d", "####72", "72"),
    ("e", "####  72", "72"),
    ("f", "#### 1,234", "1234"),
    ("g", "#### 72.0", "72"),
    ("h", "#### +3", "3"),
    ("i", "#### -3", "-3"),
    ("j", "#### ７２", "72"),
    ("k", "#### 72。", "72"),
    ("l", "#### 10\nno, again\n#### 12", "12"),
    ("m", "\\boxed{72}", "72"),
    ("n", "#### 1 234", "1234"),
    ("o", "#### ,", "72"),
    ("p", "", "72"),
    ("q", "**#### 72**", "72"),
    ("clip-just-in", "#### 72" + "x" * 293, "72"),
    ("clip-just-out", "#### 72" + "x" * 294, "72"),
    ("clip-cuts-number", "#### 1234" + "x" * 298, "34"),
    ("clip-exact-300", "y" * 293 + "#### 72", "72"),
    ("long-then-answer", "so " * 400 + "#### 5", "5"),
    ("truth-with-comma", "#### 1,234", "1,234"),
    ("truth-with-space", "#### 72", " 72"),
    ("truth-empty", "#### ,", ""),
    ("truth-empty-no-answer", "", ""),
    ("truth-zero-padded", "#### 072", "72"),
    ("truth-float", "#### 72", "72.0"),
    ("many-commas", "#### 1,2,3,4", "1234"),
    ("only-dots", "#### ...", "..."),
    ("lone-dot", "the end .", "."),
    ("dot-dot", ". . .", "72"),
    ("comma-last", "72 ,", "72"),
    ("comma-only", ",", ","),
    ("empty-parts", "a 7, b", "7"),
    ("trailing-comma", "#### 72,", "72"),
    ("double-minus", "#### --3", "-3"),
    ("minus-space", "#### - 3", "-3"),
    ("minus-dot", "#### -.5", "-.5"),
    ("unicode-minus", "#### −3", "-3"),
    ("tab", "####\t72", "72"),
    ("newline", "####\n72", "72"),
    ("five-hashes", "##### 72", "72"),
    ("three-hashes", "### 72", "72"),
    ("two-answers-one-bad", "#### 72\n#### x", "72"),
    ("two-answers-last-wrong", "#### 72\n#### 71", "72"),
    ("answer-then-text", "#### 72 apples", "72"),
    ("answer-then-sentence", "#### 72. Done", "72"),
    ("percent", "#### 72%", "72"),
    ("dollar-after", "#### 72$", "72"),
    ("arabic-digits", "#### ٧٢", "72"),
    ("superscript", "#### 7²", "7"),
    ("fraction", "#### 1/2", "0.5"),
    ("scientific", "#### 1e3", "1000"),
    ("hex", "#### 0x48", "72"),
    ("nul", "#### 72\x00", "72"),
    ("emoji", "🎉 #### 72 🎉", "72"),
    ("no-hash-number", "The answer is 72", "72"),
    ("no-hash-sentence", "The answer is 72.", "72"),
    ("range", "between 3-5", "5"),
]


def made_by() -> dict[str, str]:
    return {
        "verl": verl.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def nested(tensor: torch.Tensor) -> object:
    return tensor.detach().tolist()


def response_mask() -> torch.Tensor:
    width = max(LENGTHS)
    return torch.tensor([[1] * length + [0] * (width - length) for length in LENGTHS])


def random_logprobs(seed: int, *, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 log-probs per token, ``spread`` apart; padding holds numbers that must not matter."""
    generator = torch.Generator().manual_seed(seed)
    first = -torch.empty(len(LENGTHS), max(LENGTHS)).exponential_(1.0, generator=generator)
    second = first + spread * torch.randn(first.shape, generator=generator)
    return first, second.clamp(max=-1e-4)


def grpo_advantages() -> list[dict[str, object]]:
    cases = {
        "one-of-four": ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]),
        "interleaved": ([1.0, 0.0, 0.5, 0.25, 0.0, 2.0, -1.0, 0.5], [0, 1, 0, 1, 0, 1, 0, 1]),
        "singletons": ([0.7, 1.0, -3.0, 1.0, 0.0], [0, 1, 2, 3, 3]),
        "all-equal": ([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], [0, 0, 0, 1, 1, 1]),
        "uneven": ([0.1, 0.9, 0.3, 1.0, 0.2, 0.4, 0.8], [5, 5, 5, 2, 2, 9, 2]),
        "large": ([1e4, -1e4, 12.5, 1e4 + 1.0], [0, 0, 0, 0]),
    }
    rows = []
    for name, (rewards, groups) in cases.items():
        for dtype_name, dtype in DTYPES.items():
            for norm_by_std in (True, False):
                scores = torch.tensor(rewards, dtype=dtype).unsqueeze(-1)
                advantages, _ = core_algos.compute_grpo_outcome_advantage(
                    scores, torch.ones_like(scores), np.array(groups), norm_adv_by_std_in_grpo=norm_by_std
                )
                rows.append(
                    {
                        "id": f"{name}/{dtype_name}/{'std' if norm_by_std else 'mean'}",
                        "dtype": dtype_name,
                        "rewards": rewards,
                        "groups": groups,
                        "norm_by_std": norm_by_std,
                        "advantages": nested(advantages.squeeze(-1)),
                    }
                )
    return rows


class LossConfig(SimpleNamespace):
    """What verl's losses read from the actor's config."""

    def get(self, name: str, default: object) -> object:
        return vars(self).get(name, default)


def policy_loss() -> list[dict[str, object]]:
    settings = {
        "symmetric": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
        "clip-higher": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        "tight-dual": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 1.2},
    }
    # Every setting with the default aggregation; every aggregation, with and without weights, for one setting.
    choices = [
        (setting, spread, dtype_name, "token-mean", False)
        for setting in settings
        for spread in (0.0, 0.3, 3.0)
        for dtype_name in DTYPES
    ]
    choices += [
        ("tight-dual", 0.3, dtype_name, agg_mode, weighted)
        for dtype_name in DTYPES
        for agg_mode in AGG_MODES
        for weighted in (False, True)
        if (agg_mode, weighted) != ("token-mean", False)
    ]
    return [
        _policy_loss_row(
            setting,
            settings[setting],
            spread=spread,
            dtype_name=dtype_name,
            agg_mode=agg_mode,
            weighted=weighted,
        )
        for setting, spread, dtype_name, agg_mode, weighted in choices
    ]


def _policy_loss_row(
    setting: str, clips: dict[str, float], *, spread: float, dtype_name: str, agg_mode: str, weighted: bool
) -> dict[str, object]:
    dtype = DTYPES[dtype_name]
    old32, new32 = random_logprobs(7, spread=spread)
    old, logprobs = old32.to(dtype), new32.to(dtype).requires_grad_()
    advantages = torch.tensor([1.5, -0.5, -1.0, 0.25], dtype=dtype).unsqueeze(-1).expand_as(old).contiguous()
    mask = response_mask()
    weights = (1.0 + 0.5 * torch.sin(torch.arange(old.numel(), dtype=torch.float32))).reshape(old.shape)
    config = LossConfig(clip_ratio=0.2, global_batch_info={}, **clips)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old,
        logprobs,
        advantages,
        mask,
        loss_agg_mode=agg_mode,
        config=config,
        rollout_is_weights=weights.to(dtype) if weighted else None,
    )
    loss.backward()
    assert logprobs.grad is not None
    return {
        "id": f"{setting}/spread{spread}/{dtype_name}/{agg_mode}{'/weighted' if weighted else ''}",
        "dtype": dtype_name,
        "agg_mode": agg_mode,
        **clips,
        "old_logprobs": nested(old),
        "logprobs": nested(logprobs),
        "advantages": nested(advantages),
        "mask": nested(mask),
        "rollout_weights": nested(weights) if weighted else None,
        "loss": loss.item(),
        "gradient": nested(logprobs.grad),
        "metrics": metrics,
    }


def kl_penalty() -> list[dict[str, object]]:
    rows = []
    for kind in KL_KINDS:
        for dtype_name, dtype in DTYPES.items():
            for spread in (0.1, 2.0, 30.0):
                ref32, new32 = random_logprobs(11, spread=spread)
                logprobs = new32.to(dtype).requires_grad_()
                kl = core_algos.kl_penalty(logprobs, ref32.to(dtype), kind)
                kl.sum().backward()
                assert logprobs.grad is not None
                rows.append(
                    {
                        "id": f"{kind}/spread{spread}/{dtype_name}",
                        "kind": kind,
                        "dtype": dtype_name,
                        "logprobs": nested(logprobs),
                        "ref_logprobs": nested(ref32),
                        "kl": nested(kl),
                        "gradient_of_sum": nested(logprobs.grad),
                    }
                )
    return rows


def entropy() -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(len(LENGTHS), max(LENGTHS), 11, generator=generator)
    rows = []
    for agg_mode in AGG_MODES:
        value = core_algos.compute_entropy_loss(logits, response_mask(), loss_agg_mode=agg_mode)
        rows.append(
            {
                "id": agg_mode,
                "agg_mode": agg_mode,
                "logits": nested(logits),
                "mask": nested(response_mask()),
                "entropy": value.item(),
            }
        )
    return rows


def debug_metrics() -> list[dict[str, object]]:
    rows = []
    for spread in (0.0, 1e-4, 0.05, 2.0):
        rollout, old = random_logprobs(13, spread=spread)
        mask = response_mask()
        data = DataProto.from_dict(
            tensors={
                "rollout_log_probs": rollout,
                "old_log_probs": old,
                "response_mask": mask,
                "responses": torch.zeros_like(mask),
            }
        )
        rows.append(
            {
                "id": f"spread{spread}",
                "dtype": "float32",
                "rollout_logprobs": nested(rollout),
                "old_logprobs": nested(old),
                "mask": nested(mask),
                "metrics": calculate_debug_metrics(data),
            }
        )
    return rows


def rollout_correction() -> list[dict[str, object]]:
    settings: dict[str, dict[str, object]] = {
        "metrics-only": {},
        "token-tis": {"rollout_is": "token", "rollout_is_threshold": 2.0},
        "sequence-tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        "token-icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        "token-normalised": {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": True,
        },
        "rs-token-k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        "rs-seq-mean-k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.1"},
        "rs-seq-sum-k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    }
    rows = []
    for setting, arguments in settings.items():
        for spread in (0.0, 1e-3, 0.3, 2.0):
            rollout, old = random_logprobs(17, spread=spread)
            mask = response_mask()
            weights, kept, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
                old_log_prob=old, rollout_log_prob=rollout, response_mask=mask, **arguments
            )
            rows.append(
                {
                    "id": f"{setting}/spread{spread}",
                    "dtype": "float32",
                    "arguments": arguments,
                    "rollout_logprobs": nested(rollout),
                    "old_logprobs": nested(old),
                    "mask": nested(mask),
                    "weights": None if weights is None else nested(weights.batch["rollout_is_weights"]),
                    "kept_mask": nested(kept),
                    "metrics": metrics,
                }
            )
    return rows


def truncation() -> list[dict[str, object]]:
    rows = []
    for name in ("left", "right", "middle"):
        for length, limit in ((9, 4), (9, 5), (9, 1), (9, 9), (10, 9)):
            ids = torch.arange(100, 100 + length).unsqueeze(0)
            kept, _ = verl_torch.postprocess_data(
                ids, torch.ones_like(ids), max_length=limit, pad_token_id=0, truncation=name
            )
            rows.append(
                {
                    "id": f"{name}/{length}-to-{limit}",
                    "truncation": name,
                    "max_length": limit,
                    "token_ids": nested(ids[0]),
                    "kept": nested(kept[0]),
                }
            )
    return rows


def gsm8k_rows() -> list[dict[str, object]]:
    return [
        {
            "id": name,
            "response": response,
            "ground_truth": truth,
            "strict": float(default_compute_score("openai/gsm8k", response, truth)),
            "flexible": float(gsm8k.compute_score(response, truth, method="flexible")),
        }
        for name, response, truth in GSM8K_STRINGS
    ]


def write(name: str, content: dict[str, object]) -> None:
    text = json.dumps({"made_by": made_by(), **content}, ensure_ascii=False, allow_nan=False)
    # One row a line: small, and a change shows as the rows that changed.
    text = text.replace('{"id"', '\n{"id"')
    (HERE / name).write_text(text.rstrip() + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    write("verl_gsm8k.json", {"rows": gsm8k_rows()})
    write(
        "verl_core.json",
        {
            "grpo_advantages": grpo_advantages(),
            "policy_loss": policy_loss(),
            "kl_penalty": kl_penalty(),
            "entropy": entropy(),
            "debug_metrics": debug_metrics(),
            "rollout_correction": rollout_correction(),
            "truncation": truncation(),
        },
    )


if __name__ == "__main__":
    main()
