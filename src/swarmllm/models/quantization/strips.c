/* Products with weights in strips of 16 rows, by inputs as whole numbers; for AVX-512 with VNNI.
 *
 * A strip has the blocks of 16 rows side by side: first number 0 of all their blocks, then number 1, and so on (`field`).
 * So each instruction multiplies 4 columns of all 16 rows, no sum has to be added up across lanes, and memory is read in
 * its order.
 *
 * Processors multiply bytes four times as fast as floats, and codes are bytes without a conversion. So 32 neighbours of an
 * input become whole numbers of 24 bits, in steps of a power of two, and each number becomes three digits of a byte. A
 * number in bfloat16 is exact unless the largest neighbour is more than 16384 times as large. The error of any other one is
 * at most 2^-22.9 of the largest neighbour, which is what adding them up as floats costs, too. Sums of whole numbers are
 * exact in any order, and floats are added group by group: a product is the same whatever is multiplied at once. If one
 * number of an input is infinite or NaN, its products are NaN.
 * With inputs of 8 bits (`rounds_inputs`) there is one digit, as in int8_products.h.
 */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define LEVEL 4
#include "compiler.h"
#include "vectors.h"
#include "weight.h"

#define GROUP 32  /* columns that share a step */
#define WORDS 8   /* of 4 columns, in a group */
#define TOGETHER 4 /* inputs, whose sums fit into the registers */
#define AHEAD 2048 /* bytes */
#define PIECE 1024 /* columns of many inputs at a time: of some, they stay in the first cache */
#define MOST 64    /* inputs: their pieces, of 256 KB, stay in the second one */
#define UNROLLED _Pragma("GCC unroll 8") /* so that sums stay in registers */
#define LARGEST 8355711.0f /* whose three digits are 127 */

/* A group of an input: number i is (65536 * digits[2][i] + 256 * digits[1][i] + digits[0][i]) * step. */
typedef struct {
    int8_t digits[3][GROUP];
    /* Of each half, and of both: what the zero of codes adds to the sums of the lower digits, and of the last. */
    int32_t low[3], high[3];
    float step, total; /* of all numbers: their sum */
} prepared;

enum part { FIRST_HALF, SECOND_HALF, BOTH };

/* ---------------------------------------------------------------- rows and strips */

typedef struct {
    int size, count; /* bytes of a number; numbers in a block */
    enum { PLAIN, FIFTHS, SIGNED } means;
} field;

/* The numbers of a block, in the order of the file. */
INLINE const field *fields_of(int kind) {
    static const field q4_0[] = {{2, 1, PLAIN}, {4, 4, PLAIN}, {0}}, q4_1[] = {{2, 2, PLAIN}, {4, 4, PLAIN}, {0}};
    static const field q5_0[] = {{2, 1, PLAIN}, {4, 1, FIFTHS}, {4, 4, PLAIN}, {0}};
    static const field q5_1[] = {{2, 2, PLAIN}, {4, 1, FIFTHS}, {4, 4, PLAIN}, {0}};
    static const field q8_0[] = {{2, 1, PLAIN}, {4, 8, SIGNED}, {0}}, int8[] = {{4, 8, SIGNED}, {0}};
    static const field q4_k[] = {{2, 2, PLAIN}, {1, 12, PLAIN}, {4, 32, PLAIN}, {0}};
    static const field q5_k[] = {{2, 2, PLAIN}, {1, 12, PLAIN}, {4, 8, PLAIN}, {4, 32, PLAIN}, {0}};
    static const field q6_k[] = {{4, 32, PLAIN}, {4, 16, PLAIN}, {1, 16, PLAIN}, {2, 1, PLAIN}, {0}};
    switch (kind) {
    case INT8: return int8;
    case Q4_0: return q4_0;
    case Q4_1: return q4_1;
    case Q5_0: return q5_0;
    case Q5_1: return q5_1;
    case Q8_0: return q8_0;
    case Q4_K: return q4_k;
    case Q5_K: return q5_k;
    default: return q6_k;
    }
}

