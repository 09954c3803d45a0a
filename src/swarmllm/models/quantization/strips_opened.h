/* Products of strips with many inputs; strips.h includes this file.
 *
 * Some groups of some strips are opened once for many inputs: to bytes in the order in which they are multiplied, and to scales
 * as floats. Two registers of rows share each number of an input, so that it is loaded half as often. The order of sums
 * is that of strips.h, so a product is the same in both ways.
 */
#define STRIPS_AT_ONCE (MOST_PARTS / PARTS)
#define OPENED_ROWS (STRIPS_AT_ONCE * SIDE)
#define TOGETHER_OPENED (LEVEL == 4 ? MOST_TOGETHER : TOGETHER) /* inputs of one digit: few sums wait for each other */
#define COLUMNS_AT_ONCE 512 /* what is opened of them, and of some inputs, stays in a first cache of 48 KB */
#define INPUTS_AT_ONCE 128  /* whose columns, of 256 KB, stay in the second one */

/* From so many inputs on, opening takes less time than it saves (measured, Emerald Rapids): bytes are open already, and most
 * is to be done for blocks of 256. */
INLINE int64_t least_opened(const weight *w) {
    int is_byte = w->codes_kind == INT8 || w->codes_kind == Q8_0;
    int is_large = w->codes_kind == Q4_K || w->codes_kind == Q5_K || w->codes_kind == Q6_K;
    return is_byte ? (LEVEL == 4 ? 17 : INT64_MAX) : is_large && !w->rounds_inputs ? TOGETHER + 1 : 9;
}

/* What differs between kinds once they are open. Sums of 16 bits, without VNNI, have room for half as many codes of 5 bits. */
enum form { PLAIN_GROUPS, LEAST, PLAIN_FIVES, LEAST_FIVES, HALVES };

INLINE int form_of(int kind) {
    switch (kind) {
    case Q4_1:
    case Q4_K: return LEAST;
#ifndef VNNI
    case Q5_0: return PLAIN_FIVES;
    case Q5_1:
    case Q5_K: return LEAST_FIVES;
#else
    case Q5_1:
    case Q5_K: return LEAST;
    case Q6_K: return HALVES;
#endif
    default: return PLAIN_GROUPS;
    }
}

INLINE void add_opened(int form, const opened *from, int64_t groups, products *p) {
    int halves = form == HALVES ? 2 : 1, bits = form == PLAIN_FIVES || form == LEAST_FIVES ? 5 : 4;
    for (const opened *stop = from + groups; from < stop; from++, p->inputs++) {
        part scale[MOST_PARTS], least[MOST_PARTS];
        whole codes[MOST_PARTS];
        ask_ahead(p);
        EACH(i, MOST_PARTS)
            least[i] = load_part(from->least[i]);
        if (form == LEAST || form == LEAST_FIVES)
            add_least(p, least);
        EACH(half, halves) {
            group_sums sums;
            begin_group(p, halves == 2 ? half : BOTH, &sums);
            EACH(k, WORDS / halves) {
                EACH(i, MOST_PARTS)
                    codes[i] = words_at(from->codes[WORDS / halves * half + k][i]);
                add_word(p, WORDS / halves * half + k, codes, &sums);
                settle(p, k + 1, bits, &sums);
            }
            EACH(i, MOST_PARTS)
                scale[i] = load_part(from->scale[half][i]);
            end_group(p, BOTH, scale, &sums);
        }
    }
}

typedef void products_of_opened(const opened *, int64_t, const prepared *, const uint8_t *, int64_t, float *,
                                const passes *);
#define OF_OPENED(form, num, digits)                                                                           \
    APART void opened_##form##_##num##_##digits(const opened *from, int64_t groups, const prepared *inputs,   \
                                                const uint8_t *ahead, int64_t bytes_ahead, float *outputs,     \
                                                const passes *all) {                                            \
        products p = begin_pass(num, digits, MOST_PARTS, inputs, ahead, bytes_ahead, outputs, all);             \
        add_opened(form, from, groups, &p);                                                                    \
        end_pass(&p, outputs, all);                                                                             \
    }
