"""The static reader against bash itself: each script is read, and run by bash with a stand-in for python3."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trainfer.config.launch_script import read_launch_script
from trainfer.errors import ConfigError

LAUNCH = "python3 -m verl.trainer.main_ppo"
ENVIRONMENT = {"HOME": "/home/me", "TRAIN": "48", "NAME": "a b", "EMPTY": ""}


def read(tmp_path, text, *arguments, **variables):
    path = tmp_path / "run.sh"
    path.write_text(text)
    return read_launch_script(path, arguments=arguments, variables={**ENVIRONMENT, **variables})


def words(tmp_path, text, *arguments, **variables):
    return [word.text for word in read(tmp_path, text, *arguments, **variables).launch.words]


def by_bash(tmp_path, text, *arguments):
    """What the launch receives when bash runs the script; python3 is a stand-in that prints its arguments."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    stand_in = tools / "python3"
    stand_in.write_text('#!/bin/bash\nshift 2\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    stand_in.chmod(0o755)
    (tmp_path / "run.sh").write_text(text)
    done = subprocess.run(
        ["bash", "run.sh", *arguments],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stdout.split("\0")[:-1]


SCRIPTS = {
    "plain": f"{LAUNCH} a.b=1 c.d=x",
    "continuation": f"{LAUNCH} \\\n  a.b=1 \\\n  c.d=2\n",
    "variables": f'N=5\nM="$N"\n{LAUNCH} a=$N b=${{M}} c="x${{N}}y"',
    "defaults": f"{LAUNCH} a=${{TRAIN:-1}} b=${{MISSING:-2}} c=${{EMPTY:-3}} d=${{EMPTY-4}} e=${{TRAIN:+5}}",
    "assigning default": f': "${{K:=7}}"\n{LAUNCH} a=$K b=${{K}}',
    "nested defaults": f"{LAUNCH} a=${{X:-${{Y:-${{TRAIN}}}}}}",
    "cutting": f"P=/data/models/qwen.tar.gz\n{LAUNCH} a=${{P##*/}} b=${{P#*/}} c=${{P%.*}} d=${{P%%.*}} e=${{P##*.}}",
    "replacing": f"P=a-b-c\n{LAUNCH} a=${{P/-/_}} b=${{P//-/_}} c=${{P/#a/z}} d=${{P/%c/z}}",
    "case of letters": f"P=aBc\n{LAUNCH} a=${{P^^}} b=${{P,,}} c=${{P^}}",
    "substrings": f"P=abcdef\n{LAUNCH} a=${{P:2}} b=${{P:1:3}} c=${{#P}}",
    "arithmetic": f"A=3\n{LAUNCH} a=$((A*4+1)) b=$(( (A+1)**2 )) c=$((17 / 5)) d=$((-17 % 5)) e=$((A>2 && A<9)) f=$((1<<4)) g=$((A>5?1:2))",
    "arithmetic commands": f"A=3\n((A++))\n((A+=10))\nlet B=A*2\n{LAUNCH} a=$A b=$B",
    "arithmetic bases": f"{LAUNCH} a=$((0x1F)) b=$((010)) c=$((2#101))",
    "arrays": f'ARR=(a=1 "b=x y" \'c=3\')\nARR+=(d=4)\n{LAUNCH} "${{ARR[@]}}" n=${{#ARR[@]}} e=${{ARR[1]}} f=${{ARR[0]}}',
    "arrays over lines": f'ARR=(\n  a=1\n  # a comment\n  b=2  # another\n)\n{LAUNCH} "${{ARR[@]}}"',
    "array slices": f'ARR=(a=1 b=2 c=3)\n{LAUNCH} "${{ARR[@]:1}}" "${{ARR[@]:0:1}}"',
    "array elements": f"ARR=(1 2)\nARR[2]=9\n{LAUNCH} a=${{ARR[2]}} b=${{ARR[-1]}}",
    "keyed arrays": f"declare -A M=([x]=1 [y]=2)\nM[z]=3\n{LAUNCH} a=${{M[x]}} b=${{M[z]}}",
    "star joins": f'ARR=(1 2)\n{LAUNCH} a="${{ARR[*]}}"',
    "splitting": f'S="a=1  b=2"\n{LAUNCH} $S "$S"',
    "empty words": f'{LAUNCH} "" $EMPTY a=$EMPTY',
    "quotes": f"{LAUNCH} 'a=$TRAIN' \"b=\\$TRAIN\" c=\\$x \"d='q'\" e='\"'",
    "ansi quotes": f"{LAUNCH} a=$'x\\ty'",
    "braces": f"{LAUNCH} {{a,b}}.c=1 x={{1..3}}",
    "json-like": f"{LAUNCH} a=[1,2] 'b={{x:1}}' c=\"[a,b]\"",
    "if": f'N=8\nif [ "$N" -gt 4 ]; then T=2; else T=1; fi\n{LAUNCH} a=$T',
    "elif": f'N=3\nif [[ $N -eq 1 ]]; then T=1; elif [[ "$N" == 3 ]]; then T=3; else T=9; fi\n{LAUNCH} a=$T',
    "test of empty": f'if [ -z "$NOPE" ]; then T=1; fi\nif [[ -n "$TRAIN" ]]; then U=2; fi\n{LAUNCH} a=$T b=$U',
    "negation": f'if ! [ "$TRAIN" = 1 ]; then T=1; fi\nif [[ ! $TRAIN == 48 ]]; then T=2; fi\n{LAUNCH} a=$T',
    "patterns": f"M=Qwen3-8B\nif [[ $M == Qwen3* && $M != *VL* ]]; then T=1; fi\n{LAUNCH} a=$T",
    "and or": f'[ "$TRAIN" = 48 ] && T=1\n[ "$TRAIN" = 1 ] || U=2\n{LAUNCH} a=$T b=$U',
    "case": f'M=big\ncase "$M" in small) T=1;; big|huge) T=2;; *) T=3;; esac\n{LAUNCH} a=$T',
    "case default": f"case $TRAIN in [0-3]*) T=low;; *) T=high;; esac\n{LAUNCH} a=$T",
    "for": f'S=""\nfor i in 1 2 3; do S="$S,$i"; done\n{LAUNCH} a=$S i=$i',
    "for with break": f"for i in 1 2 3; do if [ $i -eq 2 ]; then break; fi; done\n{LAUNCH} a=$i",
    "c style for": f"T=0\nfor ((i=0; i<4; i++)); do T=$((T+i)); done\n{LAUNCH} a=$T",
    "while": f"N=1\nwhile [ $N -lt 100 ]; do N=$((N*3)); done\n{LAUNCH} a=$N",
    "functions": f"add() {{ local x=$1; R=$((x+$2)); }}\nadd 3 4\n{LAUNCH} a=$R",
    "launch in a function": f'go() {{ {LAUNCH} a=1 "$@"; }}\ngo b=2 c=3',
    "arguments": f'{LAUNCH} a=1 "$@" b=2',
    "all arguments unquoted": f"{LAUNCH} a=1 $@",
    "append to text": f'S="a"\nS+="b"\nS+=c\n{LAUNCH} x=$S',
    "prefix": f"FOO=1 BAR=2 {LAUNCH} a=1",
    "env": f"env FOO=1 {LAUNCH} a=1",
    "pipe and redirect": f"{LAUNCH} a=1 2>&1 | tee /dev/null | cat",
    "redirect first": f"{LAUNCH} a=1 b=2 > /dev/stdout",
    "in a command variable": f'CMD="{LAUNCH} a=1"\n$CMD b=2',
    "eval": f'CMD="{LAUNCH} a=1"\neval "$CMD b=$TRAIN"',
    "bash -c": f"bash -c '{LAUNCH} a=1 b=$TRAIN'",
    "export": f"export N=4 M=5\n{LAUNCH} a=$N b=$M",
    "readonly": f"readonly N=4\ndeclare -i M=5\n{LAUNCH} a=$N b=$M",
    "unset": f"N=4\nunset N\n{LAUNCH} a=${{N:-none}}",
    "heredoc before": f"cat > /dev/null <<EOT\na=$TRAIN\n{LAUNCH} z=9\nEOT\n{LAUNCH} a=1",
    "tilde": f"P=~/data\n{LAUNCH} a=$P ~/x=1",
    "comment at the end": f"{LAUNCH} a=1 # b=2",
    "subshell": f"(cd /tmp && N=3; {LAUNCH} a=${{N}})",
    "exit before": f'if [ "$TRAIN" = 1 ]; then echo no; exit 1; fi\n{LAUNCH} a=1',
    "windows line ends": f"{LAUNCH} a=1",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_hands_over(tmp_path, name):
    arguments = ("x.y=1", "z='q r'")
    expected = by_bash(tmp_path, SCRIPTS[name], *arguments)
    assert expected, "bash itself launches nothing"
    script = read(tmp_path, SCRIPTS[name], *arguments)
    found = [word.text for word in script.launch.words]
    if any("does not hand on" in note for note in script.notes):  # then the overrides are put at the end
        found = found[: len(found) - len(arguments)]
    assert found == expected


def test_every_word_has_the_line_on_which_it_stands(tmp_path):
    text = f'A=(\n  a=1\n  b=2\n)\nC="c=3"\n{LAUNCH} \\\n  "${{A[@]}}" \\\n  $C \\\n  d=4 "$@"\n'
    script = read(tmp_path, text, "e=5")
    assert [(word.text, word.line) for word in script.launch.words] == [
        ("a=1", 2), ("b=2", 3), ("c=3", 5), ("d=4", 9), ("e=5", 9),
    ]  # fmt: skip
    assert [word.is_argument for word in script.launch.words] == [False, False, False, False, True]
    assert script.launch.line == 6


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("N=$(nproc)", "$(nproc)"),
        ("N=`nproc`", "a command substitution"),
        ("N=$RANDOM", "$RANDOM"),
        ("read N", "read"),
        ("N=$((1/0))", "$((1/0))"),
        ("N=1$(date)", "$(date)"),
    ],
)
def test_what_must_be_run_is_not_known_and_says_its_line(tmp_path, body, why):
    script = read(tmp_path, f"set -e\n{body}\n{LAUNCH} a=1 b=$N")
    known, unknown = script.launch.words
    assert (known.text, known.unknown) == ("a=1", None)
    assert unknown.unknown is not None
    assert why in unknown.unknown
    assert "run.sh:2" in unknown.unknown


def test_a_variable_without_a_value_asks_for_it(tmp_path):
    (word,) = read(tmp_path, f"{LAUNCH} trainer.nnodes=$WORLD").launch.words
    assert word.unknown is not None
    assert "--env WORLD=VALUE" in word.unknown
    assert words(tmp_path, f"{LAUNCH} trainer.nnodes=$WORLD", WORLD="2") == ["trainer.nnodes=2"]


def test_a_condition_that_is_not_known_follows_both_branches(tmp_path):
    script = read(tmp_path, f"N=1\nM=1\nif [ -f /etc/x ]; then N=2; else N=3; fi\n{LAUNCH} a=$N b=$M")
    first, second = script.launch.words
    assert first.unknown is not None
    assert "depends on [ -f /etc/x ]" in first.unknown
    assert second.unknown is None


def test_a_launch_below_an_unknown_condition_is_found(tmp_path):
    assert words(tmp_path, f"if nvidia-smi; then\n {LAUNCH} a=1\nfi") == ["a=1"]


def test_a_certain_launch_beats_one_below_an_unknown_condition(tmp_path):
    script = read(tmp_path, f"if nvidia-smi; then\n {LAUNCH} a=1\nfi\n{LAUNCH} a=2")
    assert [word.text for word in script.launch.words] == ["a=2"]
    assert any("also launches" in note for note in script.notes)


@pytest.mark.parametrize(
    "command",
    [
        "python -m verl.trainer.main_ppo",
        "python3.11 -u -m verl.trainer.main_ppo",
        "nohup /opt/bin/python3 -m verl.trainer.main_ppo",
        "ray job submit --address=http://x:8265 --working-dir . -- python3 -m verl.trainer.main_ppo",
        "torchrun --nproc_per_node=8 -m verl.trainer.main_ppo",
        "PYTHONUNBUFFERED=1 python3 verl/trainer/main_ppo.py",
        "python3 -m recipe.dapo.main_dapo",
        "srun --overlap bash -c 'python3 -m verl.trainer.main_ppo'",
        "docker exec box python3 -m verl.trainer.main_ppo",
        "exec python3 -m verl.trainer.main_ppo",
        "uv run python -m verl.trainer.main_ppo",
    ],
)
def test_launches_are_recognised(tmp_path, command):
    text = command.replace("main_ppo'", "main_ppo a=1'") if command.endswith("'") else f"{command} a=1"
    assert words(tmp_path, f"python3 -m examples.make_data --n 3\n{text}") == ["a=1"]


def test_trainfer_train_is_a_launch(tmp_path):
    launch = read(tmp_path, "trainfer train run.yaml a=1").launch
    assert (launch.program, [word.text for word in launch.words]) == ("trainfer", ["run.yaml", "a=1"])


def test_the_environment_of_the_launch_is_known(tmp_path):
    text = f"export TORCHDYNAMO_DISABLE=1\nHIDDEN=2\nexport LATE\nLATE=3\nDUMP_ON=1 env PROMPTS_ONLY=1 {LAUNCH} a=1"
    environment = read(tmp_path, text).launch.environment
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert (environment["DUMP_ON"], environment["PROMPTS_ONLY"], environment["LATE"]) == ("1", "1", "3")
    assert "HIDDEN" not in environment


@pytest.mark.parametrize(
    "text",
    ["", "#!/bin/bash\n", "echo hello\n", "python3 -m verl.trainer.main_generation a=1", "exit 0\n" + LAUNCH],
)
def test_a_script_that_launches_nothing_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="launches no training"):
        read(tmp_path, text)


