/* Convolution and maximum pooling of images whose samples lie side by side in memory.
 *
 *     images    (maps, height, width, samples)
 *     weights   (outputs, inputs / groups, kernel rows, kernel columns), as torch has them
 *
 * Every load, product and store is of neighbouring samples, a vector of them at a time, however few the maps and
 * wherever a pixel lies; what is at the border of an image is a question of loop bounds. A block of maps is computed
 * at once, so that its sums stay in registers and each vector that is loaded is used several times:
 *
 *     forward            sums of 6 outputs    x 2 vectors of samples    at one pixel of the outputs
 *     input gradient     sums of 6 inputs     x 2 vectors of samples    at one pixel of the inputs
 *     weight gradient    sums of 4 outputs    x 3 weights of a row      along one row of pixels
 *
 * REAL is float or double, INTEGER of the same size. There are no fewer samples than a vector has. Where they are no multiple of it, the last
 * vector begins earlier: sums at pixels are computed twice then, those along rows leave out what was counted. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES ((int64_t)(BYTES / sizeof(REAL)))
#define MAPS 6
#define FACTORS 4
#define TAPS 3
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

/* gcc would load a vector anew for each product that it is a factor of. */
#if defined(__x86_64__)
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#else
#define IN_REGISTER(vector)
#endif

#define VECTOR(type, bytes) type __attribute__((vector_size(bytes), aligned(1), may_alias))
typedef VECTOR(REAL, BYTES) Vector;
typedef VECTOR(uint8_t, BYTES / sizeof(REAL)) Places;
typedef VECTOR(INTEGER, BYTES) Mask;

typedef struct {
    int64_t samples, inputs, height, width, outputs, rows, columns, kernel_rows, kernel_columns;
    int64_t row_stride, column_stride, row_padding, column_padding, groups;
} Shape;

/* The pixels of the other image that one pixel has to do with: `count` from `first` on, `step` apart, and the kernel's
 * rows (or columns) from `tap` on, `taps_apart` from one to the next. */
typedef struct {
    int64_t first, tap, count, step, taps_apart;
} Reach;

