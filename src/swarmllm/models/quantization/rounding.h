/* Rounds weights into blocks of GGUF as block_search.py does, to the last bit. Included for each LEVEL of processors.

   16 groups of weights are side by side in the lanes of a `vec`. Products and sums aren't fused, and sums are those of
   pairs, of pairs of pairs and so on, so that all processors, and torch, round alike. */
#include "compiler.h"
#include "vectors.h"

#define MOST_SIZE 32      /* weights of a group */
#define SMALLEST_STEP 1e-37f
#define SOLVABLE 1e-6     /* these and the tried ranges: block_search.py */
#define INTEGERS 12582912.0f /* 1.5 * 2^23: floats of this size have no fractions */

enum kinds { KIND_Q8_0 = 8, KIND_Q4_K = 12, KIND_Q5_K = 13, KIND_Q6_K = 14 };

static const float tried[] = {-2.0f, -1.5f, -1.0f, -0.5f, 0.0f, 0.5f, 1.0f};
static const float tried_5[] = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, 0.0f, 0.5f, 1.0f};
static const float tried_8[] = {-3.0f, -2.0f, -1.0f, 0.0f, 1.0f};
#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

#if LEVEL == 4
INLINE vec minus(vec one, vec other) { return _mm512_sub_ps(one, other); }
INLINE vec over(vec one, vec other) { return _mm512_div_ps(one, other); }
INLINE vec lesser(vec one, vec other) { return _mm512_min_ps(one, other); }
INLINE vec greater(vec one, vec other) { return _mm512_max_ps(one, other); }
/* `yes` where one < other */
INLINE vec if_less(vec one, vec other, vec yes, vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(one, other, _CMP_LT_OQ), no, yes);
}
#elif LEVEL == 3
#define BOTH(function) return (vec){function(one.low, other.low), function(one.high, other.high)}
INLINE vec minus(vec one, vec other) { BOTH(_mm256_sub_ps); }
INLINE vec over(vec one, vec other) { BOTH(_mm256_div_ps); }
INLINE vec lesser(vec one, vec other) { BOTH(_mm256_min_ps); }
INLINE vec greater(vec one, vec other) { BOTH(_mm256_max_ps); }
INLINE __m256 chosen(__m256 one, __m256 other, __m256 yes, __m256 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(one, other, _CMP_LT_OQ));
}
INLINE vec if_less(vec one, vec other, vec yes, vec no) {
    return (vec){chosen(one.low, other.low, yes.low, no.low), chosen(one.high, other.high, yes.high, no.high)};
}
#else
typedef int32_t four_bits __attribute__((vector_size(16)));
INLINE four chosen(four one, four other, four yes, four no) {
    four_bits mask = one < other;
    return (four)(((four_bits)yes & mask) | ((four_bits)no & ~mask));
}
INLINE vec minus(vec one, vec other) { EACH_PART(one.part[i] - other.part[i]); }
INLINE vec over(vec one, vec other) { EACH_PART(one.part[i] / other.part[i]); }
INLINE vec if_less(vec one, vec other, vec yes, vec no) {
    EACH_PART(chosen(one.part[i], other.part[i], yes.part[i], no.part[i]));
}
INLINE vec lesser(vec one, vec other) { return if_less(one, other, one, other); }
INLINE vec greater(vec one, vec other) { return if_less(other, one, one, other); }
#endif

INLINE vec negative(vec values) { return product(values, all(-1.0f)); }
INLINE vec clamped(vec values, float least, float most) { return greater(lesser(values, all(most)), all(least)); }
/* Of numbers that are small enough for INTEGERS; halves become even. */
INLINE vec whole(vec values) { return minus(sum(values, all(INTEGERS)), all(INTEGERS)); }
INLINE vec inverse(vec step) {
    vec size = greater(step, negative(step));
    return if_less(size, all(SMALLEST_STEP), all(0.0f), over(all(1.0f), step));
}

INLINE uint16_t half_of(float value) {
    uint32_t bits, half;
    float size = value < 0 ? -value : value, unit = 0.5f;
    size = size > 65504.0f ? 65504.0f : size;
    if (size < 0x1p-14f) { /* its bits count units of 2^-24, and so do the last bits of a float from 0.5 */
        size += unit;
        memcpy(&bits, &size, sizeof bits);
        memcpy(&half, &unit, sizeof half);
        half = bits - half;
    } else {
        memcpy(&bits, &size, sizeof bits);
        half = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    }
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(half ? half | (bits >> 16 & 0x8000) : 0); /* never -0 */
}
/* Rounded to float16, and its bytes. */
INLINE float as_half(float value, uint8_t *bytes) {
    uint16_t half = half_of(value);
    bytes[0] = half & 0xff, bytes[1] = half >> 8;
    return half_float(bytes);
}

