"""Checksum of a blob: fast enough to be taken of everything, sure to see a flipped bit.

Takes bytes; gives 8 hex digits. The bytes are cut into blocks of 32 KiB, each block's little-endian
64-bit words are summed modulo 2**64, and CRC-32 is taken of the sums, the up to 7 last bytes and the
length. CRC-32 of everything would cost ten times as much. Not cryptographic.
"""

import struct
import zlib

import numpy as np

_BLOCK_WORDS = 4096


def checksum(data: np.ndarray | bytes | bytearray | memoryview) -> str:
    """Checksum of contiguous bytes; equal bytes give equal text on every machine."""
    octets = np.frombuffer(data, dtype=np.uint8)
    num_words = octets.size // 8
    words = octets[: num_words * 8].view("<u8")
    whole = num_words // _BLOCK_WORDS * _BLOCK_WORDS
    sums = words[:whole].reshape(-1, _BLOCK_WORDS).sum(axis=1, dtype=np.uint64)
    rest = words[whole:].sum(dtype=np.uint64)
    crc = zlib.crc32(sums.astype("<u8").tobytes())
    crc = zlib.crc32(struct.pack("<Q", int(rest)), crc)
    crc = zlib.crc32(octets[num_words * 8 :].tobytes(), crc)
    crc = zlib.crc32(struct.pack("<Q", octets.size), crc)
    return f"{crc:08x}"
