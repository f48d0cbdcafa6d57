// Python functions of the lossless codec of bf16 values. See exponents.h.

#include <stdexcept>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "exponents.h"

namespace nb = nanobind;
using namespace codecs;

namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

RESHARD_CLONES int64_t run_encode(const uint16_t *words, size_t count, uint8_t *out, size_t capacity) {
    return encode_exponents(words, count, out, capacity);
}

RESHARD_CLONES bool run_decode(const uint8_t *data, size_t nbytes, uint16_t *words, size_t count) {
    return decode_exponents(data, nbytes, words, count);
}

void check_words(size_t nbytes, const void *data) {
    if (nbytes % sizeof(uint16_t) || reinterpret_cast<uintptr_t>(data) % sizeof(uint16_t))
        throw std::invalid_argument("a code of bf16 values needs aligned words of 2 bytes");
}

int64_t encode(Source words, Target out) {
    check_words(words.shape(0), words.data());
    const auto *from = reinterpret_cast<const uint16_t *>(words.data());
    auto *to = out.data();
    const size_t count = words.shape(0) / sizeof(uint16_t), capacity = out.shape(0);
    nb::gil_scoped_release release;
    return run_encode(from, count, to, capacity);
}

bool decode(Source data, Target words) {
    check_words(words.shape(0), words.data());
    const auto *from = data.data();
    auto *to = reinterpret_cast<uint16_t *>(words.data());
    const size_t nbytes = data.shape(0), count = words.shape(0) / sizeof(uint16_t);
    nb::gil_scoped_release release;
    return run_decode(from, nbytes, to, count);
}

} // namespace

void bind_exponent_codec(nb::module_ &m) {
    m.def("encode_exponents", &encode, nb::arg("words"), nb::arg("out"),
          "Encode bf16 values without loss; return the size of their code, or -1 if it does not fit.");
    m.def("decode_exponents", &decode, nb::arg("data"), nb::arg("words"),
          "Decode into bf16 values; return whether the data decodes to exactly that many values.");
}