typedef struct {
    vec weights[MOST_SIZE];
    vec total;
    int size;
} groups;
typedef struct {
    vec codes, squares, products;
} sums;

INLINE vec in_pairs(const vec *v) {
    vec low = sum(sum(v[0], v[1]), sum(v[2], v[3])), high = sum(sum(v[4], v[5]), sum(v[6], v[7]));
    return sum(low, high);
}
INLINE vec of_eights(const vec *eights, int size) {
    vec first = sum(eights[0], eights[1]);
    return size == 16 ? first : sum(first, sum(eights[2], eights[3]));
}

/* 16 groups of `size` weights, one after the other. */
INLINE void read_groups(groups *g, const float *from, int size) {
    float lanes[WIDTH];
    vec eights[4];
    g->size = size;
    for (int j = 0; j < size; j++) {
        for (int i = 0; i < WIDTH; i++)
            lanes[i] = from[i * size + j];
        g->weights[j] = load(lanes);
    }
    for (int j = 0; j < size; j += 8)
        eights[j / 8] = in_pairs(g->weights + j);
    g->total = of_eights(eights, size);
}

INLINE vec code(const groups *g, int j, vec inverse_step, vec minimum, float least, float most) {
    return whole(clamped(product(sum(g->weights[j], minimum), inverse_step), least, most));
}

/* Over the weights of each group, with the codes nearest to them. */
INLINE sums sums_of(const groups *g, vec step, vec minimum, float least, float most, int size) {
    vec by = inverse(step), products[8], eights[4];
    sums s = {all(0.0f), all(0.0f), all(0.0f)};
    for (int start = 0; start < size; start += 8) {
        for (int j = 0; j < 8; j++) {
            vec one = code(g, start + j, by, minimum, least, most);
            s.codes = sum(s.codes, one); /* whole numbers: exact in any order */
            s.squares = sum(s.squares, product(one, one));
            products[j] = product(one, g->weights[start + j]);
        }
        eights[start / 8] = in_pairs(products);
    }
    s.products = of_eights(eights, size);
    return s;
}

INLINE void range_of(const groups *g, vec *low, vec *high, int size) {
    *low = *high = g->weights[0];
    for (int j = 1; j < size; j++) {
        *low = lesser(*low, g->weights[j]);
        *high = greater(*high, g->weights[j]);
    }
}

/* --- code * step */

INLINE vec best_steps(const groups *g, float least, float most, const float *beyond, int count, int size) {
    vec low, high, found = all(0.0f), gained = all(-1.0f);
    range_of(g, &low, &high, size);
    vec farthest = if_less(negative(low), high, high, low);
    for (int i = 0; i < count; i++) {
        sums s = sums_of(g, over(farthest, all(least - beyond[i])), all(0.0f), least, most, size);
        vec step = product(s.products, inverse(s.squares)), gain = product(s.products, step);
        found = if_less(gained, gain, step, found);
        gained = if_less(gained, gain, gain, gained);
    }
    return found;
}

INLINE void round_q8_0(const float *from, uint8_t *to) {
    groups g;
    float step[WIDTH], codes[WIDTH];
    read_groups(&g, from, 32);
    store(step, best_steps(&g, -127, 127, tried_8, COUNT(tried_8), 32));
    for (int i = 0; i < WIDTH; i++)
        step[i] = as_half(step[i], to + 34 * i);
    vec by = inverse(load(step));
    for (int j = 0; j < 32; j++) {
        store(codes, code(&g, j, by, all(0.0f), -127, 127));
        for (int i = 0; i < WIDTH; i++)
            to[34 * i + 2 + j] = (uint8_t)(int8_t)codes[i];
    }
}

INLINE float sum_of_lanes(vec values, int start, int count) { /* of 8 or 16 */
    float lanes[WIDTH];
    store(lanes, values);
    for (int width = 1; width < count; width *= 2)
        for (int i = start; i < start + count; i += 2 * width)
            lanes[i] += lanes[i + width];
    return lanes[start];
}

