// Block codecs: 32 values share one scale. An element holds 32, 64 or 128 values: first its scales, then the codes of
// its values. Reference implementation: tests/reference/codecs/block_codecs.py.
//
// A power-of-two scale is stored as its biased exponent (E8M0 of the OCP Microscaling formats), so encoding multiplies
// by an exact power of two and rounds once, to nearest even. The byte 255 marks a block with a NaN or an infinity; all
// of its values decode to NaN. `Int4Wide` has bf16 scales instead, and 16 bits of NaN as the mark.

#pragma once

#include "lanes.h"

namespace codecs {

// Adding 1.5 * 2^23 rounds a float below 2^22 in magnitude to an integer, to nearest even; its low bits are that integer.
constexpr float ROUNDER = 12582912.0f;
constexpr uint32_t MIN_SCALE = 1, NAN_SCALE = 255; // biased exponent of 2^-126, and the mark of NaN

// Integer codes of `Bits` bits with a power-of-two scale: the smallest for which the largest value rounds to at most
// 2^(Bits - 1) - 1.
template <int Bits> struct IntCodes {
    static constexpr size_t SCALE_BYTES = 1;
    static constexpr int LARGEST_EXPONENT = Bits - 2; // of 2^(Bits - 1) - 0.5
    // 2^24 minus the significand of 2^(Bits - 1) - 0.5: carries into the exponent where the next scale is needed.
    static constexpr uint32_t CARRY = 1u << (24 - Bits);
    static RESHARD_INLINE Words round(Floats scaled) { return as<Words>(scaled + ROUNDER); }
};

struct Int8 : IntCodes<8> {
    static constexpr size_t CODE_BYTES = 32;
    static RESHARD_INLINE void pack(const Words *rounded, uint8_t *codes) {
        store_bytes(codes, rounded);
        store_bytes(codes + BLOCK / 2, rounded + VECTORS / 2);
    }
    static RESHARD_INLINE void unpack(const uint8_t *codes, Floats *values) {
        Ints words[VECTORS];
        load_bytes(codes, words);
        load_bytes(codes + BLOCK / 2, words + VECTORS / 2);
        for (int i = 0; i < VECTORS; ++i)
            values[i] = __builtin_convertvector(words[i], Floats);
    }
};

// Four words of 32 bits: word i holds value i + 4k in its nibble k.
RESHARD_INLINE void pack_nibbles(const Words *rounded, uint8_t *codes) {
    Words packed = rounded[0] & 15u;
    for (int i = 1; i < VECTORS; ++i)
        packed |= (rounded[i] & 15u) << (4 * i);
    store(codes, packed);
}

struct Int4 : IntCodes<4> {
    static constexpr size_t CODE_BYTES = 16;
    static RESHARD_INLINE void pack(const Words *rounded, uint8_t *codes) { pack_nibbles(rounded, codes); }
    static RESHARD_INLINE void unpack(const uint8_t *codes, Floats *values) {
        const Words words = load<Words>(codes);
        for (int i = 0; i < VECTORS; ++i)
            values[i] = __builtin_convertvector(as<Ints>(words << (28 - 4 * i)) >> 28, Floats);
    }
};

// 16 bytes as in Int4 with the low 4 bits of each value; then four words of 16 bits, of which word i holds the high 2
// bits of value i + 4k in its bits 2k and 2k + 1.
struct Int6 : IntCodes<6> {
    static constexpr size_t CODE_BYTES = 24;
    static RESHARD_INLINE void pack(const Words *rounded, uint8_t *codes) {
        pack_nibbles(rounded, codes);
        Words high = (rounded[0] >> 4) & 3u;
        for (int i = 1; i < VECTORS; ++i)
            high |= ((rounded[i] >> 4) & 3u) << (2 * i);
        store(codes + 16, __builtin_convertvector(high, Halves));
    }
    static RESHARD_INLINE void unpack(const uint8_t *codes, Floats *values) {
        const Words low = load<Words>(codes), high = __builtin_convertvector(load<Halves>(codes + 16), Words);
        for (int i = 0; i < VECTORS; ++i) {
            const Words code = ((low >> (4 * i)) & 15u) | (((high >> (2 * i)) & 3u) << 4);
            values[i] = __builtin_convertvector(as<Ints>(code << 26) >> 26, Floats);
        }
    }
};

// e4m3 codes (4 exponent bits, 3 mantissa bits, bias 7, largest value 448), rounded to nearest even. The scale is the
// smallest for which the largest value rounds to at most 448.
struct Fp8 {
    static constexpr size_t SCALE_BYTES = 1, CODE_BYTES = 32;
    static constexpr int LARGEST_EXPONENT = 8;
    static constexpr uint32_t CARRY = 0x180000u; // 2^24 minus the significand of 464, which is halfway to the next code
    static RESHARD_INLINE Words round(Floats scaled) {
        const Words bits = as<Words>(scaled), magnitude = bits & ~SIGN;
        const Words normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
        const Words denormal = as<Words>(as<Floats>(magnitude) + 16384.0f) - 0x46800000u; // steps of 2^-9
        return (as<Ints>(magnitude) < 0x3c800000 ? denormal : normal) | ((bits & SIGN) >> 24);
    }
    static RESHARD_INLINE void pack(const Words *rounded, uint8_t *codes) { Int8::pack(rounded, codes); }
    static RESHARD_INLINE void unpack(const uint8_t *codes, Floats *values) {
        Ints words[VECTORS];
        load_bytes(codes, words);
        load_bytes(codes + BLOCK / 2, words + VECTORS / 2);
        for (int i = 0; i < VECTORS; ++i) {
            const Words sign = as<Words>(words[i]) & SIGN, magnitude = as<Words>(words[i]) & 127u;
            const Words normal = (magnitude << 20) + (120u << 23);
            const Words denormal = as<Words>(__builtin_convertvector(as<Ints>(magnitude), Floats) * 0.001953125f);
            values[i] = as<Floats>((as<Ints>(magnitude) < 8 ? denormal : normal) | sign);
        }
    }
};

// 4-bit codes with the bf16 scale nearest to a seventh of the largest value: a quarter less error than Int4, but not
// stable when decoded values are encoded again.
struct Int4Wide {
    static constexpr size_t SCALE_BYTES = 2, CODE_BYTES = 16;
    static RESHARD_INLINE Words round(Floats scaled) { return Int4::round(scaled); }
    static RESHARD_INLINE void pack(const Words *rounded, uint8_t *codes) { pack_nibbles(rounded, codes); }
    static RESHARD_INLINE void unpack(const uint8_t *codes, Floats *values) { Int4::unpack(codes, values); }
};

// The largest magnitude of a block, as bits. Magnitudes compare as their bits do; NaN and infinity are the largest.
RESHARD_INLINE uint32_t find_largest(const Floats *values) {
    Ints largest = as<Ints>(as<Words>(values[0]) & ~SIGN);
    for (int i = 1; i < VECTORS; ++i) {
        const Ints bits = as<Ints>(as<Words>(values[i]) & ~SIGN);
        largest = largest > bits ? largest : bits;
    }
    const int32_t a = largest[0] > largest[1] ? largest[0] : largest[1], b = largest[2] > largest[3] ? largest[2] : largest[3];
    return static_cast<uint32_t>(a > b ? a : b);
}

// Sums over the values of finite blocks: of squared errors and of squares.
struct ErrorSums {
    double error = 0, square = 0;
    RESHARD_INLINE void add(Floats errors, Floats squares, double scale) { // in units of the scale
        for (int lane = 0; lane < LANES; ++lane) {
            error += scale * scale * static_cast<double>(errors[lane]);
            square += scale * scale * static_cast<double>(squares[lane]);
        }
    }
};

template <class Codec, bool Measure>
RESHARD_INLINE void encode_block(const Floats *values, uint8_t *scale, uint8_t *codes, ErrorSums &sums) {
    const uint32_t largest = find_largest(values);
    if (largest >= INFINITE) {
        std::memset(codes, 0, Codec::CODE_BYTES);
        if constexpr (Codec::SCALE_BYTES == 1)
            *scale = NAN_SCALE;
        else
            store(scale, static_cast<uint16_t>(NAN_BITS >> 16));
        return;
    }
    Floats scaled[VECTORS];
    Words rounded[VECTORS];
    float unit;
    if constexpr (Codec::SCALE_BYTES == 1) {
        const int32_t exponent = static_cast<int32_t>((largest + Codec::CARRY) >> 23) - Codec::LARGEST_EXPONENT;
        const uint32_t byte = exponent < static_cast<int32_t>(MIN_SCALE) ? MIN_SCALE : static_cast<uint32_t>(exponent);
        *scale = static_cast<uint8_t>(byte);
        unit = as<float>(byte << 23);
        const Floats inverse = all_floats(as<float>((254u - byte) << 23));
        for (int i = 0; i < VECTORS; ++i)
            scaled[i] = values[i] * inverse;
    } else {
        const float wanted = as<float>(largest) / 7.0f, smallest = as<float>(0x00800000u);
        const uint32_t bits = as<uint32_t>(wanted < smallest ? smallest : wanted);
        const uint32_t word = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; // rounded to bf16
        store(scale, static_cast<uint16_t>(word));
        unit = as<float>(word << 16);
        for (int i = 0; i < VECTORS; ++i)
            scaled[i] = values[i] / all_floats(unit);
    }
    for (int i = 0; i < VECTORS; ++i)
        rounded[i] = Codec::round(scaled[i]);
    Codec::pack(rounded, codes);
    if constexpr (Measure) {
        Floats errors{}, squares{}, decoded[VECTORS];
        Codec::unpack(codes, decoded);
        for (int i = 0; i < VECTORS; ++i) {
            const Floats error = scaled[i] - decoded[i];
            errors += error * error;
            squares += scaled[i] * scaled[i];
        }
        sums.add(errors, squares, static_cast<double>(unit));
    }
}

// Products that exceed the largest finite value of the format by up to 2^-8 of it become that value, since coding may
// have raised it. Larger ones come from a wider format and become infinite.
template <Format F> RESHARD_INLINE void limit_block(Floats *values, bool is_nan) {
    const Floats most = all_floats(as<float>(Word<F>::MAX)), least = -most;
    for (int i = 0; i < VECTORS; ++i) {
        const Floats product = values[i];
        Floats value = product > most ? most : product;
        value = value < least ? least : value;
        if constexpr (F == Format::fp16) {
            const Floats infinite = all_floats(as<float>(INFINITE)), beyond = all_floats(65504.0f * 257.0f / 256.0f);
            value = product > beyond ? infinite : value;
            value = product < -beyond ? -infinite : value;
        }
        values[i] = is_nan ? all_floats(as<float>(NAN_BITS)) : value;
    }
}

// Writes or, with Accumulate, adds 32 values.
template <class Codec, Format F, bool Accumulate>
RESHARD_INLINE void decode_block(const uint8_t *scale, const uint8_t *codes, typename Word<F>::type *target) {
    uint32_t bits;
    if constexpr (Codec::SCALE_BYTES == 1)
        bits = *scale == NAN_SCALE ? NAN_BITS : static_cast<uint32_t>(*scale) << 23;
    else
        bits = static_cast<uint32_t>(load<uint16_t>(scale)) << 16;
    const Floats unit = all_floats(as<float>(bits));
    Floats values[VECTORS];
    Codec::unpack(codes, values);
    for (int i = 0; i < VECTORS; ++i)
        values[i] = values[i] * unit;
    if (bits >= Word<F>::LARGE_UNIT)
        limit_block<F>(values, (bits & ~SIGN) > INFINITE);
    if constexpr (Accumulate) {
        Floats sums[VECTORS];
        read_block<F>(target, sums);
        for (int i = 0; i < VECTORS; ++i)
            values[i] = sums[i] + values[i];
    }
    write_block<F>(target, values);
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
    Floats values[VECTORS];
    typename Word<F>::type padded[BLOCK];
    const size_t elements = grid.elements(), nbytes = element_bytes<Codec>(grid.blocks);
    for (size_t row = 0; row < grid.rows; ++row, source += grid.columns)
        for (size_t element = 0; element < elements; ++element, out += nbytes)
            for (size_t block = 0; block < grid.blocks; ++block) {
                const size_t at = (element * grid.blocks + block) * BLOCK;
                const size_t count = at >= grid.columns ? 0 : grid.columns - at;
                const typename Word<F>::type *from = source + at;
                if (count < BLOCK) {
                    std::memset(padded, 0, sizeof padded);
                    if (count > 0)
                        std::memcpy(padded, source + at, count * sizeof padded[0]);
                    from = padded;
                }
                prefetch_ahead(source + at, BLOCK * sizeof padded[0]);
                read_block<F>(from, values);
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