/* Bit 4k + j, of column 4k + j, to bit k of byte j, and back. */
INLINE uint32_t turned_fifths(uint32_t bits, int back) {
    uint32_t turned = 0;
    for (int j = 0; j < 4; j++)
        turned |= back ? _pdep_u32(bits >> 8 * j, 0x11111111u << j) : _pext_u32(bits, 0x11111111u << j) << 8 * j;
    return turned;
}

/* Four words of four rows to four rows of four words. `changed` bits are turned over. */
INLINE void turn_words(const uint8_t *from, int64_t step, uint8_t *to, int64_t to_step, uint8_t changed) {
    const __m128i change = _mm_set1_epi8((char)changed);
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + step));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 2 * step)), d = _mm_loadu_si128((const __m128i *)(from + 3 * step));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    a = _mm_unpackhi_epi32(a, b);
    c = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)to, _mm_xor_si128(_mm_unpacklo_epi64(ab, cd), change));
    _mm_storeu_si128((__m128i *)(to + to_step), _mm_xor_si128(_mm_unpackhi_epi64(ab, cd), change));
    _mm_storeu_si128((__m128i *)(to + 2 * to_step), _mm_xor_si128(_mm_unpacklo_epi64(a, c), change));
    _mm_storeu_si128((__m128i *)(to + 3 * to_step), _mm_xor_si128(_mm_unpackhi_epi64(a, c), change));
}

/* A field of SIDE rows, whose numbers are `size` bytes each. All but the addresses are constants where this is called. */
INLINE void arrange_field(const field *of, int size, int back, uint8_t *row, int64_t row_bytes, uint8_t *strip) {
    for (int i = 0; size == 4 && of->means != FIFTHS && i < of->count; i += 4)
        for (int r = 0; r < SIDE; r += 4) {
            uint8_t *words = strip + 4 * (SIDE * i + r), *bytes = row + r * row_bytes + 4 * i;
            turn_words(back ? words : bytes, back ? 4 * SIDE : row_bytes, back ? bytes : words,
                       back ? row_bytes : 4 * SIDE, of->means == SIGNED ? 0x80 : 0);
        }
    for (int i = 0; (size != 4 || of->means == FIFTHS) && i < of->count; i++)
        for (int r = 0; r < SIDE; r++) {
            uint8_t *in_strip = strip + size * (SIDE * i + r), *in_row = row + r * row_bytes + size * i;
            uint32_t number = 0;
            memcpy(&number, back ? in_strip : in_row, size);
            number = of->means == FIFTHS ? turned_fifths(number, back) : number;
            memcpy(back ? in_row : in_strip, &number, size);
        }
}

/* Rows of blocks of a kind, `[SIDE * strips, row_bytes]`, to strips, or back. */
void swarmllm_arrange(int64_t kind, int64_t back, const uint8_t *from, int64_t strips, int64_t row_bytes, uint8_t *to) {
    const field *fields = fields_of((int)kind), *of;
    uint8_t *row = back ? to : (uint8_t *)from, *strip = back ? (uint8_t *)from : to;
    for (; strips > 0; strips--, row += (SIDE - 1) * row_bytes)
        for (const uint8_t *end = row + row_bytes; row < end;)
            for (of = fields; of->size; row += of->size * of->count, strip += SIDE * of->size * of->count, of++)
                switch (of->size) {
#define FIELD(size)                                                                                          \
    case size:                                                                                               \
        if (back)                                                                                            \
            arrange_field(of, size, 1, row, row_bytes, strip);                                               \
        else                                                                                                 \
            arrange_field(of, size, 0, row, row_bytes, strip);                                               \
        break
                    FIELD(1);
                    FIELD(2);
                    FIELD(4);
                }
}

/* ---------------------------------------------------------------- inputs */

INLINE int zero_of(int kind) { /* the code of 0, as strips have it */
    return kind == INT8 || kind == Q8_0 ? 128 : kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : 0;
}

