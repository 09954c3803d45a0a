/* Products with weights of few bits, for a few inputs at a time: decode some codes of a row, multiply, go on.
 *
 * Loaded by kernels.py through ctypes; knows neither Python nor torch. A row is decoded group by group into floats that
 * stay in the first cache, exactly as models/quantization/codes.py does it, and multiplied with each input in an order
 * that doesn't depend on how many there are. GCC makes a version for each kind of x86 processor and chooses at run time.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define VECTORS
#else
#define FOR_EACH_PROCESSOR
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline)) /* into the version of each processor */
#else
#define INLINE static inline
#endif

#define LANES 32   /* sums that grow side by side */
#define TOGETHER 4 /* inputs that a piece is multiplied with at once */
#define PIECE 1024 /* columns that are decoded at a time, at most */

#include "bit_planes.h"
#include "gguf_blocks.h"

enum codes { PAIRS = 0, INT8 = 1, FLOAT8 = 2, PLANES = 3, BYTES = 4 }; /* or one of `gguf` */
enum numbers { FLOAT32 = 0, BFLOAT16 = 1, SCALE_FLOAT8 = 2, FLOAT16 = 3, UINT8 = 4 };

/* What kernels.py fills in, in this order. */
typedef struct {
    int64_t columns, groups;     /* of a row; for GGUF its bytes instead of groups */
    int32_t codes_kind, scale_kind;
    int32_t divides;             /* whether `factor` divides the scale */
    int32_t group_bytes;         /* of the codes of a group of PLANES */
    int32_t zero_kind;
    const uint8_t *codes;        /* [rows, bytes of a row] */
    const void *scale;           /* [rows, groups]; GGUF's are among the codes */
    const void *zero;            /* [rows, groups] or NULL */
    const float *factor;         /* [rows] or NULL: of a row's scales */
    const float *values;         /* [16]: what the codes of PAIRS stand for */
    const void *least;           /* [rows, groups] or NULL: what is added at last, so code 0 of PLANES; like the scales */
} weight;

/* By which kernels.py sees whether it was written for what has been compiled. */
int64_t swarmllm_weight_bytes(void) {
    return sizeof(weight);
}

/* float8_e4m3fn; its two codes that are no numbers don't stand in weights. */
INLINE float float8(uint8_t code) {
    uint32_t magnitude = code & 0x7f, bits = (magnitude << 20) + (120u << 23);
    float normal, tiny = (float)magnitude * 0x1p-9f;
    memcpy(&normal, &bits, sizeof normal);
    float value = magnitude < 8 ? tiny : normal;
    return code & 0x80 ? -value : value;
}

/* Two codes in a byte, the first of two below. */
INLINE void decode_pairs(const float *values, const uint8_t *codes, int64_t count, float *out) {
    int64_t i = 0;
#ifdef VECTORS
    typedef float floats __attribute__((vector_size(32)));
    typedef uint32_t words __attribute__((vector_size(32)));
    const words shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    floats low, high, found;
    memcpy(&low, values, sizeof low);
    memcpy(&high, values + 8, sizeof high);
    for (; i + 8 <= count; i += 8) {
        uint32_t word;
        memcpy(&word, codes + i / 2, sizeof word);
        found = __builtin_shuffle(low, high, ((words){} + word) >> shifts & 15);
        memcpy(out + i, &found, sizeof found);
    }
#endif
    for (; i < count; i++)
        out[i] = values[codes[i / 2] >> 4 * (i % 2) & 15];
}

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

INLINE void planes_of(const weight *w, int64_t row, int64_t group, floats *values) {
    int64_t at = row * w->groups + group;
    open_group(w->codes + at * w->group_bytes, w->group_bytes, number(w->scale, w->scale_kind, at),
               number(w->least, w->scale_kind, at), values);
}

