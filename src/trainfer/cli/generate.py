"""``trainfer generate SOURCE --prompt TEXT``: sample responses from a model, a checkpoint or a run.

Takes prompts as text; gives responses as text or JSON, from the engine that training samples with. A response
depends on its prompt, its number and the seed alone.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from trainfer.cli.model_source import as_folder, find_model
from trainfer.errors import ConfigError, ModelError
from trainfer.types import Completion, GenerationRequest, Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ENGINES = ("builtin", "hf")
MAX_NEW_TOKENS = 256
"""Unless the command line says otherwise, or the model has room for fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to sample."""

    prompts: tuple[str, ...]
    system: str | None
    raw: bool
    """The prompts are text as it stands, not chat messages."""
    samples_per_prompt: int
    seed: int
    shortened: bool
    """Responses may be as short as the model's positions make them."""


@click.command("generate")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-p", "--prompt", "prompts", multiple=True, required=True, help="What the user says; may be repeated."
)
@click.option("--system", help="System message before it.")
@click.option("--raw", is_flag=True, help="Continue the text as it stands, without the chat template.")
@click.option(
    "-n", "samples", type=click.IntRange(min=1), default=1, show_default=True, help="Responses per prompt."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help=f"Default: {MAX_NEW_TOKENS}, or what the model has room for.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0 is greedy."
)
@click.option("--top-k", type=click.IntRange(min=-1), default=-1, show_default=True, help="-1: all tokens.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--min-p", type=click.FloatRange(min=0, max=1), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--engine", type=click.Choice(ENGINES), default="builtin", show_default=True)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True)
@click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16")), help="Default: bfloat16 on a GPU, else float32."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: text, tokens, log-probs, why each ended.")
def command(
    source: Path,
    *,
    prompts: tuple[str, ...],
    system: str | None,
    raw: bool,
    samples: int,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    engine: str,
    device: str,
    dtype: str | None,
    as_json: bool,
) -> int:
    """Sample responses from SOURCE.

    SOURCE is a model folder, a run folder (its newest checkpoint), a checkpoint, or a configuration file.
    """
    if top_k == 0:
        raise ConfigError("--top-k 0 leaves no token to draw; use -1 for all, or a positive number.")
    if raw and system is not None:
        raise ConfigError("--system is a chat message and --raw uses no chat template; give one of them.")
    wanted = Wanted(
        prompts=prompts,
        system=system,
        raw=raw,
        samples_per_prompt=samples,
        seed=seed,
        shortened=max_new_tokens is None,
    )
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens or MAX_NEW_TOKENS,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    found = find_model(source)
    with tempfile.TemporaryDirectory(prefix="trainfer-") as scratch:
        answers = sample(
            as_folder(found, Path(scratch)), wanted, sampling, engine=engine, device=device, dtype=dtype
        )
    if as_json:
        answer = {"schema": "trainfer.generate/1", "model": found.describe(), "responses": answers}
        click.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    else:
        _print(answers)
    return 0


def sample(
    folder: Path, wanted: Wanted, sampling: SamplingParams, *, engine: str, device: str, dtype: str | None
) -> list[dict[str, object]]:
    """Load the model, sample, and describe each response."""
    from trainfer.engines.registry import make_engine
    from trainfer.integrations.transformers.generation import stop_token_ids
    from trainfer.integrations.transformers.load import load_tokenizer
    from trainfer.train.rollout.sample import plan_rollout

    tokenizer = load_tokenizer(folder)
    prompts = [_prompt(index, text, wanted, tokenizer) for index, text in enumerate(wanted.prompts)]
    model = _load(folder, device=device, dtype=dtype)
    if wanted.shortened:
        sampling = replace(sampling, max_new_tokens=_fitting(sampling.max_new_tokens, prompts, model))
    plan = plan_rollout(
        prompts,
        samples_per_prompt=wanted.samples_per_prompt,
        sampling=replace(sampling, stop_token_ids=stop_token_ids(folder, tokenizer)),
        run_seed=wanted.seed,
        step=0,
    )
    _check_room(plan.requests, model)
    completions = make_engine(engine, model=model).generate(plan.requests)
    texts = [tokenizer.decode(list(c.token_ids), skip_special_tokens=True) for c in completions]
    return [
        _describe(
            wanted.prompts[number // wanted.samples_per_prompt], number % wanted.samples_per_prompt, *pair
        )
        for number, pair in enumerate(zip(completions, map(str, texts), strict=True))
    ]


def _prompt(index: int, text: str, wanted: Wanted, tokenizer: "PreTrainedTokenizerBase") -> Prompt:
    system = () if wanted.system is None else (Message(role="system", content=wanted.system),)
    messages = (*system, Message(role="user", content=text))
    if wanted.raw:
        token_ids = tokenizer(text)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ModelError("the tokenizer has no chat template; give --raw to continue the text as it stands.")
    else:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        token_ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    assert isinstance(token_ids, list)
    if not token_ids:
        raise ModelError(f"the prompt {text!r} has no token; give some text.")
    return Prompt(
        index=index,
        data_source="",
        messages=messages,
        token_ids=tuple(cast("list[int]", token_ids)),
        ground_truth="",
    )


def _load(folder: Path, *, device: str, dtype: str | None) -> "PreTrainedModel":
    import torch

    from trainfer.integrations.transformers.load import load_model

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use cpu, or see `trainfer doctor`.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = dtype or ("bfloat16" if device == "cuda" else "float32")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return load_model(folder, dtype=dtypes[chosen], device=device)


def _fitting(max_new_tokens: int, prompts: Sequence[Prompt], model: "PreTrainedModel") -> int:
    """As many tokens as fit behind the longest prompt, at least one."""
    room = model.config.get_text_config().max_position_embeddings - max(len(p.token_ids) for p in prompts)
    return max(1, min(max_new_tokens, room))


def _check_room(requests: Sequence[GenerationRequest], model: "PreTrainedModel") -> None:
    limit = model.config.get_text_config().max_position_embeddings
    longest = max(len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests)
    if longest > limit:
        raise ConfigError(
            f"a prompt and its response may have {longest} tokens, and the model knows {limit} positions; "
            f"lower --max-new-tokens by {longest - limit} or shorten the prompt."
        )


def _describe(prompt: str, number: int, completion: Completion, text: str) -> dict[str, object]:
    return {
        "prompt": prompt,
        "sample": number,
        "text": text,
        "finish_reason": completion.finish_reason.value,
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
    }


def _print(answers: list[dict[str, object]]) -> None:
    for answer in answers:
        if len(answers) > 1:
            click.echo(f"--- {answer['prompt']} [{answer['sample']}]")
        click.echo(answer["text"])
        if answer["finish_reason"] == "length":
            click.echo("(cut off at --max-new-tokens)", err=True)
