/* Products with weights of few bits, for a few inputs at a time: decode some codes of a row, multiply, go on.
 *
 * Compiled once for each LEVEL of processors (kernels.c chooses); knows neither Python nor torch. A row is decoded into
 * floats exactly as models/quantization/decoded.py does it: for one input in registers, for several into the first cache.
 * Whatever is multiplied at once, a product is the same: it has 16 sums side by side, to which columns are added in turn.
 */
#include "compiler.h"

#define PIECE 512 /* columns that are decoded at a time, at most */
#define ROWS 4    /* decoded at a time */
#define MOST 16   /* inputs at a time, at most */
#define BAND 64  /* rows that are multiplied by all inputs before the next, of a multiple of ROWS */

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

INLINE void add_planes(const weight *w, int64_t row, int64_t group, int num_bytes, sink *to) {
    floats values[8];
    int64_t at = row * w->groups + group;
    float scale = number(w->scale, w->scale_kind, at), least = number(w->least, w->scale_kind, at);
    open_group(w->codes + at * num_bytes, num_bytes, scale, least, values);
    for (int i = 0; i < 8; i += 2)
        take(to, joined(values + i));
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

INLINE vec codes_of(const weight *w, const float *values, int kind, int64_t at) {
    return kind == INT8    ? codes_at((const int8_t *)w->codes + at)
           : kind == PAIRS ? pairs_at(values, w->codes + at / 2)
           : kind == BYTES ? bytes_at(w->codes + at)
                           : floats8_at(w->codes + at);
}

/* Columns [start, end) of a row whose groups have whole vectors; `kind` is a constant where this is called. */
INLINE void decode_groups(const weight *w, int64_t row, int64_t start, int64_t end, int kind, sink *to) {
    int64_t size = w->columns / w->groups, first = row * w->columns;
    float values[16]; /* what is written can't change these, so that they stay in registers */
    if (kind == PAIRS)
        memcpy(values, w->values, sizeof values);
    for (int64_t group = start / size; start < end; group++) {
        int64_t at = row * w->groups + group, stop = (group + 1) * size < end ? (group + 1) * size : end;
        vec scale = all(scale_of(w, row, group)), other = all(0.0f);
        if (w->least) { /* the product is exact, so it rounds but once: see bit_planes.h */
            for (other = all(number(w->least, w->scale_kind, at)); start < stop; start += WIDTH)
                take(to, plus_product(codes_of(w, values, kind, first + start), scale, other));
        } else if (w->zero) {
            for (other = all(-number(w->zero, w->zero_kind, at)); start < stop; start += WIDTH)
                take(to, product(sum(codes_of(w, values, kind, first + start), other), scale));
        } else {
            for (; start < stop; start += WIDTH)
                take(to, product(codes_of(w, values, kind, first + start), scale));
        }
    }
}

/* Columns [start, start + count) of a row, both multiples of 16. */
INLINE void decode(const weight *w, int64_t row, int64_t start, int64_t count, sink *to) {
    int64_t size = w->columns / w->groups;
    if (w->codes_kind >= GGUF) {
        decode_gguf(w->codes_kind, w->codes + row * w->groups, start, count, to);
    } else if (w->codes_kind == PLANES) {
        for (int64_t group = start / size; group < (start + count) / size; group++)
            add_planes(w, row, group, w->group_bytes, to);
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

/* Products of one input with one piece of a row. */
APART void add_products(const weight *w, int64_t row, int64_t start, int64_t count, const float *input, vec *sum) {
    sink to = {.writes = 0, .inputs = input + start, .sum = *sum};
    decode(w, row, start, count, &to);
    *sum = to.sum;
}

APART void decode_piece(const weight *w, int64_t row, int64_t start, int64_t count, float *out) {
    sink to = {.writes = 1, .out = out};
    decode(w, row, start, count, &to);
}

void OF_LEVEL(dequantize)(const weight *w, int64_t start, int64_t end, float *out) {
    int64_t whole = w->columns / WIDTH * WIDTH;
    for (int64_t row = start; row < end; row++, out += w->columns) {
        decode_piece(w, row, 0, whole, out);
        if (whole < w->columns)
            decode_plainly(w, row, whole, w->columns, out + whole);
    }
}

#include "side_by_side.h"

/* Where a piece of some rows is: decoded, or as codes that are converted while they are multiplied. */
typedef struct {
    const float (*decoded)[PIECE];
    const int8_t *codes; /* or NULL */
    int64_t columns, count;
} pieces;

/* Products of a piece of some rows with some inputs. All but the pointers are constants where this is called, so that
 * `own` are registers. The lanes of a vec don't meet before the end: those of each part are added up on their own. */
INLINE void add_tile(const pieces *from, const float *inputs, int rows, int num, vec (*sums)[MOST]) {
    for (int lane = 0; lane < WIDTH; lane += LANES) {
        part own[ROWS][TILE], input[TILE];
        for (int row = 0; row < rows; row++)
            for (int n = 0; n < num; n++)
                own[row][n] = load_part((const float *)&sums[row][n] + lane);
        for (int64_t i = lane; i < from->count; i += WIDTH) {
            for (int n = 0; n < num; n++)
                input[n] = kept(load_part(inputs + n * from->columns + i));
            for (int row = 0; row < rows; row++) {
                part weights = from->codes ? codes_of_part(from->codes + row * from->columns + i)
                                           : load_part(from->decoded[row] + i);
                for (int n = 0; n < num; n++)
                    own[row][n] = plus_parts(weights, input[n], own[row][n]);
            }
        }
        for (int row = 0; row < rows; row++)
            for (int n = 0; n < num; n++)
                memcpy((float *)&sums[row][n] + lane, &own[row][n], sizeof(part));
    }
}

INLINE void add_tiles(const pieces *from, const float *inputs, int rows, int64_t num, vec (*sums)[MOST]) {
    int64_t n = 0;
    for (; n + TILE <= num; n += TILE)
        add_tile(from, inputs + n * from->columns, rows, TILE, (vec(*)[MOST])(&sums[0][n]));
    inputs += n * from->columns;
    switch (num - n) {
    case 3: add_tile(from, inputs, rows, TILE < 3 ? TILE : 3, (vec(*)[MOST])(&sums[0][n])); break;
    case 2: add_tile(from, inputs, rows, 2, (vec(*)[MOST])(&sums[0][n])); break;
    case 1: add_tile(from, inputs, rows, 1, (vec(*)[MOST])(&sums[0][n])); break;
    }
}

/* Ask for the part of the next rows that is as far in them as [start, start + count) is in these. It is read soon, and asked
 * for in the order of memory: processors guess the rest then, which they can't where rows are read side by side. */
INLINE void prefetch(const weight *w, int64_t row, int rows, int64_t start, int64_t count) {
    int64_t bytes = row_bytes(w);
    const uint8_t *from = w->codes + (row + rows) * bytes + start * rows * bytes / w->columns;
    for (int64_t i = 0; i < count * rows * bytes / w->columns; i += 64)
        PREFETCH_SECOND(from + i);
}

/* Some rows' products with at most MOST inputs. `bare` codes are multiplied as they are. */
INLINE void multiply_rows(const weight *w, int64_t row, int rows, int bare, const float *inputs, int64_t num,
                          float *outputs, int64_t stride) {
    int64_t whole = w->columns / WIDTH * WIDTH;
    float piece[ROWS][PIECE], lanes[WIDTH];
    vec sums[ROWS][MOST];
    for (int r = 0; r < rows; r++)
        for (int64_t n = 0; n < num; n++)
            sums[r][n] = all(0.0f);
    for (int64_t at = 0; at < whole; at += PIECE) {
        int64_t count = whole - at < PIECE ? whole - at : PIECE;
        prefetch(w, row, rows, at, count);
        for (int r = 0; r < rows && !bare; r++) {
            if (num == 1)
                add_products(w, row + r, at, count, inputs, &sums[r][0]);
            else
                decode_piece(w, row + r, at, count, piece[r]);
        }
        if (bare) {
            pieces from = {.codes = (const int8_t *)w->codes + row * w->columns + at, .columns = w->columns, .count = count};
            add_tiles(&from, inputs + at, rows, num, sums);
        } else if (num > 1) {
            pieces from = {.decoded = (const float (*)[PIECE])piece, .columns = w->columns, .count = count};
            add_tiles(&from, inputs + at, rows, num, sums);
        }
    }
    for (int r = 0; r < rows; r++) {
        if (whole < w->columns)
            decode_plainly(w, row + r, whole, w->columns, piece[0]);
        float scale = bare ? scale_of(w, row + r, 0) : 1.0f;
        for (int64_t n = 0; n < num; n++) {
            if (whole < w->columns) {
                store(lanes, sums[r][n]);
                for (int64_t i = 0; i < w->columns - whole; i++)
                    lanes[i] += piece[0][i] * inputs[n * w->columns + whole + i];
                sums[r][n] = load(lanes);
            }
            outputs[n * stride + row + r] = sum_of(sums[r][n]) * scale;
        }
    }
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end); `stride`: floats of a row of outputs. */
void OF_LEVEL(multiply)(const weight *w, int64_t start, int64_t end, const float *inputs, int64_t num_inputs,
                        float *outputs, int64_t stride) {
    int bare = is_bare(w);
    rows_times_one *by_one = side_by_side(w);
    for (int64_t stop; start < end; start = stop) { /* rows that stay in a cache for all inputs */
        stop = end - start < BAND ? end : start + BAND;
        for (int64_t first = 0; first < num_inputs; first += MOST) {
            int64_t row = start, num = num_inputs - first < MOST ? num_inputs - first : MOST;
            const float *from = inputs + first * w->columns;
            float *to = outputs + first * stride;
            for (; num == 1 && by_one && row + ROWS <= stop; row += ROWS) {
                vec sums[ROWS];
                by_one(w, row, from, sums);
                sums_of_four(sums, to + row);
                for (int r = 0; bare && r < ROWS; r++)
                    to[row + r] *= scale_of(w, row + r, 0);
            }
            for (; num > 1 && bare && row + ROWS <= stop; row += ROWS)
                multiply_rows(w, row, ROWS, 1, from, num, to, stride);
            for (; bare && row < stop; row++)
                multiply_rows(w, row, 1, 1, from, num, to, stride);
            for (; num > 1 && row + ROWS <= stop; row += ROWS) /* one input wants rows in the order of memory */
                multiply_rows(w, row, ROWS, 0, from, num, to, stride);
            for (; row < stop; row++)
                multiply_rows(w, row, 1, 0, from, num, to, stride);
        }
    }
}
