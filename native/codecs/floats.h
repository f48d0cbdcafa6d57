// Conversions between fp32 and the 16-bit formats. Integer operations and exact additions only, so that every vector
// width and every compiler gives the same bits, and loops over them vectorize.

#pragma once

#include <bit>
#include <cstdint>

#include "targets.h"

namespace codecs {

enum class Format : int { fp32, bf16, fp16 };

RESHARD_INLINE float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
RESHARD_INLINE uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }

constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7f800000u, NAN_BITS = 0x7fc00000u;

template <Format F> struct Word;
template <> struct Word<Format::fp32> {
    using type = float;
    static constexpr uint32_t MAX = 0x7f7fffffu; // bits of the largest finite value, as fp32
    static RESHARD_INLINE float load(float value) { return value; }
    static RESHARD_INLINE float store(float value) { return value; }
};
template <> struct Word<Format::bf16> {
    using type = uint16_t;
    static constexpr uint32_t MAX = 0x7f7f0000u;
    static RESHARD_INLINE float load(uint16_t word) { return as_float(static_cast<uint32_t>(word) << 16); }
    // Rounds to nearest even. NaN must have the bits NAN_BITS.
    static RESHARD_INLINE uint16_t store(float value) {
        const uint32_t bits = as_bits(value);
        return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};
template <> struct Word<Format::fp16> {
    using type = uint16_t;
    static constexpr uint32_t MAX = 0x477fe000u; // 65504
    static RESHARD_INLINE float load(uint16_t word) {
        const uint32_t magnitude = (word & 0x7fffu) << 13, sign = (word & 0x8000u) << 16;
        const uint32_t normal = magnitude + (112u << 23), infinite = magnitude + (224u << 23);
        const uint32_t denormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
        const uint32_t finite = magnitude < 0x00800000u ? denormal : normal;
        return as_float((magnitude >= 0x0f800000u ? infinite : finite) | sign);
    }
    // Rounds to nearest even. Finite values must not exceed MAX.
    static RESHARD_INLINE uint16_t store(float value) {
        const uint32_t bits = as_bits(value), magnitude = bits & ~SIGN;
        const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const uint32_t denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
        const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
        return static_cast<uint16_t>((magnitude > INFINITE ? 0x7e00u : finite) | ((bits & SIGN) >> 16));
    }
};

} // namespace codecs
