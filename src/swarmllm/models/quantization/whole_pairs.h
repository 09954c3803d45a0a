/* The order IN_PAIRS of whole.h, which includes this file: CHAINED in bfloat16, by two fused products in place of the
 * instruction that adds two columns. It consists of the two, the odd column first, and takes tiny numbers and sums for 0.
 * On Intel's processors it takes as long as four of them (measured), so for several inputs this is faster. These are in
 * float32. */
#if LEVEL == 4
#include <xmmintrin.h>

#define VECTORS_OF_ROWS 2 /* whose weights are in registers at once: sums wait for each other, and share inputs */
#define PAIRS_AT_ONCE 12  /* inputs: with the weights, all in registers */
#define TINY_IS_ZERO 0x8040u /* of the register of settings: numbers and results below the smallest normal one are 0 */

/* The compiler moves no computation of these sums from one side to the other. */
INLINE void stay_here(vec sums[][VECTORS_OF_ROWS], int num, int vectors) {
    for (int input = 0; input < num; input++)
        for (int which = 0; which < vectors; which++)
            __asm__ volatile("" : "+v"(sums[input][which]));
}

/* Words, which are pairs of columns, [begin, end) of `vectors` times LANES rows from `w` on; adds to `total`. */
INLINE void add_pairs(const char *w, int64_t words, int64_t begin, int64_t end, const float *inputs, int num, int vectors,
                      int is_first, vec total[][VECTORS_OF_ROWS]) {
    vec sums[PAIRS_AT_ONCE][VECTORS_OF_ROWS], parts[VECTORS_OF_ROWS][LANES];
    for (int input = 0; input < num; input++)
        for (int which = 0; which < vectors; which++)
            sums[input][which] = ZERO();
    unsigned settings = _mm_getcsr();
    _mm_setcsr(settings | TINY_IS_ZERO); /* as in the instruction; not in what is added to its sums */
    stay_here(sums, num, vectors);
    for (int64_t word = begin; word < end; word += LANES) {
        int num_words = end - word < LANES ? (int)(end - word) : LANES;
        for (int which = 0; which < vectors; which++) {
            vec part[LANES];
            for (int row = 0; row < LANES; row++)
                part[row] = some_at((const float *)w + (which * LANES + row) * words + word, num_words);
            for (int row = 0; row < LANES; row++) /* the sums of this part keep the processor from looking ahead */
                PREFETCH(w + ((which * LANES + row) * words + word + LANES) * 4);
            if (is_first)
                ask(w + ((vectors + which) * LANES * words + word * LANES) * 4, LANES * LANES * 4);
            transpose(part);
            for (int step = 0; step < LANES; step++)
                parts[which][step] = part[step];
        }
        for (int step = 0; step < num_words; step++) {
            vec odd[VECTORS_OF_ROWS], even[VECTORS_OF_ROWS];
            for (int which = 0; which < vectors; which++) {
                __m512i pairs = _mm512_castps_si512(parts[which][step]);
                odd[which] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
                even[which] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            }
            for (int input = 0; input < num; input++) {
                const float *one = inputs + (input * words + word + step) * 2;
                for (int which = 0; which < vectors; which++)
                    sums[input][which] = FMA(odd[which], ALL(one[1]), sums[input][which]);
                for (int which = 0; which < vectors; which++)
                    sums[input][which] = FMA(even[which], ALL(one[0]), sums[input][which]);
            }
        }
    }
    stay_here(sums, num, vectors);
    _mm_setcsr(settings);
    stay_here(sums, num, vectors);
    for (int input = 0; input < num; input++)
        for (int which = 0; which < vectors; which++)
            total[input][which] = ADD(total[input][which], sums[input][which]);
}

/* `vectors` times LANES rows from `first` on; `outputs` and `inputs` are those of the first of `num` inputs. */
INLINE void pairs_of(const whole *w, const float *bias, int64_t first, const float *inputs, int num, int vectors,
                     int is_first, char *outputs) {
    int64_t words = w->columns / 2, block = w->block / 2;
    vec total[PAIRS_AT_ONCE][VECTORS_OF_ROWS];
    for (int input = 0; input < num; input++)
        for (int which = 0; which < vectors; which++)
            total[input][which] = ZERO();
    for (int64_t begin = 0; begin < words; begin += block) {
        int64_t end = begin + block < words ? begin + block : words;
        add_pairs(w->weights + first * words * 4, words, begin, end, inputs, num, vectors, is_first, total);
    }
    for (int input = 0; input < num; input++)
        for (int which = 0; which < vectors; which++) {
            int64_t at = first + which * LANES;
            TO_BFLOAT16(outputs + (input * w->rows + at) * 2,
                        ADD(total[input][which], bias ? LOAD(bias + at) : ZERO()));
        }
}

/* `count` is a constant in each version, so that sums are in registers. */
#define PAIRS_OF(count)                                                                             \
    case count:                                                                                     \
        if (vectors == 1)                                                                           \
            pairs_of(w, bias, first, some, count, 1, turn == 0, to);                                \
        else                                                                                        \
            pairs_of(w, bias, first, some, count, VECTORS_OF_ROWS, turn == 0, to);                  \
        break;

/* Of at most ALL_INPUTS inputs. They take turns, and all but the first find the rows in a cache. */
static void in_pairs(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                     char *outputs) {
    int64_t vectors = end - start < VECTORS_OF_ROWS * LANES ? 1 : VECTORS_OF_ROWS, rows = vectors * LANES;
    int64_t turns = (num + PAIRS_AT_ONCE - 1) / PAIRS_AT_ONCE;
    for (int64_t row = start; row < end; row += rows) {
        int64_t first = row + rows <= end ? row : end - rows; /* some rows twice, with the same result */
        for (int64_t turn = 0; turn < turns; turn++) {
            int64_t begin = num * turn / turns;
            const float *some = inputs + begin * w->columns;
            char *to = outputs + begin * w->rows * 2;
            switch (num * (turn + 1) / turns - begin) {
                PAIRS_OF(1)
                PAIRS_OF(2)
                PAIRS_OF(3)
                PAIRS_OF(4)
                PAIRS_OF(5)
                PAIRS_OF(6)
                PAIRS_OF(7)
                PAIRS_OF(8)
                PAIRS_OF(9)
                PAIRS_OF(10)
                PAIRS_OF(11)
                PAIRS_OF(12)
            }
        }
    }
}
#endif
