"""Reads what ``trainfer plan`` is pointed at into a question: a YAML file, a launch script, overrides, or none.

Nothing is executed and nothing is written. A model folder's ``config.json`` is looked at for its
attention heads where it is at hand.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from trainfer.config.launch_script import Launch, LaunchWord, read_launch_script
from trainfer.config.override_records import OverrideKind
from trainfer.config.quick_overrides import parse_overrides_quickly
from trainfer.config.settings import OVERRIDE, Settings
from trainfer.errors import ConfigError
from trainfer.plan import keys
from trainfer.plan.question import Entry, ModelShape, NotStatic, Question

MAX_CONFIG_BYTES = 1024 * 1024
_STOCK = re.compile(r"verl[./]trainer[./]main_ppo(?:_v0)?(?:\.py)?$")
_YAML_ENDINGS = (".yaml", ".yml", ".json")
_CONFIG_OPTIONS = {
    "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path", "--config-name": "name", "-cn": "name",
}  # fmt: skip
_STOCK_CONFIG = re.compile(r"ppo(?:_megatron)?_trainer(?:\.yaml)?")


def read_question(
    path: Path | None,
    overrides: Sequence[str],
    *,
    variables: Mapping[str, str],
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Question:
    """Read an input.

    Args:
        path: A YAML file or a launch script; None for overrides on the defaults.
        overrides: In Hydra's grammar; for a script they are its ``"$@"``.
        variables: The environment, ``--env`` included.
        heads: Attention heads; beat those of a model folder, as ``kv_heads`` does.
        kv_heads: Key-value heads.

    Raises:
        ConfigError: unreadable input, or an override that is not of the grammar.
    """
    parsed = [Entry.of(override, source=OVERRIDE) for override in parse_overrides_quickly(overrides)]
    if path is None:
        question = Question(entries=parsed, environment=variables, variables=variables)
    elif is_yaml(path):
        question = Question(
            entries=[*_yaml_entries(path), *parsed], environment=variables, variables=variables
        )
    else:
        question = _script_question(path, overrides, variables)
    model = _model(question, path)
    if heads is not None or kv_heads is not None:
        model = model or ModelShape()
        model = replace(model, heads=heads or model.heads, key_value_heads=kv_heads or model.key_value_heads)
    return replace(question, model=model)


def question_of_settings(settings: Settings, *, variables: Mapping[str, str]) -> Question:
    """The question that a loaded training configuration asks; every value that somebody set."""
    entries = [
        Entry(key=key, value=setting.value, source=setting.source, from_command=False)
        for key, setting in settings.given().items()
    ]
    return Question(entries=entries, environment=variables, variables=variables)


def is_file(path: Path) -> bool:
    """True for a file that is there; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_yaml(path: Path) -> bool:
    """By its ending; any other file is a launch script."""
    return path.suffix.lower() in _YAML_ENDINGS


def _yaml_entries(path: Path) -> Iterator[Entry]:
    from trainfer.config.yaml_file import read_yaml  # noqa: PLC0415 - launch scripts start without a YAML parser

    for leaf in read_yaml(path, dotted_keys=True):
        if leaf.key.split(".")[0] in ("defaults", "hydra", "model_engine"):
            continue  # Hydra's own sections
        yield Entry(key=leaf.key, value=leaf.value, source=f"{path}:{leaf.line}", from_command=False)


def _script_question(path: Path, overrides: Sequence[str], variables: Mapping[str, str]) -> Question:
    script = read_launch_script(path, arguments=overrides, variables=variables)
    launch, notes = script.launch, list(script.notes)
    words, options = _without_options(launch)
    megatron = "name" in options and "megatron" in options["name"].text
    entries = _named_config(path, options, notes)
    if launch.program == "trainfer":
        words = list(words)
        entries += _config_of_train(path, words, notes)
    for word in words:
        source = OVERRIDE if word.is_argument else f"{path}:{word.line}"
        entry = _entry(word, source, notes)
        if entry is None:
            continue
        if entry.key == "model_engine":
            megatron = megatron or entry.value == "megatron"
        else:
            entries.append(entry)
    return Question(
        entries=entries,
        environment=launch.environment,
        variables=launch.environment,
        notes=notes,
        megatron=megatron,
        other_trainer=None if launch.program == "trainfer" or _STOCK.search(launch.target) else launch.target,
    )


