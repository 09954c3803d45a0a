/* Products of codes with inputs that are rounded to 8 bits, in groups of 32 neighbours: whole numbers, then floats.
 *
 * Compiled once for each kind of processor (kernels.c chooses). A row's columns are taken in pieces of 512, which are 16
 * groups. In a piece, the four bytes k of all groups are side by side (`codes[k]`): so eight products of four bytes each
 * leave the sum of group g in lane g, where its scale is. Whole numbers are exact in any order, and floats are added piece
 * by piece: the product of an input is the same whatever is multiplied at once.
 */
#include "compiler.h"
#include "vectors.h"
#include "weight.h"

#include "bit_planes.h"
#include "gguf_blocks.h"

#ifdef VNNI
#define OF_VERSION(name) OF_LEVEL(name##_vnni)
#else
#define OF_VERSION(name) OF_LEVEL(name)
#endif

#define GROUPS 16
#define WORDS 8 /* of 4 codes, in a group */
#define PIECE_COLUMNS (GROUPS * WORDS * 4)
#define ROWS_AT_ONCE 8
#define TILE_ROWS 4
#define INPUTS_AT_ONCE 32 /* whose pieces stay in the first caches with those of the rows */
#define STRIP_ROWS 64     /* that are multiplied by all inputs before the next */
#define ZERO 128          /* added to signed codes of weights: processors multiply unsigned bytes by signed ones */

/* A piece of an input: each number is about code * scale. */
typedef struct {
    int8_t codes[WORDS][GROUPS][4];
    float scale[GROUPS];
    int32_t sums[2][GROUPS];  /* of the codes of each half of a group */
    float totals[2][GROUPS];  /* the same times the scale */
} rounded_piece;

/* A piece of a row: each weight is (code - ZERO) * scale + least. Kinds with one scale for a group use scale[0], least[0]. */
typedef struct {
    uint8_t codes[WORDS][GROUPS][4];
    float scale[2][GROUPS];
    float least[2][GROUPS];
} row_piece;