/* Half of a block's codes, which are above 0 now. */
INLINE void pack_q6_k(const uint8_t *codes, uint8_t *low, uint8_t *high) {
    for (int i = 0; i < 32; i++) {
        const uint8_t q0 = codes[i], q1 = codes[32 + i], q2 = codes[64 + i], q3 = codes[96 + i];
        low[i] = (q0 & 15) | (uint8_t)((q2 & 15) << 4);
        low[32 + i] = (q1 & 15) | (uint8_t)((q3 & 15) << 4);
        high[i] = (uint8_t)(q0 >> 4 | q1 >> 4 << 2 | q2 >> 4 << 4 | q3 >> 4 << 6);
    }
}

INLINE void round_q6_k(const float *from, uint8_t *to) {
    groups g;
    float lanes[WIDTH], low = 0, high = 0;
    uint8_t codes[256];
    read_groups(&g, from, 16);
    vec steps = best_steps(&g, -32, 31, tried, COUNT(tried), 16);
    store(lanes, steps);
    low = high = lanes[0];
    for (int i = 1; i < WIDTH; i++) {
        low = lanes[i] < low ? lanes[i] : low;
        high = lanes[i] > high ? lanes[i] : high;
    }
    vec unit = all(as_half((high > -low ? high : low) / -128.0f, to + 208));
    vec scales = whole(clamped(product(steps, inverse(unit)), -128, 127));
    vec best = scales, gained = all(-__builtin_inff()), squares = all(0.0f), products = all(0.0f);
    static const float by[] = {0.0f, -1.0f, 1.0f};
    for (int i = 0; i < 3; i++) {
        vec scale = clamped(sum(scales, all(by[i])), -128, 127), step = product(scale, unit);
        sums s = sums_of(&g, step, all(0.0f), -32, 31, 16);
        vec gain = product(step, minus(product(all(2.0f), s.products), product(step, s.squares)));
        best = if_less(gained, gain, scale, best);
        squares = if_less(gained, gain, s.squares, squares);
        products = if_less(gained, gain, s.products, products);
        gained = if_less(gained, gain, gain, gained);
    }
    float above = sum_of_lanes(product(best, products), 0, 16);
    float below = sum_of_lanes(product(best, product(best, squares)), 0, 16);
    store(lanes, inverse(all(below)));
    unit = all(as_half(above * lanes[0], to + 208));
    vec inverse_step = inverse(product(best, unit));
    for (int j = 0; j < 16; j++) {
        store(lanes, sum(code(&g, j, inverse_step, all(0.0f), -32, 31), all(32.0f)));
        for (int i = 0; i < WIDTH; i++)
            codes[16 * i + j] = (uint8_t)lanes[i];
    }
    pack_q6_k(codes, to, to + 128);
    pack_q6_k(codes + 128, to + 64, to + 160);
    store(lanes, best);
    for (int i = 0; i < WIDTH; i++)
        to[192 + i] = (uint8_t)(int8_t)lanes[i];
}

/* --- code * step - minimum, with rounded steps and minima: two blocks of 8 groups of 32 */

INLINE vec error_of(const groups *g, vec step, vec minimum, sums s) {
    vec twice = product(all(2.0f), step);
    vec by_minimum = minus(product(minimum, all(32.0f)), product(twice, s.codes));
    by_minimum = product(minimum, sum(by_minimum, product(all(2.0f), g->total)));
    return sum(product(step, minus(product(step, s.squares), product(all(2.0f), s.products))), by_minimum);
}

INLINE void solved(const groups *g, sums s, vec *step, vec *minimum) {
    vec zero = all(0.0f), counted = product(all(32.0f), s.squares);
    vec determinant = minus(counted, product(s.codes, s.codes));
    vec least = product(all((float)(SOLVABLE * 32)), s.squares);
    vec above = minus(product(all(32.0f), s.products), product(s.codes, g->total));
    vec found = over(if_less(least, determinant, above, zero), if_less(least, determinant, determinant, all(1.0f)));
    vec below = over(minus(product(found, s.codes), g->total), all(32.0f));
    found = if_less(below, zero, product(s.products, inverse(s.squares)), found);
    *step = greater(found, zero);
    *minimum = greater(below, zero);
}

