/* The choice among the versions of whole.h. */
#include "compiler.h"
#include "whole_weight.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
void swarmllm_multiply_whole_3(const whole *, const float *, int64_t, int64_t, const char *, int64_t, char *);
void swarmllm_multiply_whole_4(const whole *, const float *, int64_t, int64_t, const char *, int64_t, char *);
void swarmllm_attend_as_torch_3(const attended *);
void swarmllm_attend_as_torch_4(const attended *);

/* True if this processor can multiply at this LEVEL in that order. */
int64_t swarmllm_has_order(int64_t level, int64_t is_bfloat16, int64_t order) {
    __builtin_cpu_init();
    if (level < 3)
        return 0;
    if (!is_bfloat16)
        return order < IN_PAIRS && order != EIGHTS && order != (level == 3 ? IN_LANES_LATE : TWOS);
    if (level == 3)
        return order == EIGHTS;
    return order == IN_TILES ? swarmllm_may_use_tiles()
                             : (order == CHAINED || order == IN_PAIRS) && __builtin_cpu_supports("avx512bf16");
}

/* True if this processor can attend as torch does at this LEVEL. */
int64_t swarmllm_can_attend_as_torch(int64_t level) {
    __builtin_cpu_init();
    return level == 3 || (level == 4 && __builtin_cpu_supports("avx512bf16"));
}

void swarmllm_attend_at_level(int64_t level, const attended *to) {
    (level == 3 ? swarmllm_attend_as_torch_3 : swarmllm_attend_as_torch_4)(to);
}

void swarmllm_multiply_whole(int64_t level, const whole *w, const float *bias, int64_t start, int64_t end,
                             const char *inputs, int64_t num, char *outputs) {
    (level == 3 ? swarmllm_multiply_whole_3 : swarmllm_multiply_whole_4)
        (w, bias, start, end, inputs, num, outputs);
}
#else
int64_t swarmllm_has_order(int64_t level, int64_t is_bfloat16, int64_t order) {
    (void)level, (void)is_bfloat16, (void)order;
    return 0;
}

int64_t swarmllm_can_attend_as_torch(int64_t level) {
    (void)level;
    return 0;
}

void swarmllm_attend_at_level(int64_t level, const attended *to) { (void)level, (void)to; }

void swarmllm_multiply_whole(int64_t level, const whole *w, const float *bias, int64_t start, int64_t end,
                             const char *inputs, int64_t num, char *outputs) {
    (void)level, (void)w, (void)bias, (void)start, (void)end, (void)inputs, (void)num, (void)outputs;
}
#endif

/* Several heads of keys, whose queries and outputs are one after the other; keys and values are so many numbers apart. */
void swarmllm_attend_heads(int64_t level, const attended *first, int64_t heads, int64_t keys_apart, int64_t values_apart) {
    attended one = *first;
    for (int64_t head = 0; head < heads; head++) {
        one.next = head + 1 < heads ? one.keys + keys_apart : NULL;
        swarmllm_attend_at_level(level, &one);
        one.queries += one.num * one.size, one.outputs += one.num * one.size;
        one.keys += keys_apart, one.values += values_apart;
        if (one.log_sums)
            one.log_sums += one.num;
    }
}
