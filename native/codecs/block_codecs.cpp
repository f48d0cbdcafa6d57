// Python functions of the block codecs. See blocks.h.

#include <array>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include "blocks.h"

namespace nb = nanobind;
using namespace codecs;

namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

enum class Kind : int { int8, int6, int4, fp8, int4_wide };

template <class Codec, bool Measure>
RESHARD_INLINE void encode_format(Format format, Grid grid, const void *source, uint8_t *out, ErrorSums &sums) {
    if (format == Format::fp32)
        encode_rows<Codec, Format::fp32, Measure>(grid, static_cast<const float *>(source), out, sums);
    else if (format == Format::bf16)
        encode_rows<Codec, Format::bf16, Measure>(grid, static_cast<const uint16_t *>(source), out, sums);
    else
        encode_rows<Codec, Format::fp16, Measure>(grid, static_cast<const uint16_t *>(source), out, sums);
}

template <class Codec, bool Accumulate>
RESHARD_INLINE void decode_format(Format format, Grid grid, const uint8_t *data, void *target) {
    if (format == Format::fp32)
        decode_rows<Codec, Format::fp32, Accumulate>(grid, data, static_cast<float *>(target));
    else if (format == Format::bf16)
        decode_rows<Codec, Format::bf16, Accumulate>(grid, data, static_cast<uint16_t *>(target));
    else
        decode_rows<Codec, Format::fp16, Accumulate>(grid, data, static_cast<uint16_t *>(target));
}

// One function per codec and direction, because target_clones applies to plain functions.
#define RESHARD_CODEC(NAME, CODEC)                                                                                     \
    RESHARD_CLONES void encode_##NAME(Format format, Grid grid, const void *source, uint8_t *out, bool measure,        \
                                      ErrorSums &sums) {                                                               \
        if (measure)                                                                                                   \
            encode_format<CODEC, true>(format, grid, source, out, sums);                                               \
        else                                                                                                           \
            encode_format<CODEC, false>(format, grid, source, out, sums);                                              \
    }                                                                                                                  \
    RESHARD_CLONES void decode_##NAME(Format format, Grid grid, const uint8_t *data, void *target, bool accumulate) {  \
        if (accumulate)                                                                                                \
            decode_format<CODEC, true>(format, grid, data, target);                                                    \
        else                                                                                                           \
            decode_format<CODEC, false>(format, grid, data, target);                                                   \
    }

RESHARD_CODEC(int8, Int8)
RESHARD_CODEC(int6, Int6)
RESHARD_CODEC(int4, Int4)
RESHARD_CODEC(fp8, Fp8)
RESHARD_CODEC(int4_wide, Int4Wide)

struct Functions {
    void (*encode)(Format, Grid, const void *, uint8_t *, bool, ErrorSums &);
    void (*decode)(Format, Grid, const uint8_t *, void *, bool);
    size_t block_bytes;
};

Functions find_functions(int kind) {
    switch (static_cast<Kind>(kind)) {
    case Kind::int8:
        return {encode_int8, decode_int8, element_bytes<Int8>(1)};
    case Kind::int6:
        return {encode_int6, decode_int6, element_bytes<Int6>(1)};
    case Kind::int4:
        return {encode_int4, decode_int4, element_bytes<Int4>(1)};
    case Kind::fp8:
        return {encode_fp8, decode_fp8, element_bytes<Fp8>(1)};
    case Kind::int4_wide:
        return {encode_int4_wide, decode_int4_wide, element_bytes<Int4Wide>(1)};
    }
    throw std::invalid_argument("there is no block codec " + std::to_string(kind));
}

Grid check_grid(const Functions &functions, int format, size_t columns, size_t values, size_t plain, size_t coded) {
    if (format < 0 || format > 2 || (values != 32 && values != 64 && values != 128))
        throw std::invalid_argument("a block codec needs fp32, bf16 or fp16, and elements of 32, 64 or 128 values");
    const size_t itemsize = format == 0 ? 4 : 2;
    if (columns == 0 || plain % (columns * itemsize))
        throw std::invalid_argument("the plain array does not consist of whole rows");
    const Grid grid{plain / (columns * itemsize), columns, values / BLOCK};
    if (coded != grid.rows * grid.elements() * grid.blocks * functions.block_bytes)
        throw std::invalid_argument("the coded array has " + std::to_string(coded) + " bytes, but the plain one needs " +
                                    std::to_string(grid.rows * grid.elements() * grid.blocks * functions.block_bytes));
    return grid;
}

std::pair<double, double> encode_blocks(int kind, int format, size_t columns, size_t values, Source source, Target out,
                                        bool measure) {
    const Functions functions = find_functions(kind);
    const Grid grid = check_grid(functions, format, columns, values, source.shape(0), out.shape(0));
    const void *from = source.data();
    uint8_t *to = out.data();
    nb::gil_scoped_release release;
    ErrorSums sums;
    functions.encode(static_cast<Format>(format), grid, from, to, measure, sums);
    return {sums.error, sums.square};
}

void decode_blocks(int kind, int format, size_t columns, size_t values, Source data, Target target, bool accumulate) {
    const Functions functions = find_functions(kind);
    const Grid grid = check_grid(functions, format, columns, values, target.shape(0), data.shape(0));
    const uint8_t *from = data.data();
    void *to = target.data();
    nb::gil_scoped_release release;
    functions.decode(static_cast<Format>(format), grid, from, to, accumulate);
}

} // namespace

void bind_block_codecs(nb::module_ &m) {
    m.def("encode_blocks", &encode_blocks, nb::arg("kind"), nb::arg("format"), nb::arg("columns"), nb::arg("values"),
          nb::arg("source"), nb::arg("out"), nb::arg("measure"),
          "Encode rows of values; return the sums of squared errors and of squares if measured, else zeros.");
    m.def("decode_blocks", &decode_blocks, nb::arg("kind"), nb::arg("format"), nb::arg("columns"), nb::arg("values"),
          nb::arg("data"), nb::arg("target"), nb::arg("accumulate"), "Decode into rows of values, or add to them.");
}
