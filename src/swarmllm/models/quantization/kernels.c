/* The library that kernels.py loads through ctypes: products.h for any processor, and the choice among its versions. */
#define LEVEL 1
#include "products.h"
#include "step.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDER
void swarmllm_multiply_3(const weight *, int64_t, int64_t, const float *, int64_t, float *, int64_t);
void swarmllm_multiply_4(const weight *, int64_t, int64_t, const float *, int64_t, float *, int64_t);
void swarmllm_dequantize_3(const weight *, int64_t, int64_t, float *);
void swarmllm_dequantize_4(const weight *, int64_t, int64_t, float *);
void swarmllm_step_3(step *);
void swarmllm_step_4(step *);
void swarmllm_step_part_3(step *, int64_t, int64_t);
void swarmllm_step_part_4(step *, int64_t, int64_t);
void swarmllm_help_3(step *, int64_t);
void swarmllm_help_4(step *, int64_t);
#endif

#ifdef HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ASK_FOR_STATE 0x1023 /* of Linux: each thread's state grows by the tiles, so the process has to ask for them */
#define STATE_OF_TILES 18

int swarmllm_may_use_tiles(void) {
    unsigned a, b, c, d;
    const unsigned all = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE: edx of cpuid's leaf 7 */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all &&
           __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES) == 0;
}
#else
int swarmllm_may_use_tiles(void) { return 0; }
#endif

/* Which version of strips.h multiplies at a LEVEL that the processor has: 5 multiplies many inputs by tiles, 4 and 3 have
 * instructions for products of bytes, 2 knows no codes of 6 and 8 bits, 0 is none. */
int64_t swarmllm_strips_version(int64_t level) {
#ifdef WIDER
    __builtin_cpu_init();
    if (level >= 4 && __builtin_cpu_supports("avx512vnni"))
        return swarmllm_may_use_tiles() ? BY_TILES : 4;
    if (level >= 3)
        return __builtin_cpu_supports("avxvnni") ? 3 : 2;
#endif
    (void)level;
    return 0;
}

/* By which kernels.py sees whether it was written for what has been compiled. */
int64_t swarmllm_weight_bytes(void) {
    return sizeof(weight);
}

/* The same of steps and their operations. */
int64_t swarmllm_instruction_bytes(void) {
    return sizeof(instruction);
}

int64_t swarmllm_step_bytes(void) {
    return sizeof(step);
}

/* The widest LEVEL of this processor. */
int64_t swarmllm_level(void) {
#ifdef WIDER
#define HAS(name) __builtin_cpu_supports(name)
    __builtin_cpu_init();
    if (HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2"))
        return HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl") ? 4 : 3;
#endif
    return 1;
}

void swarmllm_multiply(int64_t level, const weight *w, int64_t start, int64_t end, const float *inputs,
                       int64_t num_inputs, float *outputs, int64_t stride) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_multiply_3 : swarmllm_multiply_4)(w, start, end, inputs, num_inputs, outputs, stride);
        return;
    }
#endif
    swarmllm_multiply_1(w, start, end, inputs, num_inputs, outputs, stride);
}

static void dequantize_rows(int64_t level, const weight *w, int64_t start, int64_t end, float *out) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_dequantize_3 : swarmllm_dequantize_4)(w, start, end, out);
        return;
    }
#endif
    swarmllm_dequantize_1(w, start, end, out);
}

/* Rows [start, end); of a weight in strips, whole strips. `room` is for the bytes of a strip. */
void swarmllm_dequantize(int64_t level, const weight *w, int64_t start, int64_t end, float *out, uint8_t *room) {
    if (!w->in_strips) {
        dequantize_rows(level, w, start, end, out);
        return;
    }
    weight strip = *w;
    int64_t number = w->scale_kind == FLOAT32 ? 4 : w->scale_kind == BFLOAT16 || w->scale_kind == FLOAT16 ? 2 : 1;
    strip.codes = room;
    for (int64_t row = start; row < end; row += SIDE, out += SIDE * w->columns) {
        strip.scale = w->scale ? (const char *)w->scale + row * w->groups * number : NULL;
        swarmllm_arrange(w->codes_kind, 1, w->codes + row * row_bytes(w), 1, row_bytes(w), room);
        dequantize_rows(level, &strip, 0, SIDE, out);
    }
}

void swarmllm_step(int64_t level, step *s) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_step_3 : swarmllm_step_4)(s);
        return;
    }
#endif
    swarmllm_step_1(s);
}

/* The operations [start, end) alone. */
void swarmllm_step_part(int64_t level, step *s, int64_t start, int64_t end) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_step_part_3 : swarmllm_step_part_4)(s, start, end);
        return;
    }
#endif
    swarmllm_step_part_1(s, start, end);
}

/* For other threads, while the step runs. */
void swarmllm_help(int64_t level, step *s, int64_t thread) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_help_3 : swarmllm_help_4)(s, thread);
        return;
    }
#endif
    swarmllm_help_1(s, thread);
}
