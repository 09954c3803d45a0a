/* What whole_attention.h needs, for AVX-512 with instructions for bfloat16: oneDNN's orders.
 *
 *   scores   sums of two neighbouring columns in each of 16 lanes; halves of the lanes are added, then neighbours, neighbours
 *            of these, and the rest
 *   values   by weights in bfloat16, in sums of GROUP keys, two at a time, which are added one after the other */
#define GROUP 8
#define SUB _mm512_sub_ps
#define FLOOR _mm512_floor_ps
typedef uint16_t weighed; /* a weight, in bfloat16 */
#define PUT_WEIGHTS TO_BFLOAT16

/* The float of these bits; 0 for an x that is too small, and infinity for one that is too large. */
INLINE vec exponential_from(vec bits_of, vec x, vec least, vec most) {
    __m512i bits = _mm512_cvttps_epi32(bits_of);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, least, _CMP_LT_OS), _mm512_setzero_si512());
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, most, _CMP_GT_OS), _mm512_set1_epi32(0x7f800000));
    return _mm512_castsi512_ps(bits);
}

INLINE vec larger(vec one, vec other) { /* not a number if one isn't */
    __mmask16 unknown = _mm512_cmp_ps_mask(one, other, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_max_ps(one, other), unknown, ALL(NAN));
}

/* Lanes by halves until one is left. */
#define BY_HALVES(name, of_two)                                   \
    INLINE float name(vec v) {                                    \
        v = of_two(v, _mm512_shuffle_f32x4(v, v, 0x4e));          \
        v = of_two(v, _mm512_shuffle_f32x4(v, v, 0xb1));          \
        v = of_two(v, _mm512_shuffle_ps(v, v, 0x4e));             \
        v = of_two(v, _mm512_shuffle_ps(v, v, 0xb1));             \
        return _mm512_cvtss_f32(v);                               \
    }
BY_HALVES(sum_by_halves, ADD)
BY_HALVES(largest_by_halves, larger)

INLINE __m512i columns_at(const uint16_t *from, int64_t count) {
    return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), from);
}

INLINE __m256 folded(vec lanes) {
    return _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
}

/* Scores of `count` keys, at most four, by each query. */
INLINE void add_scores(const uint16_t *queries, const uint16_t *keys, int64_t size, int count, int num,
                       float scores[][KEYS_AT_ONCE]) {
    vec sums[MOST_QUERIES][4];
    for (int q = 0; q < num; q++)
        for (int key = 0; key < 4; key++)
            sums[q][key] = ZERO();
    for (int64_t column = 0; column < size; column += 32)
        for (int key = 0; key < count; key++) {
            __m512bh some = (__m512bh)columns_at(keys + key * size + column, size - column);
            for (int q = 0; q < num; q++) {
                __m512bh query = (__m512bh)columns_at(queries + q * size + column, size - column);
                sums[q][key] = _mm512_dpbf16_ps(sums[q][key], query, some);
            }
        }
    for (int q = 0; q < num; q++) {
        __m256 one = _mm256_hadd_ps(folded(sums[q][0]), folded(sums[q][1]));
        __m256 both = _mm256_hadd_ps(one, _mm256_hadd_ps(folded(sums[q][2]), folded(sums[q][3])));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        if (count == 4)
            _mm_storeu_ps(scores[q], four);
        else
            _mm_store_ss(scores[q], four);
    }
}

/* Meanwhile, as much of what comes after is asked for. `num` is a constant. */
INLINE void scores_of(const uint16_t *queries, const uint16_t *keys, int64_t count, int64_t size, int num,
                      const uint16_t *next, float scores[][KEYS_AT_ONCE]) {
    int64_t key = 0;
    for (; key + 4 <= count; key += 4) {
        ask((const char *)(next + key * size), 4 * size * 2);
        add_scores(queries, keys + key * size, size, 4, num, (float(*)[KEYS_AT_ONCE])(scores[0] + key));
    }
    for (; key < count; key++)
        add_scores(queries, keys + key * size, size, 1, num, (float(*)[KEYS_AT_ONCE])(scores[0] + key));
}

