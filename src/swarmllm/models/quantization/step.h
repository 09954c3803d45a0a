/* A decode step as a straight line of operations, which models/span/traced_step.py has recorded. Included after products.h.
 *
 * A line is for one new position. It runs for some rows at a time: new positions of any sessions. Each row has an arena of
 * its own, where all values are floats. An operation rounds its result if the model keeps it in bfloat16, as torch does.
 * Only products compute several rows at once, and they give a row the same numbers whatever the other rows are: so a row's
 * result depends on that row alone.
 *
 * Nothing is checked here. Places in the arena come from the recording (step.py), and no number in it is ever an index. The
 * places of keys and values come from the session's cache (SpanCache.extend), which has made room for them. A client's
 * position ids become floats, so they may be any numbers.
 */
#include <math.h>
#include <sched.h>

#include "step_line.h"

INLINE vec bfloats_at(const uint16_t *from) {
#if LEVEL == 4
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif LEVEL == 3
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8)));
    return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
#else
    uint32_t bits[WIDTH];
    vec made;
    for (int i = 0; i < WIDTH; i++)
        bits[i] = (uint32_t)from[i] << 16;
    memcpy(&made, bits, sizeof made);
    return made;
#endif
}

INLINE float float_of(uint16_t bfloat) {
    uint32_t bits = (uint32_t)bfloat << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t rounded_bits(float value) { /* to the nearest bfloat16, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits + 0x7fff + (bits >> 16 & 1);
}

INLINE float rounded(float value) {
    uint32_t bits = rounded_bits(value) & 0xffff0000u;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* e^x by its series around the nearest power of two; without calls, so that loops become vectors. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f, power = shifted - 12582912.0f; /* the nearest whole number */
    float rest = x - power * 0.693359375f + power * 2.12194440e-4f, value;
    float series = 1.0f / 5040;
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + (127u << 23);
    memcpy(&value, &bits, sizeof value);
    return series * value;
}

/* e^x as Sleef's vectors compute it (`expf` with an error of 1.0 units), which torch takes in `silu` and `sigmoid`: so these
 * have torch's bits. */
INLINE float exponential_of_sleef(float x) {
#if LEVEL >= 3
    float power = rintf(x * 1.44269504f), rest = fmaf(power, -0.693145752f, x), half, other_half;
    rest = fmaf(power, -1.42860677e-06f, rest);
    float series = fmaf(0.000198527618f, rest, 0.00139304355f);
    series = fmaf(series, rest, 0.00833336078f);
    series = fmaf(series, rest, 0.0416664854f);
    series = fmaf(series, rest, 0.166666672f);
    series = fmaf(series, rest, 0.5f);
    series = fmaf(rest * rest, series, rest) + 1.0f;
    float near = power > 300.0f ? 300.0f : power < -300.0f ? -300.0f : power == power ? power : 0.0f;
    int32_t whole = (int32_t)near, first = whole >> 1;
    uint32_t bits = (uint32_t)(first + 127) << 23, other_bits = (uint32_t)(whole - first + 127) << 23;
    memcpy(&half, &bits, sizeof half);
    memcpy(&other_half, &other_bits, sizeof other_half);
    series = series * half * other_half;
    return x < -104.0f ? 0.0f : x > 100.0f ? INFINITY : series;
#else
    return exponential(x); /* fused products would be calls there */
#endif
}

INLINE float logistic(float x) { return 1.0f / (1.0f + exponential_of_sleef(-x)); }

/* ------------------------------------------------------------------ one number from one or two others */

/* ivdep: no number depends on an earlier one of the loop. In place, each is read before it is written. */
#define EACH(value)                                                                                                    \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                                             \
        float x = a[i * sa], y = b[i * sb];                                                                            \
        (void)x, (void)y;                                                                                              \
        o[i * so] = value;                                                                                             \
    }
/* A loop for numbers side by side, one for the same second number for all, and one for any strides. GCC makes vectors of
 * the first two. */
#define POINTWISE(name, value)                                                                                         \
    APART void each_##name(const instruction *is, float *o, const float *a, const float *b) {                          \
        const int64_t n = is->sizes[DIMS - 1];                                                                         \
        int64_t so = is->out.strides[DIMS - 1], sa = is->one.strides[DIMS - 1], sb = is->other.strides[DIMS - 1];      \
        const float number = is->number;                                                                               \
        (void)number;                                                                                                  \
        if (so == 1 && sa == 1 && sb == 1) {                                                                           \
            so = sa = sb = 1;                                                                                          \
            EACH(value)                                                                                                \
        } else if (so == 1 && sa == 1 && sb == 0) {                                                                    \
            so = sa = 1;                                                                                               \
            sb = 0;                                                                                                    \
            EACH(value)                                                                                                \
        } else {                                                                                                       \
            EACH(value)                                                                                                \
        }                                                                                                              \
    }
