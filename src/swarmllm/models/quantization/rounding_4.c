/* rounding.h for x86-64-v4: AVX-512. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#pragma GCC target("arch=x86-64-v4")
#define LEVEL 4
#include "rounding.h"
#endif
