"""What is written is read back, whole, damaged or cut short."""

import json
import pickle
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from trainfer.check.dump.checksum import checksum
from trainfer.check.dump.folder import claim, rank_folder, read_manifest, read_manifests, rewrite, shard_name
from trainfer.check.dump.lines import encode_line
from trainfer.check.dump.reader import DamagedRecordError, Dump
from trainfer.check.dump.records import SCHEMA, Manifest, Role, SequenceRecord, Task, TensorRecord
from trainfer.check.dump.tensors import DTYPE_NAMES, load_tensor, rows_first
from trainfer.check.dump.writer import DumpWriter, WriterLimits
from trainfer.errors import DumpError


def manifest(**changes: object) -> Manifest:
    blank = Manifest(
        schema=SCHEMA,
        side="train",
        run_id="r",
        launch_id="l",
        rank=0,
        world_size=1,
        ranks=None,
        created="2025-01-01T00:00:00Z",
        finished=None,
        complete=False,
        incomplete_reasons=(),
        capture={},
        config={},
        model_class="M",
        model_config={},
        model_dtype="F32",
        modules=(),
        versions={},
        seed=None,
        counts={},
    )
    return msgspec.structs.replace(blank, **changes)


def put(
    writer: DumpWriter, number: int, tensor: torch.Tensor, *, step: int = 0, pass_name: str = "update"
) -> None:
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    room, ref = writer.reserve(step, pass_name, str(number), dtype, shape, tensor.nbytes)
    room[:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else room
    record = TensorRecord(
        id=number,
        task=Task.TENSOR,
        step=step,
        pass_name=pass_name,
        call=0,
        module="model",
        occurrence=0,
        function=None,
        role=Role.OUTPUT,
        name="0",
        dtype=dtype,
        shape=shape,
        row_dims=(),
        table=-1,
        device="cpu",
        requires_grad=False,
    )
    writer.put(step, pass_name, record, ref)


def write(folder: Path, tensors: list[torch.Tensor], limits: WriterLimits | None = None) -> DumpWriter:
    claim(folder, manifest(), leader=0)
    writer = DumpWriter(rank_folder(folder, 0), limits=limits)
    for number, tensor in enumerate(tensors):
        put(writer, number, tensor, pass_name="prefill" if number % 3 else "decode")
    writer.close()
    return writer


SMALL = WriterLimits(chunk_bytes=4096, inflight_bytes=16384, shard_bytes=40_000)


def test_every_dtype_and_odd_shape_comes_back_bit_for_bit(tmp_path: Path):
    torch.manual_seed(0)
    tensors = [(torch.randn(3, 5) * 4).to(dtype) for dtype in DTYPE_NAMES if dtype is not torch.bool]
    tensors += [
        torch.tensor([True, False]),
        torch.tensor(2.0),
        torch.empty(0, 4),
        torch.randn(3000),
        torch.tensor([float("nan")]),
    ]
    tensors += [torch.tensor([1.0, -2.5, 0.15625], dtype=torch.bfloat16)]
    write(tmp_path / "d", tensors, SMALL)
    dump = Dump(tmp_path / "d")
    read = [load_tensor(dump, 0, record) for record in dump.tensors(0)]
    assert [tensor.dtype for tensor in read] == [tensor.dtype for tensor in tensors]
    for ours, theirs in zip(read, tensors, strict=True):
        assert ours.shape == theirs.shape
        assert (
            ours.numpy(force=True).tobytes() == theirs.numpy().tobytes()
            if theirs.dtype in (torch.float32, torch.int64)
            else True
        )
        assert (
            torch.equal(ours.reshape(-1).view(torch.uint8), theirs.contiguous().reshape(-1).view(torch.uint8))
            or not theirs.numel()
        )
    assert dump.problems == ()


def test_a_closed_shard_is_plain_safetensors(tmp_path: Path):
    tensors = [torch.full((7,), float(number)) for number in range(9)]
    write(tmp_path / "d", tensors)
    with safe_open(tmp_path / "d/rank0/step0/prefill-0000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("4"), tensors[4])
        assert sorted(file.keys()) == ["1", "2", "4", "5", "7", "8"]


def test_shards_roll_when_full_and_every_one_is_valid(tmp_path: Path):
    tensors = [torch.full((900,), float(number)) for number in range(60)]
    write(tmp_path / "d", tensors, SMALL)
    shards = sorted((tmp_path / "d/rank0/step0").iterdir())
    assert len(shards) > 4
    names = []
    for shard in shards:
        with safe_open(shard, "pt") as file:
            names += file.keys()
    assert sorted(map(int, names)) == list(range(60))


def test_a_shard_with_many_tiny_tensors_rolls_before_its_header_overflows(tmp_path: Path):
    write(tmp_path / "d", [torch.zeros(1, 1, 1, 1)] * 1500)
    dump = Dump(tmp_path / "d")
    assert sum(1 for _ in dump.tensors(0)) == 1500
    assert len(list((tmp_path / "d/rank0/step0").glob("prefill-*.safetensors"))) > 1


def test_an_unclosed_dump_is_read_up_to_the_last_flush(tmp_path: Path):
    folder = tmp_path / "d"
    claim(folder, manifest(), leader=0)
    writer = DumpWriter(rank_folder(folder, 0))
    put(writer, 0, torch.arange(5))
    writer.flush()
    while writer.bytes_written < 60:
        pass
    while not (folder / "rank0/index.jsonl").read_bytes().endswith(b"\n"):
        pass
    dump = Dump(folder)
    assert [load_tensor(dump, 0, record).tolist() for record in dump.tensors(0)] == [[0, 1, 2, 3, 4]]
    assert not dump.complete
    writer.close()


def test_a_flipped_bit_costs_one_record(tmp_path: Path):
    tensors = [torch.full((100,), float(number)) for number in range(10)]
    write(tmp_path / "d", tensors)
    dump = Dump(tmp_path / "d")
    victim = next(record for record in dump.tensors(0) if record.id == 4)
    assert victim.blob is not None
    shard = tmp_path / "d/rank0" / victim.blob.shard
    data = bytearray(shard.read_bytes())
    data[victim.blob.offset + 17] ^= 0x20
    shard.write_bytes(data)
    readable, reasons = [], []
    for record in dump.tensors(0):
        try:
            load_tensor(dump, 0, record)
            readable.append(record.id)
        except DamagedRecordError as error:
            reasons.append(str(error))
    assert ["checksum" in reason for reason in reasons] == [True]
    assert readable == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_truncated_shard_keeps_the_records_before_the_cut(tmp_path: Path):
    write(tmp_path / "d", [torch.zeros(100)] * 3 + [torch.ones(100)] * 3)
    dump = Dump(tmp_path / "d")
    last = [record for record in dump.tensors(0) if record.pass_name == "prefill"][-1]
    assert last.blob is not None
    shard = tmp_path / "d/rank0" / last.blob.shard
    shard.write_bytes(shard.read_bytes()[: last.blob.offset + 10])
    with pytest.raises(DamagedRecordError, match="ends at byte"):
        load_tensor(dump, 0, last)
    first = next(dump.tensors(0))
    assert load_tensor(dump, 0, first).sum() == 0


@pytest.mark.parametrize("payload", [pickle.dumps({"a": 1}), b"PK\x03\x04" + bytes(50)])
def test_a_pickle_in_place_of_a_shard_is_refused_with_a_sentence(tmp_path: Path, payload: bytes):
    write(tmp_path / "d", [torch.zeros(4)])
    (tmp_path / "d/rank0/step0/decode-0000.safetensors").write_bytes(payload + bytes(70_000))
    dump = Dump(tmp_path / "d")
    with pytest.raises(DamagedRecordError, match=r"pickle or torch\.save"):
        load_tensor(dump, 0, next(dump.tensors(0)))


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/etc/passwd",
        "step0/../../x-0000.safetensors",
        "step0/x-0000.safetensors\n",
        "step0/a b-0000.safetensors",
        "",
    ],
)
def test_a_hostile_shard_name_is_not_opened(tmp_path: Path, name: str):
    write(tmp_path / "d", [torch.zeros(4)])
    index = tmp_path / "d/rank0/index.jsonl"
    record = next(Dump(tmp_path / "d").tensors(0))
    assert record.blob is not None
    hostile = msgspec.structs.replace(record, blob=msgspec.structs.replace(record.blob, shard=name))
    index.write_bytes(encode_line(hostile))
    with pytest.raises(DamagedRecordError, match="is not the name of a shard"):
        load_tensor(Dump(tmp_path / "d"), 0, next(Dump(tmp_path / "d").tensors(0)))