POINTWISE(copy, x)
POINTWISE(add, x + number * y)
POINTWISE(multiply, x * y)
POINTWISE(divide, x / y)
POINTWISE(largest, x > y || x != x ? x : y)
POINTWISE(smallest, x < y || x != x ? x : y)
POINTWISE(negate, -x)
POINTWISE(absolute, fabsf(x))
POINTWISE(root, sqrtf(x))
POINTWISE(inverse_root, 1.0f / sqrtf(x))
POINTWISE(exponential, exponential(x))
POINTWISE(sigmoid, logistic(x))
POINTWISE(silu, x / (1.0f + exponential_of_sleef(-x)))
POINTWISE(gelu, 0.5f * x * (1.0f + erff(x * 0.70710678f)))
POINTWISE(gelu_tanh, x * logistic(1.59576912f * (x + 0.044715f * x * x * x))) /* (1 + tanh(u)) / 2 is logistic(2 u) */
POINTWISE(tanh, tanhf(x))
POINTWISE(cosine, cosf(x))
POINTWISE(sine, sinf(x))

typedef void pointwise(const instruction *, float *, const float *, const float *);
static pointwise *const POINTWISE_OF[] = {
    [COPY] = each_copy,         [ADD] = each_add,           [MULTIPLY] = each_multiply, [DIVIDE] = each_divide,
    [LARGEST] = each_largest,   [SMALLEST] = each_smallest, [NEGATE] = each_negate,     [ABSOLUTE] = each_absolute,
    [ROOT] = each_root,         [INVERSE_ROOT] = each_inverse_root,
    [EXPONENTIAL] = each_exponential, [SIGMOID] = each_sigmoid, [SILU] = each_silu,     [GELU] = each_gelu,
    [GELU_TANH] = each_gelu_tanh, [TANH] = each_tanh,       [COSINE] = each_cosine,     [SINE] = each_sine,
};

INLINE const float *start_of(const place *at, const float *arena) {
    return at->fixed ? at->fixed : arena + at->offset;
}

INLINE void round_all(const instruction *is, float *o) {
    int64_t n = is->sizes[DIMS - 1], so = is->out.strides[DIMS - 1];
    if (so == 1)
        for (int64_t i = 0; i < n; i++)
            o[i] = rounded(o[i]);
    else
        for (int64_t i = 0; i < n; i++)
            o[i * so] = rounded(o[i * so]);
}

/* The order in which torch adds an axis whose numbers lie side by side (its `cascade_sum`): four vectors of eight numbers in
 * turn, in four levels of sums of sums, so that no sum gets much longer than what is added to it. */
#define SUM_LANES 8
#define SUM_TURNS 4
#define SUM_LEVELS 4

INLINE float sum_side_by_side(const float *a, int64_t n) {
    if (n < SUM_LANES && n > SUM_TURNS) { /* four numbers in turn, and what is left over is added to the first */
        float first = a[0];
        for (int64_t at = SUM_TURNS; at < n; at++)
            first += a[at];
        return first + a[1] + a[2] + a[3];
    }
    float sums[SUM_LEVELS][SUM_TURNS * SUM_LANES];
    int64_t vectors = n / SUM_LANES, rounds = vectors / SUM_TURNS, i = 0, power = 0;
    while (((int64_t)1 << power) < rounds)
        power++;
    power = power / SUM_LEVELS < 4 ? 4 : power / SUM_LEVELS;
    int64_t step = (int64_t)1 << power;
    memset(sums, 0, sizeof sums);
    while (i + step <= rounds) {
        for (int64_t end = i + step; i < end; i++)
            for (int lane = 0; lane < SUM_TURNS * SUM_LANES; lane++)
                sums[0][lane] += a[i * SUM_TURNS * SUM_LANES + lane];
        for (int level = 1; level < SUM_LEVELS; level++) {
            for (int lane = 0; lane < SUM_TURNS * SUM_LANES; lane++) {
                sums[level][lane] += sums[level - 1][lane];
                sums[level - 1][lane] = 0.0f;
            }
            if (i & ((step - 1) << (level * power)))
                break;
        }
    }
    for (; i < rounds; i++)
        for (int lane = 0; lane < SUM_TURNS * SUM_LANES; lane++)
            sums[0][lane] += a[i * SUM_TURNS * SUM_LANES + lane];
    for (int level = 1; level < SUM_LEVELS; level++)
        for (int lane = 0; lane < SUM_TURNS * SUM_LANES; lane++)
            sums[0][lane] += sums[level][lane];
    for (int64_t at = rounds * SUM_TURNS * SUM_LANES; at < vectors * SUM_LANES; at += SUM_LANES)
        for (int lane = 0; lane < SUM_LANES; lane++)
            sums[0][lane] += a[at + lane];
    for (int turn = 1; turn < SUM_TURNS; turn++)
        for (int lane = 0; lane < SUM_LANES; lane++)
            sums[0][lane] += sums[0][turn * SUM_LANES + lane];
    float total = 0.0f;
    for (int64_t at = vectors * SUM_LANES; at < n; at++)
        total += a[at];
    for (int lane = 0; lane < SUM_LANES; lane++)
        total += sums[0][lane];
    return total;
}

