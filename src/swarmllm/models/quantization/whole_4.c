/* whole.h for AVX-512. Its products in bfloat16 need instructions that whole.c asks for; GCC 11 knows those of tiles. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 11
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")
#else
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#define LEVEL 4
#include "whole.h"
#include "whole_attention.h"
#endif
