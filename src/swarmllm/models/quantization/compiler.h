/* What differs between compilers, and the names of functions for each LEVEL of processors. Included by all others. */
#ifndef COMPILER_H
#define COMPILER_H
#include <stdint.h>
#include <string.h>

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline)) /* into the version of each processor */
#else
#define INLINE static inline
#endif

#ifdef __GNUC__
#define PREFETCH(from) __builtin_prefetch(from)
#define PREFETCH_SECOND(from) __builtin_prefetch(from, 0, 2) /* into the second cache */
#define APART static __attribute__((noinline))
#define UNROLLED _Pragma("GCC unroll 8") /* a loop of few turns, so that sums stay in registers */
#define ALIGNED __attribute__((aligned(64))) /* to lines of caches */
#define IN_MEMORY(array) __asm__("" : "+m"(array)) /* so that it is read from there, and not taken out of a wide register */
#else
#define APART static
#define UNROLLED
#define ALIGNED
#define IN_MEMORY(array) (void)(array)
#define PREFETCH(from) (void)(from)
#define PREFETCH_SECOND(from) (void)(from)
#endif

/* Memory that is read soon, a little with each step of a loop: at once, processors would wait for it. */
INLINE void ask(const char *next, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64)
        PREFETCH_SECOND(next + at);
}

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 && \
    !defined(NO_TILES) /* of setup.py, for assemblers that are older */
#define HAS_TILES /* the compiler knows them, and Linux can be asked for them */
#endif
/* True if this processor has AMX, with products of bfloat16, and the system lets this process use it. */
int swarmllm_may_use_tiles(void);

#define PASTED(name, level) swarmllm_##name##_##level
#define EXPANDED(name, level) PASTED(name, level)
#define OF_LEVEL(name) EXPANDED(name, LEVEL)
#endif
