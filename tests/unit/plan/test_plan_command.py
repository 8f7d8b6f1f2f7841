"""``trainfer plan`` from the command line: exit codes, JSON, pictures, differences; and that no input breaks it."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfer.cli.main import main
from trainfer.config.launch_script import read_launch_script
from trainfer.errors import TrainferError
from trainfer.plan.analyse import analyse
from trainfer.plan.read import read_question

CASES = Path(__file__).parent / "cases"


def case(name):
    (path,) = CASES.glob(f"{name}-*.sh")
    return str(path)


def run(capsys, *words):
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_legal_plan_exits_0_and_prints_the_document(capsys):
    code, out, _ = run(capsys, case("51"), "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["schema"], document["rules"], document["ok"]) == ("trainfer.plan/1", "verl-0.9", True)
    assert document["derived"]["sequences_per_step"] == 5120
    assert document["values"]["data.train_batch_size"] == {"value": 1024, "source": f"{case('51')}:8"}
    assert document["values"]["actor_rollout_ref.actor.ppo_epochs"] == {"value": 1, "source": "default"}
    assert [c["name"] for c in document["alignment"]["conditions"]] == [
        "mini_batch_num", "gradient_accumulation", "use_remove_padding", "use_dynamic_bsz", "balance_batch",
        "TORCHDYNAMO_DISABLE",
    ]  # fmt: skip


def test_an_illegal_plan_exits_1_with_remedies(capsys):
    code, out, _ = run(capsys, case("05"), "--rules", "verl-0.6", "--json")
    problems = json.loads(out)["problems"]
    assert code == 1
    assert problems[0]["suggestions"][0] == {
        "data.train_batch_size": 120,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 60,
    }


def test_a_remedy_can_be_typed_as_it_is_printed(capsys):
    code, out, _ = run(capsys, case("05"))
    (line,) = [line for line in out.splitlines() if line.startswith("cures all")]
    assert code == 1
    assert run(capsys, case("05"), *line.split()[2:])[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["nothing_here.sh"],
        ["--rules", "verl-0.5", "x.sh"],
        ["data.train_batch_size"],
        ["--nonsense"],
        [".", "a=1"],
        ["--env", "novalue", "a=1"],
        ["a=1,2"],
        ["--heads", "0", "a=1"],
        ["x" * 5000],
        ["a\0b"],
        ["a=" + "x" * 70_000],
    ],
)
def test_what_cannot_be_done_exits_2_with_one_message(capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err


def test_a_yaml_that_is_no_mapping_exits_2(tmp_path, capsys):
    for text in ("[1, 2]\n", "just text\n", "", "a: [\n"):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        assert run(capsys, str(path))[0] == 2


def test_a_script_that_launches_nothing_exits_2(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text("echo hello\n")
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert "launches no training" in err


def test_the_picture_has_numbers_and_units(capsys, tmp_path):
    path = tmp_path / "public.yaml"
    path.write_text(
        "data: {train_batch_size: 60, max_prompt_length: 8192}\nalgorithm: {adv_estimator: grpo}\n"
        "trainer: {n_gpus_per_node: 6}\nactor_rollout_ref:\n  rollout: {n: 12, log_prob_micro_batch_size_per_gpu: 8}\n"
        "  actor: {ppo_mini_batch_size: 60, ppo_micro_batch_size_per_gpu: 8}\n"
    )
    code, out, _ = run(capsys, str(path), "--rules", "verl-0.6")
    assert code == 0
    for text in (
        "60 prompts a step",
        "x 12 samples a prompt",
        "720 sequences a step",
        "3 rollout engines x 240 sequences",
        "120 sequences a rank",
        "15 micro-batches (forward + backward)",
        "1 optimizer step a step",
        "input_ids [60, 8192]",
        "prompts [720, 8192]",
    ):
        assert text in out


def test_the_page_shows_what_the_program_prints(capsys, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "batch-arithmetic.md").read_text()
    script, printed = (
        block.split("```")[0] for block in page.split("```bash\n")[1:2] + page.split("```text\n")[1:2]
    )
    path = tmp_path / "run.sh"
    path.write_text(script)
    _, out, _ = run(capsys, str(path), "--rules", "verl-0.6")
    assert printed.strip() in out


def test_variables_come_from_env(capsys):
    _, out, _ = run(capsys, case("61"), "--env", "TRAIN_BATCH_SIZE=768", "--json")
    assert json.loads(out)["derived"]["prompts_per_step"] == 768


def test_diff_shows_what_changes_in_effect(capsys):
    code, out, _ = run(capsys, case("51"), "--diff", case("52"), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["derived"]["gradient_accumulation_steps"] == [2, {"min": 1, "max": 11}]
    assert found["problems"] == {}
    _, out, _ = run(capsys, case("51"), "--diff", case("51"))
    assert "no difference in effect" in out


def test_explain_answers_in_a_paragraph(capsys):
    code, out, _ = run(capsys, "--explain", "rollout.agent.num_workers")
    assert code == 0
    assert "8 by default" in out


def test_a_script_for_trainfer_reads_its_yaml(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "data: {train_batch_size: 12, train_files: x.parquet}\ntrainfer: {seed: 1}\n"
    )
    script = tmp_path / "go.sh"
    script.write_text(
        "trainfer train run.yaml actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=12\n"
    )
    code, out, _ = run(capsys, str(script), "--json")
    document = json.loads(out)
    assert (code, document["rules"]) == (0, "trainfer")
    assert document["derived"]["sequences_per_step"] == 48


def test_a_configuration_that_hydra_is_pointed_at_is_read_where_it_is_at_hand(tmp_path, capsys):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 96}\n"
    )
    script = tmp_path / "go.sh"
    for options in ("--config-path=conf --config-name=mine", "--config-name mine.yaml -cp conf"):
        script.write_text(f"python3 -m verl.trainer.main_ppo {options} actor_rollout_ref.rollout.n=2\n")
        document = json.loads(run(capsys, str(script), "--json")[1])
        assert document["derived"]["sequences_per_step"] == 192
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=other actor_rollout_ref.rollout.n=2\n")
    assert "other is not at hand" in str(json.loads(run(capsys, str(script), "--json")[1])["notes"])


def test_a_value_that_must_be_run_leaves_numbers_open_and_says_so(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "G=$(nvidia-smi -L | wc -l)\npython3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$G data.train_batch_size=64\n"
    )
    _, out, _ = run(capsys, str(script), "--rules", "verl-0.6", "--json")
    document = json.loads(out)
    (problem,) = [p for p in document["problems"] if p["code"] == "value_not_known"]
    assert "$(nvidia-smi -L | wc -l) in" in problem["message"]
    assert "run.sh:1" in problem["message"]
    assert document["derived"]["num_gpus"] is None
    assert document["derived"]["prompts_per_step"] == 64
    assert document["values"]["trainer.n_gpus_per_node"]["value"] is None


def test_planning_loads_neither_torch_nor_hydra():
    code = (
        "import sys; from trainfer.cli.main import main; main(['plan', sys.argv[1]]); "
        "bad = {'torch', 'hydra', 'transformers', 'ray', 'numpy'} & set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, case("61")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def damaged(draw):
    """A real script or a YAML file, with pieces cut, doubled, swapped, or replaced by what parsers dislike."""
    bits = ["$", "${", "$((", "`", '"', "'", "(", ")", "{", "}", "[[", "]]", ";;", "\\", "\n", "=", "&&", "||", "<<EOF\n", "é", "\x07", "${A[@]}", "~", "*", "#", "!!python/object:os.system", "&a", "*a", ": ", "- ", "999999999999999999999", "-1", "null", "fi", "done", "if", "for i in", "case"]  # fmt: skip
    base = draw.choice(
        [path.read_text() for path in sorted(CASES.glob("*.sh"))]
        + ["data:\n  train_batch_size: 8\ntrainer: {nnodes: 1}\n"]
    )
    for _ in range(draw.randint(1, 12)):
        start = draw.randrange(len(base) + 1)
        end = min(len(base), start + draw.randrange(40))
        action = draw.randrange(4)
        middle = ("", base[start:end] * 2, draw.choice(bits), "".join(draw.choices(bits, k=5)))[action]
        base = base[:start] + middle + base[end if action != 1 else start :]
    return base


@pytest.mark.parametrize("seed", range(10))
def test_damaged_inputs_are_answered_soon_without_a_traceback(tmp_path, seed):
    """1,000 of them over all seeds; each is a plan or one message, and takes under a second."""
    draw = random.Random(seed)
    slowest = 0.0
    for number in range(100):
        path = tmp_path / f"run{number}.{draw.choice(['sh', 'yaml'])}"
        path.write_text(damaged(draw), encoding="utf-8", errors="surrogateescape")
        began = time.process_time()
        try:
            plan = analyse(read_question(path, ("a.b=1",), variables={"HOME": "/h"}))
            json.dumps([problem.message for problem in plan.problems])
        except TrainferError:
            pass
        slowest = max(slowest, time.process_time() - began)
    assert slowest < 1.0


def test_random_bytes_are_refused(tmp_path):
    draw = random.Random(3)
    for number in range(50):
        path = tmp_path / f"{number}.sh"
        path.write_bytes(bytes(draw.randrange(1, 256) for _ in range(draw.randrange(2000))))
        with pytest.raises(TrainferError):
            read_launch_script(path)
