/* The order IN_TILES of whole.h, which includes this file: oneDNN's in bfloat16 on processors with AMX, by the same
 * instruction. It sums up 32 columns, even and odd ones apart, and adds both sums to those of the columns before in a block;
 * most rows are a single block. 16 rows by 16 inputs take it as long as by one, so the time is that in which weights are
 * read. */
#if LEVEL == 4 && defined(HAS_TILES)
#include "tiles.h"

#define TILE_COLUMNS 32 /* 64 bytes */
/* GCC wants their numbers as such: sums of two tiles of rows by two of inputs are 0 to 3, weights 4 and 5, inputs 6 and 7. */

static void shape_for_pairs(const int64_t num[2]) {
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        int64_t width = tile == 4 || tile == 5 ? TILE_ROWS : num[tile % 2];
        shapes.rows[tile] = width ? TILE_ROWS : 0;
        shapes.bytes[tile] = (uint16_t)(4 * width);
    }
    shape_tiles(&shapes);
}

/* [num, words] -> [words, num]: a word is a pair of columns. */
static void put_side_by_side(const float *inputs, int64_t words, int64_t num, float *to) {
    for (int64_t input = 0; input < num; input += LANES) {
        int64_t some = num - input < LANES ? num - input : LANES;
        for (int64_t word = 0; word < words; word += LANES) {
            vec part[LANES];
            for (int64_t one = 0; one < LANES; one++)
                part[one] = one < some ? LOAD(inputs + (input + one) * words + word) : ZERO();
            transpose(part);
            for (int64_t step = 0; step < LANES; step++)
                _mm512_mask_storeu_ps(to + (word + step) * num + input, (__mmask16)((1u << some) - 1), part[step]);
        }
    }
}

typedef float tile_sums[2 * TILE_ROWS][2 * TILE_ROWS];

/* Add the sums of some columns to those of the columns before, and begin with 0 again. */
INLINE void settle_tiles(int rows, int tiles, int is_first, tile_sums total) {
    tile_sums ALIGNED sums;
    _tile_stored(0, sums, sizeof *sums);
    _tile_zero(0);
    _tile_stored(2, sums[TILE_ROWS], sizeof *sums);
    _tile_zero(2);
    if (tiles == 2) {
        _tile_stored(1, sums[0] + TILE_ROWS, sizeof *sums);
        _tile_zero(1);
        _tile_stored(3, sums[TILE_ROWS] + TILE_ROWS, sizeof *sums);
        _tile_zero(3);
    }
    for (int row = 0; row < rows * TILE_ROWS; row++)
        for (int at = 0; at < tiles * TILE_ROWS; at += LANES) /* 0 + -0 would be another 0 */
            STORE(total[row] + at, is_first ? LOAD(sums[row] + at) : ADD(LOAD(total[row] + at), LOAD(sums[row] + at)));
}

/* Of `rows` tiles of rows from `first` on; as `tiles` of inputs, it is a constant where this is called. */
INLINE void tiles_of(const whole *w, const float *bias, int64_t first, int rows, const float *inputs, int64_t num,
                     int tiles, char *outputs) {
    int64_t bytes = 2 * w->columns, left = 2 * w->block;
    const char *from = w->weights + first * bytes, *next = from + rows * TILE_ROWS * bytes;
    tile_sums ALIGNED total;
    int is_first = 1;
    _tile_zero(0);
    _tile_zero(2);
    if (tiles == 2) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (int64_t at = 0; at < bytes; at += 2 * TILE_COLUMNS, inputs += TILE_COLUMNS / 2 * num) {
        _tile_loadd(6, inputs, 4 * num);
        _tile_loadd(4, from + at, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (rows == 2) {
            _tile_loadd(5, from + TILE_ROWS * bytes + at, bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (tiles == 2) {
            _tile_loadd(7, inputs + TILE_ROWS, 4 * num);
            _tile_dpbf16ps(1, 4, 7);
            if (rows == 2)
                _tile_dpbf16ps(3, 5, 7);
        }
        ask(next + at * rows * TILE_ROWS, rows * TILE_ROWS * 2 * TILE_COLUMNS);
        left -= 2 * TILE_COLUMNS;
        if (left == 0 || at + 2 * TILE_COLUMNS == bytes) {
            settle_tiles(rows, tiles, is_first, total);
            left = 2 * w->block;
            is_first = 0;
        }
    }
    for (int which = 0; which < rows; which++)
        for (int64_t input = 0; input < num; input += LANES) {
            vec part[LANES], added = bias ? LOAD(bias + first + which * TILE_ROWS) : ZERO();
            for (int row = 0; row < LANES; row++)
                part[row] = LOAD(total[which * TILE_ROWS + row] + input);
            transpose(part);
            for (int one = 0; one < LANES && input + one < num; one++)
                TO_BFLOAT16(outputs + ((input + one) * w->rows + first + which * TILE_ROWS) * 2,
                            bias ? ADD(part[one], added) : part[one]);
        }
}

/* Of at most MOST_IN_TILES inputs. */
static void in_tiles(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs, int64_t num,
                     char *outputs) {
    int64_t of_tiles[2] = {num < TILE_ROWS ? num : TILE_ROWS, num < TILE_ROWS ? 0 : num - TILE_ROWS}, words = w->columns / 2, left;
    float ALIGNED side_by_side[num * words];
    put_side_by_side((const float *)inputs, words, num, side_by_side);
    shape_for_pairs(of_tiles);
    for (int64_t row = start; (left = end - row) > 0; row += left < 2 * TILE_ROWS ? TILE_ROWS : 2 * TILE_ROWS) {
        int64_t first = left < TILE_ROWS ? end - TILE_ROWS : row; /* some rows twice, with the same result */
        if (num > TILE_ROWS && left >= 2 * TILE_ROWS)
            tiles_of(w, bias, first, 2, side_by_side, num, 2, outputs);
        else if (num > TILE_ROWS)
            tiles_of(w, bias, first, 1, side_by_side, num, 2, outputs);
        else if (left >= 2 * TILE_ROWS)
            tiles_of(w, bias, first, 2, side_by_side, num, 1, outputs);
        else
            tiles_of(w, bias, first, 1, side_by_side, num, 1, outputs);
    }
    _tile_release();
}
#elif LEVEL == 4
INLINE void in_tiles(const whole *w, const float *bias, int64_t start, int64_t end, const char *inputs, int64_t num,
                     char *outputs) { /* whole.c has no such order */
    (void)w, (void)bias, (void)start, (void)end, (void)inputs, (void)num, (void)outputs;
}
#endif
