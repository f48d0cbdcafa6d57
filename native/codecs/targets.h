// Compiles a function once for the baseline instruction set and once for x86-64-v3 (AVX2), where the compiler and the C
// library can choose between the two at load time. Elsewhere the macro is empty and only the baseline exists. The wide
// clones are compiled for x86-64-v4 (AVX-512) as well, for loops with much arithmetic per byte.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define RESHARD_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#define RESHARD_WIDE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RESHARD_CLONES
#define RESHARD_WIDE_CLONES
#endif

#if defined(__GNUC__) || defined(__clang__)
#define RESHARD_INLINE inline __attribute__((always_inline))
#else
#define RESHARD_INLINE inline
#endif

namespace codecs {

// Prefetches `nbytes` bytes that are read 2 KiB later than `from`: with much arithmetic per byte, the hardware prefetches
// too late. The address may lie outside the array.
RESHARD_INLINE void prefetch_ahead([[maybe_unused]] const void *from, [[maybe_unused]] size_t nbytes) {
#if defined(__GNUC__) || defined(__clang__)
    constexpr uintptr_t DISTANCE = 2048, LINE = 64;
    for (uintptr_t at = 0; at < nbytes; at += LINE)
        __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(from) + DISTANCE + at));
#endif
}

} // namespace codecs
