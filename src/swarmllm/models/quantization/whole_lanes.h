/* The orders IN_LANES and IN_LANES_LATE of whole.h, which includes this file: each lane of a vector sums up every LANES-th
 * column. Then the lanes are summed up:
 *
 *   IN_LANES       columns left over are added to the first lanes before. AVX-512: the four quarters one after the other,
 *                  then pairs of the lanes that are left. AVX2: neighbours, halves, neighbours.
 *   IN_LANES_LATE  the first lane begins with the first column. The upper half is added to the lower one, until one lane is
 *                  left. Columns left over are added to lanes that begin with this sum, and summed up in the same way.
 */
#define TOGETHER 4 /* rows whose lanes are summed up at once */
#define ALL_INPUTS 16 /* at most, of a call */

#if LEVEL == 4
#define INPUTS_AT_ONCE 6 /* inputs: more sums of four rows need more registers */

INLINE vec some_at(const float *from, int64_t count) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}

/* The vectors' quarters: to[k] has the k-th of each. */
INLINE void quarters(const vec rows[TOGETHER], vec to[4]) {
    vec first = _mm512_shuffle_f32x4(rows[0], rows[1], 0x44), second = _mm512_shuffle_f32x4(rows[2], rows[3], 0x44);
    vec third = _mm512_shuffle_f32x4(rows[0], rows[1], 0xee), fourth = _mm512_shuffle_f32x4(rows[2], rows[3], 0xee);
    to[0] = _mm512_shuffle_f32x4(first, second, 0x88);
    to[1] = _mm512_shuffle_f32x4(first, second, 0xdd);
    to[2] = _mm512_shuffle_f32x4(third, fourth, 0x88);
    to[3] = _mm512_shuffle_f32x4(third, fourth, 0xdd);
}

INLINE void sum_up(const vec rows[TOGETHER], int late, float results[TOGETHER]) {
    vec q[4];
    quarters(rows, q);
    if (late) {
        vec sum = ADD(ADD(q[0], q[2]), ADD(q[1], q[3]));
        sum = ADD(sum, SHUFFLED_IN_FOURS(sum, 0x4e));
        q[0] = ADD(sum, SHUFFLED_IN_FOURS(sum, 0xb1));
    } else {
        vec sum = ADD(ADD(ADD(q[0], q[1]), q[2]), q[3]);
        sum = ADD(sum, SHUFFLED_IN_FOURS(sum, 0xb1));
        q[0] = ADD(sum, SHUFFLED_IN_FOURS(sum, 0x4e));
    }
    for (int which = 0; which < TOGETHER; which++)
        results[which] = ((const float *)q)[which * 4];
}

INLINE vec in_first_lane(float value) { return _mm512_zextps128_ps512(_mm_set_ss(value)); }
#else
#define INPUTS_AT_ONCE 1

INLINE vec some_at(const float *from, int64_t count) {
    return _mm256_maskload_ps(
        from, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

INLINE void sum_up(const vec rows[TOGETHER], int late, float results[TOGETHER]) {
    (void)late; /* whole.c has no such order for AVX2 */
    vec one = _mm256_hadd_ps(rows[0], rows[1]), other = _mm256_hadd_ps(rows[2], rows[3]);
    __m128 low = _mm_add_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1));
    __m128 high = _mm_add_ps(_mm256_castps256_ps128(other), _mm256_extractf128_ps(other, 1));
    _mm_storeu_ps(results, _mm_hadd_ps(low, high));
}

INLINE vec in_first_lane(float value) { return _mm256_zextps128_ps256(_mm_set_ss(value)); }
#endif

INLINE void sum_up_all(const vec *rows, int count, int late, float *results) {
    for (int row = 0; row < count; row += TOGETHER)
        sum_up(rows + row, late, results + row);
}

/* `num` inputs by `count` rows, which is once or twice TOGETHER. */
INLINE void lanes_of(const whole *w, const float *weights, const float *inputs, int num, int count, int late,
                     float results[][2 * TOGETHER]) {
    int64_t columns = w->columns, column = late;
    vec sums[INPUTS_AT_ONCE][2 * TOGETHER];
    for (int input = 0; input < num; input++)
        for (int row = 0; row < count; row++)
            sums[input][row] = late ? in_first_lane(weights[row * columns] * inputs[input * columns]) : ZERO();
    for (; column + LANES <= columns; column += LANES) {
        for (int row = 0; row < count; row++) {
            vec some = LOAD(weights + row * columns + column);
            for (int input = 0; input < num; input++)
                sums[input][row] = FMA(some, LOAD(inputs + input * columns + column), sums[input][row]);
        }
        ask((const char *)(weights + (columns + column) * count), count * LANES * 4);
    }
    int64_t left = columns - column;
    for (int input = 0; input < num; input++) {
        vec *of_rows = sums[input];
        float *to = results[input];
        if (late)
            sum_up_all(of_rows, count, late, to);
        for (int row = 0; left && row < count; row++)
            of_rows[row] = FMA(some_at(weights + row * columns + column, left),
                               some_at(inputs + input * columns + column, left),
                               late ? in_first_lane(to[row]) : of_rows[row]);
        if (!late || left)
            sum_up_all(of_rows, count, late, to);
    }
}

/* `number` is a constant in each version, so that sums are in registers. */
#define LANES_OF(number, count)                                        \
    case number:                                                       \
        lanes_of(w, weights, some, number, count, 0, results + first); \
        break;

/* Of at most ALL_INPUTS inputs, of one if `late`. They take turns, and all but the first find the rows in a cache. */
INLINE void in_lanes(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                     float *outputs, int late) {
    int64_t count = num > 2 && INPUTS_AT_ONCE > 1 ? TOGETHER : 2 * TOGETHER;
    for (int64_t row = start; row < end; row += count) {
        int64_t at = row + count <= end ? row : end - count, turns = (num + INPUTS_AT_ONCE - 1) / INPUTS_AT_ONCE;
        const float *weights = (const float *)w->weights + at * w->columns;
        float results[ALL_INPUTS][2 * TOGETHER];
        for (int64_t turn = 0; turn < turns; turn++) {
            int64_t first = num * turn / turns;
            const float *some = inputs + first * w->columns;
            if (late) {
                lanes_of(w, weights, some, 1, 2 * TOGETHER, 1, results);
                continue;
            }
            switch (num * (turn + 1) / turns - first) {
                LANES_OF(1, 2 * TOGETHER)
#if LEVEL == 4
                LANES_OF(2, 2 * TOGETHER)
                LANES_OF(3, TOGETHER)
                LANES_OF(4, TOGETHER)
                LANES_OF(5, TOGETHER)
                LANES_OF(6, TOGETHER)
#endif
            }
        }
        for (int64_t input = 0; input < num; input++) {
            for (int64_t which = 0; which < count; which++) {
                float result = results[input][which];
                outputs[input * w->rows + at + which] = bias ? result + bias[at + which] : result;
            }
        }
    }
}
