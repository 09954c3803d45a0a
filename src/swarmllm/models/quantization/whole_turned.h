/* The order EIGHTS by TURNED inputs together. A lane belongs to an input. Each of the AT_A_TIME sums of a row, of every
 * AT_A_TIME-th column, is a chain of products; then the chains are added as in `sum_of_sums` and `sum_of_lanes`.
 *
 * Inputs are turned: TURNED of them side by side, and the columns of a chain one after the other, in pieces of columns.
 * Included by whole_eights.h. */
#define TURNED (2 * LANES) /* inputs */
#define LEAST_TURNED 13 /* inputs for which it is faster; measured on Zen 2 */
#define ROWS_OF_TURNED 6 /* sums, inputs and a weight are all in registers */
#define TURNED_PIECE 2048 /* columns of ROWS_OF_TURNED rows in float32 */
#define TURNED_AT_ONCE (1 << 17) /* inputs by columns, as long as these are more than TURNED inputs */
#define PADDED_PIECE (TURNED_PIECE + 16) /* so that rows don't compete for the same places in caches */

typedef struct {
    int64_t row, begin; /* of the piece in `weights` */
    float weights[ROWS_OF_TURNED * PADDED_PIECE];
} wide_piece;

static void widen(const whole *w, int64_t row, int64_t begin, int64_t columns, wide_piece *wide) {
    if (wide->row == row && wide->begin == begin)
        return;
    wide->row = row, wide->begin = begin;
    for (int64_t which = 0; which < ROWS_OF_TURNED; which++) {
        const uint16_t *from = (const uint16_t *)w->weights + (row + which) * w->columns + begin;
        for (int64_t at = 0; at < columns; at += LANES)
            STORE(wide->weights + which * PADDED_PIECE + at, eight_at(from + at));
    }
}

/* `sums` is the number of chains: AT_A_TIME, and LANES for the columns that are left over. */
static void turn_piece(const float *inputs, int64_t num, int64_t distance, int64_t columns, int64_t sums, float *turned) {
    for (int64_t column = 0; column < columns; column += LANES) {
        for (int64_t first = 0; first < TURNED; first += LANES) {
            vec some[LANES];
            for (int64_t input = 0; input < LANES; input++)
                some[input] = first + input < num ? LOAD(inputs + (first + input) * distance + column) : ZERO();
            transpose(some);
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t chain = (column + lane) % sums, place = chain * (columns / sums) + column / sums;
                STORE(turned + place * TURNED + first, some[lane]);
            }
        }
    }
}

static void turn(const float *inputs, int64_t num, int64_t columns, float *turned) {
    int64_t body = columns / AT_A_TIME * AT_A_TIME;
    for (int64_t begin = 0; begin < body; begin += TURNED_PIECE)
        turn_piece(inputs + begin, num, columns, piece_from(begin, body, TURNED_PIECE), AT_A_TIME, turned + begin * TURNED);
    turn_piece(inputs + body, num, columns, columns - body, LANES, turned + body * TURNED);
}

typedef vec some_sums[ROWS_OF_TURNED][2]; /* a chain of each row, for the halves of TURNED inputs */

/* `begins` is a constant: without sums that were there before. */
INLINE void add_chain(const float *weights, int64_t step, int64_t turns, const float *turned, int begins, some_sums to) {
    some_sums sums;
    for (int row = 0; row < ROWS_OF_TURNED; row++)
        for (int half = 0; half < 2; half++)
            sums[row][half] = begins ? ZERO() : to[row][half];
    for (int64_t turn = 0; turn < turns; turn++, weights += step, turned += TURNED) {
        vec first = LOAD(turned), second = LOAD(turned + LANES);
        for (int row = 0; row < ROWS_OF_TURNED; row++) {
            vec weight = ALL(weights[row * PADDED_PIECE]);
            sums[row][0] = FMA(weight, first, sums[row][0]);
            sums[row][1] = FMA(weight, second, sums[row][1]);
        }
    }
    memcpy(to, sums, sizeof sums);
}

