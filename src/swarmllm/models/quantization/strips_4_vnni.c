/* strips.h for AVX-512 with VNNI. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#define LEVEL 4
#define VNNI
#include "strips.h"
#endif
