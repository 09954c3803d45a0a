/* Products of weights as they are, in float32 or bfloat16, with a few inputs: the very bits of torch's own products, which
 * read memory at a third to two thirds of its speed. A sum of floats depends on its order. So each order here is one in
 * which a library under torch adds; whole.py finds out which one it is. They were revealed by masks: of numbers that are
 * all 1, one is replaced by 2^100 and another by -2^100. The sum then tells how many were added after these two had met
 * (the idea is FPRev's, 2024).
 *
 *   CHAINED     column after column, in blocks of columns: a product of matrices of MKL, in blocks of 192; and oneDNN's in
 *               bfloat16, by an instruction that adds two columns
 *   IN_PAIRS    the same in bfloat16, without that instruction: whole_pairs.h
 *   IN_TILES    32 columns after 32, even and odd ones apart: oneDNN's with AMX: whole_tiles.h
 *   FOURS       four sums, each of every fourth column: MKL for two or three inputs, whose processor isn't Intel's
 *   FOURS_LATE  the same, after one to four columns up to an address that is a multiple of 16: MKL for one input
 *   EIGHTS      eight times eight sums: torch's own product in bfloat16 on AVX2: whole_eights.h
 * And MKL on Intel's processors, in float32:
 *
 *   TWOS           as CHAINED, but with two sums in turn in each block, of 256 columns: AVX2, for three inputs; 4 to 6 and
 *                  10 to 12 are CHAINED in blocks of 256, the order of others isn't known
 *   IN_LANES       a sum in each lane of a vector, see whole_lanes.h: AVX2, for one input; AVX-512, for 2 to 15; 16 are
 *                  CHAINED
 *   IN_LANES_LATE  the same, after one column: AVX-512, for one input
 */
#include "compiler.h"
#include "whole_weight.h"
#include <immintrin.h>

#if LEVEL == 4
#define LANES 16
#define AT_ONCE 8 /* inputs: with the weights, all in registers */
typedef __m512 vec;
#define ADD _mm512_add_ps
#define MUL _mm512_mul_ps
#define FMA _mm512_fmadd_ps
#define ALL _mm512_set1_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define ZERO _mm512_setzero_ps
#define FOUR_EACH(from) _mm512_broadcast_f32x4(_mm_loadu_ps(from))
#define SHUFFLED_IN_FOURS _mm512_permute_ps
#define TO_BFLOAT16(to, values) _mm256_storeu_si256((__m256i *)(to), (__m256i)_mm512_cvtneps_pbh(values))

/* w[k][r]: column k of row r, in place of w[r][k]. */
INLINE void transpose(vec w[LANES]) {
    __m512i r[LANES], t[LANES];
    for (int i = 0; i < LANES; i++)
        r[i] = _mm512_castps_si512(w[i]);
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int half = 0; half < 2; half++) {
            r[i + 2 * half] = _mm512_unpacklo_epi64(t[i + half], t[i + 2 + half]);
            r[i + 2 * half + 1] = _mm512_unpackhi_epi64(t[i + half], t[i + 2 + half]);
        }
    }
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i more = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        __m512i last = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        w[i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even, more, 0x88));
        w[4 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd, last, 0x88));
        w[8 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even, more, 0xdd));
        w[12 + i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd, last, 0xdd));
    }
}

/* s[k]: four columns from 4 * k on, of four rows each. */
INLINE void four_steps(const float *from, int64_t columns, vec s[4]) {
    vec a = LOAD(from), b = LOAD(from + columns), c = LOAD(from + 2 * columns), d = LOAD(from + 3 * columns);
    vec first = _mm512_shuffle_f32x4(a, b, 0x44), second = _mm512_shuffle_f32x4(c, d, 0x44);
    vec third = _mm512_shuffle_f32x4(a, b, 0xee), fourth = _mm512_shuffle_f32x4(c, d, 0xee);
    s[0] = _mm512_shuffle_f32x4(first, second, 0x88);
    s[1] = _mm512_shuffle_f32x4(first, second, 0xdd);
    s[2] = _mm512_shuffle_f32x4(third, fourth, 0x88);
    s[3] = _mm512_shuffle_f32x4(third, fourth, 0xdd);
}
INLINE vec plus_pair(vec sum, vec weights, int32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(weights), (__m512bh)_mm512_set1_epi32(pair));
}
#else
#define LANES 8
#define AT_ONCE 4
typedef __m256 vec;
#define ADD _mm256_add_ps
#define MUL _mm256_mul_ps
#define FMA _mm256_fmadd_ps
#define ALL _mm256_set1_ps
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define ZERO _mm256_setzero_ps
#define FOUR_EACH(from) _mm256_broadcast_ps((const __m128 *)(from))
#define SHUFFLED_IN_FOURS _mm256_permute_ps
#define TO_BFLOAT16(to, values) (void)(values) /* no CHAINED ones here */

