"""What to type to run this program again."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

MODULE = "trainfer.cli.main"


def command_line(words: Sequence[str]) -> str:
    """What to type to run ``trainfer WORDS`` again as this process was started: by name, by path, or as a module."""
    started = sys.orig_argv
    if "-m" in started and MODULE in started:
        return shlex.join([*started[: started.index(MODULE) + 1], *words])
    return shlex.join([program_name(sys.argv[0]), *words])


def program_name(started_as: str) -> str:
    """The bare name where the shell finds this very program by it, else the path that was typed."""
    found = shutil.which("trainfer")
    is_script = Path(started_as).name == "trainfer" and Path(started_as).is_file()
    return started_as if is_script and (found is None or not Path(found).samefile(started_as)) else "trainfer"
