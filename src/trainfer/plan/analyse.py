"""A question in, a plan out: settings with verl's or trainfer's defaults, numbers, problems, suggestions."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainfer.config.override_records import OverrideKind
from trainfer.config.settings import DEFAULT, Setting, Settings, SettingsBuilder
from trainfer.config.verl_defaults import Release, Unresolved, resolved, verl_defaults
from trainfer.plan import keys
from trainfer.plan.asked import Asked, known, shown
from trainfer.plan.memory import estimate
from trainfer.plan.question import Entry, NotStatic, Question
from trainfer.plan.records import Plan, Problem, Value, ValueRow
from trainfer.plan.rule_sets import RULE_SETS, Rules
from trainfer.plan.shapes import tensors
from trainfer.plan.suggest import needs_cure, run_rules, suggest

RELEASES: dict[Rules, Release] = {"verl-0.6": "0.6.1", "verl-0.9": "0.9.1"}
MAX_NEAREST = 5
_STOCK = "verl's stock configuration"


def analyse(question: Question, rules: Rules | None = None, *, with_suggestions: bool = True) -> Plan:
    """Plan one input under ``rules``, or under the set that its keys fit; remedies take most of the time."""
    chosen, reason = (rules, "asked for") if rules is not None else choose_rules(question)
    rule_set = RULE_SETS[chosen]
    defaults = _defaults(chosen, question)
    settings = _settings(question, defaults)
    values = _resolved_values(settings, question)
    asked = _asked(values, settings, question)
    if chosen == "trainfer":
        from trainfer.plan.schema import schema_problems  # noqa: PLC0415 - verl's rules start without the schema

        structural = [*schema_problems(settings)]
    else:
        structural = [*_structural_problems(question, defaults)]
    structural += _unknown_values(asked, values, settings)
    found = run_rules(rule_set.rules, asked)
    curable = with_suggestions and any(map(needs_cure, found))
    if curable and not any(problem.severity == "error" for problem in structural):
        remedies = tuple(suggest(asked, rule_set.rules))
        found = [replace(p, suggestions=remedies) if needs_cure(p) else p for p in found]
    settled = rule_set.settled(asked)
    return Plan(
        rules=chosen,
        system=rule_set.system,
        reason=reason,
        values=_rows(values, settings),
        derived=rule_set.derived(asked),
        problems=(*structural, *found),
        alignment=rule_set.alignment(settled, _environment(question, values)),
        tensors=tensors(chosen, asked),
        memory=estimate(question.model, settled),
        notes=(
            *question.notes,
            *_general_notes(asked, chosen),
            *(known(lambda: tuple(rule_set.notes(asked))) or ()),
        ),
    )


def choose_rules(question: Question) -> tuple[Rules, str]:
    """The rule set that the keys fit: trainfer's by its own keys, else verl 0.9 unless only 0.6 knows a key."""
    if any(entry.key.split(".")[0] == "trainfer" for entry in question.entries):
        return "trainfer", "the input has keys of trainfer's own"
    misfits: dict[Rules, list[str]] = {}
    for rules in RELEASES:
        defaults = _defaults(rules, question)
        misfits[rules] = [e.key for e in question.entries if not _fits(e, defaults)]
    if any(entry.key == keys.MODE and entry.value == "sync" for entry in question.entries):
        misfits["verl-0.9"].append(f"{keys.MODE}=sync")
    if len(misfits["verl-0.6"]) < len(misfits["verl-0.9"]):
        only = [key for key in misfits["verl-0.9"] if key not in misfits["verl-0.6"]]
        return "verl-0.6", f"verl 0.9 does not have {only[0]}" + (
            f" and {len(only) - 1} more" if len(only) > 1 else ""
        )
    if len(misfits["verl-0.9"]) < len(misfits["verl-0.6"]):
        only = [key for key in misfits["verl-0.6"] if key not in misfits["verl-0.9"]]
        return "verl-0.9", f"verl 0.6 does not have {only[0]}" + (
            f" and {len(only) - 1} more" if len(only) > 1 else ""
        )
    return "verl-0.9", "the keys fit both verl releases; the newer is taken (--rules verl-0.6 for the older)"


def _defaults(rules: Rules, question: Question) -> dict[str, object]:
    if rules == "trainfer":
        from trainfer.plan.schema import schema_defaults  # noqa: PLC0415 - verl's rules start without the schema

        return schema_defaults()
    megatron = question.megatron or any(
        entry.key == keys.STRATEGY and entry.value == "megatron" for entry in question.entries
    )
    return verl_defaults(RELEASES[rules], megatron=megatron)


def _settings(question: Question, defaults: Mapping[str, object]) -> Settings:
    builder = SettingsBuilder()
    for entry in question.entries:
        if entry.kind is OverrideKind.DELETE:
            builder.delete(entry.key)
        else:
            builder.put(entry.key, entry.value, entry.source)
    return builder.build(defaults)


def _resolved_values(settings: Settings, question: Question) -> dict[str, object]:
    """Every value; a reference that cannot be followed becomes :class:`NotStatic`."""
    raw = {key: setting.value for key, setting in settings.items()}
    values: dict[str, object] = {}
    for key, setting in settings.items():
        try:
            values[key] = resolved(raw, key, question.variables)
        except Unresolved as error:
            values[key] = NotStatic(why=f"{error} in {setting.source}")
    return values


