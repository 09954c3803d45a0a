/* Products with weights in strips of 16 rows, by inputs as whole numbers.
 *
 * Compiled once for each kind of processor that has instructions for it (strips.c chooses). A strip has the blocks of 16
 * rows side by side: first number 0 of all their blocks, then number 1, and so on. So each instruction multiplies 4 columns
 * of many rows, no sum has to be added up across lanes, and memory is read in its order.
 *
 * Processors multiply bytes several times as fast as floats, and codes are bytes without a conversion. So 32 neighbours of
 * an input become whole numbers of 24 bits, in steps of a power of two, and each number becomes three digits of a byte. A
 * number in bfloat16 is exact unless the largest neighbour is more than 16384 times as large. The error of any other one is
 * at most 2^-22.9 of the largest neighbour, which is what adding them up as floats costs, too. Sums of whole numbers are
 * exact in any order, and floats are added group by group: a product is the same whatever is multiplied at once, on all
 * these processors. If one number of an input is infinite or NaN, its products are NaN.
 * With inputs of 8 bits (`rounds_inputs`) there is one digit, as in int8_products.h.
 *
 * VNNI adds products of bytes in 32 bits. AVX2 alone adds pairs of them in 16: there, codes of 8 bits would have no room,
 * and those of 6 gain nothing.
 */
#include "compiler.h"
#include "vectors.h"
#include "weight.h"

#ifdef VNNI
#define OF_VERSION(name) OF_LEVEL(name##_vnni)
#else
#define OF_VERSION(name) OF_LEVEL(name)
#endif

#define GROUP 32            /* columns that share a step */
#define WORDS 8             /* of 4 columns, in a group */
#define TOGETHER 4          /* inputs, whose sums fit into the registers */
#define MOST_TOGETHER 8     /* at most, of what has been opened: strips_opened.h */
#define TOGETHER_EXACT (LEVEL == 4 ? 4 : 2) /* the same of inputs of three digits: AVX2 has fewer registers */
#define AHEAD 12288         /* bytes, into the second cache */
#define AHEAD_FIRST 2048    /* the same into the first one */
#define AHEAD_OF_LITTLE 384 /* if there is little to compute */
#define COLUMNS_OF_MANY 1024 /* inputs: of some of them, they stay in the first cache */
#define INPUTS_OF_MANY 64   /* whose columns, of 256 KB, stay in the second one */
#define PARTS (SIDE / LANES) /* of a strip: what one register holds of its rows */
#define MOST_PARTS 2        /* multiplied at once */
#define LARGEST 8355711.0f  /* whose three digits are 127 */

/* A group of an input: number i is (65536 * digits[2][i] + 256 * digits[1][i] + digits[0][i]) * step. */
typedef struct {
    int8_t digits[3][GROUP];
    /* Of each half, and of both: what the zero of codes adds to the sums of the lower digits, and of the last. */
    int32_t low[3], high[3];
    float step, total; /* of all numbers: their sum */
} prepared;

enum share { FIRST_HALF, SECOND_HALF, BOTH };

/* A group of the rows of MOST_PARTS registers, ready to be multiplied by many inputs. */
typedef struct {
    uint8_t ALIGNED codes[WORDS][MOST_PARTS][4 * LANES];
    float scale[2][MOST_PARTS][LANES]; /* of each half, or of both */
    float least[MOST_PARTS][LANES];
} opened;

/* ---------------------------------------------------------------- whole numbers */