/* Of TURNED inputs and one row: of the sums of all lanes, and then of these. */
INLINE vec chains_added(const some_sums chains[AT_A_TIME], int row, int half) {
    vec lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        vec sums[SUMS];
        for (int sum = 0; sum < SUMS; sum++)
            sums[sum] = chains[sum * LANES + lane][row][half];
        lanes[lane] = sum_of_sums(sums);
    }
    return sum_of_sums(lanes);
}

INLINE vec left_added(const some_sums chains[LANES], int row, int half) {
    vec lanes[LANES];
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = chains[lane][row][half];
    return sum_of_sums(lanes);
}

/* ROWS_OF_TURNED rows from `first` on. The rows after them are asked for. */
static void eights_of_turned(const whole *w, const float *bias, int64_t first, wide_piece *wide, const float *turned,
                             int64_t num, uint16_t *outputs) {
    int64_t left = w->columns % AT_A_TIME, body = w->columns - left;
    const char *next = w->weights + (first + ROWS_OF_TURNED) * w->columns * 2;
    some_sums chains[AT_A_TIME], of_left[LANES];
    for (int64_t begin = 0; begin < body; begin += TURNED_PIECE) {
        int64_t turns = piece_from(begin, body, TURNED_PIECE) / AT_A_TIME;
        widen(w, first, begin, turns * AT_A_TIME, wide);
        for (int64_t one = 0; one < AT_A_TIME; one++) {
            const float *inputs = turned + (begin + one * turns) * TURNED;
            ask(next + (begin + one * turns) * ROWS_OF_TURNED * 2, turns * ROWS_OF_TURNED * 2);
            if (begin)
                add_chain(wide->weights + one, AT_A_TIME, turns, inputs, 0, chains[one]);
            else
                add_chain(wide->weights + one, AT_A_TIME, turns, inputs, 1, chains[one]);
        }
    }
    if (left) {
        widen(w, first, body, left, wide);
        for (int64_t one = 0, turns = left / LANES; one < LANES; one++)
            add_chain(wide->weights + one, LANES, turns, turned + (body + one * turns) * TURNED, 1, of_left[one]);
    }
    for (int row = 0; row < ROWS_OF_TURNED; row++) {
        float each[TURNED];
        for (int half = 0; half < 2; half++) {
            vec result = body ? chains_added(chains, row, half) : ZERO();
            STORE(each + half * LANES, ADD(result, left ? left_added(of_left, row, half) : ZERO()));
        }
        for (int64_t input = 0; input < num; input++)
            outputs[input * w->rows + first + row] = as_output(each[input], bias, first + row);
    }
}

/* 0 if there is no memory. */
static int eights_by_turning(const whole *w, const float *bias, int64_t start, int64_t end, const float *inputs, int64_t num,
                             uint16_t *outputs) {
    wide_piece wide;
    int64_t columns = w->columns, at_once = TURNED_AT_ONCE / (TURNED * columns) * TURNED;
    at_once = at_once ? at_once : TURNED;
    at_once = at_once < num ? at_once : (num + TURNED - 1) / TURNED * TURNED;
    float *turned = aligned_alloc(64, (size_t)(at_once * columns) * sizeof *turned); /* too much for small stacks */
    if (!turned)
        return 0;
    for (; num > 0; inputs += at_once * columns, outputs += at_once * w->rows, num -= at_once) {
        int64_t now = num < at_once ? num : at_once;
        for (int64_t input = 0; input < now; input += TURNED)
            turn(inputs + input * columns, now - input < TURNED ? now - input : TURNED, columns, turned + input * columns);
        wide.row = -1;
        for (int64_t row = start; row < end; row += ROWS_OF_TURNED) { /* some rows twice, with the same result */
            int64_t first = row + ROWS_OF_TURNED <= end ? row : end - ROWS_OF_TURNED;
            for (int64_t input = 0; input < now; input += TURNED)
                eights_of_turned(w, bias, first, &wide, turned + input * columns, now - input < TURNED ? now - input : TURNED,
                                 outputs + input * w->rows);
        }
    }
    free(turned);
    return 1;
}