int64_t lanes(void) { return LANES; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE Vector load(const REAL *from) { return *(const Vector *)from; }
INLINE void store(REAL *to, Vector value) { *(Vector *)to = value; }

/* The input pixels of an output. */
INLINE Reach inputs_of(int64_t at, int64_t size, int64_t kernel, int64_t stride, int64_t padding) {
    const int64_t first = at * stride - padding, tap = larger(0, -first);
    return (Reach){first + tap, tap, smaller(kernel, size - first) - tap, 1, 1};
}

/* The output pixels that an input is part of. */
INLINE Reach outputs_of(int64_t at, int64_t size, int64_t kernel, int64_t stride, int64_t padding) {
    const int64_t shifted = at + padding, last = smaller(shifted / stride, size - 1), tap = shifted - last * stride;
    const int64_t count = tap < kernel ? smaller((kernel - 1 - tap) / stride, last) + 1 : 0;
    return (Reach){last, tap, count, -1, stride};
}

/* Sums of `maps` maps at one pixel, for `vectors` vectors of samples: of products of all maps of the other image. */
INLINE void pixel(const REAL *other, int64_t others, int64_t plane, int64_t line, int64_t samples, Reach down,
                  Reach across, const REAL *weights, int64_t kernel_rows, int64_t kernel_columns, const REAL *bias,
                  REAL *to, int64_t map, int maps, int vectors) {
    Vector sum[MAPS][2];
    UNROLLED for (int m = 0; m < maps; m++)
        UNROLLED for (int v = 0; v < vectors; v++) sum[m][v] = (Vector){} + (bias ? bias[m] : 0);
    for (int64_t c = 0; c < others; c++)
        for (int64_t i = 0; i < down.count; i++) {
            const REAL *seen = other + c * plane + (down.first + i * down.step) * line + across.first * samples;
            const int64_t row = c * kernel_rows + down.tap + i * down.taps_apart;
            const REAL *factors = weights + (row * kernel_columns + across.tap) * maps;
            for (int64_t j = 0; j < across.count; j++) {
                Vector value[2];
                UNROLLED for (int v = 0; v < vectors; v++) value[v] = load(seen + v * LANES);
                UNROLLED for (int m = 0; m < maps; m++)
                    UNROLLED for (int v = 0; v < vectors; v++) sum[m][v] += value[v] * factors[m];
                seen += across.step * samples;
                factors += across.taps_apart * maps;
            }
        }
    UNROLLED for (int m = 0; m < maps; m++)
        UNROLLED for (int v = 0; v < vectors; v++) store(to + m * map + v * LANES, sum[m][v]);
}

/* The same for all samples. */
INLINE void samples_of_pixel(const REAL *other, int64_t others, int64_t plane, int64_t line, int64_t samples, Reach down,
                             Reach across, const REAL *weights, int64_t kernel_rows, int64_t kernel_columns,
                             const REAL *bias, REAL *to, int64_t map, int maps) {
    int64_t at = 0;
    for (; at + 2 * LANES <= samples; at += 2 * LANES)
        pixel(other + at, others, plane, line, samples, down, across, weights, kernel_rows, kernel_columns, bias, to + at,
              map, maps, 2);
    for (; at < samples; at += LANES) {
        const int64_t last = smaller(at, samples - LANES);
        pixel(other + last, others, plane, line, samples, down, across, weights, kernel_rows, kernel_columns, bias,
              to + last, map, maps, 1);
    }
}

/* All pixels of the outputs (or, if `back`, the inputs) of a group: all maps of one pixel after the other, so that
 * what they need of the other image stays in the cache meanwhile. */
INLINE void image(const Shape s, const REAL *other, const REAL *packed, const REAL *bias, REAL *to, int back) {
    const int64_t maps = (back ? s.inputs : s.outputs) / s.groups, others = (back ? s.outputs : s.inputs) / s.groups;
    const int64_t height = back ? s.height : s.rows, width = back ? s.width : s.columns;
    const int64_t far = back ? s.rows : s.height, wide = back ? s.columns : s.width;
    const int64_t next = wide * s.samples, map = height * width * s.samples, blocks = (maps + MAPS - 1) / MAPS;
    for (int64_t row = 0; row < height; row++)
        for (int64_t column = 0; column < width; column++) {
            const Reach down = back ? outputs_of(row, far, s.kernel_rows, s.row_stride, s.row_padding)
                                    : inputs_of(row, far, s.kernel_rows, s.row_stride, s.row_padding);
            const Reach across = back ? outputs_of(column, wide, s.kernel_columns, s.column_stride, s.column_padding)
                                      : inputs_of(column, wide, s.kernel_columns, s.column_stride, s.column_padding);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = block * maps / blocks;
                const REAL *weights = packed + first * others * s.kernel_rows * s.kernel_columns;
                const REAL *added = bias ? bias + first : 0;
                REAL *here = to + first * map + (row * width + column) * s.samples;
#define OF(maps)                                                                                                       \
    samples_of_pixel(other, others, far * next, next, s.samples, down, across, weights, s.kernel_rows,                 \
                     s.kernel_columns, added, here, map, maps)
                switch ((block + 1) * maps / blocks - first) {
                case 1: OF(1); break;
                case 2: OF(2); break;
                case 3: OF(3); break;
                case 4: OF(4); break;
                case 5: OF(5); break;
                default: OF(6);
                }
            }
        }
}

/* Put the weights of each block of maps of a group side by side, in the order in which `pixel` needs them. */
INLINE void pack(const Shape s, const REAL *weights, int64_t group, REAL *to, int back) {
    const int64_t inputs = s.inputs / s.groups, outputs = s.outputs / s.groups;
    const int64_t kernel = s.kernel_rows * s.kernel_columns, others = back ? outputs : inputs;
    const int64_t maps = back ? inputs : outputs, blocks = (maps + MAPS - 1) / MAPS;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < others; c++)
            for (int64_t k = 0; k < kernel; k++)
                for (int64_t m = block * maps / blocks; m < (block + 1) * maps / blocks; m++) {
                    const int64_t output = group * outputs + (back ? c : m), input = back ? m : c;
                    *to++ = weights[(output * inputs + input) * kernel + k];
                }
}

INLINE void all(const Shape s, const REAL *other, const REAL *weights, const REAL *bias, REAL *packed, REAL *to, int back) {
    const int64_t maps = (back ? s.inputs : s.outputs) / s.groups, others = (back ? s.outputs : s.inputs) / s.groups;
    const int64_t map = (back ? s.height * s.width : s.rows * s.columns) * s.samples;
    const int64_t other_map = (back ? s.rows * s.columns : s.height * s.width) * s.samples;
    for (int64_t group = 0; group < s.groups; group++) {
        pack(s, weights, group, packed, back);
        image(s, other + group * others * other_map, packed, bias ? bias + group * maps : 0, to + group * maps * map, back);
    }
}

/* packed: room for the weights of a group. bias: may be null. */
void convolve(const Shape *s, const REAL *x, const REAL *weights, const REAL *bias, REAL *packed, REAL *y) {
    all(*s, x, weights, bias, packed, y, 0);
}

