"""Starts stock verl 0.9.1 under ``trainfer attach`` on this machine's CPU; nothing of verl is edited.

``make setup-verl`` makes the environment; ``TRAINFER_VERL091`` names its Python. A run takes about three minutes when the cores
are free, most of it imports in ten processes, so that tests share runs. On loaded cores Ray gives up: its agent has 15 seconds to start.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_PYTHON = HERE.parents[1] / ".venv-verl091" / "bin" / "python"
RUN_SECONDS = 2400

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
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
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    "VLLM_NO_USAGE_STATS": "1",
}
_FSDP = "actor_rollout_ref.actor.fsdp_config"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = (
    "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.total_training_steps=2",
    "trainer.total_epochs=5", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.logger=[console]", "trainer.project_name=p", "trainer.experiment_name=e", "trainer.resume_mode=disable",
    "++ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=12", "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init._node_ip_address=127.0.0.1", "+ray_kwargs.ray_init.object_store_memory=400000000",
    "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=16",
    "data.dataloader_num_workers=0", "data.filter_overlong_prompts=False", "data.shuffle=False",
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
    "actor_rollout_ref.model.use_remove_padding=False", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.use_kl_loss=False",
    f"{_FSDP}.use_torch_compile=False", f"{_FSDP}.dtype=float32", f"{_FSDP}.model_dtype=fp32",
    f"+{_FSDP}.mixed_precision.param_dtype=fp32", f"+{_FSDP}.mixed_precision.reduce_dtype=fp32",
    f"+{_FSDP}.mixed_precision.buffer_dtype=fp32",
    f"{_ROLLOUT}.name=vllm", f"{_ROLLOUT}.mode=async", f"{_ROLLOUT}.n=2", f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.dtype=float32", f"{_ROLLOUT}.enforce_eager=True", f"{_ROLLOUT}.free_cache_engine=False",
    f"+{_ROLLOUT}.enable_sleep_mode=False", f"{_ROLLOUT}.max_model_len=128", f"{_ROLLOUT}.max_num_batched_tokens=512",
    f"{_ROLLOUT}.max_num_seqs=16", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", f"{_ROLLOUT}.agent.num_workers=1",
    f"{_ROLLOUT}.gpu_memory_utilization=0.3", f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    "reward.num_workers=1", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    f"reward.custom_reward_function.path={HERE / 'reward_digits.py'}",
)  # fmt: skip
WITH_REF = (
    "actor_rollout_ref.actor.use_kl_loss=True", f"{_REF}.log_prob_micro_batch_size_per_gpu=2",
    f"{_REF}.fsdp_config.dtype=float32", f"{_REF}.fsdp_config.model_dtype=fp32",
    f"{_REF}.fsdp_config.use_torch_compile=False",
)  # fmt: skip
V0 = ("trainer.use_v1=false",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended."""

    code: int
    printed: str
    out: Path

    def result(self, step: int, pass_name: str) -> dict:
        """``result.json`` of one comparison."""
        return json.loads((self.out / f"step_{step}" / f"report-{pass_name}" / "result.json").read_text())

    def causes(self, step: int, pass_name: str) -> list[str]:
        """Cause ids, the first one first."""
        return [cause["cause"] for cause in self.result(step, pass_name)["causes"]]


def python() -> Path:
    """The environment's Python."""
    return Path(os.environ.get("TRAINFER_VERL091") or DEFAULT_PYTHON)


@cache
def checkpoint(folder: Path, vocabulary: int) -> Path:
    """A tiny Qwen3 with a byte tokenizer, by that environment's own Transformers."""
    path = folder / f"qwen3-{vocabulary}"
    subprocess.run(
        [python(), HERE / "make_checkpoint.py", path, str(vocabulary)],
        check=True,
        timeout=600,
        env=_environment({}),
    )
    return path


def run(folder: Path, name: str, *, options: Sequence[str] = (), overrides: Sequence[str] = (), vocabulary: int = 0,
        environment: Mapping[str, str] | None = None) -> Run:  # fmt: skip
    """Run stock ``main_ppo`` under attach to its end."""
    model = checkpoint(folder, vocabulary)
    data = folder / "data.parquet"
    if not data.exists():
        subprocess.run([python(), HERE / "make_data.py", data], check=True, timeout=300)
    out, work = folder / name / "out", folder / name
    work.mkdir()
    command = [
        *(str(python()), "-m", "trainfer.cli.main", "attach", "--out", str(out), *options, "--"),
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
