"""Runs one step of a plan on one or several ranks and tells what each rank did; draws random plans.

Runs as a script too: ``plan_counts.py FOLDER RANKS SECONDS`` starts ranks, which run one step of every plan of
``FOLDER/plans.json`` in the same processes and write ``FOLDER/told.json``.
"""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from rank_cases import Rebuild, environment, free_port
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfer.config.load import load_config
from trainfer.errors import PlanError
from trainfer.exact.plan import PackedPlan
from trainfer.exact.ulysses import UlyssesPlan
from trainfer.integrations.transformers.characters import character_tokenizer
from trainfer.integrations.transformers.load import save_model, tiny_model
from trainfer.plan.step import plan_step
from trainfer.run import run_steps
from trainfer.workers.build import build_local_group
from trainfer.workers.group import WorkerGroup
from trainfer.workers.inputs import Inputs
from trainfer.workers.launched import Launched, launched_by_torchrun
from trainfer.workers.rank import Command, Generate, RankSetup, RankWorker, Score, Transport, Update
from trainfer.workers.ranked_group import RankedGroup
from trainfer.workers.session import open_session
from trainfer.workers.torchrun_group import TorchrunTransport, serve

A = "actor_rollout_ref"
KEYS = {
    "G": "trainer.n_gpus_per_node", "T": "data.train_batch_size", "n": f"{A}.rollout.n",
    "M": f"{A}.actor.ppo_mini_batch_size", "E": f"{A}.actor.ppo_epochs", "kl": f"{A}.actor.use_kl_loss",
    "SP": f"{A}.actor.ulysses_sequence_parallel_size", "fsdp": f"{A}.actor.fsdp_config.fsdp_size",
    "m": f"{A}.actor.ppo_micro_batch_size_per_gpu", "tokens": f"{A}.actor.ppo_max_token_len_per_gpu",
    "L": f"{A}.rollout.log_prob_micro_batch_size_per_gpu", "Ltokens": f"{A}.rollout.log_prob_max_token_len_per_gpu",
    "Lref": f"{A}.ref.log_prob_micro_batch_size_per_gpu", "reftokens": f"{A}.ref.log_prob_max_token_len_per_gpu",
    "balance": "trainer.balance_batch", "shuffle": f"{A}.actor.shuffle", "top_k": f"{A}.rollout.top_k",
    "top_p": f"{A}.rollout.top_p", "kl_reward": "algorithm.use_kl_in_reward",
    "bypass": "algorithm.rollout_correction.bypass_mode", "weights": "algorithm.rollout_correction.rollout_is",
}  # fmt: skip
"""Short names of the sizes."""
WORDS = (
    "ab",
    "abc",
    "ca",
    "dcba",
    "bc" * 8,
    "cb",
    "adbc" * 4,
    "da",
    "a",
    "bdca",
    "ac" * 5,
    "db",
    "dd",
    "cab",
    "b",
    "abc" * 2,
)
GENERATE, OLD, REF, UPDATE, OTHER = "generate", "old_logprobs", "ref_logprobs", "update", "other"


