// Block codecs: 32 values share one scale. An element holds 32, 64 or 128 values: first its scales, then the codes of
// its values. Python reference: tests/reference/block_codecs.py.
//
// A power-of-two scale is stored as its biased exponent (E8M0 of the OCP Microscaling formats), so encoding multiplies
// by an exact power of two and rounds once, to nearest even. The byte 255 marks a block with a NaN or an infinity; all
// of its values decode to NaN. `Int4Wide` has bf16 scales instead, and 16 bits of NaN as the mark.

#pragma once

#include <cstddef>
#include <cstring>

#include "floats.h"

namespace codecs {

constexpr int BLOCK = 32; // values per scale
// Adding 1.5 * 2^23 rounds a float below 2^22 in magnitude to an integer, to nearest even; its low bits are that integer.
constexpr float ROUNDER = 12582912.0f;
constexpr uint32_t MIN_SCALE = 1, MAX_SCALE = 254, NAN_SCALE = 255; // exponents of 2^-126, 2^127, and the mark of NaN

// Integer codes of `Bits` bits with a power-of-two scale: the smallest for which the largest value rounds to at most
// 2^(Bits - 1) - 1.
template <int Bits> struct IntCodes {
    static constexpr size_t SCALE_BYTES = 1;
    static constexpr int LARGEST_EXPONENT = Bits - 2; // of 2^(Bits - 1) - 0.5
    // 2^24 minus the significand of 2^(Bits - 1) - 0.5: carries into the exponent where the next scale is needed.
    static constexpr uint32_t CARRY = 1u << (24 - Bits);
};

struct Int8 : IntCodes<8> {
    static constexpr size_t CODE_BYTES = 32;
    static RESHARD_INLINE void pack(const uint32_t *rounded, uint8_t *codes) {
        for (int i = 0; i < BLOCK; ++i)
            codes[i] = static_cast<uint8_t>(rounded[i]);
    }
    static RESHARD_INLINE void unpack(const uint8_t *codes, float *values) {
        for (int i = 0; i < BLOCK; ++i)
            values[i] = static_cast<float>(static_cast<int8_t>(codes[i]));
    }
};

// Byte i holds value i in its low half and value i + 16 in its high half.
RESHARD_INLINE void pack_halves(const uint32_t *rounded, uint8_t *codes) {
    for (int i = 0; i < 16; ++i)
        codes[i] = static_cast<uint8_t>((rounded[i] & 15u) | (rounded[i + 16] << 4));
}

struct Int4 : IntCodes<4> {
    static constexpr size_t CODE_BYTES = 16;
    static RESHARD_INLINE void pack(const uint32_t *rounded, uint8_t *codes) { pack_halves(rounded, codes); }
    static RESHARD_INLINE void unpack(const uint8_t *codes, float *values) {
        for (int i = 0; i < 16; ++i) {
            values[i] = static_cast<float>(((codes[i] & 15) ^ 8) - 8);
            values[i + 16] = static_cast<float>(((codes[i] >> 4) ^ 8) - 8);
        }
    }
};

// 16 bytes as in Int4 with the low 4 bits of each value, then 8 bytes with the high 2 bits of values i, i + 8, i + 16
// and i + 24.
struct Int6 : IntCodes<6> {
    static constexpr size_t CODE_BYTES = 24;
    static RESHARD_INLINE void pack(const uint32_t *rounded, uint8_t *codes) {
        pack_halves(rounded, codes);
        for (int i = 0; i < 8; ++i)
            codes[16 + i] = static_cast<uint8_t>(((rounded[i] >> 4) & 3u) | ((rounded[i + 8] >> 2) & 12u) |
                                                 (rounded[i + 16] & 48u) | ((rounded[i + 24] << 2) & 192u));
    }
    static RESHARD_INLINE void unpack(const uint8_t *codes, float *values) {
        int32_t low[BLOCK], high[BLOCK];
        for (int i = 0; i < 16; ++i) {
            low[i] = codes[i] & 15;
            low[i + 16] = codes[i] >> 4;
        }
        for (int i = 0; i < 8; ++i) {
            const int32_t bits = codes[16 + i];
            high[i] = (bits << 4) & 48;
            high[i + 8] = (bits << 2) & 48;
            high[i + 16] = bits & 48;
            high[i + 24] = (bits >> 2) & 48;
        }
        for (int i = 0; i < BLOCK; ++i)
            values[i] = static_cast<float>(((low[i] | high[i]) ^ 32) - 32);
    }
};

// e4m3 codes (4 exponent bits, 3 mantissa bits, bias 7, largest value 448), rounded to nearest even. The scale is the
// smallest for which the largest value rounds to at most 448.
struct Fp8 {
    static constexpr size_t SCALE_BYTES = 1, CODE_BYTES = 32;
    static constexpr int LARGEST_EXPONENT = 8;
    static constexpr uint32_t CARRY = 0x180000u; // 2^24 minus the significand of 464, which is halfway to the next code
    static RESHARD_INLINE uint32_t encode(float scaled) {
        const uint32_t bits = as_bits(scaled), magnitude = bits & ~SIGN;
        const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
        const uint32_t denormal = as_bits(as_float(magnitude) + 16384.0f) - 0x46800000u; // steps of 2^-9
        return (magnitude < 0x3c800000u ? denormal : normal) | ((bits & SIGN) >> 24);
    }
    static RESHARD_INLINE void pack(const uint32_t *codes_in, uint8_t *codes) {
        for (int i = 0; i < BLOCK; ++i)
            codes[i] = static_cast<uint8_t>(codes_in[i]);
    }
    static RESHARD_INLINE void unpack(const uint8_t *codes, float *values) {
        for (int i = 0; i < BLOCK; ++i) {
            const uint32_t code = codes[i], magnitude = code & 127u;
            const uint32_t normal = (magnitude << 20) + (120u << 23);
            const uint32_t denormal = as_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125f);
            values[i] = as_float((magnitude < 8u ? denormal : normal) | ((code & 128u) << 24));
        }
    }
};

