/* Products of strips with many inputs in bfloat16, on processors with AMX; strips.h includes this file.
 *
 * Some columns of two strips are decoded to bfloat16, as tiles, and multiplied by all inputs. The results are those of torch
 * with decoded rows: an instruction sums up even and odd columns of 32 apart, and adds both to what came before. Only codes
 * of whole rows are scaled afterwards, in float32. So the time of decoding doesn't grow with the inputs, and what is decoded
 * never leaves the first cache.
 */
#if LEVEL == 4 && defined(HAS_TILES)
#include "tiles.h"

#define COLUMNS_DECODED 256 /* of OPENED_ROWS rows: 16 KB */
#define GROUPS_DECODED (COLUMNS_DECODED / GROUP)
#define INPUTS_OF_TILES 256 /* whose columns, at 4096 1 MB with sums, stay in the second cache */

typedef uint16_t tile[TILE_ROWS][GROUP]; /* of inputs, or pairs of columns of 16 rows: 16 pairs */

/* Number `byte` of each four signed bytes, as the highest byte of a whole number: times 2^24. */
INLINE part highest(whole codes, int byte) {
    const int none = -128; /* makes 0 */
    __m128i four = _mm_setr_epi8(none, none, none, byte, none, none, none, 4 + byte, none, none, none, 8 + byte, none, none,
                                 none, 12 + byte);
    return floats_of(_mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(four)));
}

/* A group of a strip: pairs of columns of each row. */
INLINE void decode_group(int kind, const opened *from, int strip, tile *to) {
    const __m512i mixed = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                            0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    int halves = form_of(kind) == HALVES ? 2 : 1;
    whole zero = WIDE(set1_epi8)((char)zero_of(kind));
    part least = form_of(kind) == LEAST ? load_part(from->least[strip]) : all_of(0.0f);
    for (int half = 0; half < halves; half++) {
        part scale = load_part(from->scale[half][strip]) * all_of(0x1p-24f);
        EACH(k, WORDS / halves) {
            int word = WORDS / halves * half + k;
            whole codes = WIDE(sub_epi8)(words_at(from->codes[word][strip]), zero);
            EACH(pair, 2) {
                part first = plus_parts(highest(codes, 2 * pair), scale, least);
                part second = plus_parts(highest(codes, 2 * pair + 1), scale, least);
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
                _mm512_store_si512((*to)[2 * word + pair], _mm512_permutexvar_epi16(mixed, both));
            }
        }
    }
}

/* Some columns of two strips. */
static void decode_strips(const weight *w, const uint8_t *strips, int64_t strip_bytes, int64_t bytes, int64_t groups,
                          tile to[][MOST_PARTS]) {
    opened ALIGNED room[GROUPS_DECODED];
    for (int strip = 0; strip < MOST_PARTS; strip++)
        open_strip(w->codes_kind, strips + strip * strip_bytes, strips + strip * strip_bytes + bytes, room, strip);
    for (int64_t group = 0; group < groups; group++)
        for (int strip = 0; strip < MOST_PARTS; strip++)
            decode_group(w->codes_kind, room + group, strip, &to[group][strip]);
}

INLINE int64_t some_of(int64_t num) { return num < INPUTS_OF_TILES ? num : INPUTS_OF_TILES; }
INLINE int64_t tiles_of(int64_t num) { return (num + TILE_ROWS - 1) / TILE_ROWS; }

/* Inputs `[num, columns]` in bfloat16 as tiles: INPUTS_OF_TILES at a time, `[groups, tiles]`, filled up with zeros. */
void swarmllm_put_in_tiles(const uint16_t *inputs, int64_t num, int64_t columns, void *made) {
    tile *to = made;
    for (int64_t some = some_of(num); num > 0; inputs += some * columns, num -= some, some = some_of(num))
        for (int64_t group = 0; group < columns / GROUP; group++, to += tiles_of(some))
            for (int64_t n = 0; n < tiles_of(some) * TILE_ROWS; n++)
                if (n < some)
                    memcpy(to[n / TILE_ROWS][n % TILE_ROWS], inputs + n * columns + group * GROUP, sizeof **to);
                else
                    memset(to[n / TILE_ROWS][n % TILE_ROWS], 0, sizeof **to);
}

