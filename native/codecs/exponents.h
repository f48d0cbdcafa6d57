// Lossless code of bf16 values. Most exponents of a block lie close to the largest one, so 3 bits per value hold the
// distance to it; sign and mantissa stay as they are. Reference implementation: tests/reference/codecs/exponents.py.
//
// A block holds 128 values:
//   1 byte     the largest exponent
//   48 bytes   codes of 3 bits: the distance of a value's exponent to the largest one, or 7 for any distance above 6
//   128 bytes  sign and mantissa of each value, the sign as the highest bit
//   1 byte     the exponent of each value with code 7, in order
// Eight codes of values i, i + 16, ..., i + 112 share bits of bytes i, i + 16 and i + 32, lowest bits first. The last
// values of an array that do not fill a block follow as they are.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "targets.h"

namespace codecs {

constexpr size_t EXPONENT_VALUES = 128, ROW = 16, ROWS = EXPONENT_VALUES / ROW, CODES_BYTES = 3 * ROW;
constexpr size_t FIXED_BYTES = 1 + CODES_BYTES + EXPONENT_VALUES; // of a block, without the exponents after it
constexpr uint8_t ESCAPE = 7;
constexpr size_t AHEAD = 4; // exponents that the encoder writes without a branch between them

typedef uint8_t Row __attribute__((vector_size(16)));
typedef uint16_t HalfRow __attribute__((vector_size(16)));

template <class To> RESHARD_INLINE To load_row(const void *from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}
template <class From> RESHARD_INLINE void store_row(void *to, From from) { std::memcpy(to, &from, sizeof from); }

// The low bytes of 16 words, all below 256.
RESHARD_INLINE Row narrow_row(HalfRow low, HalfRow high) {
#ifdef __SSE2__
    const __m128i packed = _mm_packus_epi16(load_row<__m128i>(&low), load_row<__m128i>(&high));
    return load_row<Row>(&packed);
#else
    Row out;
    for (size_t i = 0; i < ROW / 2; ++i) {
        out[i] = static_cast<uint8_t>(low[i]);
        out[i + ROW / 2] = static_cast<uint8_t>(high[i]);
    }
    return out;
#endif
}

// The 16 words with these bytes.
RESHARD_INLINE void widen_row(Row bytes, HalfRow &low, HalfRow &high) {
#ifdef __SSE2__
    const __m128i wide = load_row<__m128i>(&bytes), zero = _mm_setzero_si128();
    const __m128i a = _mm_unpacklo_epi8(wide, zero), b = _mm_unpackhi_epi8(wide, zero);
    low = load_row<HalfRow>(&a);
    high = load_row<HalfRow>(&b);
#else
    for (size_t i = 0; i < ROW / 2; ++i) {
        low[i] = bytes[i];
        high[i] = bytes[i + ROW / 2];
    }
#endif
}

// One bit per byte that equals ESCAPE.
RESHARD_INLINE uint32_t find_escapes(Row codes) {
#ifdef __SSE2__
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(load_row<__m128i>(&codes), _mm_set1_epi8(ESCAPE))));
#else
    uint32_t bits = 0;
    for (size_t i = 0; i < ROW; ++i)
        bits |= static_cast<uint32_t>(codes[i] == ESCAPE) << i;
    return bits;
#endif
}

