/* whole.h for AVX2. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define LEVEL 3
#include "whole.h"
#include "whole_attention.h"
#endif