#if LEVEL == 4
#define WIDE(name) _mm512_##name
typedef __m512i whole;
INLINE whole words_at(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE whole bits_of(part values) { return _mm512_castps_si512(values); }
INLINE part halves_of(const uint8_t *from) { return halves(_mm256_loadu_si256((const __m256i *)from)); }
INLINE int32_t largest_of(whole words) { return _mm512_reduce_max_epi32(words); }
INLINE int32_t total_of(whole words) { return _mm512_reduce_add_epi32(words); }
INLINE void store_lowest_bytes(int8_t *to, whole words) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(words)); }
INLINE whole plus_products(whole sums, whole codes, whole numbers) { return _mm512_dpbusd_epi32(sums, codes, numbers); }
/* Codes, and above them the bits of other bytes that come to the bits of `mask` if these are moved to the left. */
INLINE whole with_bits(whole codes, whole bytes, int left, int mask) {
    whole moved = _mm512_rolv_epi32(bytes, _mm512_set1_epi32(left & 31));
    return _mm512_ternarylogic_epi32(codes, moved, _mm512_set1_epi8((char)mask), 0xf8); /* codes | (moved & mask) */
}
#else
#define WIDE(name) _mm256_##name
typedef __m256i whole;
INLINE whole words_at(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE whole bits_of(part values) { return _mm256_castps_si256(values); }
INLINE part halves_of(const uint8_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE int32_t largest_of(whole words) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE int32_t total_of(whole words) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE void store_lowest_bytes(int8_t *to, whole words) {
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i one = _mm_shuffle_epi8(_mm256_castsi256_si128(words), lowest);
    __m128i other = _mm_shuffle_epi8(_mm256_extracti128_si256(words, 1), lowest);
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi32(one, other));
}
#ifdef VNNI
INLINE whole plus_products(whole sums, whole codes, whole numbers) { return _mm256_dpbusd_avx_epi32(sums, codes, numbers); }
#endif
INLINE whole with_bits(whole codes, whole bytes, int left, int mask) { /* which stay within their byte */
    whole moved = left < 0 ? _mm256_srli_epi32(bytes, -left) : _mm256_slli_epi32(bytes, left);
    return codes | (moved & _mm256_set1_epi8((char)mask));
}
#endif
INLINE part all_of(float value) { return WIDE(set1_ps)(value); }
INLINE part floats_of(whole words) { return WIDE(cvtepi32_ps)(words); }
INLINE part floats_of_bytes(__m128i bytes) { return floats_of(WIDE(cvtepu8_epi32)(bytes)); }
INLINE whole low_bits(whole bytes) { return bytes & WIDE(set1_epi8)(15); }
INLINE whole high_bits(whole bytes) { return low_bits(WIDE(srli_epi16)(bytes, 4)); }
INLINE whole nibbles_at(whole bytes, int from) { return low_bits(WIDE(srlv_epi32)(bytes, WIDE(set1_epi32)(from))); }

/* ---------------------------------------------------------------- inputs */

INLINE int zero_of(int kind) { /* the code of 0, as strips have it */
    return kind == INT8 || kind == Q8_0 ? 128 : kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : 0;
}

/* [num, columns] -> [num, groups] */
void OF_VERSION(prepare_inputs)(const weight *w, const float *inputs, int64_t num, void *made) {
    prepared *to = made;
    int zero = zero_of(w->codes_kind), num_digits = w->rounds_inputs ? 1 : 3;
    for (int64_t left = num * w->columns / GROUP; left > 0; left--, inputs += GROUP, to++) {
        part numbers[GROUP / LANES];
        whole sizes = WIDE(set1_epi32)(0);
        for (int i = 0; i < GROUP / LANES; i++) {
            numbers[i] = load_part(inputs + LANES * i);
            /* sizes are in the order of their bits */
            sizes = WIDE(max_epi32)(sizes, bits_of(numbers[i]) & WIDE(set1_epi32)(0x7fffffff));
        }
        int32_t largest = largest_of(sizes);
        float most, steps = 0.0f;
        memcpy(&most, &largest, sizeof most);
        if (largest >= 0x7f800000) { /* not finite */
            to->step = most - most; /* NaN */
            for (int i = 0; i < GROUP / LANES; i++)
                numbers[i] = all_of(0.0f);
        } else if (w->rounds_inputs) {
            int is_tiny = largest < 0x10000000; /* 2^-95: 127 / most is finite above */
            steps = is_tiny ? 0.0f : 127.0f / most;
            to->step = is_tiny ? 0.0f : most / 127.0f;
        } else {
            int32_t exponent = largest >> 23 > 23 ? largest >> 23 : 23, bits = (276 - exponent) << 23;
            memcpy(&steps, &bits, sizeof steps);
            if (most * steps > LARGEST)
                steps *= 0.5f;
            to->step = largest ? 1.0f / steps : 0.0f;
        }
        /* Rounded once, as in int8_products.h: the product with a power of two is exact, and the other one is fused. */
        part shift = all_of(w->rounds_inputs ? 0x1.8p23f : 0.0f);
        int64_t total = 0;
        for (int half = 0; half < 2; half++) {
            whole sums = WIDE(set1_epi32)(0), last = sums;
            for (int i = 16 * half; i < 16 * half + 16; i += LANES) {
                part in_steps = plus_parts(numbers[i / LANES], all_of(steps), shift);
                whole digits = WIDE(cvtps_epi32)(WIDE(sub_ps)(in_steps, shift));
                sums = WIDE(add_epi32)(sums, digits);
                for (int digit = 0; digit < num_digits; digit++) {
                    whole lowest = WIDE(srai_epi32)(WIDE(slli_epi32)(digits, 24), 24);
                    store_lowest_bytes(to->digits[digit] + i, digits);
                    if (digit == 2)
                        last = WIDE(add_epi32)(last, digits);
                    digits = WIDE(srai_epi32)(WIDE(sub_epi32)(digits, lowest), 8);
                }
            }
            int32_t sum = total_of(sums), above = total_of(last);
            to->low[half] = -zero * (sum - 65536 * above);
            to->high[half] = -zero * above;
            total += sum;
        }
        to->low[BOTH] = to->low[0] + to->low[1];
        to->high[BOTH] = to->high[0] + to->high[1];
        to->total = (float)total * to->step;
    }
}

/* ---------------------------------------------------------------- products */

/* What passes over some columns of some strips have in common. What differs is in arguments: it is written right before. */
typedef struct {
    int64_t step;     /* from input to input */
    int64_t stride;   /* floats of a row of outputs */
    int64_t is_first; /* outputs have no sums yet */
    int64_t twice;    /* what comes soon is asked for, too */
} passes;

/* A pass: what is multiplied at once, `num` inputs of `digits` digits by `parts` registers of rows. The three, and whether
 * there is a `to`, are constants where this is called. */
typedef struct {
    int num, digits, parts;
    const prepared *inputs;
    int64_t step;
    const uint8_t *ahead; /* what is asked for next: `bytes_ahead` with each group */
    int64_t bytes_ahead, twice;
    opened *to; /* if this isn't NULL, groups are opened there, from part `first` on, and not multiplied */
    int64_t first;
    part sums[MOST_TOGETHER][MOST_PARTS];
} products;

typedef struct {
    whole of[MOST_TOGETHER][3][MOST_PARTS];
    whole in_16_bits[MOST_TOGETHER][3][MOST_PARTS]; /* what isn't added to them yet */
} group_sums;

#define EACH(i, count) UNROLLED for (int i = 0; i < (count); i++)

INLINE products begin_pass(int num, int digits, int parts, const prepared *inputs, const uint8_t *ahead,
                           int64_t bytes_ahead, const float *outputs, const passes *all) {
    products p = {num, digits, parts, inputs, all->step, ahead, bytes_ahead, all->twice, NULL, 0, {{{0}}}};
    EACH(n, num)
        EACH(i, parts)
            p.sums[n][i] = all->is_first ? all_of(0.0f) : load_part(outputs + n * all->stride + LANES * i);
    return p;
}

INLINE void end_pass(const products *p, float *outputs, const passes *all) {
    EACH(n, p->num)
        EACH(i, p->parts)
            memcpy(outputs + n * all->stride + LANES * i, &p->sums[n][i], sizeof(part));
}

INLINE void begin_group(const products *p, int share, group_sums *sums) {
    EACH(n, p->num)
        EACH(i, p->parts) {
            const prepared *input = p->inputs + n * p->step;
            sums->of[n][0][i] = WIDE(set1_epi32)(input->low[share]);
            sums->of[n][1][i] = WIDE(set1_epi32)(0);
            sums->of[n][2][i] = WIDE(set1_epi32)(input->high[share]);
            EACH(digit, 3)
                sums->in_16_bits[n][digit][i] = WIDE(set1_epi32)(0);
        }
}

INLINE whole at_once(whole sum) { /* GCC would put additions off until all are left, for which the registers are too few */
    __asm__("" : "+x"(sum));
    return sum;
}

INLINE void add_word(const products *p, int word, const whole *codes, group_sums *sums) {
    for (int i = 0; p->to && i < p->parts; i++)
        memcpy(p->to->codes[word][p->first + i], &codes[i], sizeof(whole));
    EACH(n, p->num)
        EACH(digit, p->digits) {
            int32_t four;
            memcpy(&four, p->inputs[n * p->step].digits[digit] + 4 * word, sizeof four);
            whole numbers = WIDE(set1_epi32)(four);
            EACH(i, p->parts) {
#ifdef VNNI
                whole *to = &sums->of[n][digit][i];
                *to = plus_products(*to, codes[i], numbers);
#else
                whole *to = &sums->in_16_bits[n][digit][i];
                *to = at_once(WIDE(add_epi16)(*to, WIDE(maddubs_epi16)(codes[i], numbers)));
#endif
            }
        }
}

/* After so many words of a group: empty the sums of 16 bits if they may have no room for another word. */
INLINE void settle(const products *p, int words, int bits, group_sums *sums) {
#ifndef VNNI
    if (words % (bits == 4 ? 8 : 4)) /* words, times two products of 128 and the largest code: 30720, 31744 */
        return;
    EACH(n, p->num)
        EACH(digit, p->digits)
            EACH(i, p->parts) {
                whole *pairs = &sums->in_16_bits[n][digit][i], *to = &sums->of[n][digit][i];
                *to = at_once(WIDE(add_epi32)(*to, WIDE(madd_epi16)(*pairs, WIDE(set1_epi16)(1))));
                *pairs = WIDE(set1_epi32)(0);
            }
#else
    (void)p, (void)words, (void)bits, (void)sums;
#endif
}

INLINE void end_group(products *p, int share, const part *scale, const group_sums *sums) {
    for (int i = 0; p->to && i < p->parts; i++)
        memcpy(p->to->scale[share == SECOND_HALF][p->first + i], &scale[i], sizeof(part));
    EACH(n, p->num)
        EACH(i, p->parts) {
            part *to = &p->sums[n][i], total = floats_of(sums->of[n][0][i]);
            if (p->digits > 1) {
                whole low = WIDE(add_epi32)(WIDE(slli_epi32)(sums->of[n][1][i], 8), sums->of[n][0][i]);
                total = plus_parts(floats_of(sums->of[n][2][i]), all_of(65536.0f), floats_of(low));
            }
            *to = plus_parts(total, scale[i] * all_of(p->inputs[n * p->step].step), *to);
        }
}

INLINE void add_least(products *p, const part *least) {
    for (int i = 0; p->to && i < p->parts; i++)
        memcpy(p->to->least[p->first + i], &least[i], sizeof(part));
    EACH(n, p->num)
        EACH(i, p->parts) {
            part *to = &p->sums[n][i];
            *to = plus_parts(least[i], all_of(p->inputs[n * p->step].total), *to);
        }
}

/* Ask for what comes later: group by group, since processors wait for few lines of memory at once. */
INLINE void ask_ahead(products *p) {
    const uint8_t *at = p->ahead;
    p->ahead += p->bytes_ahead;
    for (; at < p->ahead; at += 64) {
        PREFETCH_SECOND(at);
        if (p->twice)
            PREFETCH(at - AHEAD + AHEAD_FIRST);
    }
}

/* Number i of 4 bytes of the rows of each part, and of 2 bytes. */
#define WORD_OF_ROWS(at, number, i) words_at((at) + 4 * (SIDE * (number) + LANES * (i)))
#define HALF_OF_ROWS(at, number, i) halves_of((at) + 2 * (SIDE * (number) + LANES * (i)))

/* A group of a kind with blocks of 32, or of whole rows. */
INLINE void add_small_block(int kind, const uint8_t *at, products *p) {
    int has_least = kind == Q4_1 || kind == Q5_1, has_fifths = kind == Q5_0 || kind == Q5_1;
    int is_byte = kind == Q8_0 || kind == INT8;
    part scale[PARTS], least[PARTS];
    whole fifths[PARTS], codes[PARTS];
    group_sums sums;
    EACH(i, PARTS)
        scale[i] = kind == INT8 ? all_of(1.0f) : HALF_OF_ROWS(at, 0, i);
    if (has_least) {
        EACH(i, PARTS)
            least[i] = HALF_OF_ROWS(at, 1, i);
        add_least(p, least);
    }
    at += kind == INT8 ? 0 : (has_least ? 4 : 2) * SIDE;
    EACH(i, PARTS)
        fifths[i] = has_fifths ? WORD_OF_ROWS(at, 0, i) : WIDE(set1_epi32)(0);
    at += has_fifths ? 4 * SIDE : 0;
    begin_group(p, BOTH, &sums);
    EACH(k, WORDS) { /* of the first half of a group, then of the other, which is above it */
        EACH(i, PARTS) {
            whole bytes = WORD_OF_ROWS(at, is_byte ? k : k % 4, i);
            codes[i] = is_byte ? bytes : k < 4 ? low_bits(bytes) : high_bits(bytes);
            codes[i] = has_fifths ? with_bits(codes[i], fifths[i], 4 - k, 16) : codes[i];
        }
        add_word(p, k, codes, &sums);
        settle(p, k + 1, has_fifths ? 5 : 4, &sums);
    }
    end_group(p, BOTH, scale, &sums);
}

/* Scales and minima of group g of blocks of Q4_K or Q5_K, of 6 bits each, in 12 bytes; `at`: those of a part's rows. */
INLINE void six_bits(const uint8_t *at, int g, part *scale, part *least) {
    const __m128i four = _mm_set1_epi8(15), six = _mm_set1_epi8(63), two = _mm_set1_epi8(48);
    __m128i one, other;
#define BYTE_OF_ROWS(number) _mm_loadu_si128((const __m128i *)(at + SIDE * (number)))
    if (g < 4) {
        one = _mm_and_si128(BYTE_OF_ROWS(g), six);
        other = _mm_and_si128(BYTE_OF_ROWS(4 + g), six);
    } else {
        __m128i both = BYTE_OF_ROWS(4 + g), above = BYTE_OF_ROWS(g - 4), above_other = BYTE_OF_ROWS(g);
        one = _mm_or_si128(_mm_and_si128(both, four), _mm_and_si128(_mm_srli_epi16(above, 2), two));
        other = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), four), _mm_and_si128(_mm_srli_epi16(above_other, 2), two));
    }
    *scale = floats_of_bytes(one);
    *least = floats_of_bytes(other);
}

