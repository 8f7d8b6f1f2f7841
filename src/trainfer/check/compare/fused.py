"""Differences of two matrices of narrow floats in one pass over memory, by some lines of C.

Takes [n, F] float32, bfloat16 or float16 on either side; gives what ``compare_rows`` gives, or says that it cannot: some
value is NaN or infinite and not equal on both sides. NumPy and torch (``quick``) need some twenty passes for the same
numbers. Squares are summed in float64, other sums in float32 within a block and in float64 beyond.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainfer.check.compare.records import Metrics
from trainfer.check.compare.ulps import ulp_max
from trainfer.check.dump.native import load_library

SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
#define BLOCK 1024

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { EQUAL, MAX_ABS, SUM_ABS, SUM_RELATIVE, MAX_RELATIVE, WITHIN_1, WITHIN_5, XX, YY, DD, ULP, MANY };

static inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float value_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline double most(double a, double b) { return a > b ? a : b; }

static int is_finite(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return (bits & 0x7ff0000000000000) != 0x7ff0000000000000;
}

/* Same bits, and no NaN among them: that would not be equal to itself. Whole numbers, since floats are taken for finite. */
static int same_words(const uint32_t *x, const uint32_t *y, int64_t n) {
    uint32_t off = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t magnitude = x[i] & 0x7fffffff;
        off |= x[i] ^ y[i];
        largest = magnitude > largest ? magnitude : largest;
    }
    return off == 0 && largest <= 0x7f800000;
}

static int same_halves(const uint16_t *x, const uint16_t *y, int64_t n, uint16_t infinity) {
    uint16_t off = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t magnitude = x[i] & 0x7fff;
        off |= x[i] ^ y[i];
        largest = magnitude > largest ? magnitude : largest;
    }
    return off == 0 && largest <= infinity;
}

static int same(const char *x, const char *y, int64_t n, int64_t type) {
    const int64_t size = type == FLOAT32 ? 4 : 2;
    for (int64_t many; n > 0; x += many * size, y += many * size, n -= many) {
        many = n < 4 * BLOCK ? n : 4 * BLOCK;
        if (type == FLOAT32) {
            if (!same_words((const uint32_t *)x, (const uint32_t *)y, many)) return 0;
        } else {
            const uint16_t infinity = type == BFLOAT16 ? 0x7f80 : 0x7c00;
            if (!same_halves((const uint16_t *)x, (const uint16_t *)y, many, infinity)) return 0;
        }
    }
    return 1;
}

/* As float32. Small float16 come without arithmetic on denormals, which a program may have told to be zero. */
static const float *widen(const char *source, int64_t n, int64_t type, float *room) {
    const uint16_t *half = (const uint16_t *)source;
    if (type == FLOAT32) return (const float *)source;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t magnitude = (uint32_t)(half[i] & 0x7fff) << 13, sign = (uint32_t)(half[i] & 0x8000) << 16;
        const uint32_t small = bits_of(value_of(magnitude + (113u << 23)) - value_of(113u << 23));
        const uint32_t normal = magnitude + ((magnitude >= 0x0f800000 ? 224u : 112u) << 23);
        const uint32_t bits = sign | (magnitude < 0x00800000 ? small : normal);
        room[i] = value_of(type == BFLOAT16 ? (uint32_t)half[i] << 16 : bits);
    }
    return room;
}

/* The largest distance in representable numbers: of unlike signs it is |x| + |y|. */
static double steps_of_words(const uint32_t *x, const uint32_t *y, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t a = x[i] & 0x7fffffff, b = y[i] & 0x7fffffff, apart = a > b ? a - b : b - a;
        const uint32_t steps = (int32_t)(x[i] ^ y[i]) < 0 ? a + b : apart;
        largest = steps > largest ? steps : largest;
    }
    return largest;
}

static double steps_of_halves(const uint16_t *x, const uint16_t *y, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t a = x[i] & 0x7fff, b = y[i] & 0x7fff, apart = a > b ? a - b : b - a, across = a + b;
        const uint16_t steps = (int16_t)(x[i] ^ y[i]) < 0 ? across : apart;
        largest = steps > largest ? steps : largest;
    }
    return largest;
}

typedef struct { double xx, yy, dd; float x, y, d; } Row;

/* At most BLOCK elements of a row. A relative difference that is not finite (x is zero, or nearly) counts as 0. */
static void add(const float *x, const float *y, int64_t n, Row *row, double *numbers) {
    float ratios[BLOCK], largest_x = row->x, largest_y = row->y, largest_d = row->d, off = 0, relative = 0;
    float ratio = (float)numbers[MAX_RELATIVE];
    double xx = 0, yy = 0, dd = 0;
    int32_t equal = 0, within_1 = 0, within_5 = 0;
    for (int64_t i = 0; i < n; i++) {
        const float a = fabsf(x[i]), b = fabsf(y[i]), d = fabsf(y[i] - x[i]);
        largest_x = a > largest_x ? a : largest_x;
        largest_y = b > largest_y ? b : largest_y;
        largest_d = d > largest_d ? d : largest_d;
        xx += (double)a * a; yy += (double)b * b; dd += (double)d * d;
        off += d;
        equal += x[i] == y[i];
        ratios[i] = d / a;
    }
    for (int64_t i = 0; i < n; i++) {
        const float r = bits_of(ratios[i]) < 0x7f800000 ? ratios[i] : 0;
        relative += r;
        ratio = r > ratio ? r : ratio;
        within_1 += r < 1e-3f; within_5 += r < 5e-3f;
    }
    row->x = largest_x; row->y = largest_y; row->d = largest_d;
    row->xx += xx; row->yy += yy; row->dd += dd;
    numbers[EQUAL] += equal; numbers[SUM_ABS] += off; numbers[SUM_RELATIVE] += relative; numbers[MAX_RELATIVE] = ratio;
    numbers[WITHIN_1] += within_1; numbers[WITHIN_5] += within_5;
}

static float error_of(const Row *row) {
    const double tiny = 1.17549435082228751e-38;
    const double by_norm = sqrt(row->dd) / most(sqrt(most(row->xx, row->yy)), tiny);
    return (float)most(by_norm, row->d / most(most(row->x, row->y), tiny));
}

/* Rows that are not all the same; 0 where a value is not finite. */
static int add_rows(const char *x, const char *y, const int64_t *about, int64_t rows, double *numbers, float *errors) {
    const int64_t width = about[1], types[2] = {about[5], about[6]};
    float room_x[BLOCK], room_y[BLOCK];
    for (int64_t i = 0; i < rows; i++, x += about[3], y += about[4]) {
        Row row = {0, 0, 0, 0, 0, 0};
        for (int64_t start = 0, n; start < width; start += n) {
            const char *a = x + start * (types[0] == FLOAT32 ? 4 : 2), *b = y + start * (types[1] == FLOAT32 ? 4 : 2);
            n = width - start < BLOCK ? width - start : BLOCK;
            add(widen(a, n, types[0], room_x), widen(b, n, types[1], room_y), n, &row, numbers);
            if (types[0] != types[1]) continue;
            numbers[ULP] = most(numbers[ULP], types[0] == FLOAT32
                ? steps_of_words((const uint32_t *)a, (const uint32_t *)b, n)
                : steps_of_halves((const uint16_t *)a, (const uint16_t *)b, n));
        }
        if (!is_finite(row.xx + row.yy + row.dd)) return 0;
        numbers[XX] += row.xx; numbers[YY] += row.yy; numbers[DD] += row.dd;
        numbers[MAX_ABS] = most(numbers[MAX_ABS], row.d);
        errors[i] = error_of(&row);
    }
    return 1;
}

/* about: rows, width, rows of a chunk, bytes from row to row (x, y), dtypes (x, y). Numbers and errors come as zeros. An
   equal chunk counts and adds nothing to the sums of squares. */
int64_t trainfer_compare_rows(const char *x, const char *y, const int64_t *about, double *numbers, float *errors) {
    const int64_t width = about[1], size = about[5] == FLOAT32 ? 4 : 2;
    const int packed = about[3] == width * size && about[4] == width * size;
    for (int64_t start = 0; start < about[0]; start += about[2]) {
        const int64_t rows = about[0] - start < about[2] ? about[0] - start : about[2], n = rows * width;
        const char *a = x + start * about[3], *b = y + start * about[4];
        double before[MANY];
        int equal = about[5] == about[6];
        if (equal && packed) equal = same(a, b, n, about[5]);
        else for (int64_t i = 0; equal && i < rows; i++) equal = same(a + i * about[3], b + i * about[4], width, about[5]);
        memcpy(before, numbers, sizeof before);
        if (!equal) {
            if (!add_rows(a, b, about, rows, numbers, errors + start)) return 0;
            if (numbers[EQUAL] - before[EQUAL] < n) continue;
            memcpy(numbers, before, sizeof before);
        }
        numbers[EQUAL] += n; numbers[WITHIN_1] += n; numbers[WITHIN_5] += n;
    }
    return 1;
}
"""

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MANY = 11

