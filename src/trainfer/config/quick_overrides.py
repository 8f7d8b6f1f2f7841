"""Overrides of the plainest form, parsed without Hydra; all others go to Hydra's own parser.

``a.b=3``, ``+a.b=true``, ``a.b=./data/train.parquet``: one whole number, ``true``/``false``/``null``, or
one word. Loading Hydra takes longer than a whole plan, and nearly every launch script holds
nothing else. A test compares both parsers.
"""

import re
from collections.abc import Sequence

from trainfer.config.override_records import Override, OverrideKind

_PLAIN = re.compile(r"(\+{0,2})([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)=([^\s]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_WORDS = {"true": True, "false": False, "null": None}
_NOT_WORDS = re.compile(r"(?i)^(?:true|false|null|nan|inf|[.0-9]+e?[-0-9]*)$")
_KINDS = {"": OverrideKind.CHANGE, "+": OverrideKind.ADD, "++": OverrideKind.FORCE_ADD}


def parse_overrides_quickly(texts: Sequence[str]) -> list[Override]:
    """Like ``parse_overrides``, with the same results and errors; Hydra is loaded only where it is needed."""
    quick = [_plain(text) for text in texts]
    if all(override is not None for override in quick):
        return [override for override in quick if override is not None]
    from trainfer.config.overrides import parse_overrides  # noqa: PLC0415 - loads Hydra, and only some need it

    return [
        override if override is not None else parse_overrides([text])[0]
        for override, text in zip(quick, texts, strict=True)
    ]


def _plain(text: str) -> Override | None:
    match = _PLAIN.fullmatch(text) if len(text) < 4096 else None
    if match is None:
        return None
    sign, key, written = match.groups()
    lowered = written.lower()
    if _NUMBER.fullmatch(written):
        value: object = int(written)
    elif lowered in _WORDS:
        value = _WORDS[lowered]
    elif _WORD.fullmatch(written) and not _NOT_WORDS.match(written):
        value = written
    else:
        return None
    return Override(kind=_KINDS[sign], key=key, value=value, has_value=True, text=text)
