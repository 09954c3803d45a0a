/* Attention of one new position in bfloat16, with the very bits of torch's (its `flash_attention` for CPUs). Its orders of
 * additions were revealed by masks, as those of products (whole.h). Scores and values depend on the library that multiplies:
 * whole_attention_4.h and whole_attention_3.h say how. Between them is the softmax of at most KEYS_AT_ONCE keys:
 *
 *   exponentials  Malossi's (2015) for LANES scores at a time, and the C library's for those left over, of doubles
 *   their sum     in twice LANES lanes, halves of which are added until one is left
 *
 * Included by whole_3.c and whole_4.c after whole.h. */
#include <math.h>

#define KEYS_AT_ONCE 512
#define MOST_QUERIES 4 /* heads that share keys, at a time */
#if LEVEL == 4
#include "whole_attention_4.h"
#else
#include "whole_attention_3.h"
#endif

INLINE vec all_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return ALL(value);
}

INLINE vec exponential_of_malossi(vec x) {
    vec power = rounded_product(x, all_of_bits(0x3fb8aa3b)), part = SUB(power, FLOOR(power));
    vec series = FMA(part, ALL(-0.079204240219773236f), ALL(-0.22433836478672356f));
    series = FMA(part, series, ALL(0.30354260500649682f));
    series = FMA(part, series, ALL(0.00010703434948458272f));
    vec bits = FMA(ALL(8388608.0f), SUB(power, series), ALL(8388608.0f * 127));
    return exponential_from(bits, x, all_of_bits(0xc2aeac50), all_of_bits(0x42b17218));
}

INLINE float largest_of(float *scores, int64_t count, float scale) { /* scales them, too */
    float largest = -INFINITY;
    vec some = ALL(largest);
    int64_t key = 0;
    for (; key + LANES <= count; key += LANES) {
        vec scaled = MUL(LOAD(scores + key), ALL(scale));
        STORE(scores + key, scaled);
        some = larger(some, scaled);
    }
    for (; key < count; key++) {
        scores[key] = rounded(scores[key] * scale);
        largest = largest < scores[key] ? scores[key] : largest;
    }
    float of_lanes = largest_by_halves(some);
    return of_lanes < largest ? largest : of_lanes; /* of what isn't a number, none is larger */
}

INLINE float to_weights(const float *scores, int64_t count, float largest, weighed *weights) {
    vec sums[2] = {ZERO(), ZERO()};
    int64_t key = 0;
    for (; key + LANES <= count; key += LANES) {
        vec *sum = sums + key / LANES % 2, made = exponential_of_malossi(SUB(LOAD(scores + key), ALL(largest)));
        *sum = ADD(*sum, made);
        PUT_WEIGHTS(weights + key, made);
    }
    float total = sum_by_halves(ADD(sums[0], sums[1])), last[LANES] = {0.0f};
    weighed rest[LANES];
    for (int64_t one = key; one < count; one++) {
        last[one - key] = (float)exp((double)(scores[one] - largest));
        total += last[one - key];
    }
    PUT_WEIGHTS(rest, LOAD(last));
    memcpy(weights + key, rest, (size_t)(count - key) * sizeof rest[0]);
    return total;
}

INLINE void attend_to(const attended *to, int num) {
    float scores[MOST_QUERIES][KEYS_AT_ONCE], totals[MOST_QUERIES][MOST_HEAD], largest[MOST_QUERIES], sums[MOST_QUERIES];
    weighed weights[MOST_QUERIES][KEYS_AT_ONCE];
    int64_t size = to->size, columns = (size + 31) / 32 * 32;
    for (int q = 0; q < num; q++) {
        largest[q] = -INFINITY, sums[q] = 0.0f;
        for (int64_t column = 0; column < columns; column += LANES)
            STORE(totals[q] + column, ZERO());
    }
    for (int64_t first = 0; first < to->count; first += KEYS_AT_ONCE) {
        int64_t count = to->count - first < KEYS_AT_ONCE ? to->count - first : KEYS_AT_ONCE;
        const uint16_t *values = to->values + first * size, *keys = to->keys + first * size;
        const uint16_t *next = first + count < to->count ? keys + count * size : to->next;
        scores_of(to->queries, keys, count, size, num, values, scores);
        for (int q = 0; q < num; q++) {
            float most = largest_of(scores[q], count, to->scale);
            most = largest[q] > most ? largest[q] : most;
            if (most == -INFINITY) {
                memset(weights[q], 0, (size_t)count * sizeof weights[q][0]);
                continue;
            }
            float sum = to_weights(scores[q], count, most, weights[q]), before = expf(largest[q] - most);
            sums[q] = fmaf(before, sums[q], sum);
            largest[q] = most;
            for (int64_t column = 0; first && column < columns; column += LANES)
                STORE(totals[q] + column, MUL(LOAD(totals[q] + column), ALL(before)));
        }
        add_values(weights, values, count, size, num, next, totals);
    }
    for (int q = 0; q < num; q++) {
        float sum = sums[q] == 0.0f ? 1.0f : sums[q], factor = 1.0f / sum;
        if (to->log_sums)
            to->log_sums[q] = (largest[q] == -INFINITY ? 0.0f : largest[q]) + logf(sum);
        for (int64_t column = 0; column < size; column += LANES)
            TO_BFLOAT16(to->outputs + q * size + column, MUL(in_order(totals[q], column), ALL(factor)));
    }
}

void OF_LEVEL(attend_as_torch)(const attended *to) {
    for (int64_t first = 0; first < to->num; first += MOST_QUERIES) {
        attended some = *to;
        some.num = to->num - first < MOST_QUERIES ? to->num - first : MOST_QUERIES;
        some.queries += first * to->size, some.outputs += first * to->size;
        some.log_sums = to->log_sums ? to->log_sums + first : NULL;
        switch (some.num) {
            case 1: attend_to(&some, 1); break;
            case 2: attend_to(&some, 2); break;
            case 3: attend_to(&some, 3); break;
            case 4: attend_to(&some, 4); break;
        }
    }
}
