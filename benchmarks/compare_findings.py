"""What msProbe and trainfer say of the same planted faults: prints the Markdown tables of docs/compared-with-msprobe.md.

For every case of ``peers/planted.py`` both sides are captured by msProbe's own PrecisionDebugger (in its environment) and by
``trainfer.capture``: the same models, seeds and inputs, one forward call over whole sequences. Then msProbe's command compares
its dumps (plain, and with ``-da``, its search for the first difference), ``trainfer.compare`` reads the very same files, and
``trainfer.compare`` reads trainfer's own. msProbe's columns are also read as its document advises: an output is suspect where
Cosine is not above 0.99 or MaxAbsErr not below 0.001. The side with the fault is msProbe's target, the other its golden.

usage: compare_findings.py --msprobe-python .venv-msprobe/bin/python [--only CASE …] [--keep FOLDER] [--json FILE] [--into PAGE]
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

import torch  # noqa: E402
from planted import CASES, PROMPT, Case, make_model, optimizer_step, play  # noqa: E402

import trainfer  # noqa: E402
from trainfer.check.diagnose import Diagnosis  # noqa: E402

DEFAULT_PYTHON = HERE.parent / ".venv-msprobe/bin/python"
RECORD = re.compile(r"Module\.(?P<module>.+?)\.[^.]+\.(?:forward|backward)\.\d+")
BEGIN, END = "<!-- findings: begin -->", "<!-- findings: end -->"
RIGHT, FAMILY, MODULE_ONLY = "right", "family right", "module right"
SEEN, MISSED = "seen, elsewhere", "**missed**"
QUIET, ALARM = "quiet", "**false alarm**"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a tool says of a case."""

    words: str
    judged: str


class OurWatch:
    """``trainfer.capture`` as ``planted.play`` uses a tool."""

    def __init__(self, capture: Any) -> None:
        self._capture = capture

    @contextmanager
    def forward(self) -> Iterator[None]:
        yield

    def scored(self, sequences: list[list[int]], logprobs: list[list[float]]) -> None:
        self._capture.record_logprobs(
            sequences=sequences, prompt_lengths=[PROMPT] * len(sequences), logprobs=logprobs,
            sampling={"temperature": 1.0},
        )  # fmt: skip

    def step(self) -> None:
        self._capture.step()


def capture_ours(case: Case, folder: Path) -> None:
    for side in ("rollout", "train"):

        @contextmanager
        def watch(model: Any, side: str = side) -> Iterator[OurWatch]:
            with trainfer.capture(model, folder / side, side=side, pass_name="forward") as capture:
                yield OurWatch(capture)

        play(case, side, watch)


def reference(case: Case) -> Any:
    """The model that both sides are to have, for the replay."""
    model = make_model(case, "train")
    for _ in range(1, case.steps):
        optimizer_step(model, leave_out=None)
    return model


def run_msprobe(python: Path, arguments: Sequence[str]) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout + done.stderr


