/* What whole_attention.h needs, for AVX2: MKL's orders on processors that aren't Intel's. Products are rounded before they
 * are added, which only shows where they are too large for float32.
 *
 *   scores   four sums, each of every fourth column; the first and the third are added, the second and the fourth, and both
 *   values   by weights in bfloat16; of four keys, the first and the third are added, the second and the fourth, both, and
 *            these to those before. Keys left over are added one after the other, the last one first */
#define SUB _mm256_sub_ps
#define FLOOR _mm256_floor_ps
#define KEYS 8 /* whose scores are computed together */
#define GROUP 4
#define KEYS_IN_CACHE 64 /* whose values stay in the first one */
#define COLUMNS 16 /* of values at a time */
typedef float weighed; /* a weight, rounded to bfloat16 */

INLINE __m256i rounded_upper(vec values) { /* of each float, the bits that bfloat16 has */
    __m256i bits = _mm256_castps_si256(values), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i unknown = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(bits, _mm256_set1_epi32(0xffff), unknown);
}

#undef TO_BFLOAT16
INLINE void TO_BFLOAT16(uint16_t *to, vec values) {
    __m256i words = _mm256_packus_epi32(rounded_upper(values), _mm256_setzero_si256());
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
}

INLINE void PUT_WEIGHTS(weighed *to, vec values) {
    _mm256_storeu_si256((__m256i *)to, _mm256_slli_epi32(rounded_upper(values), 16));
}

/* The float of these bits; 0 for an x that is too small, and infinity for one that is too large. */
INLINE vec exponential_from(vec bits_of, vec x, vec least, vec most) {
    vec value = _mm256_castsi256_ps(_mm256_cvttps_epi32(bits_of));
    value = _mm256_blendv_ps(value, ZERO(), _mm256_cmp_ps(x, least, _CMP_LT_OS));
    return _mm256_blendv_ps(value, ALL(INFINITY), _mm256_cmp_ps(x, most, _CMP_GT_OS));
}

INLINE vec larger(vec one, vec other) { /* not a number if one isn't */
    return _mm256_blendv_ps(_mm256_max_ps(one, other), ALL(NAN), _mm256_cmp_ps(one, other, _CMP_UNORD_Q));
}

/* Lanes by halves until one is left. */
#define BY_HALVES(name, of_two)                              \
    INLINE float name(vec v) {                               \
        v = of_two(v, _mm256_permute2f128_ps(v, v, 1));      \
        v = of_two(v, SHUFFLED_IN_FOURS(v, 0x4e));           \
        return _mm256_cvtss_f32(of_two(v, SHUFFLED_IN_FOURS(v, 0xb1))); \
    }
BY_HALVES(sum_by_halves, ADD)
BY_HALVES(largest_by_halves, larger)

/* Eight numbers of each of two rows; the first four of both, and the others. */
INLINE void of_two_rows(__m256i both, vec *first, vec *second) {
    *first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), both));
    *second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), both));
}

/* Scores of KEYS keys by `num` queries, one or two. */
INLINE void add_scores(const float queries[][MOST_HEAD], const uint16_t *const keys[KEYS], int64_t size, int num,
                       float scores[][KEYS_AT_ONCE]) {
    vec sums[2][KEYS / 2]; /* of keys k and k + KEYS / 2 */
    for (int q = 0; q < num; q++)
        for (int key = 0; key < KEYS / 2; key++)
            sums[q][key] = ZERO();
    for (int64_t column = 0; column < size; column += 8) {
        for (int key = 0; key < KEYS / 2; key++) {
            __m128i one = _mm_loadu_si128((const __m128i *)(keys[key] + column));
            __m128i other = _mm_loadu_si128((const __m128i *)(keys[key + KEYS / 2] + column));
            vec first, second;
            of_two_rows(_mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1), &first, &second);
            for (int q = 0; q < num; q++) {
                sums[q][key] = ADD(sums[q][key], rounded_product(first, FOUR_EACH(queries[q] + column)));
                sums[q][key] = ADD(sums[q][key], rounded_product(second, FOUR_EACH(queries[q] + column + 4)));
            }
        }
    }
    for (int q = 0; q < num; q++) {
        vec *s = sums[q], half[2];
        for (int two = 0; two < 2; two++, s += 2)
            half[two] = ADD(_mm256_shuffle_ps(s[0], s[1], 0x44), _mm256_shuffle_ps(s[0], s[1], 0xee));
        STORE(scores[q], _mm256_hadd_ps(half[0], half[1]));
    }
}

