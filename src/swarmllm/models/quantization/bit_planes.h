/* Codes of 2, 3, 3.5, 4, 5 and 6 bits → floats, as decoded.py packs them. Included by products.h; needs GNU C's vectors.
 *
 * The codes of a group's 64 columns are the bytes of 16 words: word k has columns k, 16 + k, 32 + k and 48 + k. A plane
 * has some bits of each code, closely packed: one of 4 bits has 8 words, of which word k also holds, 4 bits further up,
 * what belongs to word 8 + k; one of 2 bits has 4 words, and one of 1 bit has 2. So a shift for each word and a mask lay a
 * plane open. With 3.5 bits there are half as many codes, of two columns each.
 * Vectors are as wide as those of AVX2: GCC keeps wider ones in memory where there is no AVX-512, and is 15 times slower.
 */
typedef uint16_t short_words __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint64_t long_words __attribute__((vector_size(32)));
typedef float floats __attribute__((vector_size(32)));

/* The `bits` of the codes of words 0 to 7, with others around them; 4 bits further up those of words 8 to 15. `bits` is a
 * constant where this is called. */
INLINE void open_plane(const uint8_t *bytes, int bits, words *plane) {
    uint64_t at[2];
    if (bits == 4) {
        memcpy(plane, bytes, sizeof *plane);
    } else if (bits == 2) {
        memcpy(at, bytes, 16);
        *plane = (words)(long_words){at[0], at[1], at[0], at[1]} >> (words){0, 0, 0, 0, 2, 2, 2, 2};
    } else {
        memcpy(at, bytes, 8);
        *plane = (words)(long_words){at[0], at[0], at[0], at[0]} >> (words){0, 0, 1, 1, 2, 2, 3, 3};
    }
}

/* Codes of `low` bits, and of `high` ones above them unless that is 0. */
INLINE void open_codes(const uint8_t *bytes, int low, int high, words *codes) {
    words lower, upper;
    open_plane(bytes, low, &lower);
    if (high)
        open_plane(bytes + 8 * low, high, &upper);
    for (int half = 0; half < 2; half++) {
        words bits = lower >> 4 * half & 0x01010101u * ((1u << low) - 1);
        if (high)
            bits |= (upper >> 4 * half & 0x01010101u * ((1u << high) - 1)) << low;
        for (int i = 0; i < 4; i++)
            codes[2 * i + half] = bits >> 8 * i & 255;
    }
}

/* 3.5 bits: 32 numbers of 7 bits, 11 times the code of one column and that of the column 32 later. They are the bytes of
 * 8 words; two of them in 16 bits each are divided at once. */
INLINE void open_pairs(const uint8_t *bytes, words *codes) {
    uint64_t at[3];
    uint32_t last;
    memcpy(at, bytes, 24);
    memcpy(&last, bytes + 24, 4);
    words both = (words)(long_words){at[0], at[1], at[0], at[1]} >> (words){0, 0, 0, 0, 4, 4, 4, 4} & 0x0f0f0f0f;
    both |= ((words)(long_words){at[2], at[2], at[2], at[2]} >> (words){0, 0, 2, 2, 4, 4, 6, 6} & 0x03030303) << 4;
    both |= (((words){0} + last) >> (words){0, 1, 2, 3, 4, 5, 6, 7} & 0x01010101) << 6;
    for (int half = 0; half < 2; half++) {
        short_words pair = (short_words)(both >> 8 * half & 0x00ff00ff);
        short_words first = pair * 373 >> 12, second = pair - first * 11; /* exact below 128 */
        codes[half] = (words)first & 0xffff;
        codes[half + 2] = (words)first >> 16;
        codes[half + 4] = (words)second & 0xffff;
        codes[half + 6] = (words)second >> 16;
    }
}

/* A group whose codes take so many bytes. The products are exact, of at most 6 and 8 bits, so it rounds but once. */
INLINE void open_group(const uint8_t *bytes, int num_bytes, float scale, float least, floats *values) {
    typedef int32_t numbers __attribute__((vector_size(32)));
    words codes[8];
    switch (num_bytes) {
    case 16: open_codes(bytes, 2, 0, codes); break;
    case 24: open_codes(bytes, 2, 1, codes); break;
    case 28: open_pairs(bytes, codes); break;
    case 32: open_codes(bytes, 4, 0, codes); break;
    case 40: open_codes(bytes, 4, 1, codes); break;
    default: open_codes(bytes, 4, 2, codes); break;
    }
    for (int i = 0; i < 8; i++)
        values[i] = __builtin_convertvector((numbers)codes[i], floats) * scale + least;
}
