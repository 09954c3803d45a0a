/* Weights as they are, as whole.py describes them, and their products. */
#ifndef WHOLE_WEIGHT_H
#define WHOLE_WEIGHT_H
#include <stdint.h>

/* Orders of additions, as whole.h describes them. */
enum { CHAINED, FOURS, FOURS_LATE, EIGHTS, TWOS, IN_LANES, IN_LANES_LATE, IN_PAIRS };

typedef struct {
    const char *weights; /* [rows, columns] */
    int64_t rows, columns, is_bfloat16, order, block;
} whole;

static inline int takes_floats(const whole *w) { return !w->is_bfloat16 || w->order == EIGHTS || w->order == IN_PAIRS; }

/* Rows [start, end), at least 16, of the outputs `[num, rows]` of inputs `[num, columns]`, of the weights' type; for
 * EIGHTS and IN_PAIRS, inputs are in float32. `bias` [rows] may be NULL. */
void swarmllm_multiply_whole(int64_t level, const whole *w, const float *bias, int64_t start, int64_t end,
                             const char *inputs, int64_t num, char *outputs);
#endif