/* [num, columns] -> [num, groups] */
void swarmllm_prepare_inputs(const weight *w, const float *inputs, int64_t num, void *made) {
    prepared *to = made;
    int zero = zero_of(w->codes_kind);
    for (int64_t left = num * w->columns / GROUP; left > 0; left--, inputs += GROUP, to++) {
        __m512 numbers[2] = {load(inputs), load(inputs + 16)};
        __m512i sizes = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(numbers[0])),
                                         _mm512_castps_si512(_mm512_abs_ps(numbers[1])));
        int32_t largest = _mm512_reduce_max_epi32(sizes); /* sizes are in the order of their bits */
        int is_finite = largest < 0x7f800000;
        float most, steps = 0.0f;
        memcpy(&most, &largest, sizeof most);
        if (!is_finite) {
            to->step = most - most; /* NaN */
            numbers[0] = numbers[1] = all(0.0f);
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
        int64_t total = 0;
        for (int half = 0; half < 2; half++) {
            /* Rounded once, as in int8_products.h: the product with a power of two is exact, and the other one is fused. */
            vec shift = all(w->rounds_inputs ? 0x1.8p23f : 0.0f);
            __m512i whole = _mm512_cvtps_epi32(_mm512_sub_ps(plus_product(numbers[half], all(steps), shift), shift));
            __m512i digits = whole;
            int32_t sum = _mm512_reduce_add_epi32(whole), above = 0;
            for (int digit = 0; digit < (w->rounds_inputs ? 1 : 3); digit++) {
                __m512i lowest = _mm512_srai_epi32(_mm512_slli_epi32(digits, 24), 24);
                _mm_storeu_si128((__m128i *)(to->digits[digit] + 16 * half), _mm512_cvtepi32_epi8(digits));
                above = digit == 2 ? _mm512_reduce_add_epi32(digits) : 0;
                digits = _mm512_srai_epi32(_mm512_sub_epi32(digits, lowest), 8);
            }
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

typedef __m512i whole;
INLINE whole read(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE whole each(int byte) { return _mm512_set1_epi8((char)byte); }
INLINE whole low_bits(whole bytes) { return _mm512_and_si512(bytes, each(15)); }
INLINE whole high_bits(whole bytes) { return low_bits(_mm512_srli_epi16(bytes, 4)); }
/* Codes, and above them the bits of other bytes that come to the bits of `mask` if these are rotated to the left. */
INLINE whole with_bits(whole codes, whole bytes, int left, int mask) {
    whole moved = _mm512_rolv_epi32(bytes, _mm512_set1_epi32(left));
    return _mm512_ternarylogic_epi32(codes, moved, each(mask), 0xf8); /* codes | (moved & mask) */
}
INLINE whole nibbles_at(whole bytes, int from) { return low_bits(_mm512_srlv_epi32(bytes, _mm512_set1_epi32(from))); }
INLINE vec halves_of(const uint8_t *from) { return halves(_mm256_loadu_si256((const __m256i *)from)); }

/* What is multiplied at once: `num` inputs of `digits` digits by a strip. Both are constants where this is called. */
typedef struct {
    int num, digits;
    const prepared *inputs;
    int64_t step; /* from input to input */
    vec sums[TOGETHER];
} products;

typedef struct {
    whole of[TOGETHER][3];
} group_sums;

INLINE void begin(const products *p, int part, group_sums *sums) {
    UNROLLED
    for (int n = 0; n < p->num; n++) {
        const prepared *input = p->inputs + n * p->step;
        sums->of[n][0] = _mm512_set1_epi32(input->low[part]);
        sums->of[n][1] = _mm512_setzero_si512();
        sums->of[n][2] = _mm512_set1_epi32(input->high[part]);
    }
}

INLINE void add_word(const products *p, int word, whole codes, group_sums *sums) {
    UNROLLED
    for (int n = 0; n < p->num; n++)
        UNROLLED
        for (int digit = 0; digit < p->digits; digit++) {
            int32_t numbers;
            memcpy(&numbers, p->inputs[n * p->step].digits[digit] + 4 * word, sizeof numbers);
            sums->of[n][digit] = _mm512_dpbusd_epi32(sums->of[n][digit], codes, _mm512_set1_epi32(numbers));
        }
}

INLINE void end(products *p, vec scale, const group_sums *sums) {
    UNROLLED
    for (int n = 0; n < p->num; n++) {
        const whole *of = sums->of[n];
        vec total;
        if (p->digits == 1) {
            total = _mm512_cvtepi32_ps(of[0]);
        } else {
            whole low = _mm512_add_epi32(_mm512_slli_epi32(of[1], 8), of[0]);
            total = plus_product(_mm512_cvtepi32_ps(of[2]), all(65536.0f), _mm512_cvtepi32_ps(low));
        }
        p->sums[n] = plus_product(total, product(scale, all(p->inputs[n * p->step].step)), p->sums[n]);
    }
}

INLINE void add_least(products *p, vec least) {
    UNROLLED
    for (int n = 0; n < p->num; n++)
        p->sums[n] = plus_product(least, all(p->inputs[n * p->step].total), p->sums[n]);
}

/* Ask for what comes after AHEAD bytes: group by group, since processors wait for few lines of memory at once. */
INLINE void ask_for(const uint8_t *strip, int bytes) {
    for (int i = 0; i < bytes; i += 64)
        PREFETCH(strip + AHEAD + i);
}

/* A group of a kind with blocks of 32, or of whole rows. */
INLINE void add_small_block(int kind, const uint8_t *at, products *p) {
    int has_least = kind == Q4_1 || kind == Q5_1, has_fifths = kind == Q5_0 || kind == Q5_1;
    int is_byte = kind == Q8_0 || kind == INT8;
    vec scale = kind == INT8 ? all(1.0f) : halves_of(at);
    group_sums sums;
    if (has_least)
        add_least(p, halves_of(at + 2 * SIDE));
    at += kind == INT8 ? 0 : (has_least ? 4 : 2) * SIDE;
    whole fifths = has_fifths ? read(at) : each(0);
    at += has_fifths ? 4 * SIDE : 0;
    begin(p, BOTH, &sums);
    UNROLLED
    for (int k = 0; is_byte && k < WORDS; k++)
        add_word(p, k, read(at + 64 * k), &sums);
    UNROLLED
    for (int k = 0; !is_byte && k < 4; k++) {
        whole both = read(at + 64 * k), low = low_bits(both), high = high_bits(both);
        if (has_fifths) {
            low = with_bits(low, fifths, 4 - k, 16);
            high = with_bits(high, fifths, -k & 31, 16);
        }
        add_word(p, k, low, &sums);
        add_word(p, 4 + k, high, &sums);
    }
    end(p, scale, &sums);
}

/* Scales and minima of group g of 16 blocks of Q4_K or Q5_K, of 6 bits each, in 12 bytes. */
INLINE vec floats_of(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
INLINE void six_bits(const uint8_t *at, int g, vec *scale, vec *least) {
    const __m128i *bytes = (const __m128i *)at;
    const __m128i four = _mm_set1_epi8(15), six = _mm_set1_epi8(63), two = _mm_set1_epi8(48);
    __m128i one, other;
    if (g < 4) {
        one = _mm_and_si128(_mm_loadu_si128(bytes + g), six);
        other = _mm_and_si128(_mm_loadu_si128(bytes + 4 + g), six);
    } else {
        __m128i both = _mm_loadu_si128(bytes + 4 + g);
        __m128i above = _mm_loadu_si128(bytes + g - 4), above_other = _mm_loadu_si128(bytes + g);
        one = _mm_or_si128(_mm_and_si128(both, four), _mm_and_si128(_mm_srli_epi16(above, 2), two));
        other = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), four), _mm_and_si128(_mm_srli_epi16(above_other, 2), two));
    }
    *scale = floats_of(one);
    *least = floats_of(other);
}

INLINE void add_k_block(int kind, const uint8_t *at, int bytes, products *p) {
    vec scales = halves_of(at), minima = product(halves_of(at + 2 * SIDE), all(-1.0f));
    const uint8_t *six = at + 4 * SIDE, *fifths = six + 12 * SIDE, *codes = fifths + (kind == Q5_K ? 32 * SIDE : 0);
    for (int g = 0; g < 8; g++, p->inputs++) {
        vec scale, least;
        group_sums sums;
        ask_for(at + g * SIDE * bytes / 8, SIDE * bytes / 8);
        six_bits(six, g, &scale, &least);
        add_least(p, product(least, minima));
        begin(p, BOTH, &sums);
        UNROLLED
        for (int k = 0; k < WORDS; k++) {
            whole four = nibbles_at(read(codes + 64 * k), g % 2 * 4);
            add_word(p, k, kind == Q5_K ? with_bits(four, read(fifths + 64 * k), (4 - g) & 31, 16) : four, &sums);
        }
        codes += g % 2 * 64 * WORDS;
        end(p, product(scale, scales), &sums);
    }
}

INLINE void add_q6_block(const uint8_t *at, products *p) {
    const uint8_t *two = at + 128 * SIDE, *scales = two + 64 * SIDE;
    vec scale = halves_of(scales + 16 * SIDE);
    for (int g = 0; g < 8; g++, p->inputs++) {
        const uint8_t *four = at + 64 * WORDS * (g / 4 * 2 + g % 2), *above = two + 64 * WORDS * (g / 4);
        ask_for(at + g * SIDE * 210 / 8, SIDE * 210 / 8);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            group_sums sums;
            begin(p, half, &sums);
            UNROLLED
            for (int k = 4 * half; k < 4 * half + 4; k++) {
                whole codes = nibbles_at(read(four + 64 * k), g % 4 / 2 * 4);
                add_word(p, k, with_bits(codes, read(above + 64 * k), (4 - g % 4 * 2) & 31, 48), &sums);
            }
            end(p, product(codes_at((const int8_t *)scales + SIDE * (2 * g + half)), scale), &sums);
        }
    }
}

