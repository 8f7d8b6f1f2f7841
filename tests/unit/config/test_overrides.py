import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainfer.config.load import apply_override
from trainfer.config.overrides import OverrideKind, parse_overrides
from trainfer.config.settings import SettingsBuilder
from trainfer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "key", "value"),
    [
        ("a.b=3", OverrideKind.CHANGE, "a.b", 3),
        ("+a.b=1e-6", OverrideKind.ADD, "a.b", 1e-6),
        ("++a=true", OverrideKind.FORCE_ADD, "a", True),
        ("a=null", OverrideKind.CHANGE, "a", None),
        ("a=", OverrideKind.CHANGE, "a", ""),
        ("a=hello world", OverrideKind.CHANGE, "a", "hello world"),
        ("a='x,y=1'", OverrideKind.CHANGE, "a", "x,y=1"),
        ("a=[1,'b c',[2]]", OverrideKind.CHANGE, "a", [1, "b c", [2]]),
        ("a={b: 1, c: {d: x}}", OverrideKind.CHANGE, "a", {"b": 1, "c": {"d": "x"}}),
        ("a=${b.c}", OverrideKind.CHANGE, "a", "${b.c}"),
        ("a=/tmp/x-1.parquet", OverrideKind.CHANGE, "a", "/tmp/x-1.parquet"),
        ("a=int(3.0)", OverrideKind.CHANGE, "a", 3),
    ],
)
def test_hydra_grammar(text, kind, key, value):
    (override,) = parse_overrides([text])
    assert (override.kind, override.key, override.value) == (kind, key, value)


def test_deletion_with_and_without_value():
    bare, valued = parse_overrides(["~a.b", "~a.b=3"])
    assert (bare.kind, bare.has_value) == (OverrideKind.DELETE, False)
    assert (valued.value, valued.has_value) == (3, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=1,2", "a sweep over several values"),
        ("a=range(1,3)", "a sweep"),
        ("db@x=mysql", "config groups and packages"),
        ("data/x=mysql", "config groups"),
        ("a", "expected key=value"),
        ("=3", "an empty part"),
        ("a=[1", "not in Hydra's grammar"),
        ("a={b:", "not in Hydra's grammar"),
        ("a=" + "x" * 20_000, "longer than"),
        ("a=" + "[" * 3000, "override"),
    ],
)
def test_what_is_not_one_value_for_one_key_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_overrides([text])
    assert said in str(caught.value)
    assert len(str(caught.value)) < 700


def build(*texts, file=()):
    builder = SettingsBuilder()
    for key, value in file:
        builder.put(key, value, "f.yaml:1")
    for override in parse_overrides(texts):
        apply_override(builder, override)
    return {key: setting.value for key, setting in builder.build({}).items()}


def test_a_mapping_is_merged_leaf_by_leaf():
    assert build("a={b: 2}", file=[("a.b", 1), ("a.c", 3)]) == {"a.b": 2, "a.c": 3}
    assert build("a={}", file=[("a.b", 1)]) == {"a.b": 1}


def test_a_scalar_beats_the_section_and_a_key_beats_the_scalar():
    assert build("a=null", file=[("a.b", 1)]) == {"a": None}
    assert build("a.b=1", file=[("a", None)]) == {"a.b": 1}


def test_deleting_what_is_not_there_or_holds_another_value_is_an_error():
    assert build("~a", file=[("a.b", 1), ("c", 2)]) == {"c": 2}
    assert build("~a=1", file=[("a", 1)]) == {}
    for text, said in (("~x", "nothing to delete"), ("~a=2", "holds 1 (f.yaml:1)"), ("~x=2", "is not set")):
        with pytest.raises(ConfigError) as caught:
            build(text, file=[("a", 1)])
        assert said in str(caught.value)


@hypothesis_settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="ab.=+~[]{},:'\"$()\\ 1@/", max_size=20))
def test_any_text_is_an_override_or_a_config_error(text):
    try:
        build(text)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