def msprobe_rows(python: Path, case: Case, dumps: Path, out: Path) -> list[dict[str, str]]:
    """The rows of its CSV, for the last step."""
    step = f"step{case.steps - 1}"
    command = [str(python.parent / "msprobe"), "compare", "-tp", str(dumps / "rollout" / step), "-gp",
               str(dumps / "train" / step), "-o", str(out)]  # fmt: skip
    run_msprobe(python, command)
    (path,) = out.glob("*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def msprobe_first_difference(python: Path, case: Case, dumps: Path, out: Path) -> str:
    """The module that ``-da`` names; empty where it finds none."""
    step = f"step{case.steps - 1}"
    command = [str(python.parent / "msprobe"), "compare", "-da", "-tp", str(dumps / "rollout" / step), "-gp",
               str(dumps / "train" / step), "-o", str(out)]  # fmt: skip
    run_msprobe(python, command)
    for path in sorted(out.glob("compare_result*.json")):
        for record, node in json.loads(path.read_text()).items():
            if not node.get("is_same", True):
                return module_of(record)
    return ""


def module_of(record: str) -> str:
    found = RECORD.match(record)
    return found["module"] if found else record


def said_by_msprobe(case: Case, rows: Sequence[dict[str, str]], first: str) -> Said:
    results = Counter(row["Result"] for row in rows)
    flagged = [row for row in rows if row["Result"] in ("error", "warning")]
    marks = ", ".join(f"{results[kind]} {kind}" for kind in ("error", "warning") if results[kind])
    words = f"{marks or 'all `pass`'} of {len(rows)}"
    names: list[str] = []
    if flagged:
        name = module_of(flagged[0]["NPU Name"])
        names.append(name)
        words += f"; first `{name}`"
    own = [
        row
        for row in rows
        if case.module and module_of(row["NPU Name"]) == case.module and ".output" in row["NPU Name"]
    ]
    if own:
        words += f". Planted module's row: Cosine {short(own[0]['Cosine'], 4)}, MaxAbsErr {short(own[0]['MaxAbsErr'])}, `{own[0]['Result']}`"
    if first:
        names.append(first)
    words += f". `-da`: {f'`{first}`' if first else 'none'}"
    return Said(words=words, judged=judge(case, names))


def said_by_columns(case: Case, rows: Sequence[dict[str, str]]) -> Said:
    """What a reader sees who goes by the values, from the first row down."""
    suspects = [row for row in rows if ".output" in row["NPU Name"] and _is_suspect(row)]
    if not suspects:
        return Said(words="no output stands out", judged=judge(case, []))
    first, name = suspects[0], module_of(suspects[0]["NPU Name"])
    words = f"{len(suspects)} outputs; first `{name}` (Cosine {short(first['Cosine'], 4)}, MaxAbsErr {short(first['MaxAbsErr'])})"
    return Said(words=words, judged=judge(case, [name]))


def _is_suspect(row: dict[str, str]) -> bool:
    try:
        return not (float(row["Cosine"]) > 0.99 and float(row["MaxAbsErr"]) < 0.001)
    except ValueError:
        return row["Cosine"] != "unsupported"


def short(number: str, digits: int = 2) -> str:
    try:
        return f"{float(number):.{digits}g}"
    except ValueError:
        return number


def judge(case: Case, names: Sequence[str]) -> str:
    """Of a tool that names modules and no causes."""
    if case.clean:
        return ALARM if names else QUIET
    if not names:
        return MISSED
    return MODULE_ONLY if case.module is not None and case.module in names else SEEN


def said_by_us(case: Case, result: Diagnosis) -> Said:
    first = result.first_divergence
    where = "" if first is None else f" in `{first.module or first.stage}`"
    causes = [cause for cause in result.causes if not cause.cause.startswith("shape.")]
    named = ", ".join(f"`{c.cause}`" + (" (confirmed)" if c.confirmed else "") for c in causes[:3])
    words = f"{result.verdict}{where}" + (f": {named}" if named else "")
    alarm = bool(causes) or result.verdict == "diverged"
    if case.clean:
        judged = ALARM if alarm else QUIET
    elif not alarm:
        judged = MISSED
    else:
        modules = [first.module if first else None, *(cause.module for cause in causes)]
        judged = _judge_cause(
            case, causes[0].cause if causes else "", module=case.module in (None, *modules[:2])
        )
    return Said(words=words, judged=judged)


def _judge_cause(case: Case, cause: str, *, module: bool) -> str:
    """Of the first cause; ``module``: the planted one is the first divergence, or has that cause."""
    if not module:
        return SEEN
    if cause.startswith(case.causes or ("\0",)):
        return RIGHT
    families = {right.partition(".")[0] for right in case.causes}
    return FAMILY if cause.partition(".")[0] in families else MODULE_ONLY if case.module else SEEN


def compare_case(case: Case, python: Path, dumps: Path) -> dict[str, Said]:
    theirs, ours = dumps / "msprobe" / case.name, dumps / "trainfer" / case.name
    capture_ours(case, ours)
    rows = msprobe_rows(python, case, theirs, dumps / "out" / case.name)
    first = msprobe_first_difference(python, case, theirs, dumps / "out-da" / case.name)
    model = reference(case)
    return {
        "msprobe": said_by_msprobe(case, rows, first),
        "columns": said_by_columns(case, rows),
        "same": said_by_us(case, trainfer.compare(theirs / "rollout", theirs / "train", model=model)),
        "own": said_by_us(case, trainfer.compare(ours / "rollout", ours / "train", model=model)),
    }


COLUMNS = {
    "msprobe": "msProbe: `Result`, `-da`",
    "columns": "msProbe: its columns, read by its document's advice",
    "same": "trainfer, the same files",
    "own": "trainfer, its own dumps",
}


def tables(found: dict[str, dict[str, Said]]) -> Iterator[str]:
    """Lines of the two tables."""
    yield f"| planted | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for case in CASES:
        if case.name in found:
            where = f" (`{case.module}`)" if case.module else ""
            cells = [f"{found[case.name][key].judged}: {found[case.name][key].words}" for key in COLUMNS]
            yield f"| {case.what}{where} | {' | '.join(cells)} |"
    yield ""
    faults = [case.name for case in CASES if case.name in found and not case.clean]
    clean = [case.name for case in CASES if case.name in found and case.clean]
    judged = {key: Counter(found[name][key].judged for name in faults) for key in COLUMNS}
    alarms = {key: sum(found[name][key].judged == ALARM for name in clean) for key in COLUMNS}
    yield f"| of {len(faults)} faults, {len(clean)} clean pairs | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for words, kinds in (
        ("module and cause right", [RIGHT]),
        ("module and the cause's family right", [FAMILY]),
        ("module right, no cause or a wrong one", [MODULE_ONLY]),
        ("seen, another module named first", [SEEN]),
        ("missed", [MISSED]),
    ):
        yield (
            f"| {words} | {' | '.join(str(sum(judged[key][kind] for kind in kinds)) for key in COLUMNS)} |"
        )
    yield f"| false alarms | {' | '.join(str(alarms[key]) for key in COLUMNS)} |"