/* Sum of the last axis, divided by `number`. */
INLINE float sum_of_axis(const instruction *is, const float *a) {
    int64_t n = is->sizes[DIMS - 1], stride = is->one.strides[DIMS - 1];
    if (stride == 1)
        return sum_side_by_side(a, n) / is->number;
    float total = 0.0f;
    for (int64_t i = 0; i < n; i++)
        total += a[i * stride];
    return total / is->number;
}

/* Over the last axis, whose numbers lie side by side: minus the mean, divided by the deviation. `number` is the epsilon. */
INLINE void layer_norm(const instruction *is, float *o, const float *a) {
    int64_t n = is->sizes[DIMS - 1];
    float mean = 0.0f, square = 0.0f;
    for (int64_t i = 0; i < n; i++)
        mean += a[i];
    mean /= (float)n;
    for (int64_t i = 0; i < n; i++)
        square += (a[i] - mean) * (a[i] - mean);
    float factor = 1.0f / sqrtf(square / (float)n + is->number);
    const float *weights = is->other.fixed, *biases = is->bias;
    for (int64_t i = 0; i < n; i++)
        o[i] = (a[i] - mean) * factor * (weights ? weights[i] : 1.0f) + (biases ? biases[i] : 0.0f);
}

INLINE void run_simple(const instruction *is, float *arena) {
    float *out = (float *)start_of(&is->out, arena);
    const float *one = start_of(&is->one, arena), *other = start_of(&is->other, arena);
    for (int64_t i = 0; i < is->sizes[0]; i++)
        for (int64_t j = 0; j < is->sizes[1]; j++)
            for (int64_t k = 0; k < is->sizes[2]; k++) {
#define AT(start, place) (start + i * is->place.strides[0] + j * is->place.strides[1] + k * is->place.strides[2])
                float *o = (float *)AT(out, out);
                const float *a = AT(one, one);
                if (is->kind == SUM) {
                    float total = sum_of_axis(is, a);
                    *o = is->rounds ? rounded(total) : total;
                    continue;
                }
                if (is->kind == LAYER_NORM)
                    layer_norm(is, o, a);
                else
                    POINTWISE_OF[is->kind](is, o, a, AT(other, other));
                if (is->rounds)
                    round_all(is, o);
            }
}

/* ------------------------------------------------------------------ products, keys and values */

/* True if a product is that of many rows, to bfloat16, which tiles can multiply if inputs are in it, too: strips_tiles.h. */
INLINE int may_be_by_tiles(const instruction *is, const step *s) {
    const weight *w = is->matrix;
    return w->in_strips == BY_TILES && !w->rounds_inputs && is->rounds && s->num_rows >= LEAST_BY_TILES &&
           is->sizes[DIMS - 1] >= 2 * SIDE;
}

/* Where inputs in tiles begin: after the same ones row by row. */
INLINE void *tiles_at(const instruction *is, const step *s) {
    return (uint16_t *)s->inputs + (s->num_rows + SIDE - 1) / SIDE * SIDE * is->matrix->columns;
}

/* One after the other, in bfloat16. True if they were rounded to it already. */
INLINE int gather_in_bfloat16(const float *inputs, int64_t columns, const step *s) {
    uint32_t below = 0;
    for (int64_t row = 0; row < s->num_rows; row++, inputs += s->arena_floats)
        for (int64_t i = 0; i < columns; i++) {
            uint32_t bits;
            memcpy(&bits, inputs + i, sizeof bits);
            below |= bits & 0xffff;
            ((uint16_t *)s->inputs)[row * columns + i] = (uint16_t)(bits >> 16);
        }
    return below == 0;
}

