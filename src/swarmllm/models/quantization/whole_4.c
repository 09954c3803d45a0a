/* whole.h for AVX-512. Its products in bfloat16 need instructions that whole.c asks for. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "compiler.h"
#ifdef HAS_TILES
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")
#else
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#endif
#define LEVEL 4
#include "whole.h"
#include "whole_attention.h"
#endif