// Writes the code of an array and returns its size; -1 if it would exceed `capacity` bytes.
RESHARD_INLINE int64_t encode_exponents(const uint16_t *words, size_t count, uint8_t *out, size_t capacity) {
    const uint8_t *const end = out + capacity;
    uint8_t *to = out;
    size_t at = 0;
    for (; at + EXPONENT_VALUES <= count; at += EXPONENT_VALUES) {
        if (static_cast<size_t>(end - to) < FIXED_BYTES)
            return -1;
        prefetch_ahead(words + at, EXPONENT_VALUES * sizeof words[0]);
        Row exponents[ROWS], codes[ROWS];
        Row largest{};
        for (size_t i = 0; i < ROWS; ++i) {
            const auto low = load_row<HalfRow>(words + at + i * ROW), high = load_row<HalfRow>(words + at + i * ROW + ROW / 2);
            exponents[i] = narrow_row((low >> 7) & 255, (high >> 7) & 255);
            store_row(to + 1 + CODES_BYTES + i * ROW,
                      narrow_row((low & 127) | ((low >> 8) & 128), (high & 127) | ((high >> 8) & 128)));
            largest = largest > exponents[i] ? largest : exponents[i];
        }
        uint8_t base = largest[0];
        for (size_t i = 1; i < ROW; ++i)
            base = std::max(base, largest[i]);
        uint64_t escapes[2] = {0, 0};
        for (size_t i = 0; i < ROWS; ++i) {
            const Row distance = base - exponents[i];
            codes[i] = distance < ESCAPE ? distance : Row{} + ESCAPE;
            escapes[i / 4] |= static_cast<uint64_t>(find_escapes(codes[i])) << (i % 4 * ROW);
        }
        *to = base;
        store_row(to + 1, codes[0] | codes[1] << 3 | codes[2] << 6);
        store_row(to + 1 + ROW, codes[2] >> 2 | codes[3] << 1 | codes[4] << 4 | codes[5] << 7);
        store_row(to + 1 + 2 * ROW, codes[5] >> 1 | codes[6] << 2 | codes[7] << 5);
        to += FIXED_BYTES;
        const auto count_escapes = static_cast<size_t>(std::popcount(escapes[0]) + std::popcount(escapes[1]));
        if (static_cast<size_t>(end - to) < count_escapes + 1)
            return -1;
        for (size_t half = 0; half < 2; ++half) {
            uint64_t bits = escapes[half];
            do
                for (size_t i = 0; i < AHEAD; ++i, bits &= bits - 1) { // without bits, writes a byte that is not kept
                    const auto place = static_cast<size_t>(std::countr_zero(bits)) & 63;
                    *to = static_cast<uint8_t>(words[at + 64 * half + place] >> 7);
                    to += bits != 0;
                }
            while (bits);
        }
    }
    const size_t rest = (count - at) * sizeof(uint16_t);
    if (static_cast<size_t>(end - to) < rest)
        return -1;
    std::memcpy(to, words + at, rest);
    return to + rest - out;
}

// Reads an array of `count` values. Returns false if the data is not the code of so many; some values may be written.
RESHARD_INLINE bool decode_exponents(const uint8_t *data, size_t nbytes, uint16_t *words, size_t count) {
    const uint8_t *const end = data + nbytes;
    size_t at = 0;
    for (; at + EXPONENT_VALUES <= count; at += EXPONENT_VALUES) {
        if (static_cast<size_t>(end - data) < FIXED_BYTES)
            return false;
        const uint8_t base = *data;
        const auto a = load_row<Row>(data + 1), b = load_row<Row>(data + 1 + ROW), c = load_row<Row>(data + 1 + 2 * ROW);
        const Row codes[ROWS] = {a & 7,        (a >> 3) & 7, (a >> 6 | b << 2) & 7, (b >> 1) & 7,
                                 (b >> 4) & 7, (b >> 7 | c << 1) & 7, (c >> 2) & 7, c >> 5};
        uint64_t escapes[2] = {0, 0};
        for (size_t i = 0; i < ROWS; ++i) {
            HalfRow low, high, low_exponents, high_exponents;
            widen_row(load_row<Row>(data + 1 + CODES_BYTES + i * ROW), low, high);
            widen_row(base - codes[i], low_exponents, high_exponents);
            store_row(words + at + i * ROW, (low & 127) | (low & 128) << 8 | low_exponents << 7);
            store_row(words + at + i * ROW + ROW / 2, (high & 127) | (high & 128) << 8 | high_exponents << 7);
            escapes[i / 4] |= static_cast<uint64_t>(find_escapes(codes[i])) << (i % 4 * ROW);
        }
        data += FIXED_BYTES;
        const auto count_escapes = static_cast<size_t>(std::popcount(escapes[0]) + std::popcount(escapes[1]));
        if (static_cast<size_t>(end - data) < count_escapes)
            return false;
        uint64_t bits = escapes[0], later = escapes[1];
        uint16_t *half = words + at;
        for (size_t i = 0; i < count_escapes; ++i) { // one loop for both halves, since its end is hard to predict
            const bool is_later = bits == 0;
            bits = is_later ? later : bits;
            half = is_later ? words + at + 64 : half;
            uint16_t &word = half[std::countr_zero(bits)];
            word = static_cast<uint16_t>((word & 0x807f) | *data++ << 7);
            bits &= bits - 1;
        }
    }
    const size_t rest = (count - at) * sizeof(uint16_t);
    if (static_cast<size_t>(end - data) != rest)
        return false;
    std::memcpy(words + at, data, rest);
    return true;
}

} // namespace codecs