def test_a_symbolic_link_in_place_of_a_shard_is_not_followed(tmp_path: Path):
    write(tmp_path / "d", [torch.zeros(4)])
    shard = tmp_path / "d/rank0/step0/decode-0000.safetensors"
    outside = tmp_path / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    dump = Dump(tmp_path / "d")
    with pytest.raises(DamagedRecordError):
        load_tensor(dump, 0, next(dump.tensors(0)))


@pytest.mark.parametrize(
    ("field", "value"), [("nbytes", 2**50), ("nbytes", -8), ("offset", 0), ("offset", -1)]
)
def test_a_blob_outside_its_file_is_refused_before_memory_is_taken(tmp_path: Path, field: str, value: int):
    write(tmp_path / "d", [torch.zeros(4)])
    dump = Dump(tmp_path / "d")
    record = next(dump.tensors(0))
    assert record.blob is not None
    with pytest.raises(DamagedRecordError):
        dump.read(0, msgspec.structs.replace(record.blob, **{field: value}))


def test_a_damaged_or_torn_line_costs_that_line_and_is_named(tmp_path: Path):
    write(tmp_path / "d", [torch.zeros(2)] * 4)
    index = tmp_path / "d/rank0/index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"step":0', b'"step":7')
    index.write_bytes(b"".join(lines)[:-5])
    dump = Dump(tmp_path / "d")
    assert [record.id for record in dump.tensors(0)] == [0, 2]
    assert [("damaged" in problem, "torn" in problem) for problem in dump.problems] == [
        (True, False),
        (False, True),
    ]