INLINE void best_lines(const groups *g, float most, const float *beyond, int count, vec *step, vec *minimum) {
    vec low, high, zero = all(0.0f), least_error = all(__builtin_inff());
    range_of(g, &low, &high, 32);
    low = lesser(low, zero), high = greater(high, zero);
    *step = zero, *minimum = negative(low);
    for (int i = 0; i < count; i++) {
        sums s = sums_of(g, over(minus(high, low), all(most + beyond[i])), negative(low), 0, most, 32);
        vec found, below;
        solved(g, s, &found, &below);
        vec error = error_of(g, found, below, s);
        *step = if_less(error, least_error, found, *step);
        *minimum = if_less(error, least_error, below, *minimum);
        least_error = if_less(error, least_error, error, least_error);
    }
}

typedef struct {
    vec scales, lows;
    float unit[2], low_unit[2]; /* of each block */
    uint8_t unit_bytes[2][2], low_unit_bytes[2][2];
} lines;

INLINE vec each(const float *of_blocks) {
    float lanes[WIDTH];
    for (int i = 0; i < WIDTH; i++)
        lanes[i] = of_blocks[i / 8];
    return load(lanes);
}
INLINE vec six_bits(vec values, vec unit) { return whole(clamped(product(values, inverse(unit)), 0, 63)); }

INLINE void units_of(vec values, float *unit, uint8_t (*bytes)[2]) {
    float lanes[WIDTH];
    store(lanes, values);
    for (int block = 0; block < 2; block++) {
        float most = lanes[8 * block];
        for (int i = 1; i < 8; i++)
            most = lanes[8 * block + i] > most ? lanes[8 * block + i] : most;
        unit[block] = as_half(most / 63.0f, bytes[block]);
    }
}

INLINE void better_neighbours(const groups *g, lines *l, float most) {
    vec unit = each(l->unit), low_unit = each(l->low_unit), least_error = all(__builtin_inff());
    vec scales = l->scales, lows = l->lows;
    static const float by[] = {0.0f, -1.0f, 1.0f};
    for (int i = 0; i < 3; i++) {
        vec scale = clamped(sum(scales, all(by[i])), 0, 63), step = product(scale, unit);
        sums s = sums_of(g, step, product(lows, low_unit), 0, most, 32);
        vec low = six_bits(over(minus(product(step, s.codes), g->total), all(32.0f)), low_unit);
        vec error = error_of(g, step, product(low, low_unit), s);
        l->scales = if_less(error, least_error, scale, l->scales);
        l->lows = if_less(error, least_error, low, l->lows);
        least_error = if_less(error, least_error, error, least_error);
    }
}

INLINE vec error_with(const groups *g, const lines *l, const float *unit, const float *low_unit, float most, sums *s) {
    vec step = product(l->scales, each(unit)), minimum = product(l->lows, each(low_unit));
    *s = sums_of(g, step, minimum, 0, most, 32);
    return error_of(g, step, minimum, *s);
}

INLINE void better_units(const groups *g, lines *l, float most) {
    sums s, others;
    float unit[2], low_unit[2];
    uint8_t bytes[2][2], low_bytes[2][2];
    vec error = error_with(g, l, l->unit, l->low_unit, most, &s), scales = l->scales, lows = l->lows;
    vec terms[] = {
        product(product(scales, scales), s.squares),
        product(product(negative(scales), lows), s.codes),
        product(product(lows, lows), all(32.0f)),
        product(scales, s.products),
        product(negative(lows), g->total),
    };
    for (int block = 0; block < 2; block++) {
        float t[5], inverses[WIDTH];
        for (int i = 0; i < 5; i++)
            t[i] = sum_of_lanes(terms[i], 8 * block, 8);
        float a = t[0], b = t[1], c = t[2], x = t[3], y = t[4], determinant = a * c - b * b;
        int is_solvable = determinant > (float)SOLVABLE * a * c;
        store(inverses, inverse(all(a)));
        float found = is_solvable ? (x * c - y * b) / determinant : x * inverses[0];
        float below = is_solvable ? (a * y - b * x) / determinant : 0.0f;
        unit[block] = as_half(found > 0 ? found : 0.0f, bytes[block]);
        low_unit[block] = as_half(below > 0 ? below : 0.0f, low_bytes[block]);
    }
    vec other_error = error_with(g, l, unit, low_unit, most, &others);
    for (int block = 0; block < 2; block++)
        if (sum_of_lanes(other_error, 8 * block, 8) < sum_of_lanes(error, 8 * block, 8)) {
            l->unit[block] = unit[block], l->low_unit[block] = low_unit[block];
            memcpy(l->unit_bytes[block], bytes[block], 2);
            memcpy(l->low_unit_bytes[block], low_bytes[block], 2);
        }
}

