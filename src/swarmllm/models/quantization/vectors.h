/* 16 floats side by side, as the processors of this LEVEL have them: 4 is AVX-512, 3 AVX2, 1 any other. */
#define WIDTH 16

/* float8_e4m3fn; its two codes that are no numbers don't stand in weights. */
INLINE float float8(uint8_t code) {
    uint32_t magnitude = code & 0x7f, bits = (magnitude << 20) + (120u << 23);
    float normal, tiny = (float)magnitude * 0x1p-9f;
    memcpy(&normal, &bits, sizeof normal);
    float value = magnitude < 8 ? tiny : normal;
    return code & 0x80 ? -value : value;
}

#if LEVEL > 1
#include <immintrin.h>
INLINE float half_float(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return _cvtsh_ss(half);
}
#else
/* The bits of a float whose exponent is 112 too small; no infinities stand here. Without a branch: signs are random. */
INLINE float half_float(const uint8_t *bytes) {
    uint32_t half = bytes[0] | (uint32_t)bytes[1] << 8, magnitude = (half & 0x7fff) << 13, bits;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    bits |= (half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

#if LEVEL == 4
#define TILE 4
typedef __m512 vec, part;

INLINE vec load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store(float *to, vec values) { _mm512_storeu_ps(to, values); }
INLINE vec all(float value) { return _mm512_set1_ps(value); }
INLINE vec product(vec one, vec other) { return _mm512_mul_ps(one, other); }
INLINE vec plus_product(vec one, vec other, vec sum) { return _mm512_fmadd_ps(one, other, sum); }
INLINE vec codes_at(const int8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}
INLINE vec sum(vec one, vec other) { return _mm512_add_ps(one, other); }
INLINE vec bytes_at(const uint8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}
INLINE vec halves(__m256i bits) { return _mm512_cvtph_ps(bits); }
INLINE vec pairs_at(const float *values, const uint8_t *codes) {
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m128i two = _mm_loadl_epi64((const __m128i *)codes);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i word = _mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(two));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(word, shifts), load(values)); /* by the lowest 4 bits */
}
INLINE vec half_at(const uint8_t *bits) {
    int16_t half;
    memcpy(&half, bits, sizeof half);
    return halves(_mm256_set1_epi16(half));
}
INLINE __m128 four_sums(vec values) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

INLINE part load_part(const float *from) { return load(from); }
INLINE part codes_of_part(const int8_t *codes) { return codes_at(codes); }
INLINE part plus_parts(part one, part other, part sum) { return plus_product(one, other, sum); }
INLINE part kept(part values) { /* in a register: GCC would load it again for each product */
    __asm__("" : "+v"(values));
    return values;
}
#elif LEVEL == 3
#define TILE 3
typedef __m256 part;
typedef struct {
    __m256 low, high;
} vec;

