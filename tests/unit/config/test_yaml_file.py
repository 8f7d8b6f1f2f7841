import os

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainfer.config.yaml_file import YamlLeaf, read_yaml
from trainfer.errors import ConfigError


def leaves(path):
    return [(leaf.key, leaf.value, leaf.line) for leaf in read_yaml(path)]


def test_leaves_carry_the_line_of_their_key(write):
    text = "# note\na:\n  b: 1\n  c:\n    - x\n    - y\nd: {}\ne:\n"
    assert leaves(write(text)) == [("a.b", 1, 3), ("a.c", ["x", "y"], 4), ("d", {}, 7), ("e", None, 8)]


def test_numbers_and_dates_read_as_omegaconf_reads_them(write):
    values = [
        leaf.value for leaf in read_yaml(write("a: 1e-6\nb: 1.5\nc: 2024-01-01\nd: on\ne: 0x10\nf: '1'\n"))
    ]
    assert values == [1e-6, 1.5, "2024-01-01", True, 16, "1"]


def test_anchors_and_merges_are_read(write):
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\n"
    assert leaves(write(text)) == [("base.x", 1, 1), ("base.y", 2, 1), ("own.x", 1, 1), ("own.y", 3, 4)]


def test_a_byte_order_mark_is_no_content(write):
    assert read_yaml(write(b"\xef\xbb\xbfa: 1\n")) == [YamlLeaf(key="a", value=1, line=1)]


def bomb():
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("a: 1\n\tb: 2\n", ":2: not valid YAML"),
        ("- a\n- b\n", "not a mapping but a list"),
        ("hello\n", "not a mapping but a single value"),
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", ":4: the key a.b is given twice, first in line 2"),
        (bomb(), "once aliases (*name) are expanded"),
        ("a: &a [*a]\n", "levels deep"),
        ("a: " + "[" * 5000, "levels deep"),
        ("a: " + "{b: " * 100 + "1" + "}" * 100, "levels deep"),
        ("a.b: 1\n", "holds a dot"),
        ("1: a\n", "'1' is not text"),
        ("on: a\n", "'on' is not text"),
        ("? [a]\n: b\n", "is not text"),
        ("a: !!python/object/apply:os.system ['true']\n", "not read"),
        ("a: !!binary aGk=\n", "not read"),
        ("a: !!set {x}\n", "not read"),
        ("a: !!int x\n", "cannot be read"),
        ("a: " + "9" * 10_000, "cannot be read"),
        ("a: *missing\n", "undefined alias"),
        ("a: {<<: 3}\n", "merges mappings only"),
        ("a: 1\n" + "#" * 300_000, "larger than 256 KiB"),
        (b"\x00\x01\x02\xff\xfe", "not UTF-8 text"),
        ("ä: 1".encode("utf-16"), "not UTF-8 text"),
        ("a: é".encode("latin-1"), "not UTF-8 text (byte 3)"),
        (b"PK\x03\x04\x00\x00", "not valid YAML"),
    ],
)
def test_a_damaged_file_is_one_message_that_names_it(write, text, said):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_said_to_be_so(tmp_path):
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "no.yaml", "no such file")):
        with pytest.raises(ConfigError, match=said):
            read_yaml(path)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_yaml(tmp_path / "pipe")


@hypothesis_settings(deadline=None, max_examples=200)
@given(
    data=st.one_of(
        st.binary(max_size=60), st.text(alphabet="ab:-[]{}&*!<>|'\"#%@,? \n\t1.", max_size=60).map(str.encode)
    )
)
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        read_yaml(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017
