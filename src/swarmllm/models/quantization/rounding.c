/* rounding.h for any processor, and the choice among its versions. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
#define LEVEL 1
#include "rounding.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDER
void swarmllm_round_3(int64_t, const float *, int64_t, uint8_t *);
void swarmllm_round_4(int64_t, const float *, int64_t, uint8_t *);
#endif

/* Whole blocks of a `kind` of GGUF; weights of less than 1e18, so that squares are numbers. */
void swarmllm_round(int64_t level, int64_t kind, const float *weights, int64_t num_weights, uint8_t *to) {
#ifdef WIDER
    if (level >= 3) {
        (level == 3 ? swarmllm_round_3 : swarmllm_round_4)(kind, weights, num_weights, to);
        return;
    }
#endif
    (void)level;
    swarmllm_round_1(kind, weights, num_weights, to);
}