def test_nothing_is_executed(tmp_path):
    marker = tmp_path / "touched"
    text = f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\n: > {marker}\n{LAUNCH} a=$X"
    read(tmp_path, text)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        f"while true; do :; done\n{LAUNCH} a=1",
        f"f() {{ f; f; }}\nf\n{LAUNCH} a=1",
        "A=x\n" + "A=$A$A\n" * 60 + f"{LAUNCH} a=$A",
        "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + f'{LAUNCH} "${{A[@]}}"',
        f"{LAUNCH} a={{1..999999999}}",
        f"for i in {{1..100000}}; do for j in {{1..100000}}; do X=$i$j; done; done\n{LAUNCH} a=1",
        "((" * 400 + f"\n{LAUNCH} a=1",
        "if [ " * 300 + f"\n{LAUNCH} a=1",
        "$(" * 3000 + f"\n{LAUNCH} a=1",
        '"${' * 2000 + f"\n{LAUNCH} a=1",
        f"X={'a' * 60000}\n{LAUNCH} a=${{X##*b*c*d*e*f*}}",
        f"X={'a*' * 100}\n[[ {'a' * 3000} == $X ]] && Y=1\n{LAUNCH} a=1",
        f"eval 'eval \"eval {LAUNCH}\"'",
        f"{LAUNCH} a=$((9**9**9**9)) b=$((1<<999999))",
        f"X='$((X))'\nY=$((X+1))\n{LAUNCH} a=$Y",
        "`" * 9999,
        "'" + "x" * 100000,
        "<<EOF\n" * 200,
    ],
)
def test_hostile_scripts_end_soon_without_a_traceback(tmp_path, text):
    try:
        script = read(tmp_path, text)
    except ConfigError:
        return
    assert all(len(word.text) <= 64 * 1024 for word in script.launch.words)


@pytest.mark.parametrize("content", [b"\0\0\0", b"x" * (300 * 1024)])
def test_files_that_are_no_scripts_are_refused(tmp_path, content):
    path = tmp_path / "run.sh"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_launch_script(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_launch_script(tmp_path / "none.sh")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_launch_script(Path(tmp_path))