def put_into(page: Path, lines: list[str]) -> None:
    """Replace what stands between the page's two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--msprobe-python", type=Path, help="of an environment with msProbe and Transformers")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--keep", type=Path, help="folder for the dumps; else they are deleted")
    parser.add_argument("--json", type=Path, help="file for what was said, as JSON")
    parser.add_argument("--into", type=Path, help="page whose tables are replaced")
    options = parser.parse_args()
    python = (options.msprobe_python or DEFAULT_PYTHON).absolute()
    if not python.exists():
        print(f"{python} is not there: make setup-msprobe")
        raise SystemExit(1 if options.msprobe_python else 0)
    torch.set_num_threads(1)
    chosen = [case for case in CASES if options.only is None or case.name in options.only]
    with TemporaryDirectory() as temporary:
        dumps = options.keep or Path(temporary)
        run_msprobe(
            python,
            [str(HERE / "peers/msprobe_findings.py"), str(dumps / "msprobe"), *(c.name for c in chosen)],
        )
        found: dict[str, dict[str, Said]] = {}
        for case in chosen:
            found[case.name] = compare_case(case, python, dumps)
            print(
                f"{case.name}: " + ", ".join(said.judged for said in found[case.name].values()),
                file=sys.stderr,
                flush=True,
            )
    lines = list(tables(found))
    print(*lines, sep="\n")
    if options.into:
        put_into(options.into, lines)
    if options.json:
        plain = {name: {key: asdict(said) for key, said in row.items()} for name, row in found.items()}
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