def _without_options(launch: Launch) -> tuple[Sequence[LaunchWord], dict[str, LaunchWord]]:
    """Words that are no options of Hydra's, and its options that name a configuration."""
    words: list[LaunchWord] = []
    options: dict[str, LaunchWord] = {}
    waiting: str | None = None
    for word in launch.words:
        name, equals, value = word.text.partition("=")
        if waiting is not None:
            options[waiting], waiting = word, None
        elif name in _CONFIG_OPTIONS and equals:
            options[_CONFIG_OPTIONS[name]] = replace(word, text=value)
        elif name in _CONFIG_OPTIONS:
            waiting = _CONFIG_OPTIONS[name]
        elif word.text and not word.text.startswith("-"):
            words.append(word)
    return words, options


def _named_config(path: Path, options: Mapping[str, LaunchWord], notes: list[str]) -> list[Entry]:
    """Entries of a configuration of the user's own that Hydra is pointed at, where it is at hand."""
    name, folder = options.get("name"), options.get("path")
    if name is None or _STOCK_CONFIG.fullmatch(name.text):
        return []
    file = f"{name.text.removesuffix('.yaml')}.yaml"
    if name.unknown is None and (folder is None or folder.unknown is None):
        inside = Path(folder.text) if folder is not None else Path()
        for candidate in (inside / file, path.parent / inside / file):
            if is_file(candidate):
                return list(_yaml_entries(candidate))
    notes.append(
        f"{path}:{name.line}: the configuration {name.text} is not at hand; the stock defaults are taken"
    )
    return []


def _config_of_train(path: Path, words: list[LaunchWord], notes: list[str]) -> list[Entry]:
    """Entries of the YAML file that ``trainfer train`` is given; relative to here, else to the script."""
    if not words or "=" in words[0].text:
        return []
    named = words.pop(0)
    for candidate in (Path(named.text), path.parent / named.text):
        if named.unknown is None and is_file(candidate):
            return list(_yaml_entries(candidate))
    notes.append(f"{path}:{named.line}: {named.text} is not at hand; its values are not known")
    return []


def _entry(word: LaunchWord, source: str, notes: list[str]) -> Entry | None:
    name, equals, _ = word.text.partition("=")
    bare = name.lstrip("+~")
    if "\N{REPLACEMENT CHARACTER}" in name or (word.unknown is not None and not equals):
        notes.append(f"{source}: an argument is not known: {word.unknown}")
        return None
    if word.unknown is not None:
        kind = OverrideKind.FORCE_ADD if name.startswith("+") else OverrideKind.CHANGE
        return Entry(key=bare, value=NotStatic(why=word.unknown), source=source, kind=kind)
    if "@" in bare or "/" in bare:
        notes.append(f"{source}: the configuration group {bare[:80]} is not followed")
        return None
    try:
        return Entry.of(parse_overrides_quickly([word.text])[0], source=source)
    except ConfigError as error:
        notes.append(f"{source}: {error}")
        return None


def _model(question: Question, path: Path | None) -> ModelShape | None:
    """From the model folder's ``config.json``, where there is one that can be read."""
    folder = next((e.value for e in reversed(question.entries) if e.key == keys.MODEL_PATH), None)
    if not isinstance(folder, str) or not folder or "\0" in folder or len(folder) > 1024:
        return None
    places = [Path(folder)] if path is None else [Path(folder), path.parent / folder]
    for place in places:
        found = _shape_in(place / "config.json")
        if found is not None:
            return found
    return None


def _shape_in(file: Path) -> ModelShape | None:
    try:
        if not file.is_file() or file.stat().st_size > MAX_CONFIG_BYTES:
            return None
        document: object = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    config = cast("dict[str, object]", document)
    inner = config.get("text_config")
    if "num_attention_heads" not in config and isinstance(inner, dict):
        config = cast("dict[str, object]", inner)
    heads, width = _count(config.get("num_attention_heads")), _count(config.get("hidden_size"))
    return ModelShape(
        layers=_count(config.get("num_hidden_layers")),
        width=width,
        inner_width=_count(config.get("intermediate_size")),
        heads=heads,
        key_value_heads=_count(config.get("num_key_value_heads")) or heads,
        head_size=_count(config.get("head_dim")) or (width // heads if width and heads else None),
        vocabulary=_count(config.get("vocab_size")),
        tied_embeddings=config.get("tie_word_embeddings") is True,
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