// 4-bit codes with the bf16 scale nearest to a seventh of the largest value: a quarter less error than Int4, but not
// stable when decoded values are encoded again.
struct Int4Wide {
    static constexpr size_t SCALE_BYTES = 2, CODE_BYTES = 16;
    static RESHARD_INLINE void pack(const uint32_t *rounded, uint8_t *codes) { Int4::pack(rounded, codes); }
    static RESHARD_INLINE void unpack(const uint8_t *codes, float *values) { Int4::unpack(codes, values); }
};

// The largest magnitude of a block, as bits. Magnitudes compare as their bits do; NaN and infinity are the largest.
RESHARD_INLINE uint32_t find_largest(const float *values) {
    int32_t largest[8] = {};
    for (int i = 0; i < BLOCK; i += 8)
        for (int lane = 0; lane < 8; ++lane) {
            const int32_t bits = static_cast<int32_t>(as_bits(values[i + lane]) & ~SIGN);
            largest[lane] = largest[lane] > bits ? largest[lane] : bits;
        }
    int32_t found = largest[0];
    for (int lane = 1; lane < 8; ++lane)
        found = found > largest[lane] ? found : largest[lane];
    return static_cast<uint32_t>(found);
}

// Sums over the values of finite blocks, in units of the caller's choice: of squared errors and of squares.
struct ErrorSums {
    double error = 0, square = 0;
    RESHARD_INLINE void add(const float *scaled, const float *decoded, double scale) {
        float error_of[8] = {}, square_of[8] = {};
        for (int i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; ++lane) {
                const float value = scaled[i + lane], difference = value - decoded[i + lane];
                error_of[lane] += difference * difference;
                square_of[lane] += value * value;
            }
        for (int lane = 0; lane < 8; ++lane) {
            error += scale * scale * static_cast<double>(error_of[lane]);
            square += scale * scale * static_cast<double>(square_of[lane]);
        }
    }
};

template <class Codec, bool Measure>
RESHARD_INLINE void encode_block(const float *values, uint8_t *scale, uint8_t *codes, ErrorSums &sums) {
    const uint32_t largest = find_largest(values);
    float scaled[BLOCK];
    uint32_t rounded[BLOCK];
    float unit;
    if (largest >= INFINITE) {
        std::memset(codes, 0, Codec::CODE_BYTES);
        if constexpr (Codec::SCALE_BYTES == 1) {
            *scale = NAN_SCALE;
        } else {
            const uint16_t mark = NAN_BITS >> 16;
            std::memcpy(scale, &mark, 2);
        }
        return;
    }
    if constexpr (Codec::SCALE_BYTES == 1) {
        const int32_t exponent = static_cast<int32_t>((largest + Codec::CARRY) >> 23) - Codec::LARGEST_EXPONENT;
        const uint32_t byte = exponent < static_cast<int32_t>(MIN_SCALE) ? MIN_SCALE : static_cast<uint32_t>(exponent);
        *scale = static_cast<uint8_t>(byte);
        unit = as_float(byte << 23);
        const float inverse = as_float((254u - byte) << 23);
        for (int i = 0; i < BLOCK; ++i)
            scaled[i] = values[i] * inverse;
    } else {
        float wanted = as_float(largest) / 7.0f;
        wanted = wanted < as_float(0x00800000u) ? as_float(0x00800000u) : wanted;
        const uint16_t word = Word<Format::bf16>::store(wanted);
        std::memcpy(scale, &word, 2);
        unit = Word<Format::bf16>::load(word);
        for (int i = 0; i < BLOCK; ++i)
            scaled[i] = values[i] / unit;
    }
    if constexpr (requires { Codec::encode(0.0f); }) {
        for (int i = 0; i < BLOCK; ++i)
            rounded[i] = Codec::encode(scaled[i]);
    } else {
        for (int i = 0; i < BLOCK; ++i)
            rounded[i] = as_bits(scaled[i] + ROUNDER);
    }
    Codec::pack(rounded, codes);
    if constexpr (Measure) {
        float decoded[BLOCK];
        Codec::unpack(codes, decoded);
        sums.add(scaled, decoded, static_cast<double>(unit));
    }
}

