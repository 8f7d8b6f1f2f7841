"""The keys explained: as text for ``trainfer train --help``, as Markdown for ``docs/configuration.md``.

Everything is taken from the schema. ``python -m trainfer.config.document FILE`` writes the page.
"""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trainfer.config.keys import REQUIRED, Key, known_keys, sections
from trainfer.config.problems import find_entry, nearest_key
from trainfer.config.unsupported_table import UNSUPPORTED
from trainfer.errors import ConfigError

_INTRODUCTION = """\
# Configuration

A run is described by a YAML file and overrides on the command line:

    trainfer train run.yaml data.train_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-5

Keys have verl's names and meanings; keys of trainfer's own are under `trainfer`. This page is generated
from the schema by `python -m trainfer.config.document docs/configuration.md`.

- **Where a value comes from.** Defaults, then the file, then overrides in their order; the later wins.
  Every value remembers its source and what it beat: see `config.yaml` in the run folder.
- **Overrides** have Hydra's grammar: `key=value`, `+key=value`, `++key=value` (the last two are the same
  here), `~key` (back to the default). Lists are `key=[a,b]`. Sweeps, config groups and packages are refused.
- **Interpolation.** `${section.key}` is another key, `${oc.env:NAME}` or `${oc.env:NAME,default}` an
  environment variable, `${oc.decode:text}` reads a number out of text, `${config_dir:}` is the folder of the
  YAML file. The value that results is written to the run folder: keep secrets out.
- **Unknown keys** are an error that names the nearest known key. A key of verl's that training does not
  honour is refused with a sentence (last section); values with which verl itself does nothing may stand.
- **null** as a default often means "follows another key", as the description says; `config.yaml` in the run
  folder shows what it came to.
"""


def markdown() -> str:
    """The page ``docs/configuration.md``."""
    parts = [_INTRODUCTION]
    for section, keys in keys_by_section():
        parts.append(f"## `{section}`\n\n{sections()[section]}\n")
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(_row(key) for key in keys) + "\n")
    parts.append(
        "## Keys of verl's that training does not honour\n\n"
        "`*` stands for any further name. A value in the second column may stand, without effect; entries that\n"
        "refuse single values of an honoured key name them.\n"
    )
    parts.append("| key | may stand | refused | why, and what to use |\n|---|---|---|---|")
    for entry in UNSUPPORTED:
        columns = (f"`{entry.pattern}`", _values(entry.harmless), _values(entry.refused), entry.sentence)
        parts.append("| " + " | ".join(_cell(column) for column in columns) + " |")
    return "\n".join(parts) + "\n"


def help_text(*, width: int = 100) -> str:
    """All keys by section, as plain text."""
    lines: list[str] = []
    for section, keys in keys_by_section():
        lines += ["", f"{section}: {sections()[section]}"]
        for key in keys:
            lines += _paragraph(key, width=width)
    return "\n".join(lines).strip("\n")


def help_key(name: str, *, width: int = 100) -> str:
    """One key, or every key of one section.

    Raises ConfigError for a name that is neither, with the nearest key or the reason why it is not honoured.
    """
    lines = _paragraph(known_keys()[name], width=width, full=True) if name in known_keys() else []
    if name in sections():
        lines.append(f"{name}: {sections()[name]}")
        for key in known_keys().values():
            if key.name.startswith(f"{name}."):
                lines += _paragraph(key, width=width, full=True)
    if lines:
        return "\n".join(lines)
    entry = find_entry(name)
    if entry is not None:
        raise ConfigError(f"{name} is not honoured by training: {entry.sentence}")
    near = nearest_key(name)
    raise ConfigError(f"{name}: unknown key." + (f" Did you mean {near}?" if near else ""))


def keys_by_section() -> Iterator[tuple[str, list[Key]]]:
    """Each section that has keys of its own, with them, in schema order."""
    for section in sections():
        own = [key for key in known_keys().values() if key.name.rsplit(".", 1)[0] == section]
        if own:
            yield section, own


def _paragraph(key: Key, *, width: int, full: bool = False) -> list[str]:
    name = key.name if full else key.name.rsplit(".", 1)[-1]
    head = f"  {name} ({key.rule}; {_default(key)})"
    return [
        *textwrap.wrap(head, width, subsequent_indent=" " * 6),
        *textwrap.wrap(key.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6),
    ]


def _row(key: Key) -> str:
    default = "required" if key.default is REQUIRED else f"`{_plain(key.default)}`"
    columns = (f"`{key.name.rsplit('.', 1)[-1]}`", key.rule, default, key.description)
    return "| " + " | ".join(_cell(column) for column in columns) + " |"


def _default(key: Key) -> str:
    return "required" if key.default is REQUIRED else f"default {_plain(key.default)}"


def _plain(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _values(values: object) -> str:
    words = [f"`{_plain(value)}`" for value in msgspec.convert(values, list[object])]
    return ", ".join(words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page to the file named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m trainfer.config.document FILE")
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
