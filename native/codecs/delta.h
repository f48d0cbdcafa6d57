// Lossless differences of two arrays of words. Reference implementation: tests/reference/codecs/delta.py.
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
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "targets.h"

namespace codecs {

constexpr uint8_t SKIP = 255, WHOLE = 255;
// From this many changes in 64 bytes on, the encoder codes all words of them at once.
constexpr int MANY_CHANGES = 4;
// The decoder looks ahead if a stream has less than one byte for so many bytes of words.
constexpr size_t FEW_CHANGES = 16;

// A number of floating-point values of a format, as narrow as possible.
template <class Word>
using Steps = std::conditional_t<sizeof(Word) == 4, int64_t, std::conditional_t<sizeof(Word) == 2, int32_t, int16_t>>;

// The position of a word among all floating-point values of its format, whose sign is its highest bit.
template <class Word> RESHARD_INLINE Steps<Word> position(Word word) {
    constexpr Word sign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
    const auto magnitude = static_cast<Steps<Word>>(word & static_cast<Word>(~sign));
    const Steps<Word> negative = -static_cast<Steps<Word>>(word >> (8 * sizeof(Word) - 1)); // all bits, or none
    return (magnitude ^ negative) - negative;
}

// The code of the difference of two words, or WHOLE; without branches, as signs are hard to predict.
template <class Word> RESHARD_INLINE uint8_t code_of(Word word, Word base) {
    const Steps<Word> to = position(word), steps = to - position(base), negative = steps < 0 ? -1 : 0;
    const Steps<Word> code = 2 * ((steps ^ negative) - negative) - 2 - negative;
    const bool is_minus_zero = (to == 0) & (word != 0); // has the position of 0
    return is_minus_zero | (code < 0) | (code >= WHOLE) ? WHOLE : static_cast<uint8_t>(code);
}

// The same in 16 bits, so that vectors hold more words. Differences of more than 16 bits wrap around only if the signs
// differ, and then to a code that is small only if the magnitude of both words is large.
RESHARD_INLINE uint8_t code_of(uint16_t word, uint16_t base) {
    constexpr uint16_t SIGN = 1 << 15;
    const auto turn = [](uint16_t bits) { return static_cast<uint16_t>(bits & SIGN ? 0xFFFF : 0); }; // all bits, or none
    const auto place = [&](uint16_t bits) {
        return static_cast<uint16_t>(static_cast<uint16_t>(bits & ~SIGN) ^ turn(bits)) - turn(bits);
    };
    const auto steps = static_cast<uint16_t>(place(word) - place(base));
    const auto distance = static_cast<uint16_t>(static_cast<uint16_t>(steps ^ turn(steps)) - turn(steps));
    const auto code = static_cast<uint16_t>(2 * distance - 2 - turn(steps)); // large if the distance is 0
    const auto far = static_cast<uint16_t>((word ^ base) & SIGN) != 0;
    const bool is_whole = (code >= WHOLE) | (far & (static_cast<uint16_t>(word & ~SIGN) > 255)) | (word == SIGN);
    return is_whole ? WHOLE : static_cast<uint8_t>(code);
}

// Writes the entries of one block after another.
template <class Word> struct DeltaWriter {
    uint8_t *out, *const end;
    size_t next = 0; // the word after the last changed one

    // Writes the entries of a block of words that begins at `at`. Returns false if they may not fit. There is room for
    // whole words, so each is written, and the next entry overwrites it if it does not count: which ones count is hard to
    // predict.
    template <class CodeOf> RESHARD_INLINE bool add(size_t at, const Word *words, uint64_t changed, CodeOf code_at) {
        size_t gap = at + static_cast<size_t>(std::countr_zero(changed)) - next;
        const size_t room = gap / 255 + static_cast<size_t>(std::popcount(changed)) * (2 + sizeof(Word));
        if (room > static_cast<size_t>(end - out))
            return false;
        for (; gap >= 255; gap -= 255)
            *out++ = SKIP;
        while (true) {
            const auto i = static_cast<size_t>(std::countr_zero(changed));
            const uint8_t code = code_at(i);
            *out++ = static_cast<uint8_t>(gap);
            *out++ = code;
            std::memcpy(out, words + i, sizeof(Word));
            out += -static_cast<size_t>(code == WHOLE) & sizeof(Word);
            changed &= changed - 1;
            if (!changed) {
                next = at + i + 1;
                return true;
            }
            gap = static_cast<size_t>(std::countr_zero(changed)) - i - 1;
        }
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

// What a sample of words says about their changes.
struct ChangesOfSample {
    uint64_t count = 0, changed = 0; // words, and words that differ
    uint64_t narrow = 0;             // words whose difference is a signed byte but not 0
    uint64_t distance = 0;           // sum of the magnitudes of the lowest bytes of differences, as signed integers
};

// Samples blocks of 64 bytes, one of `every`.
template <class Word>
RESHARD_INLINE ChangesOfSample sample_changes(const Word *words, const Word *base, size_t count, size_t every) {
    constexpr size_t per_block = 64 / sizeof(Word);
    ChangesOfSample found;
    for (size_t at = 0; at + per_block <= count; at += every * per_block) {
        found.count += per_block;
        for (size_t i = 0; i < per_block; ++i) {
            const auto step = static_cast<Word>(words[at + i] - base[at + i]);
            const auto low = static_cast<int8_t>(step);
            found.changed += step != 0;
            found.narrow += step != 0 && (sizeof(Word) == 1 || static_cast<Word>(step + 128) < 256);
            found.distance += static_cast<uint64_t>(low < 0 ? -low : low);
        }
    }
    return found;
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
        const uint64_t changed = find_changes(words + at, base + at);
        if (!changed)
            continue;
        if (std::popcount(changed) < MANY_CHANGES) {
            if (!writer.add(at, words + at, changed, [&](size_t i) { return code_of(words[at + i], base[at + i]); }))
                return -1;
            continue;
        }
        uint8_t codes[per_block];
        for (size_t i = 0; i < per_block; ++i)
            codes[i] = code_of(words[at + i], base[at + i]);
        if (!writer.add(at, words + at, changed, [&](size_t i) { return codes[i]; }))
            return -1;
    }
    for (; at < count; ++at)
        if (words[at] != base[at] &&
            !writer.add(at, words + at, 1, [&](size_t) { return code_of(words[at], base[at]); }))
            return -1;
    return writer.out - out;
}

// The word `steps` values after `word`.
template <class Word> RESHARD_INLINE Word move_by(Word word, Steps<Word> steps) {
    const Steps<Word> to = position(word) + steps, negative = to < 0 ? -1 : 0;
    constexpr auto sign = static_cast<Steps<Word>>(uint64_t{1} << (8 * sizeof(Word) - 1));
    return static_cast<Word>(((to ^ negative) - negative) | (sign & negative));
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
    const bool is_sparse = nbytes < count * sizeof(Word) / FEW_CHANGES;
    for (int i = 0; is_sparse && i < Prefetcher<Word>::ENTRIES; ++i)
        prefetcher.next();
    size_t at = 0;
    while (data < end) {
        if (is_sparse)
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
            const Steps<Word> negative = -(code & 1), distance = code / 2 + 1;
            words[at] = move_by(words[at], (distance ^ negative) - negative);
        }
        ++at;
    }
    return nbytes == 0 || end[-1] != SKIP || at <= count;
}

} // namespace codecs