/* Sums of two keys' values, or of one's. Of 32 columns, four from each of 0, 8, 16, 24 on come first, and then the others: so
 * two keys' values lie side by side after one instruction. `num` and `is_pair` are constants. */
INLINE void add_pair(uint16_t weights[][KEYS_AT_ONCE], const uint16_t *values, int64_t size, int64_t columns, int is_pair,
                     int num, vec *sums, vec *more) {
    __m512i one = columns_at(values, columns), other = is_pair ? columns_at(values + size, columns) : _mm512_setzero_si512();
    __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, other), high = (__m512bh)_mm512_unpackhi_epi16(one, other);
    for (int q = 0; q < num; q++) {
        uint32_t both = weights[q][0];
        if (is_pair)
            memcpy(&both, weights[q], sizeof both);
        __m512bh by = (__m512bh)_mm512_set1_epi32((int)both);
        sums[q] = _mm512_dpbf16_ps(sums[q], low, by);
        more[q] = _mm512_dpbf16_ps(more[q], high, by);
    }
}

/* Adds up to 32 columns of some keys' values to `totals`. Meanwhile, as much of what comes after is asked for. */
INLINE void add_columns(uint16_t weights[][KEYS_AT_ONCE], const uint16_t *values, int64_t count, int64_t size,
                        int64_t columns, int num, const uint16_t *next, float totals[][MOST_HEAD]) {
    vec lower[MOST_QUERIES], upper[MOST_QUERIES];
    for (int q = 0; q < num; q++)
        lower[q] = LOAD(totals[q]), upper[q] = LOAD(totals[q] + LANES);
    for (int64_t group = 0; group < count; group += GROUP) {
        vec sums[MOST_QUERIES], more[MOST_QUERIES];
        int64_t end = group + GROUP < count ? group + GROUP : count, key = group;
        for (int q = 0; q < num; q++)
            sums[q] = more[q] = ZERO();
        if (next)
            ask((const char *)(next + group * size), GROUP * size * 2);
        for (; key + 2 <= end; key += 2)
            add_pair((uint16_t(*)[KEYS_AT_ONCE])(weights[0] + key), values + key * size, size, columns, 1, num, sums, more);
        if (key < end)
            add_pair((uint16_t(*)[KEYS_AT_ONCE])(weights[0] + key), values + key * size, size, columns, 0, num, sums, more);
        for (int q = 0; q < num; q++)
            lower[q] = ADD(lower[q], sums[q]), upper[q] = ADD(upper[q], more[q]);
    }
    for (int q = 0; q < num; q++)
        STORE(totals[q], lower[q]), STORE(totals[q] + LANES, upper[q]);
}

/* Adds the values of some keys to `totals`. `num` is a constant. */
INLINE void add_values(uint16_t weights[][KEYS_AT_ONCE], const uint16_t *values, int64_t count, int64_t size, int num,
                       const uint16_t *next, float totals[][MOST_HEAD]) {
    int64_t column = 0;
    for (; column + 32 <= size; column += 32)
        add_columns(weights, values + column, count, size, 32, num, column ? NULL : next,
                    (float(*)[MOST_HEAD])(totals[0] + column));
    if (column < size)
        add_columns(weights, values + column, count, size, size - column, num, column ? NULL : next,
                    (float(*)[MOST_HEAD])(totals[0] + column));
}

/* 16 columns of `totals`. */
INLINE vec in_order(const float *totals, int64_t column) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    int64_t begin = column / 32 * 32;
    __m512i from = _mm512_add_epi32(first, _mm512_set1_epi32(column > begin ? 8 : 0));
    return _mm512_permutex2var_ps(LOAD(totals + begin), from, LOAD(totals + begin + LANES));
}
