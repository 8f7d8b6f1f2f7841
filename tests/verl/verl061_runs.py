"""Starts stock verl 0.6.1 under ``trainfer attach`` on this machine's CPU; nothing of verl is edited.

``make setup-verl061`` makes the environment (8 GB); ``TRAINFER_VERL061`` names its Python. ``trainfer attach`` itself runs in ours:
only the probe has to work beside PyTorch 2.8. A run takes about a minute when the cores are free.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_PYTHON = HERE.parents[1] / ".venv-verl061" / "bin" / "python"
RUN_SECONDS = 2400

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_help_061.start",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "all|all|all|all",
    "VLLM_CPU_SGL_KERNEL": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_ACTOR = "actor_rollout_ref.actor"
_PRECISION = f"{_ACTOR}.fsdp_config.mixed_precision"
_ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = (
    "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.total_training_steps=2", "trainer.total_epochs=5",
    "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=[console]",
    "trainer.resume_mode=disable",
    "++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init._node_ip_address=127.0.0.1", "+ray_kwargs.ray_init.object_store_memory=400000000",
    "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=16",
    "data.dataloader_num_workers=0", "data.shuffle=False",
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
    "actor_rollout_ref.model.use_remove_padding=False", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=eager",
    f"{_ACTOR}.strategy=fsdp2", f"{_ACTOR}.ppo_mini_batch_size=4", f"{_ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"{_ACTOR}.use_torch_compile=False", f"++{_ACTOR}.fsdp_config.dtype=float32",
    f"++{_PRECISION}.param_dtype=fp32", f"++{_PRECISION}.reduce_dtype=fp32", f"++{_PRECISION}.buffer_dtype=fp32",
    f"{_ACTOR}.optim.lr=1e-4", f"{_ACTOR}.use_kl_loss=False",
    f"{_ROLLOUT}.name=vllm", f"{_ROLLOUT}.mode=sync", f"{_ROLLOUT}.n=2", f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.dtype=float32", f"{_ROLLOUT}.enforce_eager=True", f"{_ROLLOUT}.free_cache_engine=False",
    f"{_ROLLOUT}.calculate_log_probs=True", f"{_ROLLOUT}.max_model_len=128", f"{_ROLLOUT}.max_num_batched_tokens=512",
    f"{_ROLLOUT}.max_num_seqs=16", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
    f"{_ROLLOUT}.gpu_memory_utilization=0.3",
    f"custom_reward_function.path={HERE / 'reward_digits.py'}",
)  # fmt: skip
ASYNC = (
    f"{_ROLLOUT}.mode=async", f"{_ROLLOUT}.free_cache_engine=True", "data.return_raw_chat=True",
    f"+{_ROLLOUT}.engine_kwargs.vllm.enable_sleep_mode=False", f"{_ROLLOUT}.agent.num_workers=1",
)  # fmt: skip
PACKED = ("actor_rollout_ref.model.use_remove_padding=True",)
VALIDATED = ("trainer.val_before_train=True",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended."""

    code: int
    printed: str
    out: Path

    def result(self, step: int, pass_name: str) -> dict:
        """``result.json`` of one comparison."""
        return json.loads((self.out / f"step_{step}" / f"report-{pass_name}" / "result.json").read_text())


def python() -> Path:
    """The environment's Python."""
    return Path(os.environ.get("TRAINFER_VERL061") or DEFAULT_PYTHON)


@cache
def checkpoint(folder: Path) -> Path:
    """A tiny Qwen3 with a byte tokenizer, by that environment's own Transformers."""
    path = folder / "qwen3"
    command = [python(), HERE / "make_checkpoint.py", path, "400"]
    subprocess.run(command, check=True, timeout=600, env=_environment({}))
    return path


def run(
    folder: Path, name: str, *, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Run:
    """Run stock ``main_ppo`` under attach to its end."""
    model = checkpoint(folder)
    data = folder / "data.parquet"
    if not data.exists():
        subprocess.run([python(), HERE / "make_data.py", data], check=True, timeout=300)
    out, work = folder / name / "out", folder / name
    work.mkdir()
    command = [
        *(sys.executable, "-m", "trainfer.cli.main", "attach", "--out", str(out), "--"),
        *(str(python()), "-m", "verl.trainer.main_ppo", *OVERRIDES),
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={work / 'checkpoints'}",
        *overrides,
    ]
    log = work / "log"
    with log.open("wb") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=work, env=_environment(environment or {}),
            timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
    return Run(code=ended.returncode, printed=log.read_text(errors="replace"), out=out)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **more}