INLINE void add_strip(int kind, const uint8_t *strip, const uint8_t *stop, products *p) {
    int size = kind == INT8 ? 32 : kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == Q5_0 ? 22 : kind == Q5_1 ? 24
             : kind == Q8_0 ? 34 : kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
    for (; strip < stop; strip += SIDE * size) {
        if (kind == Q4_K || kind == Q5_K) {
            add_k_block(kind, strip, size, p);
        } else if (kind == Q6_K) {
            add_q6_block(strip, p);
        } else {
            ask_for(strip, SIDE * size);
            add_small_block(kind, strip, p);
            p->inputs++;
        }
    }
}

/* A function for each kind and number of inputs and digits, so that GCC keeps all sums in registers. */
typedef void products_of(const uint8_t *, const uint8_t *, const prepared *, int64_t, vec *);
#define OF(kind, num, digits)                                                                                \
    APART void strip_##kind##_##num##_##digits(const uint8_t *strip, const uint8_t *stop, const prepared *inputs, \
                                               int64_t step, vec *sums) {                                    \
        products p = {num, digits, inputs, step, {{0}}};                                                     \
        for (int n = 0; n < num; n++)                                                                        \
            p.sums[n] = sums[n];                                                                             \
        add_strip(kind, strip, stop, &p);                                                                    \
        for (int n = 0; n < num; n++)                                                                        \
            sums[n] = p.sums[n];                                                                             \
    }
