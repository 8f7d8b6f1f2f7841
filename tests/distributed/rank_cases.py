"""What the tests of several ranks share: configurations, sequences, and three steps of a group, whoever runs it.

Runs as a script too: ``rank_cases.py FOLDER`` is one rank that a launcher has started; rank 0 does every case that
``FOLDER/cases.json`` names.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trainfer.config.load import load_config
from trainfer.errors import WeightSyncError
from trainfer.plan.step import plan_step
from trainfer.train.update.batch import training_sequences
from trainfer.types import FinishReason, GenerationRequest, Prompt, SampledSequence, SamplingParams
from trainfer.workers.group import WorkerGroup
from trainfer.workers.launched import launched_by_torchrun
from trainfer.workers.rank import Place, RankSetup, RankWorker
from trainfer.workers.ranked_group import RankedGroup
from trainfer.workers.rollout import RolloutWorker

ACTOR = "actor_rollout_ref.actor"
BASE = (
    "data.train_files=unused.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=24",
    "data.max_response_length=24",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.fsdp_config.dtype=fp32",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.dtype=fp32",
    "trainer.device=cpu",
)
STEPS = 3


def sequences(seed):
    """8 sequences of 4 prompts, of very unequal lengths, from a small generator of our own."""
    state = seed * 7919 + 17

    def draw(limit):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % limit

    made = []
    for index in range(8):
        prompt_length, length = (3 + 5 * (index // 2)), (1 if index == 3 else 2 + draw(22))
        if index % 2 == 0:
            prompt_ids = tuple(3 + draw(40) for _ in range(prompt_length))
        prompt = Prompt(
            index=index // 2, data_source="none", messages=(), token_ids=prompt_ids, ground_truth=""
        )
        made.append(
            SampledSequence(
                prompt=prompt,
                sample_index=index % 2,
                group=index // 2,
                seed=index,
                sampling=SamplingParams(max_new_tokens=24, temperature=0.9),
                response_ids=tuple(3 + draw(40) for _ in range(length)),
                response_text="",
                rollout_logprobs=(-1.0,) * length,
                finish_reason=FinishReason.LENGTH,
                weights_version=0,
            )
        )
    return made


def setup_of(model_folder, overrides, num_ranks):
    config = load_config(
        None,
        [
            *BASE,
            f"actor_rollout_ref.model.path={model_folder}",
            f"trainer.n_gpus_per_node={num_ranks}",
            *overrides,
        ],
    ).config
    return RankSetup(
        config=config,
        plan=plan_step(config),
        model_folder=Path(model_folder),
        total_steps=10,
        device_type="cpu",
    )


def three_steps(group: WorkerGroup, setup: RankSetup, folder: Path, *, masked: int = 0) -> dict:
    """Generate, score, train three times, hand over, save; the floats of it all. The first ``masked`` sequences train nothing."""
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=sequence.prompt.token_ids,
            seed=index,
            sampling=SamplingParams(max_new_tokens=12, temperature=0.9),
        )
        for index, sequence in enumerate(sequences(0))
    ]
    told: dict = {
        "completions": [list(c.token_ids) for c in group.generate(requests)],
        "metrics": [],
        "scores": [],
    }
    actor = setup.config.actor_rollout_ref.actor
    for step in range(STEPS):
        sampled = sequences(step)
        old = [scored.logprobs for scored in group.old_logprobs(sampled)]
        ref = [s.logprobs for s in group.ref_logprobs(sampled)] if actor.use_kl_loss else None
        advantages = [(-1.0) ** index * (0.5 + index / 7) for index in range(len(sampled))]
        training = training_sequences(
            sampled, advantages, old_logprobs=old, ref_logprobs=ref, rollout_weights=None
        )
        training = [
            _masked(sequence) if index < masked else sequence for index, sequence in enumerate(training)
        ]
        report = group.update(training)
        told["metrics"].append(report.metrics)
        told["scores"].append([*old, *(ref or []), *(s.logprobs for s in report.scores if s is not None)])
        proof = group.sync_weights()
        assert proof.matches
        assert proof.weights_version == report.weights_version
        if step == 0:
            group.save_checkpoint(folder / "first")
    told["after"] = [list(c.token_ids) for c in group.generate(requests)]
    told["version"] = group.weights_version
    group.save_checkpoint(folder / "last")
    return told


def _masked(sequence):
    from dataclasses import replace

    return replace(sequence, loss_mask=(False,) * len(sequence.loss_mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuild:
    """A command: build this rank anew, so that one process group serves many configurations."""

    setup: RankSetup
    num_ranks: int

    def run(self, worker: RankWorker) -> None:
        place = Place(rank=worker.rank, num_ranks=self.num_ranks, local_device=0, meeting="env://")
        worker.__init__(self.setup, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """A command: on rank 1 the engine never gets one of the weights, nor, until then, does anybody notice."""

    name: str

    def run(self, worker: RankWorker) -> None:
        if worker.rank == 1:
            worker.rollout = Forgetful(worker.rollout.engine, self.name)


class Forgetful(RolloutWorker):
    def __init__(self, engine, name):
        super().__init__(engine)
        self._name = name
        self._old = dict(engine_tensors(engine))[name].detach().clone()

    def load_weights(self, named_tensors, *, version):
        sent = {name: tensor.clone() for name, tensor in named_tensors}
        sent[self._name] = self._old
        super().load_weights(sent.items(), version=version)


def engine_tensors(engine):
    return engine._model.named_parameters(remove_duplicate=False)


def run_cases(transport, folder: Path, num_ranks: int) -> dict:
    told = {}
    for case in json.loads((folder / "cases.json").read_text()):
        setup = setup_of(case["model"], case["overrides"], num_ranks)
        transport.call([Rebuild(setup=setup, num_ranks=num_ranks)] * num_ranks)
        group = RankedGroup(transport, setup)
        told[case["name"]] = three_steps(group, setup, folder / case["name"], masked=case["masked"])
    transport.call([Forget(name="model.norm.weight")] * num_ranks)
    sampled = sequences(0)
    old = [scored.logprobs for scored in group.old_logprobs(sampled)]
    group.update(
        training_sequences(
            sampled, range(len(sampled)), old_logprobs=old, ref_logprobs=None, rollout_weights=None
        )
    )
    try:
        group.sync_weights()
    except WeightSyncError as error:
        told["forgotten"] = str(error)
    return told


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(rank: int, num_ranks: int, port: int) -> dict:
    """As torchrun sets it."""
    here = str(Path(__file__).parent)
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
    }


def spawn(command: list[str], num_ranks: int, *, timeout: float = 400) -> list[subprocess.CompletedProcess]:
    """Start one process per rank as torchrun does, and end the others soon after one has ended."""
    port = free_port()
    processes = [
        subprocess.Popen(
            command,
            env=environment(rank, num_ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [p.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def main(folder: Path) -> None:
    from trainfer.workers.torchrun_group import TorchrunTransport, serve

    launched = launched_by_torchrun()
    assert launched is not None
    if launched.rank:
        serve(launched, "cpu")
    else:
        first = json.loads((folder / "cases.json").read_text())[0]
        setup = setup_of(first["model"], first["overrides"], launched.num_ranks)
        transport = TorchrunTransport(setup, launched, folder)
        told = run_cases(transport, folder, launched.num_ranks)
        transport.close()
        (folder / "told.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
