/* Products with weights of few bits, for a few inputs at a time: decode some codes of a row, multiply, go on.
 *
 * Compiled once for each LEVEL of processors (kernels.c chooses); knows neither Python nor torch. A row is decoded into
 * floats exactly as models/quantization/codes.py does it: for one input in registers, for several into the first cache.
 * Whatever is multiplied at once, a product is the same: it has 16 sums side by side, to which columns are added in turn.
 */
#include <stdint.h>
#include <string.h>

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline)) /* into the version of each processor */
#else
#define INLINE static inline
#endif

#define PASTED(name, level) swarmllm_##name##_##level
#define EXPANDED(name, level) PASTED(name, level)
#define OF_LEVEL(name) EXPANDED(name, LEVEL)

#define PIECE 512 /* columns that are decoded at a time, at most */
#define ROWS 4    /* decoded at a time */
#define MOST 16   /* inputs at a time, at most */

#include "vectors.h"
#include "weight.h"

#include "bit_planes.h"
#include "gguf_blocks.h"

INLINE vec joined(const floats *two) { /* by their place: there is more than one way to pass such vectors */
#if LEVEL == 4
    return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)two[0]), (__m256)two[1], 1);
#elif LEVEL == 3
    return (vec){(__m256)two[0], (__m256)two[1]};
#else
    return load((const float *)two);
#endif
}

INLINE float number(const void *numbers, int32_t kind, int64_t at) {
    float value;
    if (kind == FLOAT32) {
        value = ((const float *)numbers)[at];
    } else if (kind == BFLOAT16) {
        uint32_t bits = (uint32_t)((const uint16_t *)numbers)[at] << 16;
        memcpy(&value, &bits, sizeof value);
    } else if (kind == FLOAT16) { /* the bits of a float whose exponent is 112 too small; no infinities stand here */
        uint32_t half = ((const uint16_t *)numbers)[at], bits = (half & 0x7fff) << 13;
        memcpy(&value, &bits, sizeof value);
        value *= half & 0x8000 ? -0x1p112f : 0x1p112f;
    } else if (kind == UINT8) {
        value = ((const uint8_t *)numbers)[at];
    } else {
        value = float8(((const uint8_t *)numbers)[at]);
    }
    return value;
}

INLINE float scale_of(const weight *w, int64_t row, int64_t group) {
    float scale = number(w->scale, w->scale_kind, row * w->groups + group);
    if (w->factor)
        scale = w->divides ? scale / w->factor[row] : scale * w->factor[row];
    return scale;
}

INLINE void planes_of(const weight *w, int64_t row, int64_t group, floats *values) {
    int64_t at = row * w->groups + group;
    open_group(w->codes + at * w->group_bytes, w->group_bytes, number(w->scale, w->scale_kind, at),
               number(w->least, w->scale_kind, at), values);
}

/* Columns [start, end) of a row, for codes without a faster way. All codes first: what has just been written isn't read
 * in wider pieces at once. */
INLINE void decode_plainly(const weight *w, int64_t row, int64_t start, int64_t end, float *out) {
    int64_t count = end - start, size = w->columns / w->groups;
    const uint8_t *codes = w->codes + (w->codes_kind == PAIRS ? (row * w->columns + start) / 2 : row * w->columns + start);
    if (w->codes_kind == PAIRS) {
        for (int64_t i = 0; i < count; i++) /* the first of two below */
            out[i] = w->values[codes[i / 2] >> 4 * (i % 2) & 15];
    } else if (w->codes_kind == INT8) {
        for (int64_t i = 0; i < count; i++)
            out[i] = (float)(int8_t)codes[i];
    } else if (w->codes_kind == BYTES) {
        for (int64_t i = 0; i < count; i++)
            out[i] = codes[i];
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = float8(codes[i]);
    }
    for (int64_t group = start / size; start < end; group++) {
        int64_t at = row * w->groups + group, stop = (group + 1) * size < end ? (group + 1) * size : end;
        float scale = scale_of(w, row, group), zero = w->zero ? number(w->zero, w->zero_kind, at) : 0.0f;
        if (w->least) { /* the product is exact, so it rounds but once: see bit_planes.h */
            float least = number(w->least, w->scale_kind, at);
            for (; start < stop; start++, out++)
                *out = *out * scale + least;
            continue;
        }
        for (; start < stop; start++, out++)
            *out = (*out - zero) * scale;
    }
}

