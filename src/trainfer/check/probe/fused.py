"""All statistics of a float32 array in one pass over memory, by a few lines of C.

Takes an address and a length; gives eleven numbers. NumPy needs a pass for each number, and on one thread these passes
are most of what watching costs. The C below is built once per processor by the machine's own compiler, within a
second, and kept in the user's cache; where there is no compiler, ``load`` gives None and NumPy does the work.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

SAMPLE = 256
"""Elements that the quantiles are taken of, at most."""

SOURCE = """
#include <stdint.h>
#define HALF 1024

/* Two streams, so that two chains of additions run side by side. float32 within 2 * HALF elements, double beyond. */
static int64_t reduce(const float *x, int64_t n, double *out) {
    float lo = x[0], hi = x[0];
    double sum = 0, squares = 0;
    int64_t zeros = 0, start = 0;
    for (; start + 2 * HALF <= n; start += 2 * HALF) {
        const float *a = x + start, *b = a + HALF;
        float la = lo, lb = lo, ha = hi, hb = hi, sa = 0, sb = 0, qa = 0, qb = 0;
        int32_t za = 0, zb = 0;
        for (int i = 0; i < HALF; i++) {
            const float v = a[i], w = b[i];
            la = v < la ? v : la; lb = w < lb ? w : lb;
            ha = v > ha ? v : ha; hb = w > hb ? w : hb;
            sa += v; sb += w;
            qa += v * v; qb += w * w;
            za += v == 0; zb += w == 0;
        }
        lo = la < lb ? la : lb; hi = ha > hb ? ha : hb;
        sum += (double)sa + sb; squares += (double)qa + qb; zeros += za + zb;
    }
    for (; start < n; start++) {
        const float v = x[start];
        lo = v < lo ? v : lo; hi = v > hi ? v : hi;
        sum += v; squares += (double)v * v; zeros += v == 0;
    }
    out[0] = lo; out[1] = hi; out[2] = sum; out[3] = squares;
    return zeros;
}

static void sort(float *x, int n) {
    static const int gaps[] = {132, 57, 23, 10, 4, 1};
    for (int g = 0; g < 6; g++)
        for (int gap = gaps[g], i = gap; i < n; i++) {
            const float v = x[i];
            int j = i;
            for (; j >= gap && x[j - gap] > v; j -= gap) x[j] = x[j - gap];
            x[j] = v;
        }
}

/* out: min, max, sum, sum of squares, number of zeros, quantiles; of no use where the sum of squares is not finite. */
void trainfer_statistics(const float *x, int64_t n, const double *probabilities, int64_t many, double *out) {
    float sample[SAMPLE];
    const int64_t stride = (n + SAMPLE - 1) / SAMPLE;
    int taken = 0;
    out[4] = (double)reduce(x, n, out);
    for (int64_t i = 0; i < n; i += stride) sample[taken++] = x[i];
    sort(sample, taken);
    for (int64_t i = 0; i < many; i++) out[5 + i] = sample[(int)(probabilities[i] * (taken - 1))];
}
""".replace("SAMPLE", str(SAMPLE))

_FLAGS = (
    "-O3", "-march=native", "-std=c99", "-shared", "-fPIC",
    # Vector sums and minima. Not -ffast-math: a library linked with it makes the whole process flush denormals.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-ffinite-math-only", "-fno-math-errno",
)  # fmt: skip
_BUILD_TIMEOUT_S = 30

StatisticsFunction = Callable[[int, int, int, int, int], None]
"""Address of float32, elements, address of float64 probabilities, how many, address of float64 results."""


@cache
def load() -> StatisticsFunction | None:
    """The function, built where it was not yet; None where this machine cannot build it."""
    library = library_path()
    try:
        if not library.exists():
            _build(library)
        if not _is_mine(library):
            return None
        function = ctypes.PyDLL(str(library)).trainfer_statistics
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, integer, pointer, integer, pointer], None
    return function


def library_path() -> Path:
    """``$XDG_CACHE_HOME/trainfer/native``, under a digest of source, flags and processor."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    text = "\0".join((SOURCE, *_FLAGS, platform.machine(), _processor()))
    return (
        Path(base) / "trainfer" / "native" / f"statistics-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    )


def _build(library: Path) -> None:
    """Build beside the final place and move it there, so that ranks that start together do no harm."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc")
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder) / "statistics.c", Path(folder) / "statistics.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, *_FLAGS, "-o", str(built), str(source)]
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
