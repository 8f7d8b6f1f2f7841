import json
import subprocess
import sys
import textwrap

import click
import pytest

from trainfer.cli import main as cli
from trainfer.errors import PlanError

CONFIG = """\
data:
  train_files: train.jsonl
  train_batch_size: 2
actor_rollout_ref:
  model: {path: model}
  actor: {ppo_mini_batch_size: 2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def run(*words, capfd):
    code = cli.main(list(words))
    out, err = capfd.readouterr()
    return code, out, err


WRONG = {
    "missing file": (["train", "nix.yaml"], "nix.yaml: no such file"),
    "a folder": (["train", "."], ". is a folder"),
    "damaged YAML": (["train", "damaged.yaml"], "damaged.yaml:2: not valid YAML"),
    "a binary file": (["train", "binary.yaml"], "not UTF-8 text"),
    "a list": (["train", "list.yaml"], "not a mapping but a list"),
    "unknown key": (["train", "run.yaml", "trainer.save_frec=1"], "Did you mean trainer.save_freq?"),
    "wrong type": (
        ["train", "run.yaml", "trainer.nnodes=two"],
        "trainer.nnodes = 'two' (override): must be an integer",
    ),
    "verl key": (["train", "run.yaml", "critic.optim.lr=1"], "no critic"),
    "sweep": (["train", "run.yaml", "data.seed=1,2"], "a sweep"),
    "bad grammar": (["train", "run.yaml", "data.seed"], "expected key=value"),
    "unset variable": (["train", "run.yaml", "data.prompt_key=${oc.env:NOT_SET_HERE}"], "NOT_SET_HERE"),
    "impossible sizes": (
        ["train", "run.yaml", "actor_rollout_ref.actor.ppo_mini_batch_size=3"],
        "ppo_mini_batch_size",
    ),
    "no such key to explain": (["train", "--help-key", "nothing"], "nothing: unknown key"),
    "unknown option": (["train", "run.yaml", "--fast"], "No such option"),
    "unknown verb": (["trian"], "No such command"),
    "no configuration": (["train"], "Missing argument"),
    "nothing to export": (["export", "nix", "out"], "nix"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_ends_with_one_message_and_exit_code_2(folder, capfd, monkeypatch, name):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    (folder / "damaged.yaml").write_text("a: [1,\n")
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    (folder / "list.yaml").write_text("- a\n")
    words, said = WRONG[name]
    code, out, err = run(*words, capfd=capfd)
    assert code == 2
    assert said in err
    assert "Traceback" not in out + err
    assert out == ""
    assert err.lower().count("error:") == 1


def test_a_wrong_input_writes_nothing(folder, capfd):
    run("train", "run.yaml", "trainer.nnodes=two", capfd=capfd)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_debug_shows_the_traceback_too(folder, capfd):
    for words in (["train", "nix.yaml", "--debug"], ["--debug", "train", "nix.yaml"]):
        code, _, err = run(*words, capfd=capfd)
        assert code == 2
        assert "Traceback" in err
        assert "error: nix.yaml" in err


@pytest.fixture
def verb(monkeypatch):
    """Register a verb made on the spot."""

    def _verb(function):
        module = type(sys)("verb_of_a_test")
        module.command = click.command("test")(function)
        monkeypatch.setitem(sys.modules, "verb_of_a_test", module)
        monkeypatch.setattr(cli, "VERBS", {"train": cli.Verb(module="verb_of_a_test", summary="")})

    return _verb


def test_an_interrupted_run_says_how_to_go_on(verb, capfd):
    def interrupted():
        raise KeyboardInterrupt

    verb(interrupted)
    code, _, err = run("train", capfd=capfd)
    assert code == 130
    assert "goes on from the newest checkpoint:\n  trainfer train" in err


def test_a_verb_gives_the_exit_code(verb, capfd):
    verb(lambda: 1)
    assert run("train", capfd=capfd)[0] == 1
    verb(lambda: None)
    assert run("train", capfd=capfd)[0] == 0


def test_our_own_mistakes_keep_their_traceback(verb):
    def broken():
        assert 1 == 2

    verb(broken)
    with pytest.raises(AssertionError):
        cli.main(["train"])


def test_every_error_of_the_tree_is_told_alike(verb, capfd):
    def refused():
        raise PlanError("60 is not 64.")

    verb(refused)
    code, _, err = run("train", capfd=capfd)
    assert (code, err) == (2, "error: 60 is not 64.\n")


def test_every_verb_of_the_table_exists_and_explains_itself(capfd):
    code, out, _ = run("--help", capfd=capfd)
    assert code == 0
    for name in cli.VERBS:
        assert f"\n  {name} " in out
        code, text, _ = run(name, "--help", capfd=capfd)
        assert code == 0
        assert "--debug" in text


def test_help_of_training_explains_the_keys(capfd):
    code, out, _ = run("train", "--help", capfd=capfd)
    assert code == 0
    assert "actor_rollout_ref.rollout:" in out
    assert "ppo_mini_batch_size" in out
    assert run("train", "--help-key", "data.seed", capfd=capfd)[1].startswith("  data.seed (")


PROBE = """
import sys
from trainfer.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "ray", "numpy", "pandas", "pyarrow"} & set(sys.modules))
print("\\nLOADED", code, heavy)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--help-key", "data.seed"],
        ["train", "run.yaml", "trainer.nnodes=0"],
        ["train", "run.yaml", "actor_rollout_ref.actor.ppo_mini_batch_size=3"],
    ],
)
def test_help_and_mistakes_need_no_torch(folder, words):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE), *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].endswith("[]"), done.stdout[-300:]


def test_doctor_answers_in_json(folder, capfd):
    code, out, _ = run("doctor", "--json", capfd=capfd)
    answer = json.loads(out)
    assert code == 0
    assert answer["schema"] == "trainfer.doctor/1"
    assert answer["can_train"] is True
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert found["folder"]["ok"] is True
    assert found["torch"]["value"].startswith("2.")
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_doctor_sees_what_is_missing(monkeypatch, tmp_path, capfd):
    from trainfer.cli import doctor

    monkeypatch.setitem(doctor.EXTRAS, "nothing-of-this-name", "nothing")
    missing = next(f for f in doctor.examine_extras() if f.name == "nothing-of-this-name")
    assert (missing.ok, missing.value) == (False, "not installed")
    assert "pip install 'trainfer[nothing-of-this-name]'" in missing.means
    assert doctor.examine_folder(tmp_path / "nix").ok is False
    assert "vllm" in run("doctor", capfd=capfd)[1]
