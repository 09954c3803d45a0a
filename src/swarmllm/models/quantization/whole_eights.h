/* The order EIGHTS of whole.h, which includes this file: torch's own products in bfloat16 on AVX2. Each of eight vectors sums
 * up every eighth group of eight columns. Those that are left over, a multiple of 16, are summed up apart. Where none are, 0
 * is added all the same, and makes 0 of -0. Inputs are in float32. One input, some, and many (whole_turned.h) have ways of
 * their own. */
#if LEVEL == 3
#include <stdlib.h>

#define SUMS 8
#define AT_A_TIME (SUMS * LANES) /* columns */
#define MOST_OF_SOME 16 /* inputs */
#define MOST_AT_ONCE 5 /* of these, by two rows: sums, weights, an input and zeros are all in registers */
#define PIECE 512 /* columns, which MOST_AT_ONCE inputs have in the first cache; measured on Zen 2, as the next two */
#define BAND_OF_SOME 12 /* rows that take turns with a piece of inputs; a multiple of 2, 3 and 4, at most 16 */
#define ROWS_AHEAD 4

INLINE vec eight_at(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Rounded to bfloat16, to even. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE vec sum_of_sums(const vec sums[SUMS]) {
    vec some[SUMS];
    for (int sum = 0; sum < SUMS; sum++)
        some[sum] = sums[sum];
    for (int apart = SUMS / 2; apart; apart /= 2)
        for (int sum = 0; sum < apart; sum++)
            some[sum] = ADD(some[sum], some[sum + apart]);
    return some[0];
}

INLINE float sum_of_lanes(vec sum) {
    sum = ADD(sum, _mm256_permute2f128_ps(sum, sum, 1));
    sum = ADD(sum, SHUFFLED_IN_FOURS(sum, 0x4e));
    return _mm256_cvtss_f32(ADD(sum, SHUFFLED_IN_FOURS(sum, 0xb1)));
}

/* Of the columns that are left over. */
INLINE vec sum_of_left(const uint16_t *row, const float *input, int64_t left) {
    vec sum = ZERO();
    for (int64_t at = 0; at < left; at += LANES)
        sum = FMA(eight_at(row + at), LOAD(input + at), sum);
    return sum;
}

INLINE void add_row(const uint16_t *row, const float *input, int64_t columns, const char *next, vec sums[SUMS]) {
    for (int64_t column = 0; column < columns; column += AT_A_TIME) {
        ask(next + column * 2, AT_A_TIME * 2);
        for (int sum = 0; sum < SUMS; sum++) {
            int64_t at = column + sum * LANES;
            sums[sum] = FMA(eight_at(row + at), LOAD(input + at), sums[sum]);
        }
    }
}

INLINE uint16_t as_output(float result, const float *bias, int64_t row) {
    return bfloat16_of(bias ? result + bias[row] : result);
}

static void eights_of_one(const whole *w, const float *bias, int64_t start, int64_t end, const float *input,
                          uint16_t *outputs) {
    int64_t columns = w->columns, body = columns / AT_A_TIME * AT_A_TIME;
    for (int64_t row = start; row < end; row++) {
        const uint16_t *weights = (const uint16_t *)w->weights + row * columns;
        vec sums[SUMS];
        for (int sum = 0; sum < SUMS; sum++)
            sums[sum] = ZERO();
        add_row(weights, input, body, (const char *)(weights + ROWS_AHEAD * columns), sums);
        float result = sum_of_lanes(sum_of_sums(sums));
        result += body < columns ? sum_of_lanes(sum_of_left(weights + body, input + body, columns - body)) : 0.0f;
        outputs[row] = as_output(result, bias, row);
    }
}

/* ------------------------------------------------------------------ some inputs
 *
 * Weights are turned into float32 in registers, 16 at a time: columns 0 to 3 and 8 to 11 are in one vector, and the others in
 * a second. So are the inputs. Of the sums of eight lanes, each vector has the lower or upper half of two. */

INLINE vec half_of_16(const uint16_t *weights, int half) {
    __m256i all = _mm256_loadu_si256((const __m256i *)weights), zeros = _mm256_setzero_si256();
    return _mm256_castsi256_ps(half ? _mm256_unpackhi_epi16(zeros, all) : _mm256_unpacklo_epi16(zeros, all));
}

INLINE int64_t piece_from(int64_t begin, int64_t body, int64_t most) { return body - begin < most ? body - begin : most; }

/* Inputs in the order in which they are read: piece by piece, and in each piece one after the other of the SUMS vectors. */
static void arrange_inputs(const float *inputs, int64_t num, int64_t columns, float *to) {
    int64_t body = columns / AT_A_TIME * AT_A_TIME;
    for (int64_t begin = 0; begin < body; begin += PIECE) {
        int64_t size = piece_from(begin, body, PIECE), apart = size / AT_A_TIME * num * LANES;
        for (int64_t input = 0; input < num; input++) {
            for (int64_t column = 0; column < size; column += 2 * LANES) {
                const float *from = inputs + input * columns + begin + column;
                vec first = LOAD(from), second = LOAD(from + LANES);
                float *at = to + column % AT_A_TIME / LANES * apart + (column / AT_A_TIME * num + input) * LANES;
                STORE(at, _mm256_permute2f128_ps(first, second, 0x20));
                STORE(at + apart, _mm256_permute2f128_ps(first, second, 0x31));
            }
        }
        to += size * num;
    }
}

/* One of the SUMS vectors of `num` inputs by `rows` rows, all constants. `begins`: what was there before isn't added. */
INLINE void add_half(const uint16_t *weights, int64_t columns, int64_t turns, const float *inputs, int num, int rows, int half,
                     int begins, int place, vec sums[][SUMS]) {
    vec some[4][MOST_AT_ONCE];
    for (int row = 0; row < rows; row++)
        for (int input = 0; input < num; input++)
            some[row][input] = begins ? ZERO() : sums[row * MOST_AT_ONCE + input][place];
    for (int64_t turn = 0; turn < turns; turn++, weights += AT_A_TIME, inputs += num * LANES) {
        vec of_rows[4];
        for (int row = 0; row < rows; row++)
            of_rows[row] = half_of_16(weights + row * columns, half);
        for (int input = 0; input < num; input++) {
            vec one = LOAD(inputs + input * LANES);
            for (int row = 0; row < rows; row++)
                some[row][input] = FMA(of_rows[row], one, some[row][input]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int input = 0; input < num; input++)
            sums[row * MOST_AT_ONCE + input][place] = some[row][input];
}

INLINE void add_piece(const uint16_t *weights, int64_t columns, int64_t size, const float *inputs, int num, int rows, int begins,
                      const uint16_t *next, vec sums[][SUMS]) {
    int64_t turns = size / AT_A_TIME, apart = turns * num * LANES, part = size * 2 / SUMS;
    for (int two = 0; two < SUMS; two += 2, weights += 2 * LANES, inputs += 2 * apart) {
        if (next)
            for (int row = 0; row < rows; row++)
                ask((const char *)(next + row * columns) + two * part, 2 * part);
        add_half(weights, columns, turns, inputs, num, rows, 0, begins, two, sums);
        add_half(weights, columns, turns, inputs + apart, num, rows, 1, begins, two + 1, sums);
    }
}

/* Versions for so many inputs and rows. */
#define BY_ROWS(num, rows)                                                                                             \
    static void add_##num##_by_##rows(const uint16_t *weights, int64_t columns, int64_t size, const float *inputs,     \
                                      int begins, const uint16_t *next, vec sums[][SUMS]) {                            \
        if (begins)                                                                                                    \
            add_piece(weights, columns, size, inputs, num, rows, 1, next, sums);                                       \
        else                                                                                                           \
            add_piece(weights, columns, size, inputs, num, rows, 0, next, sums);                                       \
    }
BY_ROWS(2, 4)
BY_ROWS(3, 3)
BY_ROWS(3, 2)
BY_ROWS(4, 2)
BY_ROWS(5, 2)
typedef void adder(const uint16_t *weights, int64_t columns, int64_t size, const float *inputs, int begins,
                   const uint16_t *next, vec sums[][SUMS]);

INLINE adder *adder_of(int64_t num, int64_t rows) {
    return num == 2 ? add_2_by_4 : num == 4 ? add_4_by_2 : num == 5 ? add_5_by_2 : rows == 3 ? add_3_by_3 : add_3_by_2;
}

/* How many of `num` inputs are multiplied together next: all in groups of about the same size. */
INLINE int64_t next_group(int64_t num) {
    int64_t groups = (num + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    return (num + groups - 1) / groups;
}

/* Rows that are multiplied together, so that there are 8 to 10 sums at a time. */
INLINE int64_t rows_by(int64_t num) { return num == 2 ? 4 : num == 3 || num == 6 ? 3 : 2; }

/* As `sum_of_sums` and `sum_of_lanes`, of vectors in halves. */
INLINE float sum_of_halves(const vec sums[SUMS]) {
    vec lower = ADD(ADD(sums[0], sums[4]), ADD(sums[2], sums[6])), upper = ADD(ADD(sums[1], sums[5]), ADD(sums[3], sums[7]));
    __m128 first = _mm_add_ps(_mm256_castps256_ps128(lower), _mm256_extractf128_ps(lower, 1));
    __m128 four = _mm_add_ps(first, _mm_add_ps(_mm256_castps256_ps128(upper), _mm256_extractf128_ps(upper, 1)));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* BAND_OF_SOME rows from `first` on, `rows` at a time, by at most MOST_AT_ONCE inputs, which are also arranged. `asks`: for
 * the rows that come next. */
static void band_of_some(const whole *w, const float *bias, int64_t first, int64_t rows, const float *inputs,
                         const float *arranged, int64_t num, int asks, uint16_t *outputs) {
    int64_t columns = w->columns, left = columns % AT_A_TIME, body = columns - left;
    const uint16_t *band = (const uint16_t *)w->weights + first * columns;
    vec sums[BAND_OF_SOME][MOST_AT_ONCE][SUMS];
    adder *add = adder_of(num, rows);
    for (int64_t begin = 0; begin < body; begin += PIECE) {
        for (int64_t row = 0; row < BAND_OF_SOME; row += rows) {
            const uint16_t *from = band + row * columns + begin, *next = asks ? from + BAND_OF_SOME * columns : NULL;
            add(from, columns, piece_from(begin, body, PIECE), arranged + begin * num, begin == 0, next, sums[row]);
        }
    }
    for (int64_t row = 0; row < BAND_OF_SOME; row++) {
        for (int64_t input = 0; input < num; input++) {
            const float *rest = inputs + input * columns + body;
            float result = body ? sum_of_halves(sums[row][input]) : 0.0f;
            result += left ? sum_of_lanes(sum_of_left(band + row * columns + body, rest, left)) : 0.0f;
            outputs[input * w->rows + first + row] = as_output(result, bias, first + row);
        }
    }
}

/* 2 inputs or more. 0 if there is no memory. */
static int eights_of_some(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                          uint16_t *outputs) {
    int64_t columns = w->columns, body = columns / AT_A_TIME * AT_A_TIME, rows = rows_by(num);
    float *arranged = aligned_alloc(64, (size_t)(num * body) * sizeof *arranged);
    if (!arranged)
        return 0;
    for (int64_t input = 0, group; input < num; input += group) {
        group = next_group(num - input);
        arrange_inputs(inputs + input * columns, group, columns, arranged + input * body);
    }
    for (int64_t row = start; row < end; row += BAND_OF_SOME) { /* some rows twice, with the same result */
        int64_t first = row + BAND_OF_SOME <= end ? row : end - BAND_OF_SOME;
        for (int64_t input = 0, group; input < num; input += group) {
            group = next_group(num - input);
            band_of_some(w, bias, first, rows, inputs + input * columns, arranged + input * body, group, input == 0,
                         outputs + input * w->rows);
        }
    }
    free(arranged);
    return 1;
}

#include "whole_turned.h"

static void eights(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                   uint16_t *outputs) {
    int64_t columns = w->columns, turned = num % TURNED < LEAST_TURNED ? num / TURNED * TURNED : num, rest = num - turned;
    if (turned && !eights_by_turning(w, bias, start, end, inputs, turned, outputs))
        turned = 0, rest = num;
    inputs += turned * columns, outputs += turned * w->rows;
    if (rest > 1 && rest <= MOST_OF_SOME && eights_of_some(w, bias, start, end, inputs, rest, outputs))
        return;
    for (; rest > 0; rest--, inputs += columns, outputs += w->rows)
        eights_of_one(w, bias, start, end, inputs, outputs);
}
#endif
