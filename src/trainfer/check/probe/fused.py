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
#include <string.h>
#define LANES 32
#define BLOCK 2048

/* Sums of each lane are float32 within a block, double beyond. One stream and an early prefetch: from memory that is twice
   as fast as two streams side by side. It asks for no place in the caches: nobody reads these values soon again. */
static int64_t reduce(const float *x, int64_t n, double *out) {
    float lows[LANES], highs[LANES], low = x[0], high = x[0];
    double sum = 0, squares = 0;
    int64_t zeros = 0, start = 0;
    for (int j = 0; j < LANES; j++) lows[j] = highs[j] = x[0];
    for (; start + BLOCK <= n; start += BLOCK) {
        float sums[LANES] = {0}, products[LANES] = {0}, total = 0, total_squares = 0;
        int32_t counts[LANES] = {0}, count = 0;
        for (int i = 0; i < BLOCK; i += LANES) {
            const float *a = x + start + i;
            for (int j = 0; j < LANES; j += 16) __builtin_prefetch(a + BLOCK + j, 0, 0);
            for (int j = 0; j < LANES; j++) {
                const float v = a[j];
                lows[j] = v < lows[j] ? v : lows[j];
                highs[j] = v > highs[j] ? v : highs[j];
                sums[j] += v;
                products[j] += v * v;
                counts[j] += v == 0;
            }
        }
        for (int j = 0; j < LANES; j++) { total += sums[j]; total_squares += products[j]; count += counts[j]; }
        sum += total; squares += total_squares; zeros += count;
    }
    for (int j = 0; j < LANES; j++) {
        low = lows[j] < low ? lows[j] : low;
        high = highs[j] > high ? highs[j] : high;
    }
    for (; start < n; start++) {
        const float v = x[start];
        low = v < low ? v : low; high = v > high ? v : high;
        sum += v; squares += (double)v * v; zeros += v == 0;
    }
    out[0] = low; out[1] = high; out[2] = sum; out[3] = squares;
    return zeros;
}

/* Each to its place, which is the number of those before it: no branch that could be guessed wrong. */
static void sort(const float *x, int n, float *sorted) {
    for (int i = 0; i < n; i++) {
        const float v = x[i];
        int32_t place = 0;
        for (int j = 0; j < i; j++) place += x[j] <= v;
        for (int j = i + 1; j < n; j++) place += x[j] < v;
        sorted[place] = v;
    }
}

/* out: min, max, sum, sum of squares, number of zeros, quantiles; of no use where the sum of squares is not finite. */
void trainfer_statistics(const float *x, int64_t n, const double *probabilities, int64_t many, double *out) {
    float sample[SAMPLE], sorted[SAMPLE] = {0};
    const int64_t stride = (n + SAMPLE - 1) / SAMPLE;
    int taken = 0;
    out[4] = (double)reduce(x, n, out);
    for (int64_t i = 0; i < n; i += stride) sample[taken++] = x[i];
    sort(sample, taken, sorted);
    for (int64_t i = 0; i < many; i++) out[5 + i] = sorted[(int)(probabilities[i] * (taken - 1))];
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
