/* The operations of a step and what it runs on, as line.py fills them in. Included after weight.h. */
#include "whole_weight.h"

#define DIMS 4

enum kinds {
    COPY, ADD, MULTIPLY, DIVIDE, LARGEST, SMALLEST, NEGATE, ABSOLUTE, ROOT, INVERSE_ROOT, EXPONENTIAL, SIGMOID, SILU, GELU,
    GELU_TANH, TANH, COSINE, SINE, SUM, LAYER_NORM, PRODUCT, APPEND_KEYS, APPEND_VALUES, ATTEND,
    ATTEND_AS_TORCH, /* with its very bits: whole_attention.h */
    CALL /* of torch, between parts of a line; or a product with weights as they are */
};

/* Numbers in each row's arena, or the same ones for all rows. */
typedef struct {
    const float *fixed; /* or NULL */
    int64_t offset;
    int64_t strides[DIMS];
} place;

typedef struct {
    int32_t kind;
    int32_t rounds; /* the result to bfloat16 */
    int64_t block;  /* whose keys and values */
    int64_t window; /* positions that are seen; 0: all */
    int64_t sizes[DIMS];
    place out, one, other;
    const weight *matrix;
    const float *bias;
    float number; /* see Operation.number in step.py */
} instruction;

/* A row's keys and values in a block, `[heads, capacity, head]` each, and the place of the new position. */
typedef struct {
    void *keys, *values;
    int64_t key_capacity, value_capacity, position;
} stored;

/* What a CALL multiplies by. */
typedef struct {
    const whole *weight;
    const float *bias; /* or NULL */
} whole_product;

typedef struct {
    const instruction *line;
    int64_t preamble;     /* the first ones run in any case, those of [start, end) if they are of the blocks */
    int64_t start, end;
    int64_t num_rows, first_block, num_blocks, hidden_size; /* of the run */
    int64_t kept_kind;    /* of keys, values, hidden states: FLOAT32 or BFLOAT16 */
    int64_t arena_floats; /* of a row */
    int64_t hidden_at, output_at, position_at; /* in the arena; position_at is -1 if the line takes no position */
    float *arena, *inputs, *scores, *queries; /* the last two of each thread */
    const stored *stored;         /* [rows, blocks] */
    const int64_t *positions; /* [rows] */
    const void *hidden;       /* [rows, hidden_size] */
    void *outputs;
    const whole_product *wholes; /* of each instruction, if it is a CALL that C computes for so many rows */
    void *products;              /* [rows, largest output]: where these, and products by tiles, leave their results */
    int64_t num_threads, scores_floats; /* at most; of a thread */
    /* What threads share, only through atomic operations: see help() in step.h. */
    const instruction *shared;
    uint64_t parts, done;
    int64_t ended;
    int64_t in_tiles; /* whether the inputs of the product are */
} step;
