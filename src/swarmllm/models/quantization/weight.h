/* A packed matrix, as kernels.py describes it. */
#include <stdint.h>

enum codes { PAIRS = 0, INT8 = 1, FLOAT8 = 2, PLANES = 3, BYTES = 4 }; /* or one of `gguf` */
enum gguf { GGUF = 64, Q4_0 = 66, Q4_1, Q5_0 = 70, Q5_1, Q8_0, Q2_K = 74, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 84, IQ4_XS = 87 };
enum numbers { FLOAT32 = 0, BFLOAT16 = 1, SCALE_FLOAT8 = 2, FLOAT16 = 3, UINT8 = 4 };

/* What kernels.py fills in, in this order. */
typedef struct {
    int64_t columns, groups;     /* of a row; for GGUF its bytes instead of groups */
    int32_t codes_kind, scale_kind;
    int32_t divides;             /* whether `factor` divides the scale */
    int32_t group_bytes;         /* of the codes of a group of PLANES */
    int32_t zero_kind;
    int32_t rounds_inputs;       /* whether steps (step.h) and strips.h multiply by inputs of 8 bits */
    int32_t in_strips;           /* 0, or the version of strips.h for codes in strips */
    int32_t asks_far;            /* whether strips.h asks for memory far ahead even if there is little to compute */
    const uint8_t *codes;        /* [rows, bytes of a row], or as many bytes in strips */
    const void *scale;           /* [rows, groups]; GGUF's are among the codes */
    const void *zero;            /* [rows, groups] or NULL */
    const float *factor;         /* [rows] or NULL: of a row's scales */
    const float *values;         /* [16]: what the codes of PAIRS stand for */
    const void *least;           /* [rows, groups] or NULL: what is added at last, so code 0 of PLANES; like the scales */
} weight;

INLINE float number(const void *numbers, int32_t kind, int64_t at) {
    float value;
    if (kind == FLOAT32) {
        value = ((const float *)numbers)[at];
    } else if (kind == BFLOAT16) {
        uint32_t bits = (uint32_t)((const uint16_t *)numbers)[at] << 16;
        memcpy(&value, &bits, sizeof value);
    } else if (kind == FLOAT16) { /* the bits of a float whose exponent is 112 too small; no infinities stand here */
        uint32_t half = ((const uint16_t *)numbers)[at], bits = (half & 0x7fff) << 13;
        memcpy(&value, &bits, sizeof value);
        value *= half & 0x8000 ? -0x1p112f : 0x1p112f;
    } else if (kind == UINT8) {
        value = ((const uint8_t *)numbers)[at];
    } else {
        value = float8(((const uint8_t *)numbers)[at]);
    }
    return value;
}

INLINE float scale_of(const weight *w, int64_t row, int64_t group) {
    float scale = number(w->scale, w->scale_kind, row * w->groups + group);
    if (w->factor)
        scale = w->divides ? scale / w->factor[row] : scale * w->factor[row];
    return scale;
}

INLINE int64_t row_bytes(const weight *w) {
    return w->codes_kind >= GGUF       ? w->groups
           : w->codes_kind == PLANES ? w->groups * w->group_bytes
           : w->codes_kind == PAIRS  ? w->columns / 2
                                     : w->columns;
}

/* Products with inputs of 8 bits, of int8_kernels.c. */
int64_t swarmllm_int8_version(int64_t level);
int64_t swarmllm_rounded_bytes(int64_t columns);
void swarmllm_round_inputs(int64_t version, const float *inputs, int64_t num, int64_t columns, void *rounded);
void swarmllm_multiply_rounded(int64_t version, const weight *w, int64_t start, int64_t end, const void *rounded,
                               int64_t num_inputs, float *outputs, int64_t stride);

/* Weights in strips, of strips.c and strips.h. */
#define SIDE 16    /* rows of a strip */
#define BY_TILES 5 /* the version of strips that multiplies many inputs by tiles */
#define LEAST_BY_TILES 17 /* inputs; up to 16 tokens of a session have the bits of single ones */
void swarmllm_arrange(int64_t kind, int64_t back, const uint8_t *from, int64_t strips, int64_t row_bytes, uint8_t *to);
void swarmllm_prepare_inputs(const weight *w, const float *inputs, int64_t num, void *made);
void swarmllm_multiply_strips(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, float *outputs,
                              int64_t stride);
void swarmllm_put_in_tiles(const uint16_t *inputs, int64_t num, int64_t columns, void *made);
void swarmllm_multiply_tiles(const weight *w, int64_t start, int64_t end, const void *inputs, int64_t num, uint16_t *outputs,
                             int64_t stride);
