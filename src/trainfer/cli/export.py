"""``trainfer export CHECKPOINT OUT``: a checkpoint becomes a folder that Transformers and vLLM load.

Takes a run folder (its newest whole checkpoint) or one ``global_step_N``; gives a new folder, whole or not at
all. An existing folder is touched only with ``--overwrite``, and then only the files of the model in it.
"""

import json
import shutil
import tempfile
from pathlib import Path

import click

from trainfer.errors import CheckpointError
from trainfer.train.journal.checkpoints import CheckpointStore, list_checkpoints, why_damaged

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), help="Cast the weights. Default: the stored bits.")
@click.option("--overwrite", is_flag=True, help="Replace the model in an existing folder OUT.")
@click.option("--adapter", "as_adapter", is_flag=True, help="Write the adapter alone, as PEFT loads it.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Folder of the model that an adapter is merged into. Default: the one that it was trained on.",
)
def command(
    checkpoint: Path, out: Path, *, dtype: str | None, overwrite: bool, as_adapter: bool, base: Path | None
) -> None:
    """Write CHECKPOINT as a Hugging Face folder OUT.

    CHECKPOINT is RUN/checkpoints/global_step_N, or RUN for its newest whole checkpoint; or global_step_N of a run of
    verl with FSDP workers, whose shards are read without executing the pickles that they are in. A LoRA adapter is merged
    into its base model, or written alone with --adapter.
    """
    source = find_checkpoint(checkpoint)
    size = export_checkpoint(source, out, dtype=dtype, overwrite=overwrite, as_adapter=as_adapter, base=base)
    click.echo(f"{source} -> {out}: {size / 1e6:,.1f} MB of weights.")
    if as_adapter:
        click.echo(f"Load it: PeftModel.from_pretrained(base_model, {json.dumps(str(out))})")
        return
    click.echo(f"Load it: AutoModelForCausalLM.from_pretrained({json.dumps(str(out))})")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means, every file of it verified.

    Raises:
        CheckpointError: there is none, or the one that was named is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give RUN/checkpoints/global_step_N, or RUN for its newest checkpoint."
        )
    from trainfer.train.update.checkpoint_export import holds_checkpoint_of_verl

    if holds_checkpoint_of_verl(path):
        return path
    newest_of_verl = _newest_of_verl(path)
    if newest_of_verl is not None:
        return newest_of_verl
    if path.name.startswith("global_step_"):
        reason = why_damaged(path)
        if reason is not None:
            raise CheckpointError(f"{path} is damaged: {reason}. {_others(path)}")
        return path
    store = path if path.name == "checkpoints" else path / "checkpoints"
    found = CheckpointStore(store, keep=None).newest()
    if found is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint. trainer.save_freq=N writes one every N steps and at the end."
        )
    return found.folder


def _newest_of_verl(run: Path) -> Path | None:
    """The checkpoint that verl's own note names; None where there is no such note."""
    note = run / "latest_checkpointed_iteration.txt"
    try:
        step = note.read_text(encoding="utf-8")[:20].strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not step.isdecimal() or not (run / f"global_step_{step}").is_dir():
        raise CheckpointError(
            f"{note} names step {step!r}, which is not there. Give the folder global_step_N itself."
        )
    return run / f"global_step_{step}"


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None,
    overwrite: bool,
    as_adapter: bool = False,
    base: Path | None = None,
) -> int:
    """Write ``checkpoint`` to ``out``; returns the bytes of its weights.

    Raises:
        CheckpointError: ``out`` is in use, or something cannot be read or written.
    """
    _check_out(out, overwrite=overwrite)
    import torch

    from trainfer.train.update.checkpoint_export import write_adapter, write_model_folder

    dtypes: dict[str, torch.dtype] = dict(
        zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True)
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise CheckpointError(f"Cannot write beside {out}: {error.strerror}. Name another folder.") from error
    try:
        wanted = None if dtype is None else dtypes[dtype]
        size = (
            write_adapter(checkpoint, temporary, dtype=wanted)
            if as_adapter
            else write_model_folder(checkpoint, temporary, dtype=wanted, base=base)
        )
        _publish(temporary, out)
    except OSError as error:
        raise CheckpointError(f"Cannot write {out}: {error}. Name another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


def _check_out(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is an existing file. Name another folder.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise CheckpointError(f"{out} exists and is not empty. Name another folder or give --overwrite.")


def _publish(temporary: Path, out: Path) -> None:
    """Weights go first and come last: a model that is half replaced must not load."""
    temporary.chmod(0o755)
    if not out.exists() or not any(out.iterdir()):
        temporary.rename(out)
        return
    for stale in [*out.glob("*model*.safetensors"), *out.glob("model.safetensors.index.json")]:
        stale.unlink()
    for path in sorted(temporary.iterdir(), key=lambda path: path.name.startswith("model")):
        path.replace(out / path.name)


def _others(path: Path) -> str:
    others = [folder.name for _, folder in list_checkpoints(path.parent) if folder != path]
    return f"Others there: {', '.join(others[-5:])}." if others else "There is no other one beside it."
