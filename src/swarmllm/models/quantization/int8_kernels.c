/* int8_products.h for any processor, and the choice among its versions. */
#define LEVEL 1
#include "int8_products.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDER
#define DECLARED(version)                                                                                   \
    void swarmllm_round_inputs##version(const float *, int64_t, int64_t, void *);                           \
    void swarmllm_multiply_rounded##version(const weight *, int64_t, int64_t, const void *, int64_t, float *, int64_t);
DECLARED(_3)
DECLARED(_vnni_3)
DECLARED(_vnni_4)
#endif

/* Which version multiplies at a LEVEL that the processor has: 4 and 2 have instructions for products of bytes. */
int64_t swarmllm_int8_version(int64_t level) {
#ifdef WIDER
    __builtin_cpu_init();
    if (level >= 4 && __builtin_cpu_supports("avx512vnni"))
        return 4;
    if (level >= 3)
        return __builtin_cpu_supports("avxvnni") ? 3 : 2;
#endif
    (void)level;
    return 1;
}

int64_t swarmllm_rounded_bytes(int64_t columns) {
    return pieces_of(columns) * (int64_t)sizeof(rounded_piece);
}

void swarmllm_round_inputs(int64_t version, const float *inputs, int64_t num, int64_t columns, void *rounded) {
#ifdef WIDER
    if (version > 1) {
        (version == 4   ? swarmllm_round_inputs_vnni_4
         : version == 3 ? swarmllm_round_inputs_vnni_3
                        : swarmllm_round_inputs_3)(inputs, num, columns, rounded);
        return;
    }
#endif
    (void)version;
    swarmllm_round_inputs_1(inputs, num, columns, rounded);
}

void swarmllm_multiply_rounded(int64_t version, const weight *w, int64_t start, int64_t end, const void *rounded,
                               int64_t num_inputs, float *outputs, int64_t stride) {
#ifdef WIDER
    if (version > 1) {
        (version == 4   ? swarmllm_multiply_rounded_vnni_4
         : version == 3 ? swarmllm_multiply_rounded_vnni_3
                        : swarmllm_multiply_rounded_3)(w, start, end, rounded, num_inputs, outputs, stride);
        return;
    }
#endif
    (void)version;
    swarmllm_multiply_rounded_1(w, start, end, rounded, num_inputs, outputs, stride);
}