def prepare(folder: Path) -> None:
    """A model with 4 heads and 2 key/value heads, and 16 prompts of 4 to 19 tokens."""
    save_model(
        tiny_model("qwen3", vocab_size=len(tokenizer := character_tokenizer(WORDS)), hidden_size=16, intermediate_size=16, num_layers=1),
        folder / "model",
        tokenizer=tokenizer,
    )  # fmt: skip
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index},
        }
        for index, word in enumerate(WORDS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def overrides(prepared: Path, run: Path, sizes: dict[str, Any]) -> list[str]:
    """A run of these sizes, of which one step is wanted: the longest sequence has 20 + 8 tokens."""
    return [
        f"data.train_files={prepared / 'train.parquet'}", f"{A}.model.path={prepared / 'model'}",
        f"trainer.default_local_dir={run}", "data.max_prompt_length=20", "data.max_response_length=8",
        "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainfer.exact=false",
        f"{A}.actor.fsdp_config.dtype=fp32", f"{A}.rollout.dtype=fp32",
        *(f"{KEYS[name]}={json.dumps(value)}" for name, value in sizes.items()),
    ]  # fmt: skip


def draw(dice: random.Random, num_ranks: int) -> dict[str, Any]:
    """Sizes, legal or not."""

    def limit(size: str, tokens: str) -> dict[str, int]:
        return (
            {size: dice.randint(1, 6)}
            if dice.random() < 0.5
            else {tokens: dice.choice((16, 28, 45, 90, 300))}
        )

    prompts = dice.randint(1, 8)
    return {
        "G": num_ranks,
        "T": prompts,
        "n": dice.randint(1, 5),
        "M": dice.choice((prompts, dice.randint(1, prompts))),
        "E": dice.choice((1, 1, 2)),
        "SP": dice.choice((1, 1, 2)),
        "fsdp": dice.choice((-1, 1, 2, 4)),
        **limit("m", "tokens"),
        **limit("L", "Ltokens"),
        **limit("Lref", "reftokens"),
        "balance": dice.random() < 0.5,
        "shuffle": dice.random() < 0.5,
        **dice.choice(({}, {"kl": True}, {"kl": True}, {"kl_reward": True})),
        **dice.choice(
            ({}, {}, {"top_k": 0}, {"top_k": 3}, {"top_p": 0.9}, {"bypass": True}, {"weights": "token"})
        ),
    }


def draw_plans(
    seed: int, num_ranks: int, count: int, prepared: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``count`` legal ones, and the illegal ones that came before."""
    dice = random.Random(f"{seed}/{num_ranks}")
    legal, refused = [], []
    while len(legal) < count:
        sizes = draw(dice, num_ranks)
        try:
            plan_step(load_config(None, overrides(prepared, prepared / "run", sizes)).config)
        except PlanError:
            refused.append(sizes)
        else:
            legal.append(sizes)
    return legal, refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that a rank did."""

    stage: str
    what: str
    """``completions``, ``forward``, ``backward`` or ``optimizer step``."""
    lengths: tuple[int, ...] = ()
    """Tokens of each completion, or of each sequence of a forward."""
    rows: int = 0
    """Of a forward on this rank, dummies included."""
    digest: str = ""
    """Of a forward's tokens, all ranks' rows together."""


@contextmanager
def observed(stage: str) -> Iterator[list[Event]]:
    """What happens in this process inside; the forwards of an engine that generates are its own business."""
    events: list[Event] = []

    def on_forward(
        module: torch.nn.Module, _arguments: object, named: dict[str, Any], _output: object
    ) -> None:
        if stage != GENERATE and type(module).__name__.endswith("ForCausalLM"):
            plan = named["attention_plan"]
            plan = plan.whole if isinstance(plan, UlyssesPlan) else plan
            assert isinstance(plan, PackedPlan)
            layout = plan.layout
            lengths = tuple(sequence.length for sequence in layout.sequences)
            digest = hashlib.sha256(repr(layout.token_ids).encode()).hexdigest()
            rows = named["input_ids"].shape[1]
            events.append(Event(stage=stage, what="forward", lengths=lengths, rows=rows, digest=digest))

    backward = torch.Tensor.backward

    def on_backward(*arguments: Any, **named: Any) -> None:
        events.append(Event(stage=stage, what="backward"))
        backward(*arguments, **named)

    def on_step(*_: object) -> None:
        events.append(Event(stage=stage, what="optimizer step"))

    handles = [
        register_module_forward_hook(on_forward, with_kwargs=True),
        register_optimizer_step_post_hook(on_step),
    ]
    torch.Tensor.backward = on_backward
    try:
        yield events
    finally:
        torch.Tensor.backward = backward
        for handle in handles:
            handle.remove()


def recorded(stage: str, work: Callable[[], Any]) -> tuple[Any, list[Event]]:
    with observed(stage) as events:
        answer = work()
    if stage == GENERATE:
        lengths = tuple(len(completion.token_ids) for completion in answer)
        events.append(Event(stage=stage, what="completions", lengths=lengths))
    return answer, events


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A command: another one, observed."""

    command: Command[Any]

    def run(self, worker: RankWorker) -> tuple[Any, list[Event]]:
        return recorded(self._stage(), lambda: self.command.run(worker))

    def _stage(self) -> str:
        match self.command:
            case Generate():
                return GENERATE
            case Score(with_ref=with_ref):
                return REF if with_ref else OLD
            case Update():
                return UPDATE
            case _:
                return OTHER


class ObservingTransport:
    """Another one, which stays open; keeps what each rank did."""

    def __init__(self, transport: Transport, num_ranks: int) -> None:
        self._transport = transport
        self.ranks: list[list[Event]] = [[] for _ in range(num_ranks)]

    def call(self, commands: Sequence[Command[Any]]) -> list[Any]:
        told = self._transport.call([Observed(command=command) for command in commands])
        for rank, (_, events) in zip(self.ranks, told, strict=True):
            rank.extend(events)
        return [answer for answer, _ in told]

    def close(self) -> None:
        pass


def observe_local(group: WorkerGroup) -> list[Event]:
    """What a group of one rank does from now on."""
    events: list[Event] = []

    def observe(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            answer, seen = recorded(stage, lambda: method(*arguments, **named))
            events.extend(seen)
            return answer

        return call

    for name, stage in (
        ("generate", GENERATE), ("old_logprobs", OLD), ("ref_logprobs", REF), ("update", UPDATE), ("sync_weights", OTHER),
    ):  # fmt: skip
        setattr(group, name, observe(stage, getattr(group, name)))
    return events


class Ranks:
    """The processes of one launch; makes one group after another on them. Unlaunched: this process alone."""

    def __init__(self, folder: Path, launched: Launched | None) -> None:
        self._folder = folder
        self._launched = launched
        self._transport: Transport | None = None
        self.told: list[list[Event]] = []
        """What each rank of the latest group did."""

    def group(self, inputs: Inputs, model_folder: Path) -> WorkerGroup:
        if self._launched is None:
            local = build_local_group(inputs, model_folder)
            self.told = [observe_local(local)]
            return local
        num_ranks = self._launched.num_ranks
        assert inputs.plan.num_ranks == num_ranks
        setup = RankSetup(
            config=inputs.config,
            plan=inputs.plan,
            model_folder=model_folder,
            total_steps=inputs.total_steps,
            device_type="cpu",
        )
        if self._transport is None:
            self._transport = TorchrunTransport(setup, self._launched, self._folder)
        else:
            self._transport.call([Rebuild(setup=setup, num_ranks=num_ranks)] * num_ranks)
        observing = ObservingTransport(self._transport, num_ranks)
        self.told = observing.ranks
        return RankedGroup(observing, setup)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def run(self, arguments: list[str]) -> dict[str, Any]:
        """One step; what its run folder's plan says and what each rank did."""
        with open_session(load_config(None, arguments), make_group=self.group) as session:
            next(iter(run_steps(session)))
            document = json.loads((session.journal.folder.path / "plan.json").read_text())
        return {
            "derived": document["derived"],
            "step": document["step"],
            "tensors": document["tensors"],
            "ranks": [[asdict(event) for event in events] for events in self.told],
        }


def run_plans(folder: Path, launched: Launched | None) -> None:
    """One step of each configuration in ``FOLDER/plans.json``, which holds lists of overrides."""
    ranks = Ranks(folder, launched)
    told = [ranks.run(arguments) for arguments in json.loads((folder / "plans.json").read_text())]
    ranks.close()
    (folder / "told.json").write_text(json.dumps(told))


def be_rank(folder: Path, rank: int, num_ranks: int, port: int) -> None:
    os.environ |= environment(rank, num_ranks, port)
    launched = launched_by_torchrun()
    assert launched is not None
    if rank:
        serve(launched, "cpu")
    else:
        run_plans(folder, launched)


def main(folder: Path, num_ranks: int, timeout_s: float) -> int:
    """Ranks in the environment that torchrun would give them, forked: modules are imported once for all."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [
        context.Process(target=be_rank, args=(folder, rank, num_ranks, port)) for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    waiting, deadline = ranks, time.monotonic() + timeout_s
    while waiting and not any(process.exitcode for process in ranks) and time.monotonic() < deadline:
        wait([process.sentinel for process in waiting], deadline - time.monotonic())
        waiting = [process for process in waiting if process.is_alive()]
    for process in waiting:  # a rank has failed, or time is up: they may wait in a collective for ever
        process.kill()
    return 1 if waiting else max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