void input_gradient(const Shape *s, const REAL *g, const REAL *weights, REAL *packed, REAL *dx) {
    all(*s, g, weights, 0, packed, dx, 1);
}

/* Add the products of `outputs` gradients and `taps` neighbouring inputs, for one vector of samples. */
INLINE void products(Vector sum[FACTORS][TAPS], const REAL *x, int64_t samples, const REAL *g, int64_t map,
                     Vector counted, int outputs, int taps) {
    Vector value[TAPS];
    UNROLLED for (int j = 0; j < taps; j++) {
        value[j] = load(x + j * samples);
        IN_REGISTER(value[j]);
    }
    UNROLLED for (int o = 0; o < outputs; o++) {
        const Vector factor = load(g + o * map) * counted;
        UNROLLED for (int j = 0; j < taps; j++) sum[o][j] += factor * value[j];
    }
}

INLINE void samples_of(Vector sum[FACTORS][TAPS], const REAL *x, int64_t samples, const REAL *g, int64_t map,
                       Vector rest, int outputs, int taps) {
    const Vector whole = (Vector){} + 1;
    int64_t at = 0;
    for (; at + LANES <= samples; at += LANES) products(sum, x + at, samples, g + at, map, whole, outputs, taps);
    if (at < samples) {
        at = samples - LANES;
        products(sum, x + at, samples, g + at, map, rest, outputs, taps);
    }
}

/* Add to the partial sums of `outputs` x `taps` weights what one row of pixels gives. */
INLINE void row_products(const Shape s, const REAL *x, const REAL *g, Vector *to, int64_t next, int64_t left,
                         Vector rest, int outputs, int taps) {
    Vector sum[FACTORS][TAPS];
    const int64_t map = s.rows * s.columns * s.samples;
    UNROLLED for (int o = 0; o < outputs; o++)
        UNROLLED for (int j = 0; j < taps; j++) sum[o][j] = to[o * next + j];
    for (int64_t column = 0; column < s.columns; column++) {
        const int64_t first = column * s.column_stride + left;
        const REAL *seen = x + first * s.samples, *gradient = g + column * s.samples;
        if (first >= 0 && first + taps <= s.width) {
            samples_of(sum, seen, s.samples, gradient, map, rest, outputs, taps);
            continue;
        }
        UNROLLED for (int j = 0; j < taps; j++) {
            if (first + j < 0 || first + j >= s.width) continue;
            Vector one[FACTORS][TAPS];
            UNROLLED for (int o = 0; o < outputs; o++) one[o][0] = sum[o][j];
            samples_of(one, seen + j * s.samples, s.samples, gradient, map, rest, outputs, 1);
            UNROLLED for (int o = 0; o < outputs; o++) sum[o][j] = one[o][0];
        }
    }
    UNROLLED for (int o = 0; o < outputs; o++)
        UNROLLED for (int j = 0; j < taps; j++) to[o * next + j] = sum[o][j];
}

INLINE void taps_of(const Shape s, const REAL *x, const REAL *g, Vector *to, int64_t next, int64_t left, Vector rest,
                    int outputs, int taps) {
    switch (taps) {
    case 1: row_products(s, x, g, to, next, left, rest, outputs, 1); break;
    case 2: row_products(s, x, g, to, next, left, rest, outputs, 2); break;
    default: row_products(s, x, g, to, next, left, rest, outputs, 3);
    }
}

/* Add what one row of the outputs from `first` on gives to the partial sums of all their weights. */
INLINE void row_of(const Shape s, const REAL *x, const REAL *g, Vector *to, int64_t first, int64_t row, Vector rest,
                   int outputs) {
    const int64_t inputs = s.inputs / s.groups, next = inputs * s.kernel_rows * s.kernel_columns;
    const int64_t group = first / (s.outputs / s.groups);
    const int64_t parts = (s.kernel_columns + TAPS - 1) / TAPS;
    const Reach down = inputs_of(row, s.height, s.kernel_rows, s.row_stride, s.row_padding);
    const REAL *gradient = g + (first * s.rows + row) * s.columns * s.samples;
    for (int64_t c = 0; c < inputs; c++)
        for (int64_t i = 0; i < down.count; i++) {
            const REAL *line = x + ((group * inputs + c) * s.height + down.first + i) * s.width * s.samples;
            Vector *kernel_row = to + first * next + (c * s.kernel_rows + down.tap + i) * s.kernel_columns;
            for (int64_t part = 0; part < parts; part++) {
                const int64_t j = part * s.kernel_columns / parts, stop = (part + 1) * s.kernel_columns / parts;
                taps_of(s, line, gradient, kernel_row + j, next, j - s.column_padding, rest, outputs, (int)(stop - j));
            }
        }
}

