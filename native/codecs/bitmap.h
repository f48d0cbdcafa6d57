// Lossless differences of two arrays of words of which many changed.
// Reference implementation: tests/reference/codecs/bitmap.py.
//
// A block holds 64 words:
//   8 bytes            one bit per word, lowest first: whether it changed
//   1 byte a change    the new word minus the old one, as a signed integer; 0 if it does not fit
//   the new word       for each change whose byte is 0
// Every 64 blocks, the encoder gives up if their code so far takes more than 3/4 of their words.
// Words beyond the end of the array count as unchanged.
//
// Bytes are packed and unpacked eight at a time, without a branch that depends on the data: the time hardly depends on
// the share of the words that changed.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "delta.h"
#include "targets.h"

namespace codecs {

static_assert(std::endian::native == std::endian::little, "eight bytes are packed as one integer");

constexpr size_t BITMAP_WORDS = 64, BITMAP_BYTES = 8, PACKED = 8;
constexpr size_t CHECKED_WORDS = 64 * BITMAP_WORDS;
// Bytes that a block may touch: its largest size, and what packing writes or reads beyond.
template <class Word> constexpr size_t BLOCK_ROOM = BITMAP_BYTES + BITMAP_WORDS * (1 + sizeof(Word)) + PACKED;

// For each choice of eight bytes, which of them move by 1, then by 2, then by 4 places to close the gaps before them.
struct PackMoves {
    uint64_t of[3];
};
constexpr std::array<PackMoves, 256> find_pack_moves() {
    std::array<PackMoves, 256> moves{};
    for (size_t chosen = 0; chosen < moves.size(); ++chosen)
        for (size_t i = 0, gaps = 0; i < PACKED; ++i) {
            if (!(chosen >> i & 1)) {
                ++gaps;
                continue;
            }
            size_t place = i;
            for (size_t step = 0; step < 3; ++step)
                if (gaps >> step & 1) {
                    moves[chosen].of[step] |= uint64_t{255} << (8 * place);
                    place -= size_t{1} << step;
                }
        }
    return moves;
}
constexpr std::array<PackMoves, 256> PACK_MOVES = find_pack_moves();

// The chosen ones of eight bytes without the gaps between them; bytes that are not chosen must be 0.
RESHARD_INLINE uint64_t pack_bytes(uint64_t bytes, uint8_t chosen) {
    for (size_t step = 0; step < 3; ++step) {
        const uint64_t mask = PACK_MOVES[chosen].of[step], moved = bytes & mask;
        bytes = (bytes ^ moved) | moved >> (8 << step);
    }
    return bytes;
}

// The inverse: bytes that are not chosen become 0.
RESHARD_INLINE uint64_t unpack_bytes(uint64_t bytes, uint8_t chosen) {
    const int count = std::popcount(chosen);
    bytes = count == 8 ? bytes : bytes & ((uint64_t{1} << (8 * count)) - 1);
    for (size_t step = 3; step-- > 0;) {
        const uint64_t mask = PACK_MOVES[chosen].of[step], moved = bytes << (8 << step) & mask;
        bytes = (bytes & ~(mask >> (8 << step))) | moved;
    }
    return bytes;
}

// One bit per byte of 64 that is 0.
RESHARD_INLINE uint64_t find_zero_bytes(const uint8_t *bytes) {
    uint64_t zeros = 0;
#ifdef __SSE2__
    for (size_t i = 0; i < BITMAP_WORDS; i += 16) {
        __m128i row;
        std::memcpy(&row, bytes + i, sizeof row);
        zeros |= static_cast<uint64_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(row, _mm_setzero_si128()))) << i;
    }
#else
    for (size_t i = 0; i < BITMAP_WORDS; ++i)
        zeros |= static_cast<uint64_t>(bytes[i] == 0) << i;
#endif
    return zeros;
}

// Writes the code of 64 words and returns its end.
template <class Word> RESHARD_INLINE uint8_t *encode_block(const Word *words, const Word *base, uint8_t *to) {
    uint64_t changed = 0;
    for (size_t i = 0; i < BITMAP_WORDS; i += 64 / sizeof(Word))
        changed |= find_changes(words + i, base + i) << i;
    std::memcpy(to, &changed, BITMAP_BYTES);
    to += BITMAP_BYTES;
    if (!changed)
        return to;
    uint8_t bytes[BITMAP_WORDS];
    for (size_t i = 0; i < BITMAP_WORDS; ++i) {
        const auto difference = static_cast<Word>(words[i] - base[i]);
        const bool fits = sizeof(Word) == 1 || static_cast<Word>(difference + 128) < 256;
        bytes[i] = fits ? static_cast<uint8_t>(difference) : uint8_t{0};
    }
    for (size_t i = 0; i < BITMAP_WORDS; i += PACKED) {
        const auto chosen = static_cast<uint8_t>(changed >> i);
        uint64_t packed;
        std::memcpy(&packed, bytes + i, PACKED);
        packed = pack_bytes(packed, chosen);
        std::memcpy(to, &packed, PACKED);
        to += std::popcount(chosen);
    }
    if constexpr (sizeof(Word) > 1)
        for (uint64_t wide = changed & find_zero_bytes(bytes); wide; wide &= wide - 1) {
            std::memcpy(to, words + std::countr_zero(wide), sizeof(Word));
            to += sizeof(Word);
        }
    return to;
}

