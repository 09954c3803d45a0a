/* Weights in strips of 16 rows (strips.h): their order, and the choice among the versions of products. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define WIDER
#define LEVEL 3
#else
#define LEVEL 1
#endif
#include "compiler.h"
#include "vectors.h"
#include "weight.h"

#ifdef WIDER
#define DECLARED(version)                                                                                    \
    void swarmllm_prepare_inputs##version(const weight *, const float *, int64_t, void *);                   \
    void swarmllm_multiply_strips##version(const weight *, int64_t, int64_t, const void *, int64_t, float *, int64_t);
DECLARED(_3)
DECLARED(_vnni_3)
DECLARED(_vnni_4)

/* ---------------------------------------------------------------- the order */

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
    /* Places of 5 bits, (k, j) to (j, k): four times, two bits of all places change places. */
    static const struct {
        int distance;
        uint32_t from;
    } changes[] = {{3, 0x0a0a0a0a}, {6, 0x00cc00cc}, {8, 0x0000ff00}, {4, 0x00f000f0}};
    for (int i = 0; i < 4; i++) {
        int distance = changes[back ? 3 - i : i].distance;
        uint32_t differing = (bits >> distance ^ bits) & changes[back ? 3 - i : i].from;
        bits ^= differing ^ differing << distance;
    }
    return bits;
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
                    vec floats = codes_at((const int8_t *)four[r]);
                    uint8_t *at = to + (row + r) * columns * size;
                    if (wide) {
                        store((float *)at, floats);
                        continue;
                    }
                    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(floats.low), 16);
                    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(floats.high), 16);
                    _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
                }
            }
}

/* ---------------------------------------------------------------- the choice */

/* [num, columns] -> [num, groups] */
void swarmllm_prepare_inputs(const weight *w, const float *inputs, int64_t num, void *made) {
    (w->in_strips >= 4   ? swarmllm_prepare_inputs_vnni_4
     : w->in_strips == 3 ? swarmllm_prepare_inputs_vnni_3
                         : swarmllm_prepare_inputs_3)(w, inputs, num, made);
}

void swarmllm_multiply_strips(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, float *outputs,
                              int64_t stride) {
    (w->in_strips >= 4   ? swarmllm_multiply_strips_vnni_4
     : w->in_strips == 3 ? swarmllm_multiply_strips_vnni_3
                         : swarmllm_multiply_strips_3)(w, start, end, inputs, num, outputs, stride);
}
#else /* no weight is in strips */
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

#ifndef HAS_TILES /* otherwise in strips_tiles.h */
void swarmllm_put_in_tiles(const uint16_t *inputs, int64_t num, int64_t columns, void *made) {
    (void)inputs, (void)num, (void)columns, (void)made;
}
void swarmllm_multiply_tiles(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, uint16_t *outputs,
                             int64_t stride) {
    (void)w, (void)start, (void)end, (void)inputs, (void)num, (void)outputs, (void)stride;
}
#endif
