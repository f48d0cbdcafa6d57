// Python functions of the delta codec. See delta.h.

#include <stdexcept>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "delta.h"

namespace nb = nanobind;
using namespace codecs;

namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_words(size_t width, size_t nbytes, const void *data) {
    if ((width != 1 && width != 2 && width != 4) || nbytes % width || reinterpret_cast<uintptr_t>(data) % width)
        throw std::invalid_argument("a delta needs aligned words of 1, 2 or 4 bytes");
}

template <class Word>
int64_t encode_as(const uint8_t *words, const uint8_t *base, size_t nbytes, uint8_t *out, size_t capacity) {
    return encode_delta(reinterpret_cast<const Word *>(words), reinterpret_cast<const Word *>(base),
                        nbytes / sizeof(Word), out, capacity);
}

template <class Word> bool apply_as(const uint8_t *data, size_t nbytes, uint8_t *words, size_t word_bytes) {
    return apply_delta(data, nbytes, reinterpret_cast<Word *>(words), word_bytes / sizeof(Word));
}

int64_t encode(size_t width, Source words, Source base, Target out) {
    check_words(width, words.shape(0), words.data());
    check_words(width, base.shape(0), base.data());
    if (words.shape(0) != base.shape(0))
        throw std::invalid_argument("a delta needs a base of the same size");
    const auto *a = words.data(), *b = base.data();
    auto *to = out.data();
    const size_t nbytes = words.shape(0), capacity = out.shape(0);
    nb::gil_scoped_release release;
    return width == 1   ? encode_as<uint8_t>(a, b, nbytes, to, capacity)
           : width == 2 ? encode_as<uint16_t>(a, b, nbytes, to, capacity)
                        : encode_as<uint32_t>(a, b, nbytes, to, capacity);
}

bool apply(size_t width, Source data, Target words) {
    check_words(width, words.shape(0), words.data());
    const auto *from = data.data();
    auto *to = words.data();
    const size_t nbytes = data.shape(0), word_bytes = words.shape(0);
    nb::gil_scoped_release release;
    return width == 1   ? apply_as<uint8_t>(from, nbytes, to, word_bytes)
           : width == 2 ? apply_as<uint16_t>(from, nbytes, to, word_bytes)
                        : apply_as<uint32_t>(from, nbytes, to, word_bytes);
}

} // namespace

void bind_delta_codec(nb::module_ &m) {
    m.def("encode_delta", &encode, nb::arg("width"), nb::arg("words"), nb::arg("base"), nb::arg("out"),
          "Write the changes from base to words; return their size, or -1 if they do not fit.");
    m.def("apply_delta", &apply, nb::arg("width"), nb::arg("data"), nb::arg("words"),
          "Apply changes in place; return whether they are well formed.");
}
