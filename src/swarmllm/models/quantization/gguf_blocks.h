/* The blocks of GGUF (ggml) → floats: a function for each kind takes codes and scales apart.
 *
 * Included by products.h. A block is some bytes that stand for 32 or 256 neighbours of a row, with the scales of its
 * groups; numbers are little-endian. Every product here is exact in float32, so only a minimum that is taken away rounds,
 * once, whatever the compiler fuses: the floats are those of package gguf, bit for bit.
 */
#if defined(__GNUC__) && !defined(__clang__)
#define AS_VECTORS _Pragma("GCC unroll 1") /* a loop of 16 would be written out before GCC looks for vectors */
#else
#define AS_VECTORS
#endif

/* Weight i of a block is codes[i] * scale[its group] - less[its group]. */
typedef struct {
    int8_t codes[256];
    float scale[16], less[16];
} unpacked;

/* Codes of 4 bits: first the lower ones of all bytes, then the upper ones. */
INLINE void nibbles(const uint8_t *bytes, int count, int zero, int8_t *codes) {
    AS_VECTORS
    for (int i = 0; i < count; i++) {
        codes[i] = (int8_t)((bytes[i] & 15) - zero);
        codes[i + count] = (int8_t)((bytes[i] >> 4) - zero);
    }
}

/* Blocks of 32 are unpacked as groups of one of 256. With a minimum, it follows the scale. */
INLINE void q4(const uint8_t *block, int zero, int minimum, int group, unpacked *to) {
    to->scale[group] = half_float(block);
    to->less[group] = minimum ? -half_float(block + 2) : 0;
    nibbles(block + (minimum ? 4 : 2), 16, zero, to->codes + 32 * group);
}

#if LEVEL > 1
/* 32 codes of 5 bits: the fifth ones in 4 bytes, and then the others. */
INLINE __m256i five_bits(const uint8_t *bytes) {
    uint32_t fifths;
    memcpy(&fifths, bytes, sizeof fifths);
    __m128i two = _mm_loadu_si128((const __m128i *)(bytes + 4));
    __m256i sixteen = _mm256_set1_epi8(16);
    __m256i four = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(two, 4), two), _mm256_set1_epi8(15));
#if LEVEL == 4
    return _mm256_mask_add_epi8(four, fifths, four, sixteen);
#else
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i fifth = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)fifths), byte), bit);
    return _mm256_or_si256(four, _mm256_and_si256(_mm256_cmpeq_epi8(fifth, bit), sixteen));
#endif
}
#endif

/* The same in memory. */
INLINE void nibbles_and_fifths(const uint8_t *bytes, int zero, int8_t *codes) {
#if LEVEL > 1
    __m256i five = _mm256_sub_epi8(five_bits(bytes), _mm256_set1_epi8((char)zero));
    memcpy(codes, &five, sizeof five);
    IN_MEMORY(*(int8_t(*)[32])codes);
#else
    uint32_t bits = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24;
    nibbles(bytes + 4, 16, zero, codes);
    for (int i = 0; i < 32; i++)
        codes[i] = (int8_t)(codes[i] + (int)(bits >> i & 1) * 16);
#endif
}

/* The same as floats. */
INLINE void codes_of_5(const uint8_t *bytes, int zero, vec *codes) {
#if LEVEL == 4
    uint32_t fifth;
    memcpy(&fifth, bytes, sizeof fifth);
    __m128i two = _mm_loadu_si128((const __m128i *)(bytes + 4));
    __m256i four = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(two, 4), two), _mm256_set1_epi8(15));
    __m256i with = _mm256_add_epi8(four, _mm256_set1_epi8((char)(16 - zero)));
    four = zero ? _mm256_add_epi8(four, _mm256_set1_epi8((char)-zero)) : four;
    four = _mm256_mask_mov_epi8(four, fifth, with);
    codes[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(four)));
    codes[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(four, 1)));
#else
    int8_t in_memory[32];
    nibbles_and_fifths(bytes, zero, in_memory);
    codes[0] = codes_at(in_memory);
    codes[1] = codes_at(in_memory + 16);
#endif
}

INLINE void q5(const uint8_t *block, int zero, int minimum, int group, unpacked *to) {
    to->scale[group] = half_float(block);
    to->less[group] = minimum ? -half_float(block + 2) : 0;
    nibbles_and_fifths(block + (minimum ? 4 : 2), zero, to->codes + 32 * group);
}

/* Codes of 2 bits: the lowest ones of 32 bytes, then the next ones, and so on for each 32 bytes. */
INLINE void quarters(const uint8_t *bytes, int8_t *codes) {
    for (int half = 0; half < 2; half++, bytes += 32)
        for (int shift = 0; shift < 8; shift += 2, codes += 32)
            for (int i = 0; i < 32; i++)
                codes[i] = bytes[i] >> shift & 3;
}