/* Group g of a block of 256. `is_odd` is a constant where this is called. */
INLINE void add_k_group(int kind, const uint8_t *at, int g, int is_odd, products *p) {
    const uint8_t *six = at + 4 * SIDE, *fifths = six + 12 * SIDE;
    const uint8_t *fours = fifths + (kind == Q5_K ? 32 * SIDE : 0) + g / 2 * 4 * SIDE * WORDS;
    part scale[PARTS], least[PARTS];
    whole codes[PARTS];
    group_sums sums;
    EACH(i, PARTS) {
        six_bits(six + LANES * i, g, &scale[i], &least[i]);
        scale[i] *= HALF_OF_ROWS(at, 0, i);
        least[i] *= HALF_OF_ROWS(at, 1, i) * all_of(-1.0f);
    }
    add_least(p, least);
    begin_group(p, BOTH, &sums);
    EACH(k, WORDS) {
        EACH(i, PARTS) {
            codes[i] = is_odd ? high_bits(WORD_OF_ROWS(fours, k, i)) : low_bits(WORD_OF_ROWS(fours, k, i));
            codes[i] = kind == Q5_K ? with_bits(codes[i], WORD_OF_ROWS(fifths, k, i), 4 - g, 16) : codes[i];
        }
        add_word(p, k, codes, &sums);
        settle(p, k + 1, kind == Q5_K ? 5 : 4, &sums);
    }
    end_group(p, BOTH, scale, &sums);
}