#define EACH_NUMBER(kind, digits) OF(kind, 1, digits) OF(kind, 2, digits) OF(kind, 3, digits) OF(kind, 4, digits)
#define EACH_WAY(kind) EACH_NUMBER(kind, 1) EACH_NUMBER(kind, 3)
EACH_WAY(INT8) EACH_WAY(Q4_0) EACH_WAY(Q4_1) EACH_WAY(Q5_0) EACH_WAY(Q5_1) EACH_WAY(Q8_0) EACH_WAY(Q4_K) EACH_WAY(Q5_K)
EACH_WAY(Q6_K)

static products_of *products_for(int kind, int64_t num, int rounds) {
#define NUMBERS(kind, digits)                                                                                \
    {strip_##kind##_1_##digits, strip_##kind##_2_##digits, strip_##kind##_3_##digits, strip_##kind##_4_##digits}
#define FOUND(of)                                                                                            \
    case of: {                                                                                               \
        static products_of *const ways[2][TOGETHER] = {NUMBERS(of, 3), NUMBERS(of, 1)};                      \
        return ways[rounds][num - 1];                                                                        \
    }
    switch (kind) {
        FOUND(INT8) FOUND(Q4_0) FOUND(Q4_1) FOUND(Q5_0) FOUND(Q5_1) FOUND(Q8_0) FOUND(Q4_K) FOUND(Q5_K)
    default:
        FOUND(Q6_K)
    }
}

/* Add the products of some columns of a strip to the outputs of the inputs [start, stop). */
INLINE void add_inputs(const weight *w, const uint8_t *strip, int64_t columns, const prepared *inputs, int64_t start,
                       int64_t stop, int is_first, float *outputs, int64_t stride) {
    int64_t step = w->columns / GROUP, some;
    const uint8_t *end = strip + SIDE * row_bytes(w) * columns / w->columns;
    for (int64_t n = start; n < stop; n += some) {
        vec sums[TOGETHER];
        some = stop - n < TOGETHER ? stop - n : TOGETHER;
        for (int64_t one = 0; one < some; one++)
            sums[one] = is_first ? all(0.0f) : load(outputs + (n + one) * stride);
        products_for(w->codes_kind, some, w->rounds_inputs != 0)(strip, end, inputs + n * step, step, sums);
        for (int64_t one = 0; one < some; one++)
            store(outputs + (n + one) * stride, sums[one]);
    }
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end), multiples of SIDE; `stride`: floats of a row
 * of outputs. */
void swarmllm_multiply_strips(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, float *outputs,
                              int64_t stride) {
    int64_t bytes = row_bytes(w), piece = num > TOGETHER ? PIECE : w->columns;
    for (int64_t begin = 0; begin < num; begin += MOST) { /* inputs whose pieces stay in a cache for all rows */
        int64_t stop = num - begin < MOST ? num : begin + MOST, columns;
        for (int64_t column = 0; column < w->columns; column += columns) {
            columns = w->columns - column < piece ? w->columns - column : piece;
            for (int64_t row = start; row < end; row += SIDE) {
                const uint8_t *strip = w->codes + row * bytes + SIDE * bytes * column / w->columns;
                add_inputs(w, strip, columns, (const prepared *)inputs + column / GROUP, begin, stop, column == 0,
                           outputs + row, stride);
            }
        }
        for (int64_t n = begin; w->codes_kind == INT8 && n < stop; n++)
            for (int64_t row = start; row < end; row++)
                outputs[n * stride + row] *= scale_of(w, row, 0);
    }
}

/* Strips of int8 codes to rows of floats, or of bfloat16, which has room for a code. */
void swarmllm_open_strips(int64_t wide, const uint8_t *codes, int64_t strips, int64_t columns, void *made) {
    int64_t size = wide ? 4 : 2;
    uint8_t *to = made;
    for (; strips > 0; strips--, to += (SIDE - 1) * columns * size)
        for (int64_t column = 0; column < columns; column += 16, codes += 16 * SIDE, to += 16 * size)
            for (int row = 0; row < SIDE; row += 4) {
                uint8_t ALIGNED four[4][16];
                turn_words(codes + 4 * row, 4 * SIDE, four[0], 16, 0x80);
                for (int r = 0; r < 4; r++) {
                    __m512 floats = codes_at((const int8_t *)four[r]);
                    uint8_t *at = to + (row + r) * columns * size;
                    if (wide)
                        store((float *)at, floats);
                    else
                        _mm256_storeu_si256((__m256i *)at,
                                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(floats), 16)));
                }
            }
}
#else /* no weight is in strips */
#define LEVEL 1
#include "compiler.h"
#include "vectors.h"
#include "weight.h"
void swarmllm_arrange(int64_t kind, int64_t back, const uint8_t *from, int64_t strips, int64_t row_bytes, uint8_t *to) {
    (void)kind, (void)back, (void)from, (void)strips, (void)row_bytes, (void)to;
}
void swarmllm_prepare_inputs(const weight *w, const float *inputs, int64_t num, void *made) {
    (void)w, (void)inputs, (void)num, (void)made;
}
void swarmllm_multiply_strips(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, float *outputs,
                              int64_t stride) {
    (void)w, (void)start, (void)end, (void)inputs, (void)num, (void)outputs, (void)stride;
}
void swarmllm_open_strips(int64_t wide, const uint8_t *codes, int64_t strips, int64_t columns, void *made) {
    (void)wide, (void)codes, (void)strips, (void)columns, (void)made;
}
#endif