def test_an_unknown_field_is_an_error_of_its_line(tmp_path: Path):
    write(tmp_path / "d", [])

    class Odd(msgspec.Struct, tag="call", tag_field="type"):
        surprise: int

    (tmp_path / "d/rank0/index.jsonl").write_bytes(encode_line(Odd(surprise=1)))
    dump = Dump(tmp_path / "d")
    assert list(dump.index(0)) == []
    assert "not a record of this format" in dump.problems[0]


def test_deeply_nested_json_is_refused(tmp_path: Path):
    write(tmp_path / "d", [])
    (tmp_path / "d/manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(DumpError, match="not the manifest"):
        Dump(tmp_path / "d")


def test_a_used_folder_is_refused_and_its_files_stay(tmp_path: Path):
    write(tmp_path / "d", [torch.ones(3)])
    with pytest.raises(DumpError, match=r"two captures never share a folder.*\{run_id\}"):
        claim(tmp_path / "d", manifest(run_id="other"), leader=0)
    assert load_tensor(Dump(tmp_path / "d"), 0, next(Dump(tmp_path / "d").tensors(0))).tolist() == [1, 1, 1]


def test_ranks_of_one_launch_share_a_folder_and_those_of_another_do_not(tmp_path: Path):
    claim(tmp_path / "d", manifest(world_size=2), leader=0)
    claim(tmp_path / "d", manifest(world_size=2, rank=1), leader=0)
    assert Dump(tmp_path / "d").ranks == (0, 1)
    claim(tmp_path / "e", manifest(world_size=2), leader=0)
    with pytest.raises(DumpError):
        claim(tmp_path / "e", manifest(world_size=2, rank=1, launch_id="later"), leader=0)
    assert Dump(tmp_path / "e").missing_ranks == (1,)


def test_a_rank_that_looks_while_another_one_claims_sees_a_whole_manifest_or_none(tmp_path, monkeypatch):
    seen: list[bool] = []
    replace = Path.replace

    def looked(self: Path, target: Path) -> Path:
        seen.append(Path(target).exists())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", looked)
    claim(tmp_path / "d", manifest(world_size=2), leader=0)
    claim(tmp_path / "d", manifest(world_size=2, rank=1), leader=0)
    assert seen == [False, False]
    assert sorted(read_manifests(tmp_path / "d")) == [0, 1]


def test_a_manifest_is_replaced_as_a_whole(tmp_path: Path):
    claim(tmp_path / "d", manifest(), leader=0)
    rewrite(tmp_path / "d", manifest(complete=True, finished="now"), leader=0)
    assert read_manifest(tmp_path / "d/manifest.json").complete
    assert json.loads((tmp_path / "d/manifest.json").read_text())["schema"] == "trainfer.dump/1"


def test_another_schema_or_no_dump_is_an_error(tmp_path: Path):
    with pytest.raises(DumpError, match="holds no dump"):
        Dump(tmp_path)
    claim(tmp_path / "d", manifest(schema="trainfer.dump/9"), leader=0)
    with pytest.raises(DumpError, match=r"trainfer\.dump/9"):
        Dump(tmp_path / "d")
    with pytest.raises(DumpError):
        Dump(tmp_path / "nowhere")


def test_sequences_keep_their_floats_exactly(tmp_path: Path):
    claim(tmp_path / "d", manifest(), leader=0)
    writer = DumpWriter(rank_folder(tmp_path / "d", 0))
    logprobs = (-0.1, float(np.float32(-0.1)), -1e-45, "-inf")
    record = SequenceRecord(
        index=0, tokens=(1, 2, 3, 4, 5), prompt_length=1, logprobs=logprobs, sampling={"temperature": 0.7, "top_k": -1},
        weights_version=0, step=0, pass_name="decode",
    )  # fmt: skip
    writer.put(0, "decode", record)
    writer.close()
    assert list(Dump(tmp_path / "d").sequences(0)) == [record]


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=1, max_size=80_000), st.data())
def test_the_checksum_sees_every_flipped_bit(data: bytes, draw: st.DataObject):
    place = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << (place % 8)
    assert checksum(data) != checksum(flipped)


def test_the_checksum_is_the_one_in_the_document():
    data = bytes(range(256)) * 200 + b"abc"
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
    blocks = [sum(words[at : at + 4096]) % 2**64 for at in range(0, len(words), 4096)]
    message = b"".join(struct.pack("<Q", value) for value in blocks) + b"abc" + struct.pack("<Q", len(data))
    assert checksum(data) == f"{zlib.crc32(message):08x}"


def test_row_dims_move_to_the_front():
    tensor = torch.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    rows = rows_first(tensor, (0, 2))
    assert rows.shape == (10, 12)
    assert torch.equal(rows[7], tensor[1, :, 2, :].reshape(-1))


def test_shard_names_are_the_documented_ones():
    assert shard_name(3, "old_log_prob", 12) == "step3/old_log_prob-0012.safetensors"
