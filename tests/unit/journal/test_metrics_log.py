import json
import math
import resource
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.errors import RunFolderError
from trainfer.train.journal.metrics import MetricsLog, decode_line, encode_line, read_metrics

names = st.text(min_size=1, max_size=12).filter(lambda name: name not in ("step", "non_finite"))


@settings(deadline=None)
@given(
    st.integers(0, 2**40),
    st.dictionaries(names, st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**62), 2**62)),
)
def test_every_number_reads_back_to_the_same_bits_from_strict_json(step, metrics):
    line = encode_line(step, metrics)
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert line.count(b"\n") == 1
    read_step, read = decode_line(line)
    assert read_step == step
    assert {name: repr(value) for name, value in read.items()} == {
        name: repr(value) for name, value in metrics.items()
    }


def test_a_nan_is_null_and_named():
    assert encode_line(3, {"a": float("nan"), "b": 0.1, "c": -math.inf}) == (
        b'{"step": 3, "a": null, "b": 0.1, "c": null, "non_finite": {"a": "nan", "c": "-inf"}}\n'
    )


def write(path, steps, *, after=0):
    log = MetricsLog(path, resumed_step=after)
    for step in steps:
        log.append(step, {"loss": step / 3})
    log.close()


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
    write(tmp_path / "whole", range(1, 8))
    write(tmp_path / "cut", range(1, 6))
    with (tmp_path / "cut").open("ab") as file:
        file.write(b'{"step": 6, "lo')  # killed in the middle of a line
    write(tmp_path / "cut", range(4, 8), after=3)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_new_start_without_checkpoint_begins_an_empty_file_and_says_what_it_costs(tmp_path, caplog):
    write(tmp_path / "log", range(1, 4))
    assert caplog.messages == []
    write(tmp_path / "log", [1])
    assert caplog.messages == [
        "3 step(s) after step 0 are in no checkpoint; their metrics are removed and they are trained again."
    ]
    assert [step for step, _ in read_metrics(tmp_path / "log")] == [1]


def test_a_torn_last_line_costs_no_other_step(tmp_path):
    write(tmp_path / "log", range(1, 4))
    whole = (tmp_path / "log").read_bytes()
    for cut in range(1, len(encode_line(3, {"loss": 1.0}))):
        (tmp_path / "log").write_bytes(whole[:-cut])
        steps = [step for step, _ in read_metrics(tmp_path / "log")]
        assert steps == ([1, 2, 3] if cut == 1 else [1, 2])


def test_lines_are_visible_at_once(tmp_path):
    log = MetricsLog(tmp_path / "log", resumed_step=0)
    log.append(1, {"loss": 1.0})
    assert len(list(read_metrics(tmp_path / "log"))) == 1
    log.close()


def test_a_full_disk_warns_once_and_loses_no_step(tmp_path, caplog):
    path = tmp_path / "log"
    log = MetricsLog(path, resumed_step=0)
    log.append(1, {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        log.append(2, {"loss": 2.0})
        log.append(3, {"loss": 3.0})
        assert [step for step, _ in read_metrics(path)] == [1]
        assert path.read_bytes().endswith(b"\n"), "no half line"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    log.append(4, {"loss": 4.0})
    log.close()
    assert [step for step, _ in read_metrics(path)] == [1, 2, 3, 4]
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"{}", b'{"step": true}', b'{"step": "1"}', b"\xff\xfe", b"[" * 100_000, b"null", b"NaN"],
)
def test_damaged_lines_are_left_out(line):
    assert decode_line(line) is None


def test_a_huge_line_without_end_is_read_in_pieces(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * 9_000_000 + b"\n" + encode_line(5, {"a": 1.0}))
    assert [step for step, _ in read_metrics(tmp_path / "log")] == [5]


def test_an_unreadable_file_is_the_users_mistake(tmp_path):
    with pytest.raises(RunFolderError, match="No such file"):
        list(read_metrics(tmp_path / "none"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunFolderError, match="directory"):
        MetricsLog(tmp_path / "folder", resumed_step=0)
