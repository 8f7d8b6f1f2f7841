"""A few lines of C, built by the machine's own compiler where it has one.

Takes a name and a source; gives the loaded library, or None where this machine cannot build it, and NumPy then does the
work. What was built is kept in the user's cache, once per processor, and only what nobody else can have written is loaded.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = (
    "-O3", "-march=native", "-std=c99", "-shared", "-fPIC",
    # Vector sums and minima. Not -ffast-math: a library linked with it makes the whole process flush denormals.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffinite-math-only", "-fno-math-errno",
)  # fmt: skip
_BUILD_TIMEOUT_S = 30


def load_library(name: str, source: str, *, keep_gil: bool) -> ctypes.CDLL | None:
    """The library, built where it was not yet.

    Args:
        name: Of the file in the cache.
        source: C99; it may not tell NaN from other floats but by their bits.
        keep_gil: True for calls that are over before another thread could have gone on.
    """
    library = library_path(name, source)
    try:
        if not library.exists():
            _build(library, source)
        if not _is_mine(library):
            return None
        return ctypes.PyDLL(str(library)) if keep_gil else ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None


def library_path(name: str, source: str) -> Path:
    """``$XDG_CACHE_HOME/trainfer/native``, under a digest of source, flags and processor."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    text = "\0".join((source, *_FLAGS, platform.machine(), _processor()))
    return Path(base) / "trainfer" / "native" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def _build(library: Path, source: str) -> None:
    """Build beside the final place and move it there, so that ranks that start together do no harm."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc")
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        written, built = Path(folder) / "source.c", Path(folder) / "built.so"
        written.write_text(source, encoding="utf-8")
        command = [compiler, *_FLAGS, "-o", str(built), str(written), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_S)
        built.chmod(0o700)
        built.replace(library)


def _is_mine(library: Path) -> bool:
    """Nobody else can have written it; code from a cache that others share is not run."""
    found = library.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