INLINE vec codes_of(const weight *w, int kind, int64_t at) {
    return kind == INT8    ? codes_at((const int8_t *)w->codes + at)
           : kind == PAIRS ? pairs_at(w->values, w->codes + at / 2)
           : kind == BYTES ? bytes_at(w->codes + at)
                           : floats8_at(w->codes + at);
}

/* Columns [start, end) of a row whose groups have whole vectors; `kind` is a constant where this is called. */
INLINE void decode_groups(const weight *w, int64_t row, int64_t start, int64_t end, int kind, sink *to) {
    int64_t size = w->columns / w->groups, first = row * w->columns;
    for (int64_t group = start / size; start < end; group++) {
        int64_t at = row * w->groups + group, stop = (group + 1) * size < end ? (group + 1) * size : end;
        vec scale = all(scale_of(w, row, group)), other = all(0.0f);
        if (w->least) { /* the product is exact, so it rounds but once: see bit_planes.h */
            for (other = all(number(w->least, w->scale_kind, at)); start < stop; start += WIDTH)
                take(to, plus_product(codes_of(w, kind, first + start), scale, other));
        } else if (w->zero) {
            for (other = all(-number(w->zero, w->zero_kind, at)); start < stop; start += WIDTH)
                take(to, product(sum(codes_of(w, kind, first + start), other), scale));
        } else {
            for (; start < stop; start += WIDTH)
                take(to, product(codes_of(w, kind, first + start), scale));
        }
    }
}

/* Columns [start, start + count) of a row, both multiples of 16. */
INLINE void decode(const weight *w, int64_t row, int64_t start, int64_t count, sink *to) {
    int64_t size = w->columns / w->groups;
    if (w->codes_kind >= GGUF) {
        decode_gguf(w->codes_kind, w->codes + row * w->groups, start, count, to);
    } else if (w->codes_kind == PLANES) {
        floats values[8];
        for (int64_t group = start / size; group < (start + count) / size; group++) {
            planes_of(w, row, group, values);
            for (int i = 0; i < 8; i += 2)
                take(to, joined(values + i));
        }
    } else if (size % WIDTH == 0) {
        switch (w->codes_kind) {
        case INT8: decode_groups(w, row, start, start + count, INT8, to); break;
        case PAIRS: decode_groups(w, row, start, start + count, PAIRS, to); break;
        case BYTES: decode_groups(w, row, start, start + count, BYTES, to); break;
        default: decode_groups(w, row, start, start + count, FLOAT8, to);
        }
    } else if (to->writes) {
        decode_plainly(w, row, start, start + count, to->out);
    } else {
        float piece[PIECE];
        decode_plainly(w, row, start, start + count, piece);
        for (int64_t i = 0; i < count; i += WIDTH)
            take(to, load(piece + i));
    }
}

void OF_LEVEL(dequantize)(const weight *w, int64_t start, int64_t end, float *out) {
    int64_t whole = w->columns / WIDTH * WIDTH;
    for (int64_t row = start; row < end; row++, out += w->columns) {
        sink to = {.writes = 1, .out = out};
        decode(w, row, 0, whole, &to);
        if (whole < w->columns)
            decode_plainly(w, row, whole, w->columns, out + whole);
    }
}

/* Products of one input with one piece of a row. */
INLINE vec add_products(const weight *w, int64_t row, int64_t start, int64_t count, const float *input, vec sum) {
    sink to = {.writes = 0, .inputs = input + start, .sum = sum};
    decode(w, row, start, count, &to);
    return to.sum;
}

/* Products of a piece of some rows with some inputs; `rows` and `num` are constants where this is called. */
INLINE void add_block(float (*piece)[PIECE], int64_t count, const float *inputs, int64_t columns, int rows, int num,
                      vec (*sums)[MOST]) {
    vec own[AT_ONCE][AT_ONCE];
    for (int row = 0; row < rows; row++)
        for (int n = 0; n < num; n++)
            own[row][n] = sums[row][n];
    for (int64_t i = 0; i < count; i += WIDTH)
        for (int n = 0; n < num; n++) {
            vec input = load(inputs + n * columns + i);
            for (int row = 0; row < rows; row++)
                own[row][n] = plus_product(load(piece[row] + i), input, own[row][n]);
        }
    for (int row = 0; row < rows; row++)
        for (int n = 0; n < num; n++)
            sums[row][n] = own[row][n];
}