/* Put the inputs of a product where the kernels read them: one after the other, perhaps rounded, or in tiles. */
INLINE void gather_inputs(const instruction *is, step *s) {
    const float *inputs = s->arena + is->one.offset;
    int64_t columns = is->matrix->columns;
    s->in_tiles = may_be_by_tiles(is, s) && gather_in_bfloat16(inputs, columns, s);
    if (s->in_tiles) {
        swarmllm_put_in_tiles((const uint16_t *)s->inputs, s->num_rows, columns, tiles_at(is, s));
        return;
    }
    for (int64_t row = 0; row < s->num_rows; row++, inputs += s->arena_floats)
        if (is->matrix->in_strips)
            swarmllm_prepare_inputs(is->matrix, inputs, 1, s->inputs + row * columns);
        else if (is->matrix->rounds_inputs)
            swarmllm_round_inputs(swarmllm_int8_version(LEVEL), inputs, 1, columns,
                                  (char *)s->inputs + row * swarmllm_rounded_bytes(columns));
        else if (s->num_rows > 1)
            memcpy(s->inputs + row * columns, inputs, columns * sizeof(float));
}

/* The rows [start, end) of a matrix by all inputs. */
INLINE void multiply_part(const instruction *is, const step *s, int64_t start, int64_t end) {
    float *outputs = s->arena + is->out.offset;
    if (s->in_tiles) {
        int64_t size = is->sizes[DIMS - 1];
        uint16_t *made = s->products;
        swarmllm_multiply_tiles(is->matrix, start, end, tiles_at(is, s), s->num_rows, made, size);
        for (int64_t row = 0; row < s->num_rows; row++)
            for (int64_t i = start; i < end; i++)
                outputs[row * s->arena_floats + i] = float_of(made[row * size + i]);
        return;
    }
    if (is->matrix->in_strips) {
        swarmllm_multiply_strips(is->matrix, start, end, s->inputs, s->num_rows, outputs, s->arena_floats);
    } else if (is->matrix->rounds_inputs) {
        swarmllm_multiply_rounded(swarmllm_int8_version(LEVEL), is->matrix, start, end, s->inputs, s->num_rows, outputs,
                                  s->arena_floats);
    } else {
        const float *inputs = s->num_rows > 1 ? s->inputs : s->arena + is->one.offset;
        OF_LEVEL(multiply)(is->matrix, start, end, inputs, s->num_rows, outputs, s->arena_floats);
    }
    for (int64_t row = 0; is->rounds && row < s->num_rows; row++)
        for (int64_t i = start; i < end; i++)
            outputs[row * s->arena_floats + i] = rounded(outputs[row * s->arena_floats + i]);
}

INLINE const whole_product *whole_of(const instruction *is, const step *s) { return s->wholes + (is - s->line); }

/* The inputs of a product with weights as they are, one after the other, as swarmllm_multiply_whole takes them. */
INLINE void gather_whole_inputs(const instruction *is, const step *s) {
    const float *inputs = s->arena + is->one.offset;
    const whole *w = whole_of(is, s)->weight;
    if (!takes_floats(w))
        gather_in_bfloat16(inputs, w->columns, s);
    for (int64_t row = 0; takes_floats(w) && s->num_rows > 1 && row < s->num_rows; row++, inputs += s->arena_floats)
        memcpy(s->inputs + row * w->columns, inputs, w->columns * sizeof(float));
}

/* Rows [start, end) of weights as they are by all inputs. */
INLINE void multiply_whole_part(const instruction *is, const step *s, int64_t start, int64_t end) {
    float *outputs = s->arena + is->out.offset;
    const whole_product *by = whole_of(is, s);
    int is_direct = s->num_rows == 1 && !by->weight->is_bfloat16;
    const float *inputs = s->num_rows == 1 && takes_floats(by->weight) ? s->arena + is->one.offset : s->inputs;
    void *made = is_direct ? outputs : s->products;
    swarmllm_multiply_whole(LEVEL, by->weight, by->bias, start, end, (const char *)inputs, s->num_rows, made);
    for (int64_t row = 0; !is_direct && row < s->num_rows; row++)
        for (int64_t i = start; i < end; i++) {
            int64_t at = row * by->weight->rows + i;
            outputs[row * s->arena_floats + i] =
                by->weight->is_bfloat16 ? float_of(((uint16_t *)made)[at]) : ((float *)made)[at];
        }
}

/* Write keys or values `[heads, head]` of a new position to the session's cache. */
INLINE void append(const instruction *is, const step *s, const stored *at, const float *arena) {
    const float *from = arena + is->one.offset;
    int64_t heads = is->sizes[DIMS - 2], size = is->sizes[DIMS - 1];
    char *to = is->kind == APPEND_KEYS ? at->keys : at->values;
    int64_t capacity = is->kind == APPEND_KEYS ? at->key_capacity : at->value_capacity;
    for (int64_t head = 0; head < heads; head++) {
        const float *a = from + head * is->one.strides[DIMS - 2];
        int64_t begin = (head * capacity + at->position) * size, stride = is->one.strides[DIMS - 1];
        for (int64_t i = 0; i < size; i++) {
            if (s->kept_kind == BFLOAT16)
                ((uint16_t *)to)[begin + i] = (uint16_t)(rounded_bits(a[i * stride]) >> 16);
            else
                ((float *)to)[begin + i] = a[i * stride];
        }
    }
}