// Writes or, with Accumulate, adds 32 values. Products that overflow become the largest finite value of the format.
template <class Codec, Format F, bool Accumulate>
RESHARD_INLINE void decode_block(const uint8_t *scale, const uint8_t *codes, typename Word<F>::type *target) {
    uint32_t unit_bits;
    if constexpr (Codec::SCALE_BYTES == 1) {
        unit_bits = *scale == NAN_SCALE ? NAN_BITS : static_cast<uint32_t>(*scale) << 23;
    } else {
        uint16_t word;
        std::memcpy(&word, scale, 2);
        unit_bits = static_cast<uint32_t>(word) << 16;
    }
    const bool is_nan = (unit_bits & ~SIGN) > INFINITE;
    const float unit = as_float(unit_bits), most = as_float(Word<F>::MAX), least = -most;
    float values[BLOCK];
    Codec::unpack(codes, values);
    for (int i = 0; i < BLOCK; ++i) {
        const float value = values[i] * unit, below = value > most ? most : value;
        values[i] = below < least ? least : below;
    }
    if (is_nan)
        for (int i = 0; i < BLOCK; ++i)
            values[i] = as_float(NAN_BITS);
    for (int i = 0; i < BLOCK; ++i) {
        if constexpr (Accumulate)
            values[i] += Word<F>::load(target[i]);
        target[i] = Word<F>::store(values[i]);
    }
}

// The shape of an encoded array: `rows` times `columns` values, the columns in elements of `blocks` blocks each. The
// last element of a row is padded with zeros.
struct Grid {
    size_t rows, columns, blocks;
    size_t elements() const { return (columns + blocks * BLOCK - 1) / (blocks * BLOCK); }
};

template <class Codec> constexpr size_t element_bytes(size_t blocks) {
    return blocks * (Codec::SCALE_BYTES + Codec::CODE_BYTES);
}

template <class Codec, Format F, bool Measure>
RESHARD_INLINE void encode_rows(Grid grid, const typename Word<F>::type *source, uint8_t *out, ErrorSums &sums) {
    float values[BLOCK];
    const size_t elements = grid.elements(), nbytes = element_bytes<Codec>(grid.blocks);
    for (size_t row = 0; row < grid.rows; ++row, source += grid.columns)
        for (size_t element = 0; element < elements; ++element, out += nbytes)
            for (size_t block = 0; block < grid.blocks; ++block) {
                const size_t at = (element * grid.blocks + block) * BLOCK;
                const size_t count = at >= grid.columns ? 0 : grid.columns - at;
                if (count >= BLOCK) {
                    for (int i = 0; i < BLOCK; ++i)
                        values[i] = Word<F>::load(source[at + i]);
                } else {
                    for (size_t i = 0; i < BLOCK; ++i)
                        values[i] = i < count ? Word<F>::load(source[at + i]) : 0.0f;
                }
                encode_block<Codec, Measure>(
                    values, out + block * Codec::SCALE_BYTES,
                    out + grid.blocks * Codec::SCALE_BYTES + block * Codec::CODE_BYTES, sums);
            }
}

template <class Codec, Format F, bool Accumulate>
RESHARD_INLINE void decode_rows(Grid grid, const uint8_t *data, typename Word<F>::type *target) {
    typename Word<F>::type values[BLOCK];
    const size_t elements = grid.elements(), nbytes = element_bytes<Codec>(grid.blocks);
    for (size_t row = 0; row < grid.rows; ++row, target += grid.columns)
        for (size_t element = 0; element < elements; ++element, data += nbytes)
            for (size_t block = 0; block < grid.blocks; ++block) {
                const size_t at = (element * grid.blocks + block) * BLOCK;
                const size_t count = at >= grid.columns ? 0 : grid.columns - at;
                const uint8_t *scale = data + block * Codec::SCALE_BYTES;
                const uint8_t *codes = data + grid.blocks * Codec::SCALE_BYTES + block * Codec::CODE_BYTES;
                if (count >= BLOCK) {
                    decode_block<Codec, F, Accumulate>(scale, codes, target + at);
                } else if (count > 0) {
                    std::memset(values, 0, sizeof values);
                    std::memcpy(values, target + at, count * sizeof values[0]);
                    decode_block<Codec, F, Accumulate>(scale, codes, values);
                    std::memcpy(target + at, values, count * sizeof values[0]);
                }
            }
}

} // namespace codecs
