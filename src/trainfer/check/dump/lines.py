"""Records as lines: 8 hex digits of CRC-32, one space, one JSON object, one newline.

Takes records, gives bytes, and back. A line that is torn, too long or changed is told apart
from a whole one, and the lines after it are still read.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO, TypeVar

import msgspec

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is refused: no file can make the reader allocate without bound."""

T = TypeVar("T")
_ENCODER = msgspec.json.Encoder()


def encode_line(record: msgspec.Struct) -> bytes:
    """One record as one line."""
    body = _ENCODER.encode(record)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode_lines(stream: BinaryIO, decoder: msgspec.json.Decoder[T]) -> Iterator[T | str]:
    """The records of a file, in order; for a line that cannot be read, a sentence saying why."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                yield f"line {number} is longer than {MAX_LINE_BYTES} bytes; the rest of the file is not read"
            else:
                yield f"line {number} is torn: the writer was stopped in the middle of it"
            return
        yield _decode_line(line, number, decoder)


def _decode_line(line: bytes, number: int, decoder: msgspec.json.Decoder[T]) -> T | str:
    crc, body = line[:8], line[9:-1]
    if line[8:9] != b" " or crc != b"%08x" % zlib.crc32(body):
        return f"line {number} is damaged: its checksum does not fit"
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"line {number} is not a record of this format: {error}"
