// Python functions of the codecs of differences. See delta.h and bitmap.h.

#include <stdexcept>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include "bitmap.h"
#include "delta.h"

namespace nb = nanobind;
using namespace codecs;

namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Encode = int64_t (*)(const uint8_t *words, const uint8_t *base, size_t nbytes, uint8_t *out, size_t capacity);
using Apply = bool (*)(const uint8_t *data, size_t nbytes, uint8_t *words, size_t word_bytes);

// A function for each width of a word; target_clones does not take templates.
#define RESHARD_DELTA_OF(codec, Word)                                                                                  \
    RESHARD_CLONES int64_t encode_##codec##_##Word(const uint8_t *words, const uint8_t *base, size_t nbytes,           \
                                                   uint8_t *out, size_t capacity) {                                    \
        return encode_##codec(reinterpret_cast<const Word *>(words), reinterpret_cast<const Word *>(base),             \
                              nbytes / sizeof(Word), out, capacity);                                                   \
    }                                                                                                                  \
    RESHARD_CLONES bool apply_##codec##_##Word(const uint8_t *data, size_t nbytes, uint8_t *words,                     \
                                               size_t word_bytes) {                                                    \
        return apply_##codec(data, nbytes, reinterpret_cast<Word *>(words), word_bytes / sizeof(Word));                \
    }
#define RESHARD_SAMPLE(Word)                                                                                           \
    RESHARD_CLONES ChangesOfSample sample_##Word(const uint8_t *words, const uint8_t *base, size_t nbytes,             \
                                                 size_t every) {                                                       \
        return sample_changes(reinterpret_cast<const Word *>(words), reinterpret_cast<const Word *>(base),             \
                              nbytes / sizeof(Word), every);                                                           \
    }
RESHARD_SAMPLE(uint8_t) RESHARD_SAMPLE(uint16_t) RESHARD_SAMPLE(uint32_t)
#define RESHARD_DELTA(codec)                                                                                           \
    RESHARD_DELTA_OF(codec, uint8_t) RESHARD_DELTA_OF(codec, uint16_t) RESHARD_DELTA_OF(codec, uint32_t)
RESHARD_DELTA(delta)
RESHARD_DELTA(bitmap)

void check_words(size_t width, size_t nbytes, const void *data) {
    if ((width != 1 && width != 2 && width != 4) || nbytes % width || reinterpret_cast<uintptr_t>(data) % width)
        throw std::invalid_argument("a delta needs aligned words of 1, 2 or 4 bytes");
}

void check_pair(size_t width, const Source &words, const Source &base) {
    check_words(width, words.shape(0), words.data());
    check_words(width, base.shape(0), base.data());
    if (words.shape(0) != base.shape(0))
        throw std::invalid_argument("a delta needs a base of the same size");
}

int64_t encode(const Encode (&of_width)[3], size_t width, Source words, Source base, Target out) {
    check_pair(width, words, base);
    const auto *a = words.data(), *b = base.data();
    auto *to = out.data();
    const size_t nbytes = words.shape(0), capacity = out.shape(0);
    nb::gil_scoped_release release;
    return of_width[width / 2](a, b, nbytes, to, capacity);
}

bool apply(const Apply (&of_width)[3], size_t width, Source data, Target words) {
    check_words(width, words.shape(0), words.data());
    const auto *from = data.data();
    auto *to = words.data();
    const size_t nbytes = data.shape(0), word_bytes = words.shape(0);
    nb::gil_scoped_release release;
    return of_width[width / 2](from, nbytes, to, word_bytes);
}

} // namespace

void bind_delta_codec(nb::module_ &m) {
    m.def(
        "sample_changes",
        [](size_t width, Source words, Source base, size_t every) {
            check_pair(width, words, base);
            if (every == 0)
                throw std::invalid_argument("a sample needs a positive distance");
            const auto sample = width == 1 ? sample_uint8_t : width == 2 ? sample_uint16_t : sample_uint32_t;
            const auto found = sample(words.data(), base.data(), words.shape(0), every);
            return std::make_tuple(found.count, found.changed, found.narrow, found.distance);
        },
        nb::arg("width"), nb::arg("words"), nb::arg("base"), nb::arg("every"),
        "Words in one of so many blocks of 64 bytes: all, changed, changed by a signed byte; and the sum of low bytes.");
    m.def(
        "encode_delta",
        [](size_t width, Source words, Source base, Target out) {
            const Encode of_width[] = {encode_delta_uint8_t, encode_delta_uint16_t, encode_delta_uint32_t};
            return encode(of_width, width, words, base, out);
        },
        nb::arg("width"), nb::arg("words"), nb::arg("base"), nb::arg("out"),
        "Write the changes from base to words; return their size, or -1 if they do not fit.");
    m.def(
        "apply_delta",
        [](size_t width, Source data, Target words) {
            const Apply of_width[] = {apply_delta_uint8_t, apply_delta_uint16_t, apply_delta_uint32_t};
            return apply(of_width, width, data, words);
        },
        nb::arg("width"), nb::arg("data"), nb::arg("words"),
        "Apply changes in place; return whether they are well formed.");
    m.def(
        "encode_bitmap",
        [](size_t width, Source words, Source base, Target out) {
            const Encode of_width[] = {encode_bitmap_uint8_t, encode_bitmap_uint16_t, encode_bitmap_uint32_t};
            return encode(of_width, width, words, base, out);
        },
        nb::arg("width"), nb::arg("words"), nb::arg("base"), nb::arg("out"),
        "Write a bitmap of the changes and a byte for each; return their size, or -1 if they do not fit.");
    m.def(
        "apply_bitmap",
        [](size_t width, Source data, Target words) {
            const Apply of_width[] = {apply_bitmap_uint8_t, apply_bitmap_uint16_t, apply_bitmap_uint32_t};
            return apply(of_width, width, data, words);
        },
        nb::arg("width"), nb::arg("data"), nb::arg("words"),
        "Apply what encode_bitmap wrote in place; return whether it is well formed.");
}