INLINE void add_blocks(float (*piece)[PIECE], int64_t count, const float *inputs, int64_t columns, int rows, int64_t num,
                       vec (*sums)[MOST]) {
    for (int row = 0; row < rows; row += AT_ONCE) {
        int64_t n = 0;
        for (; n + AT_ONCE <= num; n += AT_ONCE)
            add_block(piece + row, count, inputs + n * columns, columns, rows < AT_ONCE ? rows : AT_ONCE, AT_ONCE,
                      (vec(*)[MOST])(&sums[row][n]));
        for (; n < num; n++)
            add_block(piece + row, count, inputs + n * columns, columns, rows < AT_ONCE ? rows : AT_ONCE, 1,
                      (vec(*)[MOST])(&sums[row][n]));
    }
}

/* Ask for a piece of a row, which is read soon: processors guess that less well, where rows are read side by side. */
INLINE void prefetch(const weight *w, int64_t row, int64_t start, int64_t count) {
#ifdef __GNUC__
    int64_t bytes = w->codes_kind >= GGUF       ? w->groups
                    : w->codes_kind == PLANES ? w->groups * w->group_bytes
                    : w->codes_kind == PAIRS  ? w->columns / 2
                                              : w->columns;
    const uint8_t *from = w->codes + row * bytes + start * bytes / w->columns;
    for (int64_t i = 0; i < count * bytes / w->columns; i += 64)
        __builtin_prefetch(from + i);
#endif
}

/* Some rows' products with at most MOST inputs. */
INLINE void multiply_rows(const weight *w, int64_t row, int rows, const float *inputs, int64_t num, float *outputs,
                          int64_t stride) {
    int64_t whole = w->columns / WIDTH * WIDTH;
    float piece[ROWS][PIECE], lanes[WIDTH];
    vec sums[ROWS][MOST];
    for (int r = 0; r < rows; r++)
        for (int64_t n = 0; n < num; n++)
            sums[r][n] = all(0.0f);
    for (int64_t at = 0; at < whole; at += PIECE) {
        int64_t count = whole - at < PIECE ? whole - at : PIECE;
        for (int r = 0; r < rows; r++) {
            sink to = {.writes = 1, .out = piece[r]};
            prefetch(w, row + rows + r, at, count);
            if (num == 1)
                sums[r][0] = add_products(w, row + r, at, count, inputs, sums[r][0]);
            else
                decode(w, row + r, at, count, &to);
        }
        if (num > 1)
            add_blocks(piece, count, inputs + at, w->columns, rows, num, sums);
    }
    for (int r = 0; r < rows; r++) {
        if (whole < w->columns)
            decode_plainly(w, row + r, whole, w->columns, piece[0]);
        for (int64_t n = 0; n < num; n++) {
            if (whole < w->columns) {
                store(lanes, sums[r][n]);
                for (int64_t i = 0; i < w->columns - whole; i++)
                    lanes[i] += piece[0][i] * inputs[n * w->columns + whole + i];
                sums[r][n] = load(lanes);
            }
            outputs[n * stride + row + r] = sum_of(sums[r][n]);
        }
    }
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end); `stride`: floats of a row of outputs. */
void OF_LEVEL(multiply)(const weight *w, int64_t start, int64_t end, const float *inputs, int64_t num_inputs,
                        float *outputs, int64_t stride) {
    for (; num_inputs > 0; num_inputs -= MOST, inputs += MOST * w->columns, outputs += MOST * stride) {
        int64_t row = start, num = num_inputs < MOST ? num_inputs : MOST;
        for (; num > 1 && row + ROWS <= end; row += ROWS) /* one input wants rows in the order of memory */
            multiply_rows(w, row, ROWS, inputs, num, outputs, stride);
        for (; row < end; row++)
            multiply_rows(w, row, 1, inputs, num, outputs, stride);
    }
}
