"""Reads a launch script (bash) statically: which training it would launch, with which overrides.

Takes a path, the caller's overrides (the script's ``"$@"``) and variables; gives the launch command
with the line of every word. A real bash grammar finds the structure; nothing is ever executed, no
other file is read, and all expansions are bounded. What cannot be known keeps its line and reason.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from trainfer.config.launch_script_run import Runner, SimpleCommand
from trainfer.config.launch_script_state import OutOfBudget, ScriptState, ScriptWord
from trainfer.errors import ConfigError

MAX_BYTES = 256 * 1024
_MODULE = re.compile(r"^(?:verl|recipe|verl\.recipe)\.[\w.]*\bmain(?:_\w+)?$")
_FILE = re.compile(r"(?:^|/)(?:verl|recipe)/[\w./-]*main(?:_\w+)?\.py$|(?:^|/)main_(?:ppo|dapo)\w*\.py$")
_NOT_TRAINING = re.compile(r"main_(?:generation|eval|merge|opd_?eval)\w*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchWord:
    """One word of the command line that configures the training."""

    text: str
    line: int
    is_argument: bool
    """True for the caller's own override, handed on by ``"$@"``."""
    unknown: str | None
    """Why some part of the word is not known; its text then holds U+FFFD in that place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The training that a script launches."""

    program: str
    """``verl`` or ``trainfer``."""
    target: str
    """The module, file or sub-command."""
    line: int
    words: tuple[LaunchWord, ...]
    """What follows the target."""
    environment: Mapping[str, str]
    """Exported variables and prefixes, over the caller's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchScript:
    """What is known of a script."""

    launch: Launch
    notes: tuple[str, ...]


def read_launch_script(
    path: Path, *, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> LaunchScript:
    """Find the launch of a script.

    Args:
        path: The script.
        arguments: Overrides; where the script has no ``"$@"`` they are put at the end.
        variables: The environment in which it would run, ``--env`` included.

    Raises:
        ConfigError: unreadable, not text, or nothing is launched that can be planned.
    """
    source = _read(path)
    state = ScriptState(name=str(path), arguments=arguments, variables=variables or {})
    parser = Parser(Language(tree_sitter_bash.language()))

    def parse(text: bytes) -> Node:
        return parser.parse(text).root_node

    runner = Runner(state, parse)
    try:
        runner.run(parse(source))
    except OutOfBudget as error:
        state.note(0, f"{error}; the rest is not read")
    except RecursionError:
        state.note(0, "nested too deeply; the rest is not read")
    return _chosen(state, runner.commands, arguments)


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a regular file; expected a launch script.")
        with path.open("rb") as file:
            source = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. Expected a launch script or a YAML configuration."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB; not a launch script.")
    if b"\0" in source:
        raise ConfigError(f"{path}: holds NUL bytes; not a text file.")
    return source.replace(b"\r\n", b"\n")


def _chosen(state: ScriptState, commands: Sequence[SimpleCommand], arguments: Sequence[str]) -> LaunchScript:
    """The first launch that is certain to run, else the first at all; the others are named."""
    launches = [launch for command in commands if (launch := _launch(state, command)) is not None]
    if not launches:
        ran = ", ".join(sorted({_shown(command.words[0].text) for command in commands})[:8])
        raise ConfigError(
            f"{state.name}: launches no training that can be planned (looked for `python3 -m verl.trainer.main_ppo` and "
            f"`trainfer train`); it runs {ran or 'nothing'}."
            + "".join(f"\n  {note}" for note in state.notes[:10])
        )
    certain = [launch for launch, is_certain in launches if is_certain]
    launch = certain[0] if certain else launches[0][0]
    for other, _ in launches:
        if other is not launch and other.line != launch.line:
            state.note(other.line, f"also launches {other.target}; the one in line {launch.line} is planned")
    given = [word for word in launch.words if word.is_argument]
    if arguments and not given:
        more = tuple(LaunchWord(text=text, line=0, is_argument=True, unknown=None) for text in arguments)
        state.note(launch.line, 'the script does not hand on "$@"; the overrides are put at the end')
        launch = Launch(
            program=launch.program,
            target=launch.target,
            line=launch.line,
            words=(*launch.words, *more),
            environment=launch.environment,
        )
    return LaunchScript(launch=launch, notes=tuple(state.notes))


def _launch(state: ScriptState, command: SimpleCommand) -> tuple[Launch, bool] | None:
    texts = [word.text for word in command.words]
    found = _target(texts)
    if found is None:
        return None
    program, target, rest = found
    environment = dict(command.environment)
    for text in texts[: rest - 1]:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier() and "\0" not in value:
            environment[name] = value
    return (
        Launch(
            program=program,
            target=target,
            line=command.line,
            words=tuple(_word(state, word) for word in command.words[rest:]),
            environment=environment,
        ),
        command.is_certain,
    )


def _target(texts: Sequence[str]) -> tuple[str, str, int] | None:
    """Program, target and the index of the first word after it."""
    for position, text in enumerate(texts):
        following = texts[position + 1] if position + 1 < len(texts) else ""
        if text == "-m" and _MODULE.match(following) and not _NOT_TRAINING.search(following):
            return "verl", following, position + 2
        if (
            text == "-m"
            and following in ("trainfer", "trainfer.cli.main")
            and texts[position + 2 : position + 3] == ["train"]
        ):
            return "trainfer", "train", position + 3
        if text.rsplit("/", 1)[-1] == "trainfer" and following == "train":
            return "trainfer", "train", position + 2
        runs_python = any(
            re.search(r"(?:python[\d.]*|torchrun|launch|run)$", earlier) for earlier in texts[:position]
        )
        if runs_python and _FILE.search(text) and not _NOT_TRAINING.search(text.removesuffix(".py")):
            return "verl", text, position + 1
    return None


def _word(state: ScriptState, word: ScriptWord) -> LaunchWord:
    return LaunchWord(
        text=_shown(word.text), line=word.line, is_argument=word.is_argument, unknown=state.reason(word.text)
    )


def _shown(text: str) -> str:
    return re.sub("\0[US]\\d+\0", "\N{REPLACEMENT CHARACTER}", text)
