"""Four prompts in verl's parquet layout: make_data.py OUT.parquet."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number + 2} + {number + 5}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number + 7)},
        "extra_info": {"index": number, "split": "train"},
    }
    for number in range(4)
]
pq.write_table(pa.Table.from_pylist(ROWS), sys.argv[1])