INLINE void q2_k(const uint8_t *block, unpacked *to) {
    float scale = half_float(block + 80), less = half_float(block + 82);
    quarters(block + 16, to->codes);
    for (int group = 0; group < 16; group++) {
        to->scale[group] = scale * (float)(block[group] & 15);
        to->less[group] = less * (float)(block[group] >> 4);
    }
}

INLINE void q3_k(const uint8_t *block, unpacked *to) {
    const uint8_t *scales = block + 96;
    float scale = half_float(block + 108);
    quarters(block + 32, to->codes);
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < 32; i++)
            to->codes[32 * bit + i] = (int8_t)(to->codes[32 * bit + i] + (block[i] >> bit & 1) * 4 - 4);
    for (int group = 0; group < 16; group++) {
        int low = scales[group % 8] >> group / 8 * 4 & 15, high = scales[8 + group % 4] >> group / 4 * 2 & 3;
        to->scale[group] = scale * (float)((low | high << 4) - 32);
        to->less[group] = 0;
    }
}

/* Of Q4_K and Q5_K: scales and minima have 6 bits each, in 12 bytes. */
INLINE void k_scales(const uint8_t *block, float *scale, float *less) {
    typedef uint32_t four_words __attribute__((vector_size(16)));
    uint32_t six[3];
    float codes[16], of_scales = half_float(block), of_minima = half_float(block + 2);
    memcpy(six, block + 4, sizeof six);
    four_words low = {six[0], six[2], six[1], six[2] >> 4}, high = {0, six[0], 0, six[1]};
    low &= (four_words){0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f};
    low |= (high >> 6 & 0x03030303) << 4;
    store(codes, bytes_at((const uint8_t *)&low));
    for (int group = 0; group < 8; group++) {
        scale[group] = codes[group] * of_scales;
        less[group] = codes[8 + group] * of_minima;
    }
}

INLINE void q4_k(const uint8_t *block, unpacked *to) {
    k_scales(block, to->scale, to->less);
    for (int pair = 0; pair < 4; pair++)
        nibbles(block + 16 + 32 * pair, 32, 0, to->codes + 64 * pair);
}

typedef uint8_t bytes_32 __attribute__((vector_size(32)));
typedef uint16_t words_16 __attribute__((vector_size(32)));

/* Shifted bytes, into which bits of their neighbours come. No functions: there is more than one way to return such vectors. */
#define UP(bytes, bits) ((bytes_32)((words_16)(bytes) << (bits)))
#define DOWN(bytes, bits) ((bytes_32)((words_16)(bytes) >> (bits)))

INLINE void q5_k(const uint8_t *block, unpacked *to) {
    bytes_32 low, high, codes[8];
    memcpy(&high, block + 16, sizeof high);
    k_scales(block, to->scale, to->less);
    for (int pair = 0; pair < 4; pair++) {
        memcpy(&low, block + 48 + 32 * pair, sizeof low);
        codes[2 * pair] = (low & 15) | (UP(high, 4) & 16);
        codes[2 * pair + 1] = (DOWN(low, 4) & 15) | (UP(high, 3) & 16);
        high = DOWN(high, 2);
    }
    memcpy(to->codes, codes, sizeof codes);
}

INLINE void q6_k(const uint8_t *block, unpacked *to) {
    bytes_32 one, two, high, codes[8];
    for (int half = 0; half < 2; half++) {
        memcpy(&one, block + 64 * half, sizeof one);
        memcpy(&two, block + 64 * half + 32, sizeof two);
        memcpy(&high, block + 128 + 32 * half, sizeof high);
        codes[4 * half] = ((one & 15) | (UP(high, 4) & 48)) - 32;
        codes[4 * half + 1] = ((two & 15) | (UP(high, 2) & 48)) - 32;
        codes[4 * half + 2] = ((DOWN(one, 4) & 15) | (high & 48)) - 32;
        codes[4 * half + 3] = ((DOWN(two, 4) & 15) | (DOWN(high, 2) & 48)) - 32;
    }
    memcpy(to->codes, codes, sizeof codes);
    store(to->scale, product(codes_at((const int8_t *)block + 192), half_at(block + 208)));
    memset(to->less, 0, sizeof to->less);
}

INLINE void iq4(const uint8_t *bytes, float scale, int group, unpacked *to) {
    static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    int8_t *codes = to->codes + 32 * group;
#if LEVEL > 1
    typedef int8_t sixteen __attribute__((vector_size(16)));
    typedef uint8_t places __attribute__((vector_size(16)));
    sixteen table, low, high;
    places pairs;
    memcpy(&table, values, sizeof table);
    memcpy(&pairs, bytes, sizeof pairs);
    low = __builtin_shuffle(table, (sixteen)(pairs & 15));
    high = __builtin_shuffle(table, (sixteen)(pairs >> 4));
    memcpy(codes, &low, sizeof low);
    memcpy(codes + 16, &high, sizeof high);
#else
    for (int i = 0; i < 16; i++) {
        codes[i] = values[bytes[i] & 15];
        codes[i + 16] = values[bytes[i] >> 4];
    }
#endif
    to->scale[group] = scale;
    to->less[group] = 0;
}