def _asked(values: Mapping[str, object], settings: Settings, question: Question) -> Asked:
    plain: dict[str, Value] = {}
    unknown: set[str] = set()
    for key in keys.ALL:
        value = values.get(key)
        if isinstance(value, NotStatic) or value == "???":
            unknown.add(key)
        elif value is None or isinstance(value, (str, int, float, bool)):
            if key in values:
                plain[key] = value
        else:
            plain[key] = str(value)[:80]
    return Asked(
        values=plain,
        unknown=frozenset(unknown),
        given=frozenset(key for key in keys.ALL if key in settings and settings[key].source != DEFAULT),
        attention_heads=None if question.model is None else question.model.heads,
        key_value_heads=None if question.model is None else question.model.key_value_heads,
    )


def _fits(entry: Entry, defaults: Mapping[str, object]) -> bool:
    """Hydra's rule: a key exists, or is added with ``+``; below an open mapping everything exists."""
    if entry.kind in (OverrideKind.ADD, OverrideKind.FORCE_ADD):
        return True
    return entry.key in defaults or _inside(entry.key, defaults)


def _inside(key: str, defaults: Mapping[str, object]) -> bool:
    """True for a section, and for a key below a mapping or list that is empty by default."""
    if any(name.startswith(f"{key}.") for name in defaults):
        return True
    parts = key.split(".")
    return any(isinstance(defaults.get(".".join(parts[:length])), dict) for length in range(1, len(parts)))


def _structural_problems(question: Question, defaults: Mapping[str, object]) -> Iterator[Problem]:
    nearest_shown = 0
    for entry in question.entries:
        if not _fits(entry, defaults):
            hint = ""
            if nearest_shown < MAX_NEAREST:
                nearest_shown += 1
                near = difflib.get_close_matches(entry.key, defaults, n=1, cutoff=0.75)
                hint = f" Did you mean {near[0]}?" if near else ""
            other = question.other_trainer
            yield Problem(
                severity="error" if other is None else "warning",
                when="config",
                code="unknown_key",
                keys=(entry.key,),
                message=f"{entry.key} ({entry.source}) is not a key of {_STOCK if other else 'this system'}."
                + (f" {other} may have it." if other else hint)
                + (" A new key is added with +key=value." if entry.from_command else ""),
                upstream_message=f"Could not override '{entry.key}'.\nTo append to your config use "
                f"+{entry.key}={_plain(entry.value)}"
                if entry.from_command
                else None,
            )
        elif entry.kind is OverrideKind.ADD and defaults.get(entry.key) is not None and entry.from_command:
            yield Problem(
                severity="error",
                when="config",
                code="key_exists_already",
                keys=(entry.key,),
                message=f"+{entry.key} ({entry.source}) adds a key that exists; write {entry.key}=… or ++{entry.key}=….",
                upstream_message=f"Could not append to config. An item is already at '{entry.key}'.",
            )


def _plain(value: object) -> str:
    return shown(value) if value is None or isinstance(value, (str, int, float, bool)) else str(value)[:80]


def _unknown_values(asked: Asked, values: Mapping[str, object], settings: Settings) -> Iterator[Problem]:
    for key in keys.ALL:
        value = values.get(key)
        if key in asked.unknown and isinstance(value, NotStatic) and settings[key].source != DEFAULT:
            yield Problem(
                severity="warning",
                when="config",
                code="value_not_known",
                keys=(key,),
                message=f"{key} ({settings[key].source}) cannot be known without running something: {value.why}. "
                "Numbers that need it are left open; give it as an override, or its variable with --env NAME=VALUE.",
            )


def _rows(values: Mapping[str, object], settings: Settings) -> dict[str, ValueRow]:
    """Every value that was set, and every key that batch arithmetic reads."""
    wanted = [key for key, setting in settings.items() if setting.source != DEFAULT]
    wanted += [key for key in keys.ALL if key in settings and settings[key].source == DEFAULT]
    return {key: _row(values[key], settings[key]) for key in wanted}


def _row(value: object, setting: Setting) -> ValueRow:
    unknown = value.why if isinstance(value, NotStatic) else None
    return ValueRow(
        value=None if unknown is not None else value,
        source=setting.source,
        beaten=tuple(f"{_plain(loser.value)} ({loser.source})" for loser in setting.beaten),
        unknown=unknown,
    )


def _environment(question: Question, values: Mapping[str, object]) -> dict[str, str]:
    prefix = "ray_kwargs.ray_init.runtime_env.env_vars."
    from_config = {
        key.removeprefix(prefix): str(value) for key, value in values.items() if key.startswith(prefix)
    }
    return {**question.environment, **from_config}


def _general_notes(asked: Asked, rules: Rules) -> Iterator[str]:
    if rules == "trainfer":
        return
    if keys.ENGINE in asked.unknown and keys.ENGINE not in asked.given:
        yield f"{keys.ENGINE} is not set; verl has no default for it (vllm or sglang)."
    if asked.values.get(keys.KL_LOSS) is True and asked.values.get(keys.KL_REWARD) is True:
        yield "verl notices: You have both enabled in-reward kl and kl loss."
    if asked.values.get(keys.VAL) is not None:
        yield f"{keys.VAL} is deprecated: validation sets are sent to the engines as a whole."