/* partial: room for a vector for each weight. */
void weight_gradient(const Shape *shape, const REAL *x, const REAL *g, REAL *partial, REAL *dw) {
    const Shape s = *shape;
    const int64_t outputs = s.outputs / s.groups, blocks = (outputs + FACTORS - 1) / FACTORS;
    const int64_t weights = s.outputs * (s.inputs / s.groups) * s.kernel_rows * s.kernel_columns;
    Vector rest;
    for (int64_t lane = 0; lane < LANES; lane++) rest[lane] = lane >= LANES - s.samples % LANES;
    memset(partial, 0, weights * BYTES);
    for (int64_t row = 0; row < s.rows; row++)
        for (int64_t group = 0; group < s.groups; group++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = group * outputs + block * outputs / blocks;
                switch (group * outputs + (block + 1) * outputs / blocks - first) {
                case 1: row_of(s, x, g, (Vector *)partial, first, row, rest, 1); break;
                case 2: row_of(s, x, g, (Vector *)partial, first, row, rest, 2); break;
                case 3: row_of(s, x, g, (Vector *)partial, first, row, rest, 3); break;
                default: row_of(s, x, g, (Vector *)partial, first, row, rest, 4);
                }
            }
    for (int64_t weight = 0; weight < weights; weight++) {
        REAL sum = 0;
        for (int64_t lane = 0; lane < LANES; lane++) sum += partial[weight * LANES + lane];
        dw[weight] = sum;
    }
}

/* The largest number of each window, and its place in it, row by row: the first of several, and NaN before all. */
void pool(const Shape *shape, const REAL *x, REAL *y, uint8_t *places) {
    const Shape s = *shape;
    for (int64_t map = 0; map < s.outputs; map++)
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t column = 0; column < s.columns; column++) {
                const Reach down = inputs_of(row, s.height, s.kernel_rows, s.row_stride, s.row_padding);
                const Reach across = inputs_of(column, s.width, s.kernel_columns, s.column_stride, s.column_padding);
                const REAL *corner = x + ((map * s.height + down.first) * s.width + across.first) * s.samples;
                const int64_t to = ((map * s.rows + row) * s.columns + column) * s.samples;
                for (int64_t n = 0; n < s.samples; n += LANES) {
                    const int64_t at = smaller(n, s.samples - LANES);
                    Mask largest = (Mask)load(corner + at), place = (Mask){} + (INTEGER)(down.tap * s.kernel_columns + across.tap);
                    for (int64_t i = 0; i < down.count; i++)
                        for (int64_t j = 0; j < across.count; j++) {
                            const Vector value = load(corner + (i * s.width + j) * s.samples + at);
                            const Mask more = (Mask)(value > (Vector)largest) | (Mask)(value != value);
                            const INTEGER k = (INTEGER)((down.tap + i) * s.kernel_columns + across.tap + j);
                            largest = (more & (Mask)value) | (~more & largest);
                            place = (more & ((Mask){} + k)) | (~more & place);
                        }
                    store(y + to + at, (Vector)largest);
                    *(Places *)(places + to + at) = __builtin_convertvector(place, Places);
                }
            }
}

void pool_gradient(const Shape *shape, const REAL *restrict g, const uint8_t *restrict places, REAL *restrict dx) {
    const Shape s = *shape;
    memset(dx, 0, s.outputs * s.height * s.width * s.samples * sizeof(REAL));
    for (int64_t map = 0; map < s.outputs; map++)
        for (int64_t row = 0; row < s.rows; row++)
            for (int64_t column = 0; column < s.columns; column++) {
                const Reach down = inputs_of(row, s.height, s.kernel_rows, s.row_stride, s.row_padding);
                const Reach across = inputs_of(column, s.width, s.kernel_columns, s.column_stride, s.column_padding);
                REAL *corner = dx + ((map * s.height + down.first) * s.width + across.first) * s.samples;
                const int64_t from = ((map * s.rows + row) * s.columns + column) * s.samples;
                for (int64_t i = 0; i < down.count; i++)
                    for (int64_t j = 0; j < across.count; j++) {
                        const int64_t k = (down.tap + i) * s.kernel_columns + across.tap + j;
                        REAL *to = corner + (i * s.width + j) * s.samples;
                        for (int64_t n = 0; n < s.samples; n++) to[n] += places[from + n] == k ? g[from + n] : 0;
                    }
            }
}
