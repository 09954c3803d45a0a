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

/* Fifth bits, in 4 bytes, are before the others. */
INLINE void q5(const uint8_t *block, int zero, int minimum, int group, unpacked *to) {
    const uint8_t *high = block + (minimum ? 4 : 2);
    int8_t *codes = to->codes + 32 * group;
    uint32_t bits = high[0] | high[1] << 8 | high[2] << 16 | (uint32_t)high[3] << 24;
    to->scale[group] = half_float(block);
    to->less[group] = minimum ? -half_float(block + 2) : 0;
    nibbles(high + 4, 16, zero, codes);
#if LEVEL > 1
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i fifth = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte), bit);
    __m256i lower = _mm256_loadu2_m128i((const __m128i *)(codes + 16), (const __m128i *)codes); /* as they were written */
    fifth = _mm256_and_si256(_mm256_cmpeq_epi8(fifth, bit), _mm256_set1_epi8(16));
    lower = _mm256_add_epi8(lower, fifth);
    memcpy(codes, &lower, sizeof lower);
#else
    for (int i = 0; i < 32; i++)
        codes[i] = (int8_t)(codes[i] + (int)(bits >> i & 1) * 16);
#endif
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

/* Q4_K, and Q5_K with fifth bits in `high`. */
INLINE void k_nibbles(const uint8_t *block, const uint8_t *high, const uint8_t *codes, unpacked *to) {
    k_scales(block, to->scale, to->less);
    for (int pair = 0; pair < 4; pair++)
        nibbles(codes + 32 * pair, 32, 0, to->codes + 64 * pair);
    for (int bit = 0; high && bit < 8; bit++)
        for (int i = 0; i < 32; i++)
            to->codes[32 * bit + i] = (int8_t)(to->codes[32 * bit + i] | (high[i] >> bit & 1) << 4);
}

INLINE void q6_k(const uint8_t *block, unpacked *to) {
    const uint8_t *low = block, *high = block + 128;
    float scale = half_float(block + 208);
    for (int half = 0; half < 2; half++, low += 64, high += 32) {
        int8_t *codes = to->codes + 128 * half;
        nibbles(low, 64, 32, codes);
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                codes[32 * quarter + i] = (int8_t)(codes[32 * quarter + i] + ((high[i] >> 2 * quarter & 3) << 4));
    }
    for (int group = 0; group < 16; group++) {
        to->scale[group] = scale * (float)(int8_t)block[192 + group];
        to->less[group] = 0;
    }
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
INLINE void add_q4(const uint8_t *block, int minimum, int64_t count, sink *to) {
    for (; count > 0; count -= 32, block += minimum ? 20 : 18) {
        vec scale = half_at(block), least = minimum ? half_at(block + 2) : product(scale, all(-8.0f));
        meanings values = meanings_of(scale, least);
        take(to, lower(block + (minimum ? 4 : 2), values));
        take(to, upper(block + (minimum ? 4 : 2), values));
    }
}

/* The same with 5 bits. */
INLINE void add_q5(const uint8_t *block, int minimum, sink *to) {
    uint32_t fifth;
    memcpy(&fifth, block + (minimum ? 4 : 2), sizeof fifth);
    vec scale = half_at(block), least = minimum ? half_at(block + 2) : product(scale, all(-16.0f));
    meanings_of_5 values = meanings_of_5_bits(scale, least);
    take(to, lower_5(block + (minimum ? 8 : 6), fifth, values));
    take(to, upper_5(block + (minimum ? 8 : 6), fifth >> 16, values));
}

/* One bit of each of 32 bytes. */
INLINE uint32_t bits_of(const uint8_t *bytes, int bit) {
#if LEVEL > 1
    return (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(_mm256_loadu_si256((const __m256i *)bytes), 7 - bit));
#else
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++)
        bits |= (uint32_t)(bytes[i] >> bit & 1) << i;
    return bits;
#endif
}

/* 64 columns of a block of Q5_K, with codes of 4 bits at `codes`: groups `group` and the next one. */
INLINE void add_q5_k(const uint8_t *high, const uint8_t *codes, int group, const float *scale, const float *less, sink *to) {
    uint32_t fifth = bits_of(high, group);
    meanings_of_5 values = meanings_of_5_bits(all(scale[group]), all(-less[group]));
    take(to, lower_5(codes, fifth, values));
    take(to, lower_5(codes + 16, fifth >> 16, values));
    fifth = bits_of(high, group + 1);
    values = meanings_of_5_bits(all(scale[group + 1]), all(-less[group + 1]));
    take(to, upper_5(codes, fifth, values));
    take(to, upper_5(codes + 16, fifth >> 16, values));
}

/* A block of Q6_K. A weight is (code - 32) * scale, which is exact, so that it doesn't matter that 32 scales are taken
 * away at last. */
INLINE void add_q6_k(const uint8_t *block, sink *to) {
    const uint8_t *low = block, *high = block + 128;
    float codes[16], scales[16];
    store(codes, codes_at((const int8_t *)block + 192));
    store(scales, product(load(codes), half_at(block + 208)));
    const float *scale = scales;
    for (int half = 0; half < 2; half++, low += 64, high += 32)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i += WIDTH, scale++) {
                const uint8_t *at = low + quarter % 2 * 32 + i;
                vec found = quarter < 2 ? lower_6(at, high + i, 2 * quarter) : upper_6(at, high + i, 2 * quarter);
                take(to, plus_product(found, all(*scale), all(-32.0f * *scale)));
            }
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
    case Q4_K: WHOLE(8, 32, 144, k_nibbles(block, NULL, block + 16, &one));
    case Q5_K: WHOLE(8, 32, 176, k_nibbles(block, block + 16, block + 48, &one));
    case Q6_K: WHOLE(16, 16, 210, q6_k(block, &one));
    case IQ4_NL: PARTS(18, iq4(block + 2, half_float(block), group, &one));
    case IQ4_XS: WHOLE(8, 32, 136, iq4_xs(block, &one));
    }
#undef PARTS
#undef WHOLE
}