INLINE void iq4_xs(const uint8_t *block, unpacked *to) {
    int high = block[2] | block[3] << 8;
    for (int group = 0; group < 8; group++) {
        int code = (block[4 + group / 2] >> group % 2 * 4 & 15) | (high >> 2 * group & 3) << 4;
        iq4(block + 8 + 16 * group, half_float(block) * (float)(code - 32), group, to);
    }
}

INLINE void spread(const unpacked *from, int groups, int size, sink *to) {
    for (int group = 0; group < groups; group++) {
        vec scale = all(from->scale[group]), less = all(-from->less[group]);
        for (int i = 0; i < size; i += WIDTH)
            take(to, plus_product(codes_at(from->codes + size * group + i), scale, less));
    }
}

INLINE void spread_q8_0(const uint8_t *block, int64_t count, sink *to) {
    for (; count > 0; count -= 32, block += 34) {
        vec scale = half_at(block);
        take(to, product(codes_at((const int8_t *)block + 2), scale));
        take(to, product(codes_at((const int8_t *)block + 18), scale));
    }
}

/* Codes of 4 bits, for products, in registers; a weight of 0 has no sign here, which no product shows. */
INLINE void add_q4(const uint8_t *codes, vec scale, vec least, sink *to) {
    meanings values = meanings_of(scale, least);
    take(to, lower(codes, values));
    take(to, upper(codes, values));
}

/* The same with 5 bits, of which the fifth ones, in 4 bytes, are before the others. */
INLINE void add_q5(const uint8_t *codes, vec scale, vec least, sink *to) {
    vec bytes[2];
    codes_of_5(codes, 0, bytes);
    take(to, plus_product(bytes[0], scale, least));
    take(to, plus_product(bytes[1], scale, least));
}

/* Q4_0 and Q5_0, with the scale and the scale once more. Their products are exact. */
INLINE void add_q4_0(const uint8_t *codes, vec scale, sink *to) {
#if LEVEL == 4
    meanings values = product(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), scale);
    take(to, lower(codes, values));
    take(to, upper(codes, values));
#else
    add_q4(codes, scale, product(scale, all(-8.0f)), to);
#endif
}
INLINE void add_q5_0(const uint8_t *codes, vec scale, vec again, sink *to) {
    vec bytes[2];
    codes_of_5(codes, 16, bytes);
    take(to, product(bytes[0], scale));
    take(to, product(bytes[1], again));
}

/* 64 columns of a block of Q4_K: two of its groups. */
INLINE void add_q4_k(const uint8_t *codes, const float *scale, const float *less, sink *to) {
    meanings below = meanings_of(all(scale[0]), all(-less[0])), above = meanings_of(all(scale[1]), all(-less[1]));
    take(to, lower(codes, below));
    take(to, lower(codes + 16, below));
    take(to, upper(codes, above));
    take(to, upper(codes + 16, above));
}

/* Columns [start, start + count) of a row that begins at `row`; they begin and end with a block. */
INLINE void decode_gguf(int kind, const uint8_t *row, int64_t start, int64_t count, sink *to) {
    unpacked one;
    const uint8_t *block;
#define WHOLE(groups, size, bytes, unpack)                                            \
    for (block = row + start / 256 * (bytes); count > 0; block += (bytes), count -= 256) { \
        unpack;                                                                        \
        spread(&one, groups, size, to);                                                \
    }                                                                                  \
    break
#define PARTS(bytes, unpack)                                                           \
    for (block = row + start / 32 * (bytes); count > 0; count -= 256) {                \
        int groups = count < 256 ? (int)count / 32 : 8;                                \
        for (int group = 0; group < groups; group++, block += (bytes))                 \
            unpack;                                                                    \
        spread(&one, groups, 32, to);                                                  \
    }                                                                                  \
    break
    switch (kind) {
    case Q4_0: PARTS(18, q4(block, 8, 0, group, &one));
    case Q4_1: PARTS(20, q4(block, 0, 1, group, &one));
    case Q5_0: PARTS(22, q5(block, 16, 0, group, &one));
    case Q5_1: PARTS(24, q5(block, 0, 1, group, &one));
    case Q8_0: spread_q8_0(row + start / 32 * 34, count, to); break;
    case Q2_K: WHOLE(16, 16, 84, q2_k(block, &one));
    case Q3_K: WHOLE(16, 16, 110, q3_k(block, &one));
    case Q4_K: WHOLE(8, 32, 144, q4_k(block, &one));
    case Q5_K: WHOLE(8, 32, 176, q5_k(block, &one));
    case Q6_K: WHOLE(16, 16, 210, q6_k(block, &one));
    case IQ4_NL: PARTS(18, iq4(block + 2, half_float(block), group, &one));
    case IQ4_XS: WHOLE(8, 32, 136, iq4_xs(block, &one));
    }
#undef PARTS
#undef WHOLE
}