INLINE int64_t pieces_of(int64_t columns) { return (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS; }

/* ---------------------------------------------------------------- lanes */

#if LEVEL == 4
#define TILE_INPUTS 4
typedef __m512i whole;
typedef __m512 fraction;
INLINE whole load_whole(const void *from) { return _mm512_loadu_si512(from); }
INLINE whole dot(whole sum, whole weights, whole inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
INLINE whole whole_sum(whole one, whole other) { return _mm512_add_epi32(one, other); }
INLINE whole less_zeros(whole sums) { return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, 7)); }
INLINE fraction load_fraction(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store_fraction(float *to, fraction values) { _mm512_storeu_ps(to, values); }
INLINE fraction as_fraction(whole values) { return _mm512_cvtepi32_ps(values); }
INLINE fraction fraction_product(fraction one, fraction other) { return _mm512_mul_ps(one, other); }
INLINE fraction fraction_plus(fraction one, fraction other, fraction sum) { return _mm512_fmadd_ps(one, other, sum); }
#elif LEVEL == 3
#define TILE_INPUTS 2
typedef __m256i whole;
typedef __m256 fraction;
INLINE whole load_whole(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE whole dot(whole sum, whole weights, whole inputs) {
#ifdef VNNI
    return _mm256_dpbusd_avx_epi32(sum, weights, inputs);
#else /* even bytes and odd ones, in 16 bits: pairs of products of 8 bits would be too large for these */
    whole low = _mm256_and_si256(weights, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(weights, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_srai_epi16(inputs, 8)));
#endif
}
INLINE whole whole_sum(whole one, whole other) { return _mm256_add_epi32(one, other); }
INLINE whole less_zeros(whole sums) { return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sums, 7)); }
INLINE fraction load_fraction(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store_fraction(float *to, fraction values) { _mm256_storeu_ps(to, values); }
INLINE fraction as_fraction(whole values) { return _mm256_cvtepi32_ps(values); }
INLINE fraction fraction_product(fraction one, fraction other) { return _mm256_mul_ps(one, other); }
INLINE fraction fraction_plus(fraction one, fraction other, fraction sum) { return _mm256_fmadd_ps(one, other, sum); }
#else
#define TILE_INPUTS 2
typedef int32_t whole __attribute__((vector_size(16)));
typedef four fraction;
INLINE whole load_whole(const void *from) {
    whole made;
    memcpy(&made, from, sizeof made);
    return made;
}
INLINE whole dot(whole sum, whole weights, whole inputs) {
    whole byte = {255, 255, 255, 255};
    for (int shift = 0; shift < 32; shift += 8)
        sum += (weights >> shift & byte) * (inputs << (24 - shift) >> 24);
    return sum;
}
INLINE whole whole_sum(whole one, whole other) { return one + other; }
INLINE whole less_zeros(whole sums) { return -ZERO * sums; }
INLINE fraction load_fraction(const float *from) { return load_part(from); }
INLINE void store_fraction(float *to, fraction values) { memcpy(to, &values, sizeof values); }
INLINE fraction as_fraction(whole values) { return __builtin_convertvector(values, fraction); }
INLINE fraction fraction_product(fraction one, fraction other) { return one * other; }
INLINE fraction fraction_plus(fraction one, fraction other, fraction sum) { return sum + one * other; }
#endif
#define LANES_AT_ONCE ((int)(sizeof(whole) / 4))

INLINE whole in_register(whole values) { /* GCC would load it again for each product */
#if LEVEL > 1
    __asm__("" : "+v"(values));
#endif
    return values;
}

/* ---------------------------------------------------------------- inputs */

/* 32 numbers as codes; returns their scale, which is NaN if one of them is NaN or infinite. */
INLINE float round_group(const float *numbers, int8_t *codes) {
    int32_t largest = 0;
    for (int i = 0; i < 32; i++) {
        int32_t size;
        memcpy(&size, numbers + i, sizeof size);
        size &= 0x7fffffff; /* sizes are in the order of their bits */
        largest = size > largest ? size : largest;
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    int is_finite = largest < 0x7f800000, is_tiny = largest < 0x10000000; /* 2^-95: 127 / most is finite above */
    float steps = is_finite && !is_tiny ? 127.0f / most : 0.0f;
    for (int i = 0; i < 32; i++) /* rounds to the nearest: floats as large as 1.5 * 2^23 have no fractions */
        codes[i] = (int8_t)(int32_t)((is_finite ? numbers[i] : 0.0f) * steps + 0x1.8p23f - 0x1.8p23f);
    return is_finite ? (is_tiny ? 0.0f : most / 127.0f) : most - most;
}

/* [num, columns] -> [num, pieces]; columns are a multiple of 32, and what is missing in the last piece is 0. */
void OF_VERSION(round_inputs)(const float *inputs, int64_t num, int64_t columns, void *rounded) {
    rounded_piece *piece = rounded;
    for (int64_t n = 0; n < num; n++, inputs += columns) {
        for (int64_t at = 0; at < columns; at += PIECE_COLUMNS, piece++) {
            memset(piece, 0, sizeof *piece);
            for (int64_t group = 0; group < GROUPS && at + 32 * group < columns; group++) {
                int8_t codes[32];
                int sums[2] = {0, 0};
                float scale = round_group(inputs + at + 32 * group, codes);
                for (int i = 0; i < 16; i++) {
                    sums[0] += codes[i];
                    sums[1] += codes[16 + i];
                }
                for (int word = 0; word < WORDS; word++)
                    memcpy(piece->codes[word][group], codes + 4 * word, 4);
                piece->scale[group] = scale;
                for (int half = 0; half < 2; half++) {
                    piece->sums[half][group] = sums[half];
                    piece->totals[half][group] = scale * (float)sums[half];
                }
            }
        }
    }
}

/* ---------------------------------------------------------------- rows */

/* 32 bytes: the codes of a group, in the order of columns. */
#if LEVEL > 1
typedef __m256i bytes_of_group;
INLINE bytes_of_group group_at(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE bytes_of_group low_bits(bytes_of_group bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
INLINE bytes_of_group high_bits(bytes_of_group bytes) { return low_bits(_mm256_srli_epi16(bytes, 4)); }
INLINE bytes_of_group pairs_of_16(const uint8_t *from) { /* 16 codes below, the next 16 above */
    __m128i both = _mm_loadu_si128((const __m128i *)from);
    return low_bits(_mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1));
}
INLINE bytes_of_group with_fifths(const uint8_t *from) { return five_bits(from); }
/* Some bits of each byte, `from` places above the lowest, as bits 4 and higher. */
INLINE bytes_of_group bits_above(bytes_of_group bytes, int from, int mask) {
    return _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(bytes, from), _mm256_set1_epi8((char)mask)), 4);
}
INLINE bytes_of_group joined_bits(bytes_of_group one, bytes_of_group other) { return _mm256_or_si256(one, other); }
#else
#pragma GCC diagnostic ignored "-Wpsabi" /* no such vectors are passed: all is inlined */
typedef uint8_t bytes_of_group __attribute__((vector_size(32)));
INLINE bytes_of_group group_at(const void *from) {
    bytes_of_group made;
    memcpy(&made, from, sizeof made);
    return made;
}
INLINE bytes_of_group low_bits(bytes_of_group bytes) { return bytes & 15; }
INLINE bytes_of_group high_bits(bytes_of_group bytes) { return bytes >> 4; }
INLINE bytes_of_group pairs_of_16(const uint8_t *from) {
    bytes_of_group made;
    for (int i = 0; i < 16; i++) {
        made[i] = from[i] & 15;
        made[16 + i] = from[i] >> 4;
    }
    return made;
}
INLINE bytes_of_group with_fifths(const uint8_t *from) {
    bytes_of_group made;
    nibbles_and_fifths(from, 0, (int8_t *)&made);
    return made;
}
INLINE bytes_of_group bits_above(bytes_of_group bytes, int from, int mask) {
    return (bytes >> (uint8_t)from & (uint8_t)mask) << 4;
}
INLINE bytes_of_group joined_bits(bytes_of_group one, bytes_of_group other) { return one | other; }
#endif

/* The codes of 16 groups, with `more` added to each, word by word. */
INLINE void store_words(const bytes_of_group *groups, int more, row_piece *to) {
#if LEVEL == 4
    __m512i two[WORDS], words[2][4], added = _mm512_set1_epi8((char)more);
    for (int i = 0; i < WORDS; i++) { /* groups g and g + 4, for 0, 1, 2, 3, 8, 9, 10 and 11 */
        const bytes_of_group *first = groups + (i % 4 + i / 4 * 8);
        two[i] = _mm512_add_epi8(_mm512_inserti64x4(_mm512_castsi256_si512(first[0]), first[4], 1), added);
    }
    for (int half = 0; half < 2; half++) {
        __m512i *of = two + 4 * half;
        __m512i a = _mm512_unpacklo_epi32(of[0], of[1]), b = _mm512_unpackhi_epi32(of[0], of[1]);
        __m512i c = _mm512_unpacklo_epi32(of[2], of[3]), d = _mm512_unpackhi_epi32(of[2], of[3]);
        words[half][0] = _mm512_unpacklo_epi64(a, c);
        words[half][1] = _mm512_unpackhi_epi64(a, c);
        words[half][2] = _mm512_unpacklo_epi64(b, d);
        words[half][3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int word = 0; word < 4; word++) {
        _mm512_store_si512(to->codes[word], _mm512_shuffle_i32x4(words[0][word], words[1][word], 0x88));
        _mm512_store_si512(to->codes[4 + word], _mm512_shuffle_i32x4(words[0][word], words[1][word], 0xdd));
    }
#elif LEVEL == 3
    for (int half = 0; half < 2; half++) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++)
            a[i] = _mm256_castsi256_ps(_mm256_add_epi8(groups[8 * half + i], _mm256_set1_epi8((char)more)));
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
            a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
            a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
            a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
        for (int word = 0; word < 4; word++) {
            _mm256_store_ps((float *)to->codes[word][8 * half], _mm256_permute2f128_ps(a[word], a[4 + word], 0x20));
            _mm256_store_ps((float *)to->codes[4 + word][8 * half], _mm256_permute2f128_ps(a[word], a[4 + word], 0x31));
        }
    }
#else
    for (int group = 0; group < GROUPS; group++) {
        bytes_of_group codes = groups[group] + (uint8_t)more;
        for (int word = 0; word < WORDS; word++)
            memcpy(to->codes[word][group], (const uint8_t *)&codes + 4 * word, 4);
    }
#endif
}