INLINE void add_q6_group(const uint8_t *at, int g, products *p) {
    const uint8_t *twos = at + 128 * SIDE, *scales = twos + 64 * SIDE;
    EACH(half, 2) {
        part scale[PARTS];
        whole codes[PARTS];
        group_sums sums;
        begin_group(p, half, &sums);
        EACH(k, 4) {
            EACH(i, PARTS) {
                whole above = WORD_OF_ROWS(twos, WORDS * (g / 4) + 4 * half + k, i);
                codes[i] = nibbles_at(WORD_OF_ROWS(at, WORDS * (g / 4 * 2 + g % 2) + 4 * half + k, i), g % 4 / 2 * 4);
                codes[i] = with_bits(codes[i], above, 4 - g % 4 * 2, 48);
            }
            add_word(p, 4 * half + k, codes, &sums);
        }
        EACH(i, PARTS)
            scale[i] = codes_of_part((const int8_t *)scales + SIDE * (2 * g + half) + LANES * i) *
                       HALF_OF_ROWS(scales, 8, i);
        end_group(p, half, scale, &sums);
    }
}

INLINE void add_strip(int kind, const uint8_t *strip, const uint8_t *stop, products *p) {
    int size = kind == INT8 ? 32 : kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == Q5_0 ? 22 : kind == Q5_1 ? 24
             : kind == Q8_0 ? 34 : kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
    int groups = kind == Q4_K || kind == Q5_K || kind == Q6_K ? 8 : 1;
    for (; strip < stop; strip += SIDE * size)
        for (int g = 0; g < groups; g++, p->inputs++) {
            ask_ahead(p);
            if (kind == Q6_K)
                add_q6_group(strip, g, p);
            else if (groups == 1)
                add_small_block(kind, strip, p);
            else if (g % 2)
                add_k_group(kind, strip, g, 1, p);
            else
                add_k_group(kind, strip, g, 0, p);
            if (p->to)
                p->to++;
        }
}