INLINE void transpose(vec w[LANES]) {
    vec t[LANES], p[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm256_unpacklo_ps(w[i], w[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(w[i], w[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int half = 0; half < 2; half++) {
            p[i + 2 * half] = _mm256_shuffle_ps(t[i + half], t[i + 2 + half], 0x44);
            p[i + 2 * half + 1] = _mm256_shuffle_ps(t[i + half], t[i + 2 + half], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2f128_ps(p[i], p[4 + i], 0x20);
        w[4 + i] = _mm256_permute2f128_ps(p[i], p[4 + i], 0x31);
    }
}
/* The same of two rows each. */
INLINE void four_steps(const float *from, int64_t columns, vec s[4]) {
    for (int half = 0; half < 2; half++, from += LANES) {
        vec a = LOAD(from), b = LOAD(from + columns);
        s[2 * half] = _mm256_permute2f128_ps(a, b, 0x20);
        s[2 * half + 1] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}
INLINE vec plus_pair(vec sum, vec weights, int32_t pair) {
    (void)weights, (void)pair;
    return sum;
}
#endif

/* Not fused with the sum that follows. */
INLINE vec rounded_product(vec one, vec other) {
    vec product = MUL(one, other);
    __asm__("" : "+v"(product));
    return product;
}

INLINE float rounded(float product) {
    __asm__("" : "+x"(product));
    return product;
}

/* ------------------------------------------------------------------ CHAINED */

/* Of LANES rows from `w` on. A word is a column in float32, or a pair of columns in bfloat16. */
INLINE void chain(const char *w, int64_t words, int64_t block, const int32_t *inputs, int num, int is_bfloat16, int twos,
                  vec *total) {
    for (int64_t begin = 0; begin < words; begin += block) {
        int64_t end = begin + block < words ? begin + block : words;
        vec sums[AT_ONCE], others[AT_ONCE], part[LANES];
        for (int input = 0; input < num; input++)
            sums[input] = others[input] = ZERO();
        for (int64_t word = begin; word < end; word += LANES) {
            int num_words = LANES;
            if (word + LANES <= end) {
                for (int row = 0; row < LANES; row++)
                    part[row] = LOAD((const float *)w + row * words + word);
            } else {
                num_words = (int)(end - word);
                for (int row = 0; row < LANES; row++) {
                    part[row] = ZERO();
                    memcpy(part + row, w + (row * words + word) * 4, (size_t)num_words * 4);
                }
            }
            ask(w + (LANES * words + word * LANES) * 4, LANES * LANES * 4);
            transpose(part);
            for (int step = 0; step < LANES && step < num_words; step++) {
                for (int input = 0; input < num; input++) {
                    const int32_t *one = inputs + input * words + word + step;
                    if (is_bfloat16) {
                        sums[input] = plus_pair(sums[input], part[step], *one);
                    } else {
                        vec *sum = (twos && step % 2 ? others : sums) + input;
                        *sum = FMA(part[step], ALL(*(const float *)one), *sum);
                    }
                }
            }
        }
        for (int input = 0; input < num; input++)
            total[input] = ADD(total[input], twos ? ADD(sums[input], others[input]) : sums[input]);
    }
}

INLINE void chained(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs, int num,
                    char *outputs, int is_bfloat16, int twos) {
    int64_t size = is_bfloat16 ? 2 : 4, words = w->columns * size / 4, block = w->block * size / 4;
    for (int64_t row = start; row < end; row += LANES) {
        int64_t first = row + LANES <= end ? row : end - LANES; /* some rows twice, with the same result */
        vec total[AT_ONCE], added = bias ? LOAD(bias + first) : ZERO();
        for (int input = 0; input < num; input++)
            total[input] = is_bfloat16 ? ZERO() : added; /* MKL begins with it, oneDNN adds it last */
        chain(w->weights + first * words * 4, words, block, (const int32_t *)inputs, num, is_bfloat16, twos,
              total);
        for (int input = 0; input < num; input++) {
            char *to = outputs + (input * w->rows + first) * size;
            if (is_bfloat16)
                TO_BFLOAT16(to, ADD(total[input], added));
            else
                STORE((float *)to, total[input]);
        }
    }
}

/* ------------------------------------------------------------------ FOURS, FOURS_LATE */

/* Rows of a vector, and vectors that are summed at once: sums wait for each other. */
#define ROWS (LANES / 4)
#define VECTORS 4

/* Columns up to the begin of a line of the caches: loads across two lines take twice as long. */
INLINE int64_t lines_begin(const float *from) {
    return (int64_t)(-(uintptr_t)from % 64 / 4);
}

INLINE void four_columns(const float *from, int64_t columns, const float *inputs, int num, vec sums[][VECTORS]) {
    float four[LANES];
    for (int vector = 0; vector < VECTORS; vector++) {
        for (int64_t which = 0; which < ROWS; which++)
            memcpy(four + which * 4, from + (vector * ROWS + which) * columns, 16);
        for (int input = 0; input < num; input++)
            sums[input][vector] =
                ADD(sums[input][vector], rounded_product(LOAD(four), FOUR_EACH(inputs + input * columns)));
    }
}

INLINE void fours(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int num,
                  float *outputs, int late) {
    const float *weights = (const float *)w->weights;
    int64_t columns = w->columns, head = late ? 4 - ((int64_t)(uintptr_t)weights / 4) % 4 : 0;
    int64_t body = head + (columns - head) / 4 * 4, together = ROWS * VECTORS;
    for (int64_t row = start; row < end; row += together) {
        int64_t at = row + together <= end ? row : end - together;
        const float *from = weights + at * columns;
        vec sums[3][VECTORS];
        float four[LANES];
        for (int input = 0; input < num; input++) {
            const float *one = inputs + input * columns;
            for (int vector = 0; vector < VECTORS; vector++) {
                memset(four, 0, sizeof four);
                for (int64_t which = 0; late && which < ROWS; which++) {
                    const float *w_row = from + (vector * ROWS + which) * columns;
                    for (int64_t column = 0; column < head; column++) {
                        float product = rounded(w_row[column] * one[column]);
                        four[which * 4] = column ? four[which * 4] + product : product;
                    }
                }
                sums[input][vector] = LOAD(four);
            }
        }
        int64_t column = head, in_lines = head + lines_begin(from + head);
        for (; column < in_lines && column < body; column += 4)
            four_columns(from + column, columns, inputs + column, num, sums);
        for (; column + 16 <= body; column += 16) {
            for (int vector = 0; vector < VECTORS; vector++) {
                vec steps[4];
                four_steps(from + vector * ROWS * columns + column, columns, steps);
                ask((const char *)(from + (columns + column - head) * together) + vector * ROWS * 64, ROWS * 64);
                for (int input = 0; input < num; input++)
                    for (int step = 0; step < 4; step++)
                        sums[input][vector] =
                            ADD(sums[input][vector],
                                rounded_product(steps[step], FOUR_EACH(inputs + input * columns + column + step * 4)));
            }
        }
        for (; column < body; column += 4)
            four_columns(from + column, columns, inputs + column, num, sums);
        for (int input = 0; input < num; input++) {
            for (int vector = 0; vector < VECTORS; vector++) {
                vec sum = sums[input][vector];
                sum = ADD(sum, SHUFFLED_IN_FOURS(sum, 0x4e));
                STORE(four, ADD(sum, SHUFFLED_IN_FOURS(sum, 0xb1)));
                for (int64_t which = 0; which < ROWS; which++) {
                    const float *w_row = from + (vector * ROWS + which) * columns;
                    float result = four[which * 4];
                    for (int64_t last = body; last < columns; last++)
                        result += rounded(w_row[last] * inputs[input * columns + last]);
                    int64_t output = at + vector * ROWS + which;
                    outputs[input * w->rows + output] = bias ? result + bias[output] : result;
                }
            }
        }
    }
}

#include "whole_eights.h"
#include "whole_lanes.h"
#include "whole_pairs.h"
#include "whole_tiles.h"

/* ------------------------------------------------------------------ for whole.c */

/* `num` is a constant in each version, so that sums are in registers. */
#define CHAINED_OF(count)                                               \
    case count:                                                         \
        if (LEVEL == 4 && w->is_bfloat16)                               \
            chained(w, bias, start, end, inputs, count, outputs, 1, 0); \
        else                                                            \
            chained(w, bias, start, end, inputs, count, outputs, 0, 0); \
        break;

static void some_chained(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs, int64_t num,
                         char *outputs) {
    switch (num) {
        CHAINED_OF(1)
        CHAINED_OF(2)
        CHAINED_OF(3)
        CHAINED_OF(4)
#if AT_ONCE == 8
        CHAINED_OF(5)
        CHAINED_OF(6)
        CHAINED_OF(7)
        CHAINED_OF(8)
#endif
    }
}

static void some_fours(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                       float *outputs) {
    if (w->order == FOURS_LATE)
        fours(w, bias, start, end, inputs, 1, outputs, 1);
    else if (num == 1)
        fours(w, bias, start, end, inputs, 1, outputs, 0);
    else if (num == 2)
        fours(w, bias, start, end, inputs, 2, outputs, 0);
    else
        fours(w, bias, start, end, inputs, 3, outputs, 0);
}

#if LEVEL == 3
static void some_twos(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs, int64_t num,
                      char *outputs) {
    if (num == 1)
        chained(w, bias, start, end, inputs, 1, outputs, 0, 1);
    else if (num == 2)
        chained(w, bias, start, end, inputs, 2, outputs, 0, 1);
    else
        chained(w, bias, start, end, inputs, 3, outputs, 0, 1);
}
#else
static void late_lanes(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, float *outputs) {
    in_lanes(w, bias, start, end, inputs, 1, outputs, 1);
}
#endif

static void some_lanes(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                       float *outputs) {
    in_lanes(w, bias, start, end, inputs, num, outputs, 0);
}

void OF_LEVEL(multiply_whole)(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs,
                              int64_t num, char *outputs) {
    static const int64_t at_once[] = {[CHAINED] = AT_ONCE, [FOURS] = 3, [FOURS_LATE] = 1, [EIGHTS] = INT64_MAX,
                                      [TWOS] = 3,          [IN_LANES] = ALL_INPUTS, [IN_LANES_LATE] = 1,
                                      [IN_PAIRS] = ALL_INPUTS, [IN_TILES] = MOST_IN_TILES};
    int64_t size = w->is_bfloat16 ? 2 : 4, most = at_once[w->order], input_size = takes_floats(w) ? 4 : size;
    while (num > 0) {
        int64_t some = num < most ? num : most;
        if (w->order == CHAINED)
            some_chained(w, bias, start, end, inputs, some, outputs);
#if LEVEL == 3
        else if (w->order == EIGHTS)
            eights(w, bias, start, end, (const float *)inputs, some, (uint16_t *)outputs);
        else if (w->order == TWOS)
            some_twos(w, bias, start, end, inputs, some, outputs);
#else
        else if (w->order == IN_LANES_LATE)
            late_lanes(w, bias, start, end, (const float *)inputs, (float *)outputs);
        else if (w->order == IN_PAIRS)
            in_pairs(w, bias, start, end, (const float *)inputs, some, outputs);
        else if (w->order == IN_TILES)
            in_tiles(w, bias, start, end, inputs, some, outputs);
#endif
        else if (w->order == IN_LANES)
            some_lanes(w, bias, start, end, (const float *)inputs, some, (float *)outputs);
        else
            some_fours(w, bias, start, end, (const float *)inputs, some, (float *)outputs);
        inputs += some * w->columns * input_size, outputs += some * w->rows * size, num -= some;
    }
}
