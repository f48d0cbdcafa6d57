// Lossless differences of two arrays of words. Python reference: tests/reference/codecs/delta.py.
//
// The stream has one entry per changed word, in order: the number of unchanged words before it as one byte, then its
// difference. 255 skips 255 words and is followed by another number, without a difference. The difference counts the
// floating-point values between the old and the new word, zigzag coded into one byte (0 for +1, 1 for -1, 2 for +2, ...);
// 255 is followed by the new word itself, as is the case for every -0.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "targets.h"

namespace codecs {

constexpr uint8_t SKIP = 255, WHOLE = 255;

// The position of a word among all floating-point values of its format, whose sign is its highest bit.
template <class Word> RESHARD_INLINE int64_t position(Word word) {
    constexpr Word sign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
    const auto magnitude = static_cast<int64_t>(static_cast<Word>(word & static_cast<Word>(~sign)));
    return word & sign ? -magnitude : magnitude;
}

// Writes entries one by one.
template <class Word> struct DeltaWriter {
    uint8_t *out, *const end;
    size_t next = 0; // the word after the last changed one

    // Returns false if the entry does not fit.
    RESHARD_INLINE bool add(size_t at, Word word, Word base) {
        size_t gap = at - next;
        if (gap / 255 + 2 + sizeof(Word) + 1 > static_cast<size_t>(end - out))
            return false;
        for (; gap >= 255; gap -= 255)
            *out++ = SKIP;
        *out++ = static_cast<uint8_t>(gap);
        const int64_t steps = position(word) - position(base);
        const int64_t code = steps > 0 ? 2 * steps - 2 : -2 * steps - 1;
        const bool is_minus_zero = position(word) == 0 && word != 0; // has the position of 0
        if (steps == 0 || is_minus_zero || code >= WHOLE) {
            *out++ = WHOLE;
            std::memcpy(out, &word, sizeof(Word));
            out += sizeof(Word);
        } else {
            *out++ = static_cast<uint8_t>(code);
        }
        next = at + 1;
        return true;
    }
};

// The words of a block of 64 bytes that differ, as bits.
template <class Word> RESHARD_INLINE uint64_t find_changes(const Word *words, const Word *base) {
    constexpr size_t count = 64 / sizeof(Word);
    uint64_t changed = 0;
#ifdef __SSE2__
    __m128i same[4];
    for (size_t i = 0; i < 4; ++i) {
        __m128i a, b;
        std::memcpy(&a, words + i * count / 4, 16);
        std::memcpy(&b, base + i * count / 4, 16);
        same[i] = sizeof(Word) == 1   ? _mm_cmpeq_epi8(a, b)
                  : sizeof(Word) == 2 ? _mm_cmpeq_epi16(a, b)
                                      : _mm_cmpeq_epi32(a, b);
    }
    const auto bits = [](__m128i bytes) { return static_cast<uint64_t>(_mm_movemask_epi8(bytes)); };
    if constexpr (sizeof(Word) == 1)
        changed = bits(same[0]) | bits(same[1]) << 16 | bits(same[2]) << 32 | bits(same[3]) << 48;
    else if constexpr (sizeof(Word) == 2)
        changed = bits(_mm_packs_epi16(same[0], same[1])) | bits(_mm_packs_epi16(same[2], same[3])) << 16;
    else
        changed = bits(_mm_packs_epi16(_mm_packs_epi32(same[0], same[1]), _mm_packs_epi32(same[2], same[3])));
    changed = ~changed & (~uint64_t{0} >> (64 - count));
#else
    for (size_t i = 0; i < count; ++i)
        changed |= static_cast<uint64_t>(words[i] != base[i]) << i;
#endif
    return changed;
}

// Writes the stream and returns its size; -1 if it could exceed `capacity` bytes.
template <class Word>
RESHARD_INLINE int64_t encode_delta(const Word *words, const Word *base, size_t count, uint8_t *out, size_t capacity) {
    constexpr size_t per_block = 64 / sizeof(Word);
    DeltaWriter<Word> writer{out, out + capacity};
    size_t at = 0;
    for (; at + per_block <= count; at += per_block) {
        prefetch_ahead(words + at, 64);
        prefetch_ahead(base + at, 64);
        for (uint64_t changed = find_changes(words + at, base + at); changed; changed &= changed - 1) {
            const size_t i = at + static_cast<size_t>(std::countr_zero(changed));
            if (!writer.add(i, words[i], base[i]))
                return -1;
        }
    }
    for (; at < count; ++at)
        if (words[at] != base[at] && !writer.add(at, words[at], base[at]))
            return -1;
    return writer.out - out;
}

// The word `steps` values after `word`.
template <class Word> RESHARD_INLINE Word move_by(Word word, int64_t steps) {
    const int64_t to = position(word) + steps;
    constexpr auto sign = static_cast<int64_t>(uint64_t{1} << (8 * sizeof(Word) - 1));
    return static_cast<Word>(to < 0 ? sign - to : to);
}

// Reads a stream some entries ahead of its application, and prefetches the words that change. The changed words of a
// large array are too far apart for the hardware prefetcher.
template <class Word> struct Prefetcher {
    static constexpr int ENTRIES = 24;
    const uint8_t *data, *const end;
    const Word *const words;
    const size_t count;
    size_t at = 0;

    RESHARD_INLINE void next() {
        while (end - data >= 2) {
            const uint8_t gap = *data++;
            at += gap;
            if (gap == SKIP)
                continue;
            if (at < count)
                __builtin_prefetch(words + at, 1);
            const ptrdiff_t entry = *data == WHOLE ? 1 + sizeof(Word) : 1;
            data = end - data > entry ? data + entry : end;
            ++at;
            return;
        }
    }
};

// Applies a stream to the base, in place. Returns false if the stream is not one for so many words; some words may have
// changed then.
template <class Word>
RESHARD_INLINE bool apply_delta(const uint8_t *data, size_t nbytes, Word *words, size_t count) {
    const uint8_t *const end = data + nbytes;
    Prefetcher<Word> prefetcher{data, end, words, count};
    for (int i = 0; i < Prefetcher<Word>::ENTRIES; ++i)
        prefetcher.next();
    size_t at = 0;
    while (data < end) {
        prefetcher.next();
        const uint8_t gap = *data++;
        at += gap;
        if (gap == SKIP)
            continue;
        if (at >= count || data >= end)
            return false;
        const uint8_t code = *data++;
        if (code == WHOLE) {
            if (static_cast<size_t>(end - data) < sizeof(Word))
                return false;
            std::memcpy(words + at, data, sizeof(Word));
            data += sizeof(Word);
        } else {
            const int64_t steps = code & 1 ? -(static_cast<int64_t>(code) + 1) / 2 : static_cast<int64_t>(code) / 2 + 1;
            words[at] = move_by(words[at], steps);
        }
        ++at;
    }
    return nbytes == 0 || end[-1] != SKIP || at <= count;
}

} // namespace codecs