/* A function for each kind and number of inputs and digits, so that GCC keeps all sums in registers. */
typedef void products_of(const uint8_t *, const uint8_t *, const prepared *, const uint8_t *, int64_t, float *,
                         const passes *);
#define OF(kind, num, digits)                                                                                  \
    APART void strip_##kind##_##num##_##digits(const uint8_t *strip, const uint8_t *stop, const prepared *inputs, \
                                               const uint8_t *ahead, int64_t bytes_ahead, float *outputs,      \
                                               const passes *all) {                                             \
        products p = begin_pass(num, digits, PARTS, inputs, ahead, bytes_ahead, outputs, all);                  \
        add_strip(kind, strip, stop, &p);                                                                      \
        end_pass(&p, outputs, all);                                                                             \
    }
#define EACH_ROUNDED(of, kind) of(kind, 1, 1) of(kind, 2, 1) of(kind, 3, 1) of(kind, 4, 1)
#if LEVEL == 4
#define EACH_EXACT(of, kind) of(kind, 1, 3) of(kind, 2, 3) of(kind, 3, 3) of(kind, 4, 3)
#else
#define EACH_EXACT(of, kind) of(kind, 1, 3) of(kind, 2, 3)
#endif
#define EACH_WAY(kind) EACH_EXACT(OF, kind) EACH_ROUNDED(OF, kind)
EACH_WAY(Q4_0) EACH_WAY(Q4_1) EACH_WAY(Q5_0) EACH_WAY(Q5_1) EACH_WAY(Q4_K) EACH_WAY(Q5_K)
#ifdef VNNI
EACH_WAY(INT8) EACH_WAY(Q8_0) EACH_WAY(Q6_K)
#endif