/* One float16 of each group, which are `step` bytes apart; the scales of groups that aren't there are 0. */
INLINE void open_scales(const uint8_t *from, int64_t step, int groups, float *to) {
    uint16_t found[GROUPS] = {0};
    for (int group = 0; group < groups; group++)
        memcpy(found + group, from + group * step, 2);
#if LEVEL > 1
    store(to, halves(_mm256_loadu_si256((const __m256i *)found)));
#else
    for (int group = 0; group < GROUPS; group++)
        to[group] = half_float((const uint8_t *)(found + group));
#endif
}

/* Blocks of 32; `groups` is a constant where this is called. */
INLINE void open_small_blocks(int kind, const uint8_t *from, int groups, row_piece *to) {
    int64_t step = kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == Q5_0 ? 22 : kind == Q5_1 ? 24 : 34;
    bytes_of_group found[GROUPS];
    if (groups < GROUPS)
        memset(found, 0, sizeof found);
    for (int group = 0; group < groups; group++) {
        const uint8_t *block = from + group * step;
        if (kind == Q8_0) {
            found[group] = group_at(block + 2);
        } else if (kind == Q4_0 || kind == Q4_1) {
            found[group] = pairs_of_16(block + (kind == Q4_1 ? 4 : 2));
        } else {
            found[group] = with_fifths(block + (kind == Q5_1 ? 4 : 2));
        }
    }
    open_scales(from, step, groups, to->scale[0]);
    if (kind == Q4_1 || kind == Q5_1)
        open_scales(from + 2, step, groups, to->least[0]);
    store_words(found, kind == Q4_0 ? ZERO - 8 : kind == Q5_0 ? ZERO - 16 : ZERO, to);
}