// Writes the code of an array and returns its size; -1 if it would exceed `capacity` bytes, or pays little.
template <class Word>
RESHARD_INLINE int64_t encode_bitmap(const Word *words, const Word *base, size_t count, uint8_t *out, size_t capacity) {
    const uint8_t *const end = out + capacity;
    uint8_t *to = out;
    for (size_t at = 0; at < count; at += BITMAP_WORDS) {
        const size_t num_words = std::min(BITMAP_WORDS, count - at);
        if (at % CHECKED_WORDS == 0 && 4 * static_cast<size_t>(to - out) > 3 * at * sizeof(Word))
            return -1;
        if (num_words == BITMAP_WORDS && static_cast<size_t>(end - to) >= BLOCK_ROOM<Word>) {
            prefetch_ahead(words + at, BITMAP_WORDS * sizeof(Word));
            prefetch_ahead(base + at, BITMAP_WORDS * sizeof(Word));
            to = encode_block(words + at, base + at, to);
            continue;
        }
        Word last[BITMAP_WORDS]{}, last_base[BITMAP_WORDS]{};
        std::memcpy(last, words + at, num_words * sizeof(Word));
        std::memcpy(last_base, base + at, num_words * sizeof(Word));
        uint8_t block[BLOCK_ROOM<Word>];
        const auto size = static_cast<size_t>(encode_block(last, last_base, block) - block);
        if (static_cast<size_t>(end - to) < size)
            return -1;
        std::memcpy(to, block, size);
        to += size;
    }
    return to - out;
}

// Applies the code of a block to 64 words and returns its size. Reads at most BLOCK_ROOM bytes.
template <class Word> RESHARD_INLINE size_t apply_block(const uint8_t *data, Word *words) {
    const uint8_t *from = data + BITMAP_BYTES;
    uint64_t changed;
    std::memcpy(&changed, data, BITMAP_BYTES);
    if (!changed)
        return BITMAP_BYTES;
    uint8_t bytes[BITMAP_WORDS];
    for (size_t i = 0; i < BITMAP_WORDS; i += PACKED) {
        const auto chosen = static_cast<uint8_t>(changed >> i);
        uint64_t packed;
        std::memcpy(&packed, from, PACKED);
        packed = unpack_bytes(packed, chosen);
        std::memcpy(bytes + i, &packed, PACKED);
        from += std::popcount(chosen);
    }
    for (size_t i = 0; i < BITMAP_WORDS; ++i)
        words[i] = static_cast<Word>(words[i] + static_cast<Word>(static_cast<int8_t>(bytes[i])));
    for (uint64_t wide = changed & find_zero_bytes(bytes); wide; wide &= wide - 1) {
        std::memcpy(words + std::countr_zero(wide), from, sizeof(Word));
        from += sizeof(Word);
    }
    return static_cast<size_t>(from - data);
}

// Applies a code to the base, in place. Returns false if it is not one for so many words; some words may have changed
// then.
template <class Word>
RESHARD_INLINE bool apply_bitmap(const uint8_t *data, size_t nbytes, Word *words, size_t count) {
    const uint8_t *const end = data + nbytes;
    for (size_t at = 0; at < count; at += BITMAP_WORDS) {
        const size_t num_words = std::min(BITMAP_WORDS, count - at), left = static_cast<size_t>(end - data);
        size_t size;
        if (num_words == BITMAP_WORDS && left >= BLOCK_ROOM<Word>) {
            prefetch_ahead(words + at, BITMAP_WORDS * sizeof(Word));
            size = apply_block(data, words + at);
        } else {
            uint8_t block[BLOCK_ROOM<Word>]{};
            Word last[BITMAP_WORDS]{};
            std::memcpy(block, data, std::min(left, sizeof block));
            uint64_t changed;
            std::memcpy(&changed, block, BITMAP_BYTES);
            if (num_words < BITMAP_WORDS && changed >> num_words)
                return false;
            std::memcpy(last, words + at, num_words * sizeof(Word));
            size = apply_block(block, last);
            if (size > left)
                return false;
            std::memcpy(words + at, last, num_words * sizeof(Word));
        }
        data += size;
    }
    return data == end;
}

} // namespace codecs
