// Vectors of four 32-bit lanes, in the vector extension of GCC and Clang: the compiler maps them to the registers that
// the target has. Conversions between fp32 and 16-bit formats, in integer operations and exact additions only, so that
// every vector width gives the same bits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "targets.h"

namespace codecs {

constexpr int LANES = 4, BLOCK = 32, VECTORS = BLOCK / LANES; // a block is the values that share a scale
typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(8)));
typedef int8_t Bytes __attribute__((vector_size(4)));

constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7f800000u, NAN_BITS = 0x7fc00000u;

template <class To, class From> RESHARD_INLINE To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <class To> RESHARD_INLINE To load(const void *from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}
template <class From> RESHARD_INLINE void store(void *to, From from) { std::memcpy(to, &from, sizeof from); }

template <class Vector, class Scalar> RESHARD_INLINE Vector all(Scalar value) { return Vector{} + value; }
// Not all<Floats>(value): adding to zero would change -0.
RESHARD_INLINE Floats all_floats(float value) { return as<Floats>(all<Words>(as<uint32_t>(value))); }

// Reads 16 signed bytes.
RESHARD_INLINE void load_bytes(const uint8_t *from, Ints *words) {
#ifdef __SSE2__
    const __m128i bytes = load<__m128i>(from);
    const __m128i low = _mm_unpacklo_epi8(bytes, bytes), high = _mm_unpackhi_epi8(bytes, bytes);
    words[0] = as<Ints>(_mm_unpacklo_epi16(low, low)) >> 24;
    words[1] = as<Ints>(_mm_unpackhi_epi16(low, low)) >> 24;
    words[2] = as<Ints>(_mm_unpacklo_epi16(high, high)) >> 24;
    words[3] = as<Ints>(_mm_unpackhi_epi16(high, high)) >> 24;
#else
    for (int i = 0; i < 4; ++i)
        words[i] = __builtin_convertvector(load<Bytes>(from + i * LANES), Ints);
#endif
}

// Writes the low bytes of 16 words.
RESHARD_INLINE void store_bytes(uint8_t *to, const Words *words) {
#ifdef __SSE2__
    __m128i signed_bytes[4];
    for (int i = 0; i < 4; ++i)
        signed_bytes[i] = as<__m128i>(as<Ints>(words[i] << 24) >> 24);
    store(to, _mm_packs_epi16(_mm_packs_epi32(signed_bytes[0], signed_bytes[1]),
                              _mm_packs_epi32(signed_bytes[2], signed_bytes[3])));
#else
    for (int i = 0; i < 4; ++i)
        store(to + i * LANES, __builtin_convertvector(words[i], Bytes));
#endif
}

// Reads and writes 8 unsigned words of 16 bits.
RESHARD_INLINE void load_halves(const uint16_t *from, Words *words) {
#ifdef __SSE2__
    const __m128i halves = load<__m128i>(from), zero = _mm_setzero_si128();
    words[0] = as<Words>(_mm_unpacklo_epi16(halves, zero));
    words[1] = as<Words>(_mm_unpackhi_epi16(halves, zero));
#else
    for (int i = 0; i < 2; ++i)
        words[i] = __builtin_convertvector(load<Halves>(from + i * LANES), Words);
#endif
}
RESHARD_INLINE void store_halves(uint16_t *to, const Words *words) {
#ifdef __SSE2__
    __m128i signed_halves[2];
    for (int i = 0; i < 2; ++i)
        signed_halves[i] = as<__m128i>(as<Ints>(words[i] << 16) >> 16);
    store(to, _mm_packs_epi32(signed_halves[0], signed_halves[1]));
#else
    for (int i = 0; i < 2; ++i)
        store(to + i * LANES, __builtin_convertvector(words[i], Halves));
#endif
}

enum class Format : int { fp32, bf16, fp16 };

// How values of a format become fp32, and how fp32 is rounded to it, to nearest even. A value to round is a NaN with the
// bits NAN_BITS, an infinity, or at most MAX in magnitude.
template <Format F> struct Word;
template <> struct Word<Format::fp32> {
    using type = float;
    static constexpr uint32_t MAX = 0x7f7fffffu; // bits of the largest finite value, as fp32
    static constexpr uint32_t LARGE_UNIT = 240u << 23; // bits of a scale; below, all codes stay finite
};
template <> struct Word<Format::bf16> {
    using type = uint16_t;
    static constexpr uint32_t MAX = 0x7f7f0000u, LARGE_UNIT = 240u << 23;
    static RESHARD_INLINE Floats widen(Words word) { return as<Floats>(word << 16); }
    static RESHARD_INLINE Words narrow(Floats values) {
        const Words bits = as<Words>(values);
        return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
};
template <> struct Word<Format::fp16> {
    using type = uint16_t;
    static constexpr uint32_t MAX = 0x477fe000u, LARGE_UNIT = 134u << 23; // 65504, 2^7
    static RESHARD_INLINE Floats widen(Words word) {
        const Words magnitude = (word & 0x7fffu) << 13, sign = (word & 0x8000u) << 16;
        const Words smallest = all<Words>(113u << 23); // 2^-14, the smallest normal value
        const Words denormal = as<Words>(as<Floats>(magnitude + smallest) - as<Floats>(smallest));
        const Words finite = as<Ints>(magnitude) < 0x00800000 ? denormal : magnitude + (112u << 23);
        return as<Floats>((as<Ints>(magnitude) >= 0x0f800000 ? magnitude + (224u << 23) : finite) | sign);
    }
    static RESHARD_INLINE Words narrow(Floats values) {
        const Words bits = as<Words>(values), magnitude = bits & ~SIGN;
        const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const Words denormal = as<Words>(as<Floats>(magnitude) + 0.5f) - 0x3f000000u;
        const Words finite = as<Ints>(magnitude) < 0x38800000 ? denormal : normal;
        const Words special = magnitude == INFINITE ? all<Words>(0x7c00u) : all<Words>(0x7e00u);
        const Words word = as<Ints>(magnitude) >= static_cast<int32_t>(INFINITE) ? special : finite;
        return word | ((bits & SIGN) >> 16);
    }
};

// Reads and writes a block of values.
template <Format F> RESHARD_INLINE void read_block(const typename Word<F>::type *from, Floats *values) {
    if constexpr (F == Format::fp32) {
        for (int i = 0; i < VECTORS; ++i)
            values[i] = load<Floats>(from + i * LANES);
    } else {
        for (int i = 0; i < VECTORS; i += 2) {
            Words words[2];
            load_halves(from + i * LANES, words);
            values[i] = Word<F>::widen(words[0]);
            values[i + 1] = Word<F>::widen(words[1]);
        }
    }
}
template <Format F> RESHARD_INLINE void write_block(typename Word<F>::type *to, const Floats *values) {
    if constexpr (F == Format::fp32) {
        for (int i = 0; i < VECTORS; ++i)
            store(to + i * LANES, values[i]);
    } else {
        for (int i = 0; i < VECTORS; i += 2) {
            const Words words[2] = {Word<F>::narrow(values[i]), Word<F>::narrow(values[i + 1])};
            store_halves(to + i * LANES, words);
        }
    }
}

} // namespace codecs