/* The 8 groups of a block of Q4_K, Q5_K or Q6_K. */
INLINE void open_k_block(int kind, const uint8_t *block, int first, bytes_of_group *found, row_piece *to) {
    if (kind == Q6_K) {
        float scale = half_float(block + 208);
        for (int half = 0; half < 2; half++) {
            bytes_of_group above = group_at(block + 128 + 32 * half);
            for (int i = 0; i < 2; i++) {
                bytes_of_group both = group_at(block + 64 * half + 32 * i);
                found[4 * half + i] = joined_bits(low_bits(both), bits_above(above, 2 * i, 3));
                found[4 * half + 2 + i] = joined_bits(high_bits(both), bits_above(above, 4 + 2 * i, 3));
            }
        }
        int8_t codes[2][8]; /* of the first halves, of the second ones */
        float scales[2][8];
        for (int group = 0; group < 8; group++) {
            codes[0][group] = (int8_t)block[192 + 2 * group];
            codes[1][group] = (int8_t)block[193 + 2 * group];
        }
        store(scales[0], product(codes_at(codes[0]), all(scale)));
        memcpy(to->scale[0] + first, scales[0], sizeof scales[0]);
        memcpy(to->scale[1] + first, scales[1], sizeof scales[1]);
        return;
    }
    const uint8_t *codes = block + (kind == Q5_K ? 48 : 16);
    float less[8];
    for (int pair = 0; pair < 4; pair++) {
        bytes_of_group both = group_at(codes + 32 * pair);
        found[2 * pair] = low_bits(both);
        found[2 * pair + 1] = high_bits(both);
        for (int i = 2 * pair; kind == Q5_K && i < 2 * pair + 2; i++)
            found[i] = joined_bits(found[i], bits_above(group_at(block + 16), i, 1));
    }
    k_scales(block, to->scale[0] + first, less);
    for (int group = 0; group < 8; group++)
        to->least[0][first + group] = -less[group];
}

