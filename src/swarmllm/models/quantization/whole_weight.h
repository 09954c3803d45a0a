/* Weights as they are, as whole.py describes them, and their products. */
#ifndef WHOLE_WEIGHT_H
#define WHOLE_WEIGHT_H
#include <stdint.h>

/* Orders of additions, as whole.h describes them. */
enum { CHAINED, FOURS, FOURS_LATE, EIGHTS, TWOS, IN_LANES, IN_LANES_LATE, IN_PAIRS, IN_TILES };
#define MOST_IN_TILES 32 /* inputs */

typedef struct {
    const char *weights; /* [rows, columns] */
    int64_t rows, columns, is_bfloat16, order, block;
} whole;

static inline int takes_floats(const whole *w) { return !w->is_bfloat16 || w->order == EIGHTS || w->order == IN_PAIRS; }

/* Rows [start, end), at least 16, of the outputs `[num, rows]` of inputs `[num, columns]`, of the weights' type; for
 * EIGHTS and IN_PAIRS, inputs are in float32. `bias` [rows] may be NULL. */
void swarmllm_multiply_whole(int64_t level, const whole *w, const float *bias, int64_t start, int64_t end,
                             const char *inputs, int64_t num, char *outputs);

/* Attention of one new position: heads of queries that share keys. All in bfloat16 but for `log_sums`. */
#define MOST_HEAD 256 /* numbers */
typedef struct {
    const uint16_t *queries, *keys, *values; /* [num, size], [count, size], [count, size] */
    int64_t num, count, size;                /* a multiple of 16, at most MOST_HEAD */
    float scale;
    uint16_t *outputs; /* [num, size] */
    float *log_sums;   /* [num], logarithms of the sums of exponentials; or NULL */
    const uint16_t *next; /* keys that are read after these; or NULL */
} attended;

void swarmllm_attend_at_level(int64_t level, const attended *to);
#endif
