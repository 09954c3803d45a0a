/* strips.h for AVX2 with AVX-VNNI. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3,avxvnni")
#define LEVEL 3
#define VNNI
#include "strips.h"
#endif