/* Blocks of 256: one, or two. */
INLINE void open_large_blocks(int kind, const uint8_t *from, int groups, row_piece *to) {
    int64_t step = kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
    bytes_of_group found[GROUPS];
    if (groups < GROUPS) {
        memset(found, 0, sizeof found);
        memset(to->scale, 0, sizeof to->scale + sizeof to->least);
    }
    for (int first = 0; first < groups; first += 8)
        open_k_block(kind, from + first / 8 * step, first, found + first, to);
    store_words(found, kind == Q6_K ? ZERO - 32 : ZERO, to);
}

/* Kinds for which it isn't worth having a faster way. */
INLINE void open_rare_blocks(int kind, const uint8_t *row, int64_t start, int groups, row_piece *to) {
    bytes_of_group found[GROUPS];
    memset(found, 0, sizeof found);
    memset(to->scale, 0, sizeof to->scale + sizeof to->least);
    for (int first = 0; first < groups; first += 8) {
        unpacked one;
        int some = groups - first < 8 ? groups - first : 8;
        int64_t block = start / 256 + first / 8;
        switch (kind) {
        case Q2_K: q2_k(row + block * 84, &one); break;
        case Q3_K: q3_k(row + block * 110, &one); break;
        case IQ4_XS: iq4_xs(row + block * 136, &one); break;
        default:
            for (int group = 0; group < some; group++) {
                const uint8_t *of = row + (start / 32 + first + group) * 18;
                iq4(of + 2, half_float(of), group, &one);
            }
        }
        memcpy(found + first, one.codes, (size_t)(32 * some));
        for (int group = 0; group < some; group++) {
            for (int half = 0; half < 2; half++) {
                int at = kind == Q2_K || kind == Q3_K ? 2 * group + half : group;
                to->scale[half][first + group] = one.scale[at];
                to->least[half][first + group] = -one.less[at];
            }
        }
    }
    store_words(found, ZERO, to);
}

/* Codes of a byte, with one scale for the row or for some groups. */
INLINE void open_bytes(const weight *w, int64_t row, int64_t start, int groups, row_piece *to) {
    const int8_t *from = (const int8_t *)w->codes + row * w->columns + start;
    int64_t size = w->columns / w->groups;
    bytes_of_group found[GROUPS];
    if (groups < GROUPS)
        memset(found, 0, sizeof found);
    for (int group = 0; group < groups; group++)
        found[group] = group_at(from + 32 * group);
    store_words(found, ZERO, to);
    if (w->groups == 1)
        store(to->scale[0], all(scale_of(w, row, 0)));
    else
        for (int group = 0; group < GROUPS; group++)
            to->scale[0][group] = group < groups ? scale_of(w, row, (start + 32 * group) / size) : 0.0f;
}

/* To open is to bring the codes of a piece of a row into the order of `row_piece`. `start` is its first column. */
typedef void opens(const weight *, int64_t, int64_t, row_piece *);
#define OPENS(name, whole_piece, part_of_it)                                                               \
    APART void open_##name(const weight *w, int64_t row, int64_t start, row_piece *to) {                    \
        int64_t left = w->columns - start;                                                                 \
        const uint8_t *at = w->codes + row * row_bytes(w);                                                  \
        int groups = left < PIECE_COLUMNS ? (int)left / 32 : GROUPS;                                       \
        (void)at;                                                                                          \
        if (groups == GROUPS)                                                                              \
            whole_piece;                                                                                   \
        else                                                                                               \
            part_of_it;                                                                                    \
    }