static products_of *products_for(int kind, int64_t num, int rounds) {
#define NAME(kind, num, digits) strip_##kind##_##num##_##digits,
#define FOUND(of)                                                                                            \
    case of: {                                                                                               \
        static products_of *const ways[2][TOGETHER] = {{EACH_EXACT(NAME, of)}, {EACH_ROUNDED(NAME, of)}}; \
        return ways[rounds][num - 1];                                                                        \
    }
    switch (kind) {
#ifdef VNNI
        FOUND(INT8) FOUND(Q8_0) FOUND(Q6_K)
#endif
        FOUND(Q4_0) FOUND(Q4_1) FOUND(Q5_0) FOUND(Q5_1) FOUND(Q4_K)
    default:
        FOUND(Q5_K)
    }
}

#include "strips_opened.h"
#include "strips_tiles.h"

/* Add the products of `bytes` of a strip, some columns, to the outputs of `num` inputs.
 *
 * A processor shouldn't wait for memory while it might multiply, so what comes later is brought into the second cache. With
 * a single pass over a strip, what comes soon is brought into the first one, too; several passes share in asking for the
 * next strip. If there is little to compute, and blocks are read in their order, some processors ask for most by themselves,
 * and need only the next bytes; kernels.py measures it (`asks_far`). Zen 4, weights in memory, beside 2048 bytes ahead into
 * the first cache: one input 1.05 to 1.5 times as fast, 8 inputs of three digits 1.2 times, of one digit 2 times. Emerald
 * Rapids, one input: far ahead 1.2 times as fast as the next bytes.
 */
