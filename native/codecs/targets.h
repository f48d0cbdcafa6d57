// Compiles a function once for the baseline instruction set and once for x86-64-v3 (AVX2), where the compiler and the C
// library can choose between the two at load time. Elsewhere the macro is empty and only the baseline exists.

#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define RESHARD_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define RESHARD_CLONES
#endif

#if defined(__GNUC__) || defined(__clang__)
#define RESHARD_INLINE inline __attribute__((always_inline))
#else
#define RESHARD_INLINE inline
#endif