#define OPENS_SMALL(name, kind, size)                                                                      \
    OPENS(name, open_small_blocks(kind, at + start / 32 * (size), GROUPS, to),                             \
          open_small_blocks(kind, at + start / 32 * (size), groups, to))
#define OPENS_LARGE(name, kind, size)                                                                      \
    OPENS(name, open_large_blocks(kind, at + start / 256 * (size), GROUPS, to),                            \
          open_large_blocks(kind, at + start / 256 * (size), groups, to))
#define OPENS_RARE(name, kind)                                                                             \
    OPENS(name, open_rare_blocks(kind, at, start, GROUPS, to), open_rare_blocks(kind, at, start, groups, to))
OPENS(int8, open_bytes(w, row, start, GROUPS, to), open_bytes(w, row, start, groups, to))
OPENS_SMALL(q4_0, Q4_0, 18)
OPENS_SMALL(q4_1, Q4_1, 20)
OPENS_SMALL(q5_0, Q5_0, 22)
OPENS_SMALL(q5_1, Q5_1, 24)
OPENS_SMALL(q8_0, Q8_0, 34)
OPENS_LARGE(q4_k, Q4_K, 144)
OPENS_LARGE(q5_k, Q5_K, 176)
OPENS_LARGE(q6_k, Q6_K, 210)
OPENS_RARE(q2_k, Q2_K)
OPENS_RARE(q3_k, Q3_K)
OPENS_RARE(iq4_nl, IQ4_NL)
OPENS_RARE(iq4_xs, IQ4_XS)

static opens *opens_kind(int kind) {
    switch (kind) {
    case Q4_0: return open_q4_0;
    case Q4_1: return open_q4_1;
    case Q5_0: return open_q5_0;
    case Q5_1: return open_q5_1;
    case Q8_0: return open_q8_0;
    case Q4_K: return open_q4_k;
    case Q5_K: return open_q5_k;
    case Q6_K: return open_q6_k;
    case Q2_K: return open_q2_k;
    case Q3_K: return open_q3_k;
    case IQ4_NL: return open_iq4_nl;
    case IQ4_XS: return open_iq4_xs;
    default: return open_int8;
    }
}

/* ---------------------------------------------------------------- products */

typedef float sums_of_inputs[INPUTS_AT_ONCE][GROUPS];

/* Products of a piece of some rows with one of some inputs, `step` pieces apart; all but pointers and `step` are constants
 * where this is called. */
INLINE void add_products_of(const row_piece *rows, const rounded_piece *inputs, int64_t step, int num_rows, int num,
                            int halves_too, int least_too, sums_of_inputs *sums) {
    for (int lane = 0; lane < GROUPS; lane += LANES_AT_ONCE) {
        for (int half = 0; half <= halves_too; half++) {
            whole own[TILE_ROWS][TILE_INPUTS], input[TILE_INPUTS];
            for (int n = 0; n < num; n++) {
                const rounded_piece *of = inputs + n * step;
                whole codes = load_whole(of->sums[half] + lane);
                if (!halves_too)
                    codes = whole_sum(codes, load_whole(of->sums[1] + lane));
                for (int row = 0; row < num_rows; row++)
                    own[row][n] = less_zeros(codes);
            }
            for (int word = halves_too ? 4 * half : 0; word < (halves_too ? 4 * half + 4 : WORDS); word++) {
                for (int n = 0; n < num; n++)
                    input[n] = in_register(load_whole(inputs[n * step].codes[word][lane]));
                for (int row = 0; row < num_rows; row++) {
                    whole weights = load_whole(rows[row].codes[word][lane]);
                    for (int n = 0; n < num; n++)
                        own[row][n] = dot(own[row][n], weights, input[n]);
                }
            }
            for (int n = 0; n < num; n++) {
                const rounded_piece *of = inputs + n * step;
                fraction scale = load_fraction(of->scale + lane);
                for (int row = 0; row < num_rows; row++) {
                    float *sum = sums[row][n] + lane;
                    fraction scales = fraction_product(load_fraction(rows[row].scale[half] + lane), scale);
                    fraction next = fraction_plus(as_fraction(own[row][n]), scales, load_fraction(sum));
                    for (int part = half; least_too && part < (halves_too ? half + 1 : 2); part++)
                        next = fraction_plus(load_fraction(rows[row].least[half] + lane),
                                             load_fraction(of->totals[part] + lane), next);
                    store_fraction(sum, next);
                }
            }
        }
    }
}