INLINE vec kept_at(const void *from, int64_t at, int kind) {
    return kind == BFLOAT16 ? bfloats_at((const uint16_t *)from + at) : load((const float *)from + at);
}

INLINE float one_kept_at(const void *from, int64_t at, int kind) {
    return kind == BFLOAT16 ? float_of(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

#define QUERIES 4 /* heads of queries that share keys, at a time */

#define AT_ONCE (LEVEL == 4 ? 4 : 1) /* keys, or vectors of a value, whose sums fit into the registers */

/* Products of queries `[num, size]` with `most` keys, to scores `[num, count]`. Numbers are constants. */
INLINE void score_some(const float *queries, const void *keys, int64_t count, int64_t size, int num, int most, int kind,
                       float *scores) {
    int64_t whole = size / WIDTH * WIDTH;
    vec sums[QUERIES][4];
    UNROLLED for (int q = 0; q < num; q++)
        UNROLLED for (int k = 0; k < most; k++)
            sums[q][k] = all(0.0f);
    for (int64_t i = 0; i < whole; i += WIDTH)
        UNROLLED for (int k = 0; k < most; k++) {
            vec key = kept_at(keys, k * size + i, kind);
            UNROLLED for (int q = 0; q < num; q++)
                sums[q][k] = plus_product(key, load(queries + q * size + i), sums[q][k]);
        }
    UNROLLED for (int q = 0; q < num; q++) {
        if (most == 4)
            sums_of_four(sums[q], scores + q * count);
        else
            scores[q * count] = sum_of(sums[q][0]);
        for (int64_t i = whole; i < size; i++)
            for (int k = 0; k < most; k++)
                scores[q * count + k] += queries[q * size + i] * one_kept_at(keys, k * size + i, kind);
    }
}

/* Queries `[num, size]` of heads that share `keys` `[count, size]`: their products. `num` and `kind` are constants. Of what
 * is read `next`, `next_bytes` are asked for with each key. */
INLINE void score(const float *queries, const char *keys, int64_t count, int64_t size, int num, int kind,
                  const char *next, int64_t next_bytes, float *scores) {
    int64_t j = 0, bytes = size * (kind == BFLOAT16 ? 2 : 4);
    for (; j + AT_ONCE <= count; j += AT_ONCE) {
        ask(next + j * next_bytes, AT_ONCE * next_bytes);
        score_some(queries, keys + j * bytes, count, size, num, AT_ONCE, kind, scores + j);
    }
    for (; j < count; j++)
        score_some(queries, keys + j * bytes, count, size, num, 1, kind, scores + j);
}

/* Sums of the columns [start, start + vectors * WIDTH) of `values`. `next` as score() has it, or NULL. */
INLINE void blend_columns(const float *weights, const void *values, int64_t count, int64_t size, int num, int kind,
                          int64_t start, int vectors, const char *next, int64_t next_bytes, float *out) {
    vec sums[QUERIES][4];
    UNROLLED for (int q = 0; q < num; q++)
        UNROLLED for (int v = 0; v < vectors; v++)
            sums[q][v] = all(0.0f);
    for (int64_t j = 0; j < count; j++) {
        if (next)
            ask(next + j * next_bytes, next_bytes);
        UNROLLED for (int v = 0; v < vectors; v++) {
            vec value = kept_at(values, j * size + start + v * WIDTH, kind);
            UNROLLED for (int q = 0; q < num; q++)
                sums[q][v] = plus_product(value, all(weights[q * count + j]), sums[q][v]);
        }
    }
    UNROLLED for (int q = 0; q < num; q++)
        UNROLLED for (int v = 0; v < vectors; v++)
            store(out + q * size + start + v * WIDTH, sums[q][v]);
}

/* Sums of `values` `[count, size]` by their `weights`. */
INLINE void blend(const float *weights, const void *values, int64_t count, int64_t size, int num, int kind,
                  const char *next, int64_t next_bytes, float *out) {
    int64_t i = 0;
    for (; i + AT_ONCE * WIDTH <= size; i += AT_ONCE * WIDTH)
        blend_columns(weights, values, count, size, num, kind, i, AT_ONCE, i ? NULL : next, next_bytes, out);
    for (; i + WIDTH <= size; i += WIDTH)
        blend_columns(weights, values, count, size, num, kind, i, 1, i ? NULL : next, next_bytes, out);
    for (; i < size; i++)
        for (int q = 0; q < num; q++) {
            float total = 0.0f;
            for (int64_t j = 0; j < count; j++)
                total += weights[q * count + j] * one_kept_at(values, j * size + i, kind);
            out[q * size + i] = total;
        }
}

INLINE void to_weights(float *scores, int64_t count, float scale) { /* softmax */
    float largest = scores[0], total = 0.0f, lane[WIDTH];
    int64_t j = 0, whole = count / WIDTH * WIDTH;
    for (int i = 0; i < WIDTH; i++)
        lane[i] = largest;
    for (; j < whole; j += WIDTH)
        for (int i = 0; i < WIDTH; i++)
            lane[i] = scores[j + i] > lane[i] ? scores[j + i] : lane[i];
    for (; j < count; j++)
        largest = scores[j] > largest ? scores[j] : largest;
    for (int i = 0; i < WIDTH; i++)
        largest = lane[i] > largest ? lane[i] : largest;
    for (j = 0; j < count; j++)
        scores[j] = exponential((scores[j] - largest) * scale);
    vec totals = all(0.0f);
    for (j = 0; j < whole; j += WIDTH)
        totals = sum(totals, load(scores + j));
    for (; j < count; j++)
        total += scores[j];
    total += sum_of(totals);
    for (j = 0; j < count; j++)
        scores[j] /= total;
}

typedef struct {
    const void *keys, *values, *next; /* what is read after them */
    int64_t count, key_size, value_size;
    float scale;
} seen;

INLINE void attend_some(const float *queries, const seen *of, int num, int kind, float *scores, float *out) {
    int64_t bytes = kind == BFLOAT16 ? 2 : 4;
    score(queries, of->keys, of->count, of->key_size, num, kind, of->values, of->value_size * bytes, scores);
    for (int q = 0; q < num; q++)
        to_weights(scores + q * of->count, of->count, of->scale);
    blend(scores, of->values, of->count, of->value_size, num, kind, of->next, of->key_size * bytes, out);
}

#define ATTEND(num, kind)                                                                                              \
    APART void attend_##num##_##kind(const float *queries, const seen *of, float *scores, float *out) {                \
        attend_some(queries, of, num, kind, scores, out);                                                              \
    }
ATTEND(1, FLOAT32) ATTEND(2, FLOAT32) ATTEND(3, FLOAT32) ATTEND(4, FLOAT32)
ATTEND(1, BFLOAT16) ATTEND(2, BFLOAT16) ATTEND(3, BFLOAT16) ATTEND(4, BFLOAT16)
typedef void attention(const float *, const seen *, float *, float *);
static attention *const ATTEND_OF[2][QUERIES] = {
    {attend_1_FLOAT32, attend_2_FLOAT32, attend_3_FLOAT32, attend_4_FLOAT32},
    {attend_1_BFLOAT16, attend_2_BFLOAT16, attend_3_BFLOAT16, attend_4_BFLOAT16},
};

INLINE const stored *stored_of(const instruction *is, const step *s, int64_t row) {
    return s->stored + row * s->num_blocks + is->block - s->first_block;
}

/* What a row's new position sees of one head of keys. `sizes`: heads of keys, heads of queries that share one, sizes of a head
 * of keys and of values. Heads are numbered through all rows; of one that there isn't, nothing is seen. */
INLINE seen seen_of(const instruction *is, const step *s, int64_t head) {
    int64_t heads = is->sizes[0], bytes = s->kept_kind == BFLOAT16 ? 2 : 4;
    seen of = {.key_size = is->sizes[2], .value_size = is->sizes[3], .scale = is->number};
    if (head >= s->num_rows * heads)
        return of;
    const stored *at = stored_of(is, s, head / heads);
    int64_t end = at->position + 1, first = is->window && end > is->window ? end - is->window : 0;
    of.count = end - first;
    of.keys = (char *)at->keys + (head % heads * at->key_capacity + first) * of.key_size * bytes;
    of.values = (char *)at->values + (head % heads * at->value_capacity + first) * of.value_size * bytes;
    return of;
}

/* Attention of a new position: one head of keys, and the heads of queries that share it. */
INLINE void attend(const instruction *is, const step *s, const seen *of, float *arena, int64_t head, int64_t thread) {
    float *queries = s->queries + thread * QUERIES * is->sizes[2], *scores = s->scores + thread * s->scores_floats;
    const float *from = arena + is->one.offset;
    float *out = arena + is->out.offset;
    int64_t shared = is->sizes[1], size = is->sizes[2], value_size = is->sizes[3];
    for (int64_t q = 0; q < shared; q += QUERIES) {
        int64_t num = shared - q < QUERIES ? shared - q : QUERIES;
        for (int64_t one = 0; one < num; one++) { /* queries may lie in any order */
            const float *query = from + (head * shared + q + one) * is->one.strides[1];
            for (int64_t i = 0; i < size; i++)
                queries[one * size + i] = query[i * is->one.strides[2]];
        }
        float *to = out + (head * shared + q) * value_size;
        ATTEND_OF[s->kept_kind == BFLOAT16][num - 1](queries, of, scores, to);
        for (int64_t i = 0; is->rounds && i < num * value_size; i++)
            to[i] = rounded(to[i]);
    }
}

/* The same with torch's bits, of keys and values in bfloat16. No window. */
INLINE void attend_as_torch(const instruction *is, const seen *of, float *arena, int64_t head) {
    int64_t shared = is->sizes[1], size = is->sizes[2];
    uint16_t queries[QUERIES * MOST_HEAD], outputs[QUERIES * MOST_HEAD];
    attended to = {.queries = queries, .keys = of->keys, .values = of->values, .next = of->next,
                   .count = of->count, .size = size, .scale = of->scale, .outputs = outputs};
    for (int64_t q = head * shared; q < (head + 1) * shared; q += to.num) {
        to.num = (head + 1) * shared - q < QUERIES ? (head + 1) * shared - q : QUERIES;
        for (int64_t one = 0; one < to.num; one++) {
            const float *query = arena + is->one.offset + (q + one) * is->one.strides[1];
            for (int64_t i = 0; i < size; i++) /* they are rounded already */
                queries[one * size + i] = (uint16_t)(rounded_bits(query[i * is->one.strides[2]]) >> 16);
        }
        swarmllm_attend_at_level(LEVEL, &to);
        for (int64_t i = 0; i < to.num * size; i++)
            arena[is->out.offset + q * size + i] = float_of(outputs[i]);
    }
}

/* ------------------------------------------------------------------ several threads
 *
 * The thread of run_line() publishes an operation in parts; it and all helpers take parts until none is left. So it never
 * waits for a helper that hasn't begun: other programs may have the cores. `parts` holds the number of an operation, how
 * many parts it has, and how many are taken, in one number, so that nobody takes a part of an operation that is over.
 */
#define PART_ROWS 256     /* of a matrix, at least */
_Static_assert(BAND % SIDE == 0, "a part must have whole strips");
#define PART_CODES (1 << 17) /* of a matrix, at least; assumed: they take some 10 microseconds */
#define SPINS 4000        /* then other threads get the core */
#define TAKEN(parts) ((parts) & 0xffff)
#define ALL_PARTS(parts) ((parts) >> 16 & 0xffff)

#if defined(__x86_64__) && defined(__GNUC__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() (void)0
#endif

/* One part of the published operation. */
APART void run_part(const step *s, const instruction *is, int64_t part, int64_t parts, int64_t thread) {
    if (is->kind == PRODUCT || is->kind == CALL) {
        int64_t out = is->sizes[DIMS - 1], bands = (out + BAND - 1) / BAND, start = bands * part / parts * BAND;
        int64_t end = bands * (part + 1) / parts * BAND;
        (is->kind == PRODUCT ? multiply_part : multiply_whole_part)(is, s, start, end < out ? end : out);
        return;
    }
    int64_t heads = is->sizes[0];
    for (int64_t one = part; one < s->num_rows * heads; one += parts) {
        float *arena = s->arena + one / heads * s->arena_floats;
        seen of = seen_of(is, s, one);
        of.next = seen_of(is, s, one + parts).keys;
        if (is->kind == ATTEND_AS_TORCH)
            attend_as_torch(is, &of, arena, one % heads);
        else
            attend(is, s, &of, arena, one % heads, thread);
    }
}

/* Take a part; 0 if there is none. */
INLINE int take_part(step *s, int64_t thread) {
    uint64_t parts = __atomic_load_n(&s->parts, __ATOMIC_RELAXED);
    if (TAKEN(parts) >= ALL_PARTS(parts))
        return 0;
    parts = __atomic_fetch_add(&s->parts, 1, __ATOMIC_ACQ_REL);
    if (TAKEN(parts) >= ALL_PARTS(parts))
        return 0;
    run_part(s, s->shared, (int64_t)TAKEN(parts), (int64_t)ALL_PARTS(parts), thread);
    __atomic_fetch_add(&s->done, 1, __ATOMIC_RELEASE);
    return 1;
}

INLINE void wait_a_little(int *spins) {
    PAUSE();
    if (++*spins % SPINS == 0)
        sched_yield();
}

/* Helper threads run this from the beginning of a step to its end. */
void OF_LEVEL(help)(step *s, int64_t thread) {
    for (int spins = 0; !__atomic_load_n(&s->ended, __ATOMIC_ACQUIRE);)
        if (take_part(s, thread))
            spins = 0;
        else
            wait_a_little(&spins);
}

INLINE int64_t parts_of(const instruction *is, const step *s) {
    int64_t most = 1;
    if (is->kind == PRODUCT) {
        int64_t out = is->sizes[DIMS - 1], by_codes = out * is->matrix->columns / PART_CODES;
        most = out / PART_ROWS < by_codes ? out / PART_ROWS : by_codes;
    } else if (is->kind == CALL) {
        const whole *w = whole_of(is, s)->weight;
        int64_t by_bytes = w->rows * w->columns * (w->is_bfloat16 ? 2 : 4) * s->num_rows / PART_CODES;
        most = w->rows / PART_ROWS < by_bytes ? w->rows / PART_ROWS : by_bytes;
    } else {
        int64_t seen = s->scores_floats / QUERIES * (is->sizes[2] + is->sizes[3]) * is->sizes[0] * is->sizes[1];
        if (seen * s->num_rows > PART_CODES)
            most = s->num_rows * is->sizes[0];
    }
    most = most < 4 * s->num_threads ? most : 4 * s->num_threads;
    return most > 1 ? most : 1;
}

INLINE void run_shared(step *s, const instruction *is) {
    int64_t parts = s->num_threads > 1 ? parts_of(is, s) : 1;
    if (is->kind == PRODUCT)
        gather_inputs(is, s);
    else if (is->kind == CALL)
        gather_whole_inputs(is, s);
    if (parts == 1) {
        run_part(s, is, 0, 1, 0);
        return;
    }
    uint64_t number = (s->parts >> 32) + 1;
    s->shared = is;
    __atomic_store_n(&s->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->parts, number << 32 | (uint64_t)parts << 16, __ATOMIC_RELEASE);
    while (take_part(s, 0)) {
    }
    for (int spins = 0; __atomic_load_n(&s->done, __ATOMIC_ACQUIRE) < (uint64_t)parts;)
        wait_a_little(&spins);
}

INLINE void run_line(step *s, int64_t start, int64_t end) {
    for (const instruction *is = s->line + start; is < s->line + end; is++) {
        if (is->kind == PRODUCT || is->kind == ATTEND || is->kind == ATTEND_AS_TORCH || is->kind == CALL) {
            run_shared(s, is);
            continue;
        }
        for (int64_t row = 0; row < s->num_rows; row++) {
            float *arena = s->arena + row * s->arena_floats;
            if (is->kind == APPEND_KEYS || is->kind == APPEND_VALUES)
                append(is, s, stored_of(is, s, row), arena);
            else
                run_simple(is, arena);
        }
    }
}

/* Numbers of a tensor `[size]`, to floats in an arena and back. */
INLINE void read_numbers(const void *from, int kind, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i++)
        to[i] = kind == BFLOAT16 ? float_of(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

INLINE void write_numbers(const float *from, int kind, int64_t size, void *to) {
    for (int64_t i = 0; i < size; i++)
        if (kind == BFLOAT16)
            ((uint16_t *)to)[i] = (uint16_t)(rounded_bits(from[i]) >> 16);
        else
            ((float *)to)[i] = from[i];
}

/* Some operations alone; torch computes those between. */
void OF_LEVEL(step_part)(step *s, int64_t start, int64_t end) {
    run_line(s, start, end);
}

void OF_LEVEL(step)(step *s) {
    int64_t row_bytes = s->hidden_size * (s->kept_kind == BFLOAT16 ? 2 : 4);
    for (int64_t row = 0; row < s->num_rows; row++)
        if (s->position_at >= 0)
            s->arena[row * s->arena_floats + s->position_at] = (float)s->positions[row];
    run_line(s, 0, s->preamble);
    for (int64_t row = 0; row < s->num_rows; row++)
        read_numbers((char *)s->hidden + row * row_bytes, s->kept_kind, s->hidden_size,
                     s->arena + row * s->arena_floats + s->hidden_at);
    run_line(s, s->start, s->end);
    for (int64_t row = 0; row < s->num_rows; row++)
        write_numbers(s->arena + row * s->arena_floats + s->output_at, s->kept_kind, s->hidden_size,
                      (char *)s->outputs + row * row_bytes);
    __atomic_store_n(&s->ended, 1, __ATOMIC_RELEASE);
}
