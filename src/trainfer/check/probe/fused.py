"""All statistics of a float32 array in one pass over memory, by a few lines of C.

Takes an address and a length; gives eleven numbers. NumPy needs a pass for each number, and on one thread these passes
are most of what watching costs. Where the C below cannot be built (``dump.native``), ``load`` gives None and NumPy does
the work.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from trainfer.check.dump.native import load_library

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

StatisticsFunction = Callable[[int, int, int, int, int], None]
"""Address of float32, elements, address of float64 probabilities, how many, address of float64 results."""


@cache
def load() -> StatisticsFunction | None:
    """The function, built where it was not yet; None where this machine cannot build it."""
    library = load_library("statistics", SOURCE, keep_gil=True)
    if library is None:
        return None
    function = library.trainfer_statistics
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, integer, pointer, integer, pointer], None
    return function
