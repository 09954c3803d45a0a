/* Products of one input with ROWS whole rows side by side, so that no sum waits for its last product. Included by products.h.
 *
 * What comes next is asked for in the order of memory: processors guess the rest then, which they can't where rows are read
 * side by side. Each kind has a function of its own: in small ones GCC keeps the sums in registers.
 */
enum halves { NONE, ONE, TWO };

#if LEVEL == 4
/* Halves at the beginning of ROWS blocks, as floats in memory: `TWO`, or `ONE` twice. Each is read only once, so that GCC makes
 * it a part of the instruction that multiplies by it: any other way to get it into all lanes takes as long as a product. */
INLINE void read_halves(const uint8_t *blocks, int64_t bytes, int num, float *floats) {
    uint32_t two[ROWS];
    for (int r = 0; r < ROWS; r++)
        memcpy(two + r, blocks + r * bytes, sizeof *two);
    __m256 read = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)two));
    _mm256_storeu_ps(floats, num == ONE ? _mm256_moveldup_ps(read) : read);
    IN_MEMORY(*(float(*)[2 * ROWS])floats);
}
#define FIRST all(halves[2 * r])
#define SECOND all(halves[2 * r + 1])
#define AGAIN SECOND
#else
#define read_halves(blocks, bytes, num, floats) (void)0
#define FIRST half_at(at)
#define SECOND half_at(at + 2)
#define AGAIN FIRST
#endif

/* Written out, so that GCC keeps the sums of all rows in registers. */
#define EACH_ROW(...)                                                                                        \
    { ROW(0, __VA_ARGS__) ROW(1, __VA_ARGS__) ROW(2, __VA_ARGS__) ROW(3, __VA_ARGS__) }
#define ROW(number, ...)                                                                                     \
    {                                                                                                        \
        enum { r = number };                                                                                 \
        const uint8_t *at = from + r * bytes;                                                                \
        (void)at;                                                                                            \
        __VA_ARGS__;                                                                                         \
    }
#define SIDE_BY_SIDE(name, size, num_halves, add)                                                            \
    APART void add_##name(const weight *w, int64_t row, const float *input, vec *sums) {                     \
        int64_t bytes = row_bytes(w), group = 0;                                                             \
        const uint8_t *from = w->codes + row * bytes, *end = from + bytes, *later = from + 2 * ROWS * bytes; \
        float scale[ROWS][8] = {{0}}, less[ROWS][8];                                                         \
        float ALIGNED halves[2 * ROWS];                                                                      \
        unpacked ALIGNED blocks[ROWS];                                                                       \
        sink to[ROWS];                                                                                       \
        (void)scale, (void)less, (void)halves, (void)blocks;                                                 \
        EACH_ROW(to[r].writes = 0, to[r].inputs = input, to[r].sum = all(0.0f))                              \
        for (; from < end; from += (size), later += ROWS * (size), group++) {                                \
            for (int i = 0; i < ROWS * (size); i += 64)                                                      \
                PREFETCH_SECOND(later + i); /* the first cache has no room for wide rows */                  \
            if (num_halves != NONE)                                                                          \
                read_halves(from, bytes, num_halves, halves);                                                \
            EACH_ROW(add);                                                                                   \
        }                                                                                                    \
        EACH_ROW(sums[r] = to[r].sum)                                                                        \
    }
SIDE_BY_SIDE(int8_rows, WIDTH, NONE, take(&to[r], codes_at((const int8_t *)at)))
SIDE_BY_SIDE(q4_0_rows, 18, ONE, add_q4_0(at + 2, FIRST, &to[r]))
SIDE_BY_SIDE(q4_1_rows, 20, TWO, add_q4(at + 4, FIRST, SECOND, &to[r]))
SIDE_BY_SIDE(q5_0_rows, 22, ONE, add_q5_0(at + 2, FIRST, AGAIN, &to[r]))
SIDE_BY_SIDE(q5_1_rows, 24, TWO, add_q5(at + 4, FIRST, SECOND, &to[r]))
SIDE_BY_SIDE(q8_0_rows, 34, ONE, {
    take(&to[r], product(codes_at((const int8_t *)at + 2), FIRST));
    take(&to[r], product(codes_at((const int8_t *)at + 18), AGAIN));
})
SIDE_BY_SIDE(q4_k_rows, 144, NONE, {
    k_scales(at, scale[r], less[r]);
    IN_MEMORY(scale[r]);
    IN_MEMORY(less[r]);
    for (int pair = 0; r == ROWS - 1 && pair < 4; pair++)
        EACH_ROW(add_q4_k(at + 16 + 32 * pair, scale[r] + 2 * pair, less[r] + 2 * pair, &to[r]));
})
SIDE_BY_SIDE(q5_k_rows, 176, NONE, {
    q5_k(at, &blocks[r]);
    IN_MEMORY(blocks[r]);
    for (int i = 0; r == ROWS - 1 && i < 256; i += WIDTH)
        EACH_ROW(take(&to[r], plus_product(codes_at(blocks[r].codes + i), all(blocks[r].scale[i / 32]),
                                           all(-blocks[r].less[i / 32]))));
})
SIDE_BY_SIDE(q6_k_rows, 210, NONE, {
    q6_k(at, &blocks[r]);
    IN_MEMORY(blocks[r]);
    for (int i = 0; r == ROWS - 1 && i < 256; i += WIDTH)
        EACH_ROW(take(&to[r], product(codes_at(blocks[r].codes + i), all(blocks[r].scale[i / 16]))));
})
SIDE_BY_SIDE(planes_4_rows, 32, NONE, add_planes(w, row + r, group, 32, &to[r]))
SIDE_BY_SIDE(pairs_rows, 16, NONE, { /* 32 columns, of a group of as many or more */
    int size = (int)(w->columns / w->groups);
    int column = (int)group * 32;
    if (column % size == 0)
        scale[r][0] = scale_of(w, row + r, column / size);
    take(&to[r], product(pairs_at(w->values, at), all(scale[r][0])));
    take(&to[r], product(pairs_at(w->values, at + 8), all(scale[r][0])));
})

/* Whether codes of whole rows have one scale, which comes last then. */
INLINE int is_bare(const weight *w) {
    return w->codes_kind == INT8 && w->groups == 1 && !w->zero && !w->least && w->columns % WIDTH == 0;
}

/* How ROWS rows are multiplied by one input; NULL: one after the other, in the order of memory. */
typedef void rows_times_one(const weight *, int64_t, const float *, vec *);
static rows_times_one *side_by_side(const weight *w) {
    switch (w->codes_kind) {
    case INT8: return is_bare(w) ? add_int8_rows : NULL;
    case PLANES: return w->group_bytes == 32 ? add_planes_4_rows : NULL;
    case PAIRS: return w->columns / w->groups % 32 == 0 && !w->zero && !w->least ? add_pairs_rows : NULL;
    case Q4_0: return add_q4_0_rows;
    case Q4_1: return add_q4_1_rows;
    case Q5_0: return add_q5_0_rows;
    case Q5_1: return add_q5_1_rows;
    case Q8_0: return add_q8_0_rows;
    case Q4_K: return add_q4_k_rows;
    case Q5_K: return add_q5_k_rows;
    case Q6_K: return add_q6_k_rows;
    default: return NULL;
    }
}