#if LEVEL == 4
#define EACH_MORE(of, form) EACH_ROUNDED(of, form) of(form, 5, 1) of(form, 6, 1) of(form, 7, 1) of(form, 8, 1)
#else
#define EACH_MORE EACH_ROUNDED
#endif
#define OPENED_WAYS(form) EACH_EXACT(OF_OPENED, form) EACH_MORE(OF_OPENED, form)
OPENED_WAYS(PLAIN_GROUPS) OPENED_WAYS(LEAST)
#ifdef VNNI
OPENED_WAYS(HALVES)
#else
OPENED_WAYS(PLAIN_FIVES) OPENED_WAYS(LEAST_FIVES)
#endif

static products_of_opened *opened_products_for(int form, int64_t num, int rounds) {
#define OPENED_NAME(form, num, digits) opened_##form##_##num##_##digits,
#define OPENED_FOUND(of)                                                                                        \
    case of: {                                                                                                  \
        static products_of_opened *const ways[2][MOST_TOGETHER] = {{EACH_EXACT(OPENED_NAME, of)},               \
                                                                   {EACH_MORE(OPENED_NAME, of)}};               \
        return ways[rounds][num - 1];                                                                           \
    }
    switch (form) {
#ifdef VNNI
        OPENED_FOUND(HALVES)
#else
        OPENED_FOUND(PLAIN_FIVES) OPENED_FOUND(LEAST_FIVES)
#endif
        OPENED_FOUND(LEAST)
    default:
        OPENED_FOUND(PLAIN_GROUPS)
    }
}

#define OPENING(kind)                                                                                        \
    case kind: add_strip(kind, strip, stop, &p); break;

/* Some columns of a strip, to the parts from `first` on. */
static void open_strip(int kind, const uint8_t *strip, const uint8_t *stop, opened *to, int64_t first) {
    products p = {.num = 0, .digits = 1, .parts = PARTS, .to = to, .first = first};
    switch (kind) {
#ifdef VNNI
        OPENING(INT8) OPENING(Q8_0) OPENING(Q6_K)
#endif
        OPENING(Q4_0) OPENING(Q4_1) OPENING(Q5_0) OPENING(Q5_1) OPENING(Q4_K) OPENING(Q5_K)
    }
}

/* Rows [start, end), multiples of OPENED_ROWS. */
static void multiply_opened(const weight *w, int64_t start, int64_t end, const prepared *inputs, int64_t num, float *outputs,
                            int64_t stride) {
    int64_t together = w->rounds_inputs ? TOGETHER_OPENED : TOGETHER_EXACT, bytes = SIDE * row_bytes(w), columns, some, stop;
    opened ALIGNED groups[COLUMNS_AT_ONCE / GROUP];
    for (int64_t first = 0; first < num; first = stop) {
        stop = num - first < INPUTS_AT_ONCE ? num : first + INPUTS_AT_ONCE;
        for (int64_t column = 0; column < w->columns; column += columns) {
            columns = w->columns - column < COLUMNS_AT_ONCE ? w->columns - column : COLUMNS_AT_ONCE;
            int64_t num_passes = (stop - first + together - 1) / together, num_groups = columns / GROUP;
            int64_t before = bytes * column / w->columns, some_bytes = bytes * columns / w->columns;
            int64_t bytes_ahead = (STRIPS_AT_ONCE * some_bytes / num_groups + num_passes - 1) / num_passes;
            passes all = {w->columns / GROUP, stride, column == 0, 0};
            for (int64_t row = start; row < end; row += OPENED_ROWS) {
                const uint8_t *strips = w->codes + row / SIDE * bytes + before;
                const uint8_t *next = row + OPENED_ROWS < end ? strips + STRIPS_AT_ONCE * bytes : strips;
                for (int64_t which = 0; which < STRIPS_AT_ONCE; which++)
                    open_strip(w->codes_kind, strips + which * bytes, strips + which * bytes + some_bytes, groups,
                               which * PARTS);
                for (int64_t n = first, asked = 0; n < stop; n += some, asked += bytes_ahead * num_groups) {
                    some = stop - n < together ? stop - n : together;
                    opened_products_for(form_of(w->codes_kind), some, w->rounds_inputs != 0)(
                        groups, num_groups, inputs + n * all.step + column / GROUP,
                        next + asked + (asked < some_bytes ? 0 : bytes - some_bytes), bytes_ahead,
                        outputs + n * stride + row, &all);
                }
            }
        }
    }
}
