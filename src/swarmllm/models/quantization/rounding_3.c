/* rounding.h for x86-64-v3: AVX2. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#pragma GCC target("arch=x86-64-v3")
#define LEVEL 3
#include "rounding.h"
#endif