INLINE vec load(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void store(float *to, vec values) {
    _mm256_storeu_ps(to, values.low);
    _mm256_storeu_ps(to + 8, values.high);
}
INLINE vec all(float value) { return (vec){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
INLINE vec product(vec one, vec other) {
    return (vec){_mm256_mul_ps(one.low, other.low), _mm256_mul_ps(one.high, other.high)};
}
INLINE vec plus_product(vec one, vec other, vec sum) {
    return (vec){_mm256_fmadd_ps(one.low, other.low, sum.low), _mm256_fmadd_ps(one.high, other.high, sum.high)};
}
INLINE __m256 eight_codes(const int8_t *codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}
INLINE vec codes_at(const int8_t *codes) { return (vec){eight_codes(codes), eight_codes(codes + 8)}; }
INLINE vec sum(vec one, vec other) {
    return (vec){_mm256_add_ps(one.low, other.low), _mm256_add_ps(one.high, other.high)};
}
INLINE __m256 eight_bytes(const uint8_t *codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}
INLINE vec bytes_at(const uint8_t *codes) { return (vec){eight_bytes(codes), eight_bytes(codes + 8)}; }
INLINE vec halves(__m256i bits) {
    return (vec){_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}
INLINE __m256 eight_pairs(const float *values, const uint8_t *codes) {
    uint32_t word;
    memcpy(&word, codes, sizeof word);
    __m256i places = _mm256_srlv_epi32(_mm256_set1_epi32((int)word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), places); /* by the lowest 3 bits */
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), places);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28))); /* by the fourth */
}
INLINE vec pairs_at(const float *values, const uint8_t *codes) {
    return (vec){eight_pairs(values, codes), eight_pairs(values, codes + 4)};
}
INLINE vec half_at(const uint8_t *bits) {
    int16_t half;
    memcpy(&half, bits, sizeof half);
    __m256 eight = _mm256_cvtph_ps(_mm_set1_epi16(half));
    return (vec){eight, eight};
}
INLINE __m256 eight_lower(const uint8_t *codes) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
    return _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
}
INLINE __m256 eight_upper(const uint8_t *codes) {
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)), 4));
}
INLINE vec lower_bits(const uint8_t *codes) { return (vec){eight_lower(codes), eight_lower(codes + 8)}; }
INLINE vec upper_bits(const uint8_t *codes) { return (vec){eight_upper(codes), eight_upper(codes + 8)}; }
INLINE __m128 four_sums(vec values) {
    __m256 eight = _mm256_add_ps(values.low, values.high);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

INLINE part load_part(const float *from) { return _mm256_loadu_ps(from); }
INLINE part codes_of_part(const int8_t *codes) { return eight_codes(codes); }
INLINE part plus_parts(part one, part other, part sum) { return _mm256_fmadd_ps(one, other, sum); }
INLINE part kept(part values) { return values; }
#else
#define TILE 3
typedef float four __attribute__((vector_size(16))); /* which every processor has, or the compiler makes of numbers */
typedef four part;
typedef struct {
    four part[WIDTH / 4];
} vec;

#define EACH_PART(value)                                                                                               \
    vec made;                                                                                                          \
    for (int i = 0; i < WIDTH / 4; i++)                                                                                \
        made.part[i] = value;                                                                                          \
    return made
#define EACH_LANE(value)                                                                                               \
    vec made;                                                                                                          \
    float lane[WIDTH];                                                                                                 \
    for (int i = 0; i < WIDTH; i++)                                                                                    \
        lane[i] = value;                                                                                               \
    memcpy(&made, lane, sizeof made);                                                                                  \
    return made

INLINE vec load(const float *from) {
    vec made;
    memcpy(&made, from, sizeof made);
    return made;
}
INLINE void store(float *to, vec values) { memcpy(to, &values, sizeof values); }
INLINE vec all(float value) { EACH_PART(((four){value, value, value, value})); }
INLINE vec product(vec one, vec other) { EACH_PART(one.part[i] * other.part[i]); }
INLINE vec plus_product(vec one, vec other, vec sum) { EACH_PART(sum.part[i] + one.part[i] * other.part[i]); }
INLINE vec sum(vec one, vec other) { EACH_PART(one.part[i] + other.part[i]); }
INLINE vec codes_at(const int8_t *codes) { EACH_LANE((float)codes[i]); }
INLINE vec bytes_at(const uint8_t *codes) { EACH_LANE((float)codes[i]); }
INLINE vec pairs_at(const float *values, const uint8_t *codes) { EACH_LANE(values[codes[i / 2] >> 4 * (i % 2) & 15]); }
INLINE vec floats8_at(const uint8_t *codes) { EACH_LANE(float8(codes[i])); }
INLINE vec half_at(const uint8_t *bits) { return all(half_float(bits)); }
INLINE vec lower_bits(const uint8_t *codes) { EACH_LANE((float)(codes[i] & 15)); }
INLINE vec upper_bits(const uint8_t *codes) { EACH_LANE((float)(codes[i] >> 4)); }
INLINE float sum_of(vec values) {
    four both = values.part[0] + values.part[1] + values.part[2] + values.part[3];
    return both[0] + both[1] + both[2] + both[3];
}

INLINE part load_part(const float *from) {
    part made;
    memcpy(&made, from, sizeof made);
    return made;
}
INLINE part codes_of_part(const int8_t *codes) {
    return (part){(float)codes[0], (float)codes[1], (float)codes[2], (float)codes[3]};
}
INLINE part plus_parts(part one, part other, part sum) { return sum + one * other; }
INLINE part kept(part values) { return values; }
#endif

/* What codes of 4 bits stand for, of which 16 bytes have as many below and as many above. */
#if LEVEL < 4
typedef struct {
    vec scale, least;
} meanings;
INLINE meanings meanings_of(vec scale, vec least) { return (meanings){scale, least}; }
INLINE vec lower(const uint8_t *codes, meanings of) { return plus_product(lower_bits(codes), of.scale, of.least); }
INLINE vec upper(const uint8_t *codes, meanings of) { return plus_product(upper_bits(codes), of.scale, of.least); }
#else
typedef vec meanings; /* looked up by the lowest 4 bits */
INLINE meanings meanings_of(vec scale, vec least) {
    return plus_product(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), scale, least);
}
INLINE __m512i wide(const uint8_t *codes) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)); }
INLINE vec lower(const uint8_t *codes, meanings of) { return _mm512_permutexvar_ps(wide(codes), of); }
INLINE vec upper(const uint8_t *codes, meanings of) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(wide(codes), 4), of);
}
#endif

#if LEVEL > 1
INLINE float sum_of(vec values) {
    __m128 four = four_sums(values), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
/* sum_of() each of four, to the last bit. */
INLINE void sums_of_four(const vec *values, float *sums) {
    __m128 a = four_sums(values[0]), b = four_sums(values[1]), c = four_sums(values[2]), d = four_sums(values[3]);
    __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)), cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
}
#else
INLINE void sums_of_four(const vec *values, float *sums) {
    for (int i = 0; i < 4; i++)
        sums[i] = sum_of(values[i]);
}
#endif

/* A `part` is what one register holds of a vec; ROWS * TILE of them and their factors fit into the registers. */
#define LANES ((int)(sizeof(part) / sizeof(float)))

#if LEVEL > 1
/* As halves, whose exponent is 8 too small: they have no numbers for which processors take longer. */
INLINE vec floats8_at(const uint8_t *codes) {
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    __m256i bits = _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000)),
                                   _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7));
    return product(halves(bits), all(256.0f));
}
#endif

/* The end of decoded weights: memory, or products with inputs. `writes` is a constant, so that one of them is left. */
typedef struct {
    int writes;
    float *out;
    const float *inputs;
    vec sum;
} sink;

INLINE void take(sink *to, vec weights) {
    if (to->writes) {
        store(to->out, weights);
        to->out += WIDTH;
    } else {
        to->sum = plus_product(weights, load(to->inputs), to->sum);
        to->inputs += WIDTH;
    }
}
