"""Microseconds of the library's product and of every Triton tile, at few rows, weights not in the cache.

python benchmarks/gpu/tiles.py
"""

import torch
import torch.nn.functional as F

from trainfer.exact.gpu_linear import LARGE_TILE, SMALL_TILES, Tile, _microseconds, tile_product

MORE = (
    Tile(64, 16, 256, 4, 4), Tile(64, 32, 128, 4, 6), Tile(64, 8, 128, 4, 6), Tile(64, 8, 256, 4, 4),
    Tile(64, 16, 64, 4, 8), Tile(64, 64, 64, 4, 6), Tile(64, 16, 128, 4, 7), Tile(64, 128, 64, 4, 5),
)  # fmt: skip


def main() -> None:
    for outputs, inner in ((1024, 3072), (4096, 1024), (1024, 2048), (6144, 1024), (32000, 1024)):
        for count in (8, 64):
            rows = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)
            weights = [
                torch.randn(outputs, inner, device="cuda", dtype=torch.bfloat16)
                for _ in range(max(2, (1 << 28) // (outputs * inner * 2)))
            ]
            library = _microseconds(lambda w, rows=rows: F.linear(rows, w), weights)
            print(f"{inner}x{outputs}, {count} rows: library {library:.2f} us")
            for tile in (*SMALL_TILES, *MORE, LARGE_TILE):
                ours = _microseconds(
                    lambda w, rows=rows, tile=tile: tile_product(rows, w, None, tile), weights
                )
                print(f"   {tuple(tile)}: {ours:.2f} us")


if __name__ == "__main__":
    main()