INLINE void add_few(const weight *w, const uint8_t *strip, const uint8_t *next, int64_t bytes, int64_t groups,
                    const prepared *inputs, int64_t num, int is_little, float *outputs, const passes *all) {
    int64_t together = w->rounds_inputs ? TOGETHER : TOGETHER_EXACT, num_passes = (num + together - 1) / together, some;
    int64_t bytes_ahead = (bytes / groups + num_passes - 1) / num_passes;
    const uint8_t *ahead = num_passes > 1 ? next : strip + (is_little ? AHEAD_OF_LITTLE : AHEAD);
    for (int64_t n = 0; n < num; n += some, ahead += bytes_ahead * groups) {
        some = num - n < together ? num - n : together;
        products_for(w->codes_kind, some, w->rounds_inputs != 0)(strip, strip + bytes, inputs + n * all->step, ahead,
                                                                 bytes_ahead, outputs + n * all->stride, all);
    }
}

/* Rows [start, end), strip by strip as they are stored. */
static void multiply_few(const weight *w, int64_t start, int64_t end, const prepared *inputs, int64_t num, float *outputs,
                         int64_t stride) {
    int64_t bytes = SIDE * row_bytes(w), groups = w->columns / GROUP, columns, stop;
    int64_t most = num > TOGETHER ? COLUMNS_OF_MANY : w->columns, together = w->rounds_inputs ? TOGETHER : TOGETHER_EXACT;
    int is_little = !w->asks_far && num == 1 && (w->rounds_inputs || bytes >= SIDE * w->columns) && w->codes_kind < Q2_K;
    for (int64_t first = 0; first < num; first = stop) { /* inputs whose columns stay in a cache for all rows */
        stop = num - first < INPUTS_OF_MANY ? num : first + INPUTS_OF_MANY;
        for (int64_t column = 0; column < w->columns; column += columns) {
            columns = w->columns - column < most ? w->columns - column : most;
            int64_t some_bytes = bytes * columns / w->columns, before = bytes * column / w->columns;
            passes all = {groups, stride, column == 0, stop - first <= together && !is_little};
            for (int64_t row = start; row < end; row += SIDE) {
                const uint8_t *strip = w->codes + row / SIDE * bytes + before, *next = row + SIDE < end ? strip + bytes : strip;
                add_few(w, strip, next, some_bytes, columns / GROUP, inputs + first * groups + column / GROUP, stop - first,
                        is_little, outputs + first * stride + row, &all);
            }
        }
    }
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end), multiples of SIDE; `stride`: floats of a row
 * of outputs. */
void OF_VERSION(multiply_strips)(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num,
                                 float *outputs, int64_t stride) {
    int64_t few = num < least_opened(w) ? end - start : (end - start) % OPENED_ROWS;
    multiply_opened(w, start, end - few, inputs, num, outputs, stride);
    multiply_few(w, end - few, end, inputs, num, outputs, stride);
    for (int64_t row = start; w->codes_kind == INT8 && row < end; row += SIDE) {
        float scales[SIDE];
        for (int r = 0; r < SIDE; r++)
            scales[r] = scale_of(w, row + r, 0);
        for (int64_t n = 0; n < num; n++)
            for (int r = 0; r < SIDE; r++)
                outputs[n * stride + row + r] *= scales[r];
    }
}
