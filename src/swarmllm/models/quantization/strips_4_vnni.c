/* strips.h for AVX-512 with VNNI, and for many inputs with AMX. */
#include "compiler.h"
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#ifdef HAS_TILES
#pragma GCC target("arch=x86-64-v4,avx512vnni,avx512bf16,amx-tile,amx-bf16")
#else
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#endif
#define LEVEL 4
#define VNNI
#include "strips.h"
#endif