RowsFunction = Callable[[int, int, int, int, int], int]
"""Addresses of x, y, what is to be known about them, the numbers, the rows' errors; gives 0 where a value is odd."""
Compared = tuple[Metrics, NDArray[np.float32]]


@cache
def load() -> RowsFunction | None:
    """The function, built where it was not yet; None where this machine cannot build it."""
    library = load_library("rows", SOURCE, keep_gil=False)
    if library is None:
        return None
    function = library.trainfer_compare_rows
    function.argtypes, function.restype = [ctypes.c_void_p] * 5, ctypes.c_int64
    return function


def compare_fused(function: RowsFunction, rollout: Tensor, train: Tensor, step: int) -> Compared | None:
    """Compare in chunks of ``step`` rows; None where a value is NaN or infinite and not equal on both sides."""
    num_rows, width = rollout.shape
    x, y = _rows_in_memory(rollout), _rows_in_memory(train)
    strides = (x.stride(0) * x.element_size(), y.stride(0) * y.element_size())
    about = np.array((num_rows, width, step, *strides, _TYPES[x.dtype], _TYPES[y.dtype]), dtype=np.int64)
    numbers, errors = np.zeros(_MANY), np.zeros(num_rows, dtype=np.float32)
    where = (about.ctypes.data, numbers.ctypes.data, errors.ctypes.data)
    if not function(x.data_ptr(), y.data_ptr(), *where):
        return None
    equal, max_abs, sum_abs, sum_relative, max_relative, one, five, xx, yy, dd, steps = numbers.tolist()
    if x.dtype is not y.dtype and equal < x.numel():
        parts = range(0, num_rows, step)
        steps = max(ulp_max(x[start : start + step], y[start : start + step]) for start in parts)
    metrics = Metrics(
        elements=rollout.numel(),
        equal=int(equal),
        max_abs=max_abs,
        sum_abs=sum_abs,
        sum_relative=sum_relative,
        max_relative=max_relative,
        within_thousandth=int(one),
        within_five_thousandths=int(five),
        dot=(xx + yy - dd) / 2,
        sum_rollout_squared=xx,
        sum_train_squared=yy,
        sum_difference_squared=dd,
        ulp_max=int(steps),
    )
    return metrics, errors


def _rows_in_memory(rows: Tensor) -> Tensor:
    """The same, with the elements of a row side by side."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
