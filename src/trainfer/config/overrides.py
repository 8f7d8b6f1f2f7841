"""Overrides of the command line in Hydra's grammar, parsed by Hydra itself.

Takes strings such as ``a.b=3``, ``+a.b=[1,2]``, ``++a.b={c: 1}``, ``~a.b``; gives ``Override``s. Sweeps
(``a=1,2``), config groups and packages are refused: one run has one value a key.
"""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from trainfer.config.override_records import Override, OverrideKind
from trainfer.errors import ConfigError

MAX_CHARACTERS = 16 * 1024


_KINDS = {
    OverrideType.CHANGE: OverrideKind.CHANGE,
    OverrideType.ADD: OverrideKind.ADD,
    OverrideType.FORCE_ADD: OverrideKind.FORCE_ADD,
    OverrideType.DEL: OverrideKind.DELETE,
}


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Parse overrides in order.

    Raises ConfigError, with the override, for one that is not of the grammar, is a sweep, names a config
    group or package, or is longer than 16 KiB.
    """
    parser = OverridesParser.create()
    return [_parse(parser, text) for text in texts]


def _parse(parser: OverridesParser, text: str) -> Override:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"override {shown!r}: longer than {MAX_CHARACTERS} characters.")
    if text.startswith("-"):
        raise ConfigError(
            f"override {shown!r}: options go before the configuration file, overrides are key=value."
        )
    try:
        parsed = parser.parse_override(text)
        value: object = parsed.value()
    except (HydraException, ValueError) as error:
        raise ConfigError(f"override {shown!r}: {_reason(text, error)}") from error
    except RecursionError:
        raise ConfigError(f"override {shown!r}: nested too deeply.") from None
    _refuse_groups_and_sweeps(parsed, shown)
    assert parsed.type is not None, "Hydra gives every override a type"
    return Override(
        kind=_KINDS[parsed.type],
        key=parsed.key_or_group,
        value=value,
        has_value=parsed.value_type is not None,
        text=text,
    )


def _refuse_groups_and_sweeps(parsed: HydraOverride, shown: str) -> None:
    if parsed.package is not None or "/" in parsed.key_or_group:
        raise ConfigError(
            f"override {shown!r}: config groups and packages are not used here; write section.key=value."
        )
    if "" in parsed.key_or_group.split("."):
        raise ConfigError(f"override {shown!r}: the key has an empty part between dots.")
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {shown!r}: a sweep over several values; one run has one value. "
            "For a list write key=[a,b]; for text with a comma put quotes inside: 'key=\"a,b\"'."
        )


def _reason(text: str, error: Exception) -> str:
    first_line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    if "=" not in text:
        return "expected key=value, +key=value, ++key=value or ~key."
    return (
        f"not in Hydra's grammar ({first_line}). Put quotes inside around special characters: 'key=\"a b\"'."
    )
