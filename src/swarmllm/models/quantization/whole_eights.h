/* The order EIGHTS of whole.h, which includes this file: torch's own products in bfloat16 on AVX2. Each of eight vectors sums
 * up every eighth group of eight columns. Those that are left over, a multiple of 16, are summed up apart. Inputs are in
 * float32. One input, some, and many (whole_turned.h) have ways of their own. */
#if LEVEL == 3
#define SUMS 8
#define AT_A_TIME (SUMS * LANES) /* columns */
#define ROWS_OF_MANY 3 /* by INPUTS_OF_MANY: a sum of each, weights and an input are all in registers */
#define INPUTS_OF_MANY 4
#define MOST_OF_MANY 16 /* inputs whose sums are in the first cache */
#define BAND_OF_MANY 24 /* rows that take turns with inputs, all in the second cache */
#define PIECE 256 /* columns of ROWS_OF_MANY rows in float32, and of INPUTS_OF_MANY inputs, are there, too */
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

/* The same of LANES vectors, in the same order. */
INLINE vec sums_of_lanes(vec of[LANES]) {
    transpose(of);
    return ADD(ADD(ADD(of[0], of[4]), ADD(of[2], of[6])), ADD(ADD(of[1], of[5]), ADD(of[3], of[7])));
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

/* Of `num` inputs, at most INPUTS_OF_MANY, each `distance` after the one before; `wide` has rows of PIECE columns. */
INLINE void add_some(const float *wide, const float *inputs, int64_t distance, int num, int64_t columns,
                     vec sums[][ROWS_OF_MANY][SUMS]) {
    for (int sum = 0; sum < SUMS; sum++) {
        vec some[INPUTS_OF_MANY][ROWS_OF_MANY];
        for (int input = 0; input < num; input++)
            for (int which = 0; which < ROWS_OF_MANY; which++)
                some[input][which] = sums[input][which][sum];
        for (int64_t at = sum * LANES; at < columns; at += AT_A_TIME) {
            vec weights[ROWS_OF_MANY];
            for (int which = 0; which < ROWS_OF_MANY; which++)
                weights[which] = LOAD(wide + which * PIECE + at);
            for (int input = 0; input < num; input++) {
                vec one = LOAD(inputs + input * distance + at);
                for (int which = 0; which < ROWS_OF_MANY; which++)
                    some[input][which] = FMA(weights[which], one, some[input][which]);
            }
        }
        for (int input = 0; input < num; input++)
            for (int which = 0; which < ROWS_OF_MANY; which++)
                sums[input][which][sum] = some[input][which];
    }
}

/* `num` is a constant in each version, so that sums are in registers. */
static void add_to_some(const float *wide, const float *inputs, int64_t distance, int64_t num, int64_t columns,
                        vec sums[][ROWS_OF_MANY][SUMS]) {
    if (num == 1)
        add_some(wide, inputs, distance, 1, columns, sums);
    else if (num == 2)
        add_some(wide, inputs, distance, 2, columns, sums);
    else if (num == 3)
        add_some(wide, inputs, distance, 3, columns, sums);
    else
        add_some(wide, inputs, distance, INPUTS_OF_MANY, columns, sums);
}

INLINE uint16_t as_output(float result, const float *bias, int64_t row) {
    return bfloat16_of(bias ? result + bias[row] : result);
}

/* Outputs of row `first + which` from the sums of `num` inputs, at most MOST_OF_MANY, and the columns that these lack. */
INLINE void put_row(const whole *w, const float *bias, int64_t first, int which, vec sums[][ROWS_OF_MANY][SUMS],
                    const float *inputs, int64_t num, uint16_t *outputs) {
    int64_t row = first + which, left = w->columns % AT_A_TIME, body = w->columns - left;
    const uint16_t *weights = (const uint16_t *)w->weights + row * w->columns + body;
    for (int64_t begin = 0; begin < num; begin += LANES) {
        int64_t some = num - begin < LANES ? num - begin : LANES;
        vec of_sums[LANES], of_left[LANES], results;
        float each[LANES];
        for (int64_t input = 0; input < LANES; input++)
            of_sums[input] = input < some ? sum_of_sums(sums[begin + input][which]) : ZERO();
        results = sums_of_lanes(of_sums);
        if (left) {
            for (int64_t input = 0; input < LANES; input++)
                of_left[input] =
                    input < some ? sum_of_left(weights, inputs + (begin + input) * w->columns + body, left) : ZERO();
            results = ADD(results, sums_of_lanes(of_left));
        }
        STORE(each, results);
        for (int64_t input = 0; input < some; input++)
            outputs[(begin + input) * w->rows + row] = as_output(each[input], bias, row);
    }
}

/* ROWS_OF_MANY rows from `first` on by at most MOST_OF_MANY inputs. Rows are turned into float32 piece by piece. */
INLINE void eights_of_many(const whole *w, const float *bias, int64_t first, const float *inputs, int64_t num, int is_read,
                           uint16_t *outputs) {
    int64_t columns = w->columns, body = columns / AT_A_TIME * AT_A_TIME;
    const uint16_t *rows = (const uint16_t *)w->weights + first * columns;
    vec sums[MOST_OF_MANY][ROWS_OF_MANY][SUMS];
    float wide[ROWS_OF_MANY * PIECE];
    memset(sums, 0, (size_t)num * sizeof sums[0]);
    for (int64_t begin = 0; begin < body; begin += PIECE) {
        int64_t some = begin + PIECE < body ? PIECE : body - begin;
        for (int which = 0; which < ROWS_OF_MANY; which++) {
            const uint16_t *row = rows + which * columns + begin;
            for (int64_t at = 0; at < some; at += LANES)
                STORE(wide + which * PIECE + at, eight_at(row + at));
            if (is_read)
                ask((const char *)(row + ROWS_OF_MANY * columns), some * 2);
        }
        for (int64_t input = 0; input < num; input += INPUTS_OF_MANY)
            add_to_some(wide, inputs + input * columns + begin, columns, num - input, some, sums + input);
    }
    for (int which = 0; which < ROWS_OF_MANY; which++)
        put_row(w, bias, first, which, sums, inputs, num, outputs);
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
        if (body < columns)
            result += sum_of_lanes(sum_of_left(weights + body, input + body, columns - body));
        outputs[row] = as_output(result, bias, row);
    }
}

#include "whole_turned.h"

static void eights(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                   uint16_t *outputs) {
    if (num == 1) {
        eights_of_one(w, bias, start, end, inputs, outputs);
        return;
    }
    int64_t some = num % TURNED < LEAST_TURNED ? num / TURNED * TURNED : num;
    if (some && eights_by_turning(w, bias, start, end, inputs, some, outputs)) {
        if (some < num)
            eights(w, bias, start, end, inputs + some * w->columns, num - some, outputs + some * w->rows);
        return;
    }
    for (int64_t begin = start; begin < end; begin += BAND_OF_MANY) {
        int64_t last = begin + BAND_OF_MANY < end ? begin + BAND_OF_MANY : end;
        for (int64_t input = 0; input < num; input += MOST_OF_MANY) {
            int64_t some = num - input < MOST_OF_MANY ? num - input : MOST_OF_MANY;
            for (int64_t row = begin; row < last; row += ROWS_OF_MANY) { /* some rows twice, with the same result */
                int64_t first = row + ROWS_OF_MANY <= end ? row : end - ROWS_OF_MANY;
                eights_of_many(w, bias, first, inputs + input * w->columns, some, input == 0, outputs + input * w->rows);
            }
        }
    }
}
#endif