/* Columns [start, end) of a row. All codes first: what has just been written isn't read in wider pieces at once. */
INLINE void decode(const weight *w, int64_t row, int64_t start, int64_t end, float *out) {
    int64_t count = end - start, size = w->columns / w->groups;
    if (w->codes_kind >= GGUF) {
        decode_gguf(w->codes_kind, w->codes + row * w->groups, start, count, out);
        return;
    }
    if (w->codes_kind == PLANES) {
        floats values[8];
        for (int64_t group = start / size; group < end / size; group++, out += size) {
            planes_of(w, row, group, values);
            for (int i = 0; i < 8; i++)
                memcpy(out + 8 * i, values + i, sizeof *values); /* all at once would go through memory twice */
        }
        return;
    }
    const uint8_t *codes = w->codes + (w->codes_kind == PAIRS ? (row * w->columns + start) / 2 : row * w->columns + start);
    if (w->codes_kind == PAIRS) {
        decode_pairs(w->values, codes, count, out);
    } else if (w->codes_kind == INT8) {
        for (int64_t i = 0; i < count; i++)
            out[i] = (float)(int8_t)codes[i];
    } else if (w->codes_kind == BYTES) {
        for (int64_t i = 0; i < count; i++)
            out[i] = codes[i];
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = float8(codes[i]);
    }
    for (int64_t group = start / size; start < end; group++) {
        int64_t at = row * w->groups + group, stop = (group + 1) * size < end ? (group + 1) * size : end;
        float scale = scale_of(w, row, group), zero = w->zero ? number(w->zero, w->zero_kind, at) : 0.0f;
        if (w->least) { /* the product is exact, so it rounds but once: see bit_planes.h */
            float least = number(w->least, w->scale_kind, at);
            for (; start < stop; start++, out++)
                *out = *out * scale + least;
            continue;
        }
        for (; start < stop; start++, out++)
            *out = (*out - zero) * scale;
    }
}

FOR_EACH_PROCESSOR
void swarmllm_dequantize(const weight *w, int64_t start, int64_t end, float *out) {
    for (int64_t row = start; row < end; row++)
        decode(w, row, 0, w->columns, out + (row - start) * w->columns);
}

INLINE float sum_of(float *sums) {
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] += sums[lane + width];
    return sums[0];
}

/* Products of one piece of a row with `num` inputs, which is a constant where this is called. */
INLINE void dots(const float *piece, int64_t count, const float *inputs, int64_t columns, int num, float *products) {
    float sums[TOGETHER][LANES] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int n = 0; n < num; n++)
            for (int lane = 0; lane < LANES; lane++)
                sums[n][lane] += piece[i + lane] * inputs[n * columns + i + lane];
    for (int n = 0; n < num; n++) {
        for (int64_t rest = i; rest < count; rest++)
            sums[n][rest - i] += piece[rest] * inputs[n * columns + rest];
        products[n] = sum_of(sums[n]);
    }
}

/* The same with one input, in the same order, of columns [start, end) of PLANES: they needn't be written first. */
INLINE float dot_of_planes(const weight *w, int64_t row, int64_t start, int64_t end, const float *input) {
    floats sums[4] = {{0}}, values[8], factors; /* LANES sums in all */
    float lanes[LANES];
    for (int64_t group = start / 64; group < end / 64; group++) {
        planes_of(w, row, group, values);
        for (int i = 0; i < 8; i++) {
            memcpy(&factors, input + group * 64 + 8 * i, sizeof factors);
            sums[i % 4] += values[i] * factors;
        }
    }
    memcpy(lanes, sums, sizeof sums);
    return sum_of(lanes);
}

/* outputs[n, row] = inputs[n, :] . weight[row, :] for the rows [start, end); `stride`: floats of a row of outputs. */
FOR_EACH_PROCESSOR
void swarmllm_multiply(const weight *w, int64_t start, int64_t end, const float *inputs, int64_t num_inputs,
                       float *outputs, int64_t stride) {
    float piece[PIECE], products[TOGETHER];
    for (int64_t row = start; row < end; row++) {
        for (int64_t at = 0; at < w->columns; at += PIECE) {
            int64_t count = w->columns - at < PIECE ? w->columns - at : PIECE;
            if (w->codes_kind == PLANES && num_inputs == 1) {
                products[0] = dot_of_planes(w, row, at, at + count, inputs);
                outputs[row] = at ? outputs[row] + products[0] : products[0];
                continue;
            }
            decode(w, row, at, at + count, piece);
            for (int64_t n = 0; n < num_inputs;) {
                int together = num_inputs - n < TOGETHER ? 1 : TOGETHER;
                if (together == TOGETHER)
                    dots(piece, count, inputs + n * w->columns + at, w->columns, TOGETHER, products);
                else
                    dots(piece, count, inputs + n * w->columns + at, w->columns, 1, products);
                for (int i = 0; i < together; i++, n++) {
                    float *output = outputs + n * stride + row;
                    *output = at ? *output + products[i] : products[i];
                }
            }
        }
    }
}