INLINE void pack_scales(const lines *l, int block, uint8_t *to) {
    float scales[WIDTH], lows[WIDTH];
    store(scales, l->scales);
    store(lows, l->lows);
    memcpy(to, l->unit_bytes[block], 2);
    memcpy(to + 2, l->low_unit_bytes[block], 2);
    for (int i = 0; i < 4; i++) {
        int scale = (int)scales[8 * block + i], last_scale = (int)scales[8 * block + 4 + i];
        int low = (int)lows[8 * block + i], last_low = (int)lows[8 * block + 4 + i];
        to[4 + i] = (uint8_t)(scale | last_scale >> 4 << 6);
        to[8 + i] = (uint8_t)(low | last_low >> 4 << 6);
        to[12 + i] = (uint8_t)((last_scale & 15) | (last_low & 15) << 4);
    }
}

INLINE void round_k(const float *from, uint8_t *to, int bits, int num_bytes) {
    const float most = bits == 5 ? 31.0f : 15.0f;
    groups g;
    lines l;
    vec steps, minima;
    float lanes[WIDTH];
    uint8_t codes[WIDTH][32];
    read_groups(&g, from, 32);
    best_lines(&g, most, bits == 5 ? tried_5 : tried, bits == 5 ? COUNT(tried_5) : COUNT(tried), &steps, &minima);
    units_of(steps, l.unit, l.unit_bytes);
    units_of(minima, l.low_unit, l.low_unit_bytes);
    l.scales = six_bits(steps, each(l.unit)), l.lows = six_bits(minima, each(l.low_unit));
    for (int round = 0; round < 2; round++) {
        better_neighbours(&g, &l, most);
        better_units(&g, &l, most);
    }
    vec by = inverse(product(l.scales, each(l.unit))), minimum = product(l.lows, each(l.low_unit));
    for (int j = 0; j < 32; j++) {
        store(lanes, code(&g, j, by, minimum, 0, most));
        for (int i = 0; i < WIDTH; i++)
            codes[i][j] = (uint8_t)lanes[i];
    }
    for (int block = 0; block < 2; block++, to += num_bytes) {
        uint8_t (*of)[32] = codes + 8 * block, *nibbles = to + num_bytes - 128;
        pack_scales(&l, block, to);
        for (int j = 0; bits == 5 && j < 32; j++) {
            to[16 + j] = 0;
            for (int i = 0; i < 8; i++)
                to[16 + j] |= (uint8_t)(of[i][j] >> 4 << i);
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++)
                nibbles[32 * i + j] = (uint8_t)((of[2 * i][j] & 15) | of[2 * i + 1][j] << 4);
    }
}

APART void of_q8_0(const float *from, uint8_t *to) { round_q8_0(from, to); }
APART void of_q6_k(const float *from, uint8_t *to) { round_q6_k(from, to); }
APART void of_q5_k(const float *from, uint8_t *to) { round_k(from, to, 5, 176); }
APART void of_q4_k(const float *from, uint8_t *to) { round_k(from, to, 4, 144); }

/* Each function rounds `at_once` weights; what is left is filled up with zeros. */
void OF_LEVEL(round)(int64_t kind, const float *from, int64_t num_weights, uint8_t *to) {
    int is_8 = kind == KIND_Q8_0, is_6 = kind == KIND_Q6_K;
    int64_t at_once = is_6 ? 256 : 512, num_bytes = is_8 ? 16 * 34 : is_6 ? 210 : kind == KIND_Q5_K ? 2 * 176 : 2 * 144;
    void (*function)(const float *, uint8_t *) = is_8 ? of_q8_0 : is_6 ? of_q6_k : kind == KIND_Q5_K ? of_q5_k : of_q4_k;
    for (; num_weights >= at_once; num_weights -= at_once, from += at_once, to += num_bytes)
        function(from, to);
    if (num_weights) {
        float filled[512] = {0};
        uint8_t bytes[16 * 34];
        memcpy(filled, from, (size_t)num_weights * sizeof *from);
        function(filled, bytes);
        memcpy(to, bytes, (size_t)(num_weights * num_bytes / at_once));
    }
}
