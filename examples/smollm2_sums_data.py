"""Sums of two numbers for SmolLM2: chat prompts with four worked examples, as parquet in verl's schema.

    pip install reasoning-gym
    python examples/smollm2_sums_data.py OUT_FOLDER

The tasks are reasoning-gym's ``chain_sum`` (two terms of one or two digits, plus and minus); a response is scored by the
scorer of GSM8K: ``#### NUMBER`` exactly. Training and validation share no expression.
"""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import reasoning_gym

SHOTS = (("2 + 5 =", "#### 7"), ("31 - 4 =", "#### 27"), ("12 + 45 =", "#### 57"), ("8 - 9 =", "#### -1"))
SYSTEM = "Answer with #### and the number."


def messages(expression: str) -> list[dict[str, str]]:
    """The conversation up to the question."""
    said = [{"role": "system", "content": SYSTEM}]
    for question, answer in SHOTS:
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*said, {"role": "user", "content": f"{expression} ="}]


def rows(size: int, seed: int, without: set[str]) -> list[dict[str, object]]:
    """``size`` tasks whose expressions are not in ``without`` and differ from one another."""
    tasks = reasoning_gym.create_dataset(
        "chain_sum", size=4 * size, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    answers = {task["metadata"]["expression"]: task["answer"] for task in tasks}
    chosen = [(text, answer) for text, answer in answers.items() if text not in without][:size]
    assert len(chosen) == size, f"only {len(chosen)} different tasks"
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": messages(text),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (text, answer) in enumerate(chosen)
    ]


def main() -> None:
    """Write ``train.parquet`` (2,048 tasks) and ``val.parquet`` (256)."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    held_out = rows(256, 2, set())
    texts = {row["prompt"][-1]["content"].removesuffix(" =") for row in held_out}
    for name, table in (("val", held_out), ("train", rows(2048, 1, texts))):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{name}.parquet")
        print(folder / f"{name}.parquet", len(table))


if __name__ == "__main__":
    main()