/* Meanwhile, as much of what comes after is asked for. `num` is a constant. */
INLINE void scores_of(const uint16_t *queries, const uint16_t *keys, int64_t count, int64_t size, int num,
                      const uint16_t *next, float scores[][KEYS_AT_ONCE]) {
    float wide[MOST_QUERIES][MOST_HEAD];
    for (int q = 0; q < num; q++)
        for (int64_t column = 0; column < size; column += LANES)
            STORE(wide[q] + column, eight_at(queries + q * size + column));
    for (int64_t first = 0; first < count; first += KEYS) {
        const uint16_t *at[KEYS];
        for (int key = 0; key < KEYS; key++) /* scores that are left over aren't read */
            at[key] = keys + (first + key < count ? first + key : count - 1) * size;
        ask((const char *)(next + first * size), KEYS * size * 2);
        for (int q = 0; q < num; q += 2)
            add_scores(wide + q, at, size, num - q < 2 ? 1 : 2, (float(*)[KEYS_AT_ONCE])(scores[q] + first));
    }
}

/* LANES of COLUMNS columns of a key's values: 0 to 3 and 8 to 11, or the others. */
INLINE vec half_of(const uint16_t *values, int is_second) {
    vec first, second;
    of_two_rows(_mm256_loadu_si256((const __m256i *)values), &first, &second);
    return is_second ? second : first;
}

/* Adds COLUMNS columns of some keys' values to `totals`, whose halves of columns are as half_of() gives them. */
INLINE void add_columns(weighed weights[][KEYS_AT_ONCE], const uint16_t *values, int64_t count, int64_t size, int num,
                        float totals[][MOST_HEAD]) {
    vec sums[MOST_QUERIES][2];
    for (int q = 0; q < num; q++)
        for (int half = 0; half < 2; half++)
            sums[q][half] = LOAD(totals[q] + half * LANES);
    int64_t key = 0;
    for (; key + GROUP <= count; key += GROUP) {
        for (int half = 0; half < 2; half++) {
            vec of[GROUP];
            for (int one = 0; one < GROUP; one++)
                of[one] = half_of(values + (key + one) * size, half);
            for (int q = 0; q < num; q++) {
                const weighed *by = weights[q] + key;
                vec even = ADD(rounded_product(of[0], ALL(by[0])), rounded_product(of[2], ALL(by[2])));
                vec odd = ADD(rounded_product(of[1], ALL(by[1])), rounded_product(of[3], ALL(by[3])));
                sums[q][half] = ADD(sums[q][half], ADD(even, odd));
            }
        }
    }
    for (int64_t last = count - 1; last >= key; last--)
        for (int q = 0; q < num; q++)
            for (int half = 0; half < 2; half++)
                sums[q][half] = ADD(sums[q][half], rounded_product(half_of(values + last * size, half), ALL(weights[q][last])));
    for (int q = 0; q < num; q++)
        for (int half = 0; half < 2; half++)
            STORE(totals[q] + half * LANES, sums[q][half]);
}

/* Adds the values of some keys to `totals`. `num` is a constant. */
INLINE void add_values(weighed weights[][KEYS_AT_ONCE], const uint16_t *values, int64_t count, int64_t size, int num,
                       const uint16_t *next, float totals[][MOST_HEAD]) {
    for (int64_t first = 0; first < count; first += KEYS_IN_CACHE) {
        int64_t some = count - first < KEYS_IN_CACHE ? count - first : KEYS_IN_CACHE;
        if (next)
            ask((const char *)(next + first * size), some * size * 2);
        for (int64_t column = 0; column < size; column += COLUMNS)
            add_columns((weighed(*)[KEYS_AT_ONCE])(weights[0] + first), values + first * size + column, some, size, num,
                        (float(*)[MOST_HEAD])(totals[0] + column));
    }
}

/* LANES columns of `totals`. */
INLINE vec in_order(const float *totals, int64_t column) {
    int64_t begin = column / COLUMNS * COLUMNS;
    vec first = LOAD(totals + begin), second = LOAD(totals + begin + LANES);
    return column == begin ? _mm256_permute2f128_ps(first, second, 0x20) : _mm256_permute2f128_ps(first, second, 0x31);
}