/* Add the products of two strips by two tiles of inputs, or by one. Tiles 0 to 3 are sums. */
INLINE void add_tiles(int two, const tile (*weights)[MOST_PARTS], int64_t groups, const tile *inputs, int64_t num_tiles,
                      int is_first, float (*sums)[OPENED_ROWS]) {
    const int64_t stride = sizeof *sums;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (!is_first) {
        _tile_loadd(0, sums[0], stride);
        _tile_loadd(1, sums[0] + SIDE, stride);
        if (two) {
            _tile_loadd(2, sums[TILE_ROWS], stride);
            _tile_loadd(3, sums[TILE_ROWS] + SIDE, stride);
        }
    }
    for (int64_t group = 0; group < groups; group++, inputs += num_tiles) {
        _tile_loadd(4, inputs[0], sizeof **inputs);
        _tile_loadd(6, weights[group][0], sizeof **inputs);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights[group][1], sizeof **inputs);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, inputs[1], sizeof **inputs);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], stride);
    _tile_stored(1, sums[0] + SIDE, stride);
    if (two) {
        _tile_stored(2, sums[TILE_ROWS], stride);
        _tile_stored(3, sums[TILE_ROWS] + SIDE, stride);
    }
}

/* Of at most INPUTS_OF_TILES inputs. */
static void multiply_some(const weight *w, int64_t start, int64_t end, const tile *inputs, int64_t num, uint16_t *outputs,
                          int64_t stride) {
    int64_t strip_bytes = SIDE * row_bytes(w), num_tiles = tiles_of(num), columns;
    tile ALIGNED weights[GROUPS_DECODED][MOST_PARTS];
    float ALIGNED sums[INPUTS_OF_TILES][OPENED_ROWS];
    for (int64_t row = start; row < end; row += OPENED_ROWS) {
        int64_t first = row + OPENED_ROWS <= end ? row : end - OPENED_ROWS; /* a strip twice, with the same result */
        const uint8_t *strips = w->codes + first / SIDE * strip_bytes;
        for (int64_t column = 0; column < w->columns; column += columns) {
            columns = w->columns - column < COLUMNS_DECODED ? w->columns - column : COLUMNS_DECODED;
            int64_t bytes = strip_bytes * columns / w->columns, groups = columns / GROUP;
            decode_strips(w, strips + strip_bytes * column / w->columns, strip_bytes, bytes, groups, weights);
            WRITTEN();
            for (int64_t at = 0; at < num_tiles; at += 2) {
                const tile *some = inputs + column / GROUP * num_tiles + at;
                if (at + 1 < num_tiles)
                    add_tiles(1, weights, groups, some, num_tiles, column == 0, sums + at * TILE_ROWS);
                else
                    add_tiles(0, weights, groups, some, num_tiles, column == 0, sums + at * TILE_ROWS);
            }
        }
        for (int strip = 0; strip < MOST_PARTS; strip++) {
            float scales[SIDE];
            for (int r = 0; r < SIDE; r++)
                scales[r] = w->codes_kind == INT8 ? scale_of(w, first + SIDE * strip + r, 0) : 1.0f;
            for (int64_t n = 0; n < num; n++) {
                part sum = load_part(sums[n] + SIDE * strip) * load_part(scales);
                __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
                _mm256_storeu_si256((__m256i *)(outputs + n * stride + first + SIDE * strip), rounded);
            }
        }
    }
}

/* outputs[n, row] = inputs[n, :] . weight[row, :], of inputs that have been put in tiles, for the rows [start, end), multiples
 * of SIDE, of at least OPENED_ROWS. */
void swarmllm_multiply_tiles(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num,
                                uint16_t *outputs, int64_t stride) {
    tile_shapes shapes = {.palette = 1};
    for (int one = 0; one < 8; one++) {
        shapes.rows[one] = TILE_ROWS;
        shapes.bytes[one] = 2 * GROUP;
    }
    shape_tiles(&shapes);
    for (int64_t n = 0; n < num; n += INPUTS_OF_TILES)
        multiply_some(w, start, end, (const tile *)inputs + tiles_of(n) * w->columns / GROUP, some_of(num - n),
                      outputs + n * stride, stride);
    _tile_release();
}
#endif
