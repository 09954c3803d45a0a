/* Products of one input with ROWS whole rows side by side, so that no sum waits for its last product. Included by products.h.
 *
 * What comes next is asked for in the order of memory: processors guess the rest then, which they can't where rows are read
 * side by side. Each kind has a function of its own: in small ones GCC keeps the sums in registers.
 */
#define EACH_ROW(add)                                                                                        \
    _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) {                                                 \
        const uint8_t *at = from + r * bytes;                                                                \
        (void)at;                                                                                            \
        add;                                                                                                 \
    }
#define SIDE_BY_SIDE(name, size, add)                                                                        \
    APART void add_##name(const weight *w, int64_t row, const float *input, vec *sums) {                     \
        int64_t bytes = row_bytes(w), group = 0;                                                             \
        const uint8_t *from = w->codes + row * bytes, *end = from + bytes, *next = from + ROWS * bytes;      \
        float scale[ROWS][8] = {{0}}, less[ROWS][8];                                                         \
        sink to[ROWS];                                                                                       \
        (void)scale, (void)less;                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                       \
            to[r] = (sink){.writes = 0, .inputs = input, .sum = all(0.0f)};                                  \
        for (; from < end; from += (size), next += ROWS * (size), group++) {                                 \
            for (int i = 0; i < ROWS * (size); i += 64)                                                      \
                PREFETCH(next + i);                                                                          \
            EACH_ROW(add);                                                                                   \
        }                                                                                                    \
        for (int r = 0; r < ROWS; r++)                                                                       \
            sums[r] = to[r].sum;                                                                             \
    }
SIDE_BY_SIDE(int8_rows, WIDTH, take(&to[r], codes_at((const int8_t *)at)))
SIDE_BY_SIDE(q4_0_rows, 18, add_q4(at, 0, 32, &to[r]))
SIDE_BY_SIDE(q4_1_rows, 20, add_q4(at, 1, 32, &to[r]))
SIDE_BY_SIDE(q5_0_rows, 22, add_q5(at, 0, &to[r]))
SIDE_BY_SIDE(q5_1_rows, 24, add_q5(at, 1, &to[r]))
SIDE_BY_SIDE(q8_0_rows, 34, spread_q8_0(at, 32, &to[r]))
SIDE_BY_SIDE(q4_k_rows, 144, {
    k_scales(at, scale[r], less[r]);
    for (int pair = 0; r == ROWS - 1 && pair < 4; pair++)
        EACH_ROW(add_q4_k(at + 16 + 32 * pair, scale[r] + 2 * pair, less[r] + 2 * pair, &to[r]));
})
SIDE_BY_SIDE(q5_k_rows, 176, {
    k_scales(at, scale[r], less[r]);
    for (int pair = 0; r == ROWS - 1 && pair < 4; pair++)
        EACH_ROW(add_q5_k(at + 16, at + 48 + 32 * pair, 2 * pair, scale[r], less[r], &to[r]));
})
SIDE_BY_SIDE(q6_k_rows, 210, add_q6_k(at, &to[r]))
SIDE_BY_SIDE(planes_4_rows, 32, add_planes(w, row + r, group, 32, &to[r]))
SIDE_BY_SIDE(pairs_rows, 16, { /* 32 columns, of a group of as many or more */
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