/* Functions of their own: in small ones GCC keeps the sums in registers. */
typedef void add_tile_of(const row_piece *, const rounded_piece *, int64_t, sums_of_inputs *);
#define TILE_OF(kind, num_rows, num, halves_too, least_too)                                                \
    APART void add_##kind##_##num_rows##_##num(const row_piece *rows, const rounded_piece *inputs, int64_t step, \
                                               sums_of_inputs *sums) {                                     \
        add_products_of(rows, inputs, step, num_rows, num, halves_too, least_too, sums);                   \
    }
#define TILES_OF(kind, halves_too, least_too)                                                              \
    TILE_OF(kind, TILE_ROWS, TILE_INPUTS, halves_too, least_too)                                           \
    TILE_OF(kind, TILE_ROWS, 1, halves_too, least_too)                                                     \
    TILE_OF(kind, 1, TILE_INPUTS, halves_too, least_too)                                                   \
    TILE_OF(kind, 1, 1, halves_too, least_too)                                                             \
    static add_tile_of *const tiles_of_##kind[2][2] = {                                                    \
        {add_##kind##_1_1, add_##kind##_1_TILE_INPUTS},                                                    \
        {add_##kind##_TILE_ROWS_1, add_##kind##_TILE_ROWS_TILE_INPUTS},                                    \
    };
TILES_OF(scaled, 0, 0)
TILES_OF(shifted, 0, 1)
TILES_OF(halves, 1, 0)
TILES_OF(shifted_halves, 1, 1)

static add_tile_of *const (*tiles_of(int kind))[2] {
    switch (kind) {
    case Q4_1: case Q5_1: case Q4_K: case Q5_K: return tiles_of_shifted;
    case Q3_K: case Q6_K: return tiles_of_halves;
    case Q2_K: return tiles_of_shifted_halves;
    default: return tiles_of_scaled;
    }
}

/* Memory that is read soon. It is asked for little by little: at once, processors would wait for it, or drop it. */
typedef struct {
    const uint8_t *at, *end;
} ahead;

INLINE void ask_for(ahead *next, int64_t bytes) {
    const uint8_t *stop = next->end - next->at < bytes ? next->end : next->at + bytes;
    for (; next->at < stop; next->at += 64)
        PREFETCH_SECOND(next->at);
}

/* Products of one row, or of TILE_ROWS, with any number of inputs. */
INLINE void add_all_inputs(add_tile_of *const *tiles, const row_piece *rows, const rounded_piece *inputs, int64_t step,
                           int64_t num, sums_of_inputs *sums, ahead *next, int64_t bytes) {
    int64_t n = 0;
    for (; n + TILE_INPUTS <= num; n += TILE_INPUTS) {
        ask_for(next, bytes);
        tiles[1](rows, inputs + n * step, step, (sums_of_inputs *)&(*sums)[n]);
    }
    for (; n < num; n++) {
        ask_for(next, bytes);
        tiles[0](rows, inputs + n * step, step, (sums_of_inputs *)&(*sums)[n]);
    }
}

#if LEVEL > 1
/* The sums of the lanes of TILE_ROWS rows, each in the order of `sum_of`. */
INLINE void store_sums(const sums_of_inputs *sums, int64_t n, float *to) {
    __m128 row[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        const float *lanes = sums[r][n];
        __m128 even = _mm_add_ps(_mm_load_ps(lanes), _mm_load_ps(lanes + 8));
        row[r] = _mm_add_ps(even, _mm_add_ps(_mm_load_ps(lanes + 4), _mm_load_ps(lanes + 12)));
    }
    __m128 first = _mm_add_ps(_mm_unpacklo_ps(row[0], row[1]), _mm_unpackhi_ps(row[0], row[1]));
    __m128 last = _mm_add_ps(_mm_unpacklo_ps(row[2], row[3]), _mm_unpackhi_ps(row[2], row[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm_movelh_ps(first, last), _mm_movehl_ps(last, first)));
}
#else
INLINE void store_sums(const sums_of_inputs *sums, int64_t n, float *to) {
    for (int r = 0; r < TILE_ROWS; r++)
        to[r] = sum_of(load(sums[r][n]));
}
#endif

APART void multiply_some_rows(const weight *w, int64_t row, int64_t num_rows, const rounded_piece *inputs, int64_t num,
                              float *outputs, int64_t stride) {
    add_tile_of *const(*tiles)[2] = tiles_of(w->codes_kind);
    opens *open = opens_kind(w->codes_kind);
    int64_t step = pieces_of(w->columns), r;
    row_piece rows[ROWS_AT_ONCE] ALIGNED;
    float sums[ROWS_AT_ONCE][INPUTS_AT_ONCE][GROUPS] ALIGNED;
    int64_t bytes = row_bytes(w), tiles_of_piece = (num + TILE_INPUTS - 1) / TILE_INPUTS * ((num_rows + 3) / 4);
    int64_t share = PIECE_COLUMNS * num_rows * bytes / w->columns / tiles_of_piece + 63;
    const uint8_t *behind = w->codes + (row + num_rows) * bytes;
    ahead next = {behind, behind};
    for (r = 0; r < num_rows; r++)
        memset(sums[r], 0, (size_t)num * sizeof sums[r][0]);
    for (int64_t at = 0; at < w->columns; at += PIECE_COLUMNS, inputs++) {
        int64_t next_at = at + PIECE_COLUMNS < w->columns ? at + PIECE_COLUMNS : w->columns;
        next.end = behind + next_at * num_rows * bytes / w->columns;
        for (r = 0; r < num_rows; r++)
            open(w, row + r, at, rows + r);
        for (r = 0; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
            add_all_inputs(tiles[1], rows + r, inputs, step, num, sums + r, &next, share);
        for (; r < num_rows; r++)
            add_all_inputs(tiles[0], rows + r, inputs, step, num, sums + r, &next, share);
    }
    for (r = 0; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
        for (int64_t n = 0; n < num; n++)
            store_sums(sums + r, n, outputs + n * stride + row + r);
    for (; r < num_rows; r++)
        for (int64_t n = 0; n < num; n++)
            outputs[n * stride + row + r] = sum_of(load(sums[r][n]));
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end); `stride`: floats of a row of outputs. */
void OF_VERSION(multiply_rounded)(const weight *w, int64_t start, int64_t end, const void *rounded, int64_t num_inputs,
                                float *outputs, int64_t stride) {
    int64_t step = pieces_of(w->columns);
    for (int64_t stop; start < end; start = stop) { /* rows that stay in a cache for all inputs */
        stop = end - start < STRIP_ROWS ? end : start + STRIP_ROWS;
        for (int64_t first = 0; first < num_inputs; first += INPUTS_AT_ONCE) {
            int64_t num = num_inputs - first < INPUTS_AT_ONCE ? num_inputs - first : INPUTS_AT_ONCE;
            const rounded_piece *from = (const rounded_piece *)rounded + first * step;
            int64_t most = num == 1 ? TILE_ROWS : ROWS_AT_ONCE, rows; /* one wants few rows of memory at once */
            for (int64_t row = start; row < stop; row += rows) {
                rows = stop - row < most ? stop - row : most;
                multiply_some_rows(w, row, rows, from, num, outputs + first * stride, stride);
            }
        }
    }
}
