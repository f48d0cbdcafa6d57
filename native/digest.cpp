// A digest of the elements of a tensor that does not depend on how the tensor is cut into shards. Reference
// implementation: tests/reference/digest.py.
//
// The digest of an element is a 64-bit mix of its bits and of its flat index in the whole tensor. The digest of a set of
// elements is the sum of both 32-bit halves, each modulo 2^32. So the digests of disjoint shards add up to that of the
// tensor. The mix uses 32-bit multiplications only, because vector units have no fast 64-bit ones.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "codecs/targets.h"

namespace nb = nanobind;

namespace {

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr uint32_t LOW_INDEX = 0x9E3779B1, HIGH_INDEX = 0x85EBCA77;
constexpr uint32_t FIRST = 0x7FEB352D, SECOND = 0x846CA68B, THIRD = 0xC2B2AE35;

// Regions of at most this many words are digested without releasing the GIL.
constexpr size_t MAX_HELD = 1 << 17;

struct Sums {
    uint32_t low = 0, high = 0;
};

// Adds one element. The last multiplications of the mix are those of the whole sums, in digest_of.
RESHARD_INLINE void add(uint32_t seeded, uint32_t &low, uint32_t &high) {
    uint32_t mixed = (seeded ^ (seeded >> 16)) * FIRST;
    mixed ^= mixed >> 15;
    low += mixed;
    high += mixed ^ (mixed >> 13);
}

uint64_t digest_of(const Sums &sums) { return static_cast<uint64_t>(sums.high * THIRD) << 32 | sums.low * SECOND; }

// Adds `count` elements. `seed` is what the index of the first one adds to its bits, `step` the difference to the next.
#define RESHARD_ADD_ROW(Word)                                                                                          \
    RESHARD_WIDE_CLONES void add_row_##Word(const Word *at, size_t count, uint32_t seed, uint32_t step, Sums &sums) {  \
        uint32_t low = sums.low, high = sums.high;                                                                     \
        for (size_t i = 0; i < count; ++i)                                                                             \
            add(static_cast<uint32_t>(at[i]) + (seed + static_cast<uint32_t>(i) * step), low, high);                   \
        sums.low = low, sums.high = high;                                                                              \
    }
RESHARD_ADD_ROW(uint8_t)
RESHARD_ADD_ROW(uint16_t)
RESHARD_ADD_ROW(uint32_t)

void add_row(const uint8_t *at, size_t count, uint32_t seed, uint32_t step, Sums &sums) {
    add_row_uint8_t(at, count, seed, step, sums);
}
void add_row(const uint16_t *at, size_t count, uint32_t seed, uint32_t step, Sums &sums) {
    add_row_uint16_t(at, count, seed, step, sums);
}
void add_row(const uint32_t *at, size_t count, uint32_t seed, uint32_t step, Sums &sums) {
    add_row_uint32_t(at, count, seed, step, sums);
}

uint32_t seed_of(int64_t index) {
    const auto wide = static_cast<uint64_t>(index);
    return static_cast<uint32_t>(wide) * LOW_INDEX + static_cast<uint32_t>(wide >> 32) * HIGH_INDEX;
}

struct Dim {
    int64_t size, stride, index_stride;
};

template <typename Word> void add_elements(const Word *data, const std::vector<Dim> &dims, int64_t first, Sums &sums) {
    const Dim inner = dims.back();
    std::vector<int64_t> at(dims.size() - 1);
    const Word *row = data;
    int64_t index = first;
    while (true) {
        const int64_t last = index + (inner.size - 1) * inner.index_stride;
        if (inner.stride == 1 && (index >> 32) == (last >> 32)) {
            const auto step = static_cast<uint32_t>(inner.index_stride) * LOW_INDEX;
            add_row(row, static_cast<size_t>(inner.size), seed_of(index), step, sums);
        } else {
            for (int64_t i = 0; i < inner.size; ++i)
                add(row[i * inner.stride] + seed_of(index + i * inner.index_stride), sums.low, sums.high);
        }
        size_t dim = at.size();
        while (dim > 0 && ++at[dim - 1] == dims[dim - 1].size) {
            --dim;
            at[dim] = 0;
            row -= (dims[dim].size - 1) * dims[dim].stride;
            index -= (dims[dim].size - 1) * dims[dim].index_stride;
        }
        if (dim == 0)
            return;
        row += dims[dim - 1].stride;
        index += dims[dim - 1].index_stride;
    }
}

// The dims of a region, as rows. Empty if it has no elements.
template <typename Words> std::vector<Dim> rows_of(const Words &words, const Ints &index_strides) {
    if (words.ndim() != index_strides.shape(0))
        throw std::invalid_argument("a digest needs an index stride for each dim");
    std::vector<Dim> dims;
    for (size_t dim = 0; dim < words.ndim(); ++dim) {
        const Dim next{static_cast<int64_t>(words.shape(dim)), words.stride(dim), index_strides.data()[dim]};
        if (next.size == 0)
            return {};
        if (next.size > 1)
            dims.push_back(next);
    }
    // Rows run along the dim that lies closest together in memory. Dims that continue each other become one.
    std::stable_sort(dims.begin(), dims.end(), [](const Dim &a, const Dim &b) { return a.stride > b.stride; });
    std::vector<Dim> merged;
    for (const Dim &next : dims) {
        if (!merged.empty() && merged.back().stride == next.stride * next.size &&
            merged.back().index_stride == next.index_stride * next.size)
            merged.back() = {merged.back().size * next.size, next.stride, next.index_stride};
        else
            merged.push_back(next);
    }
    if (merged.empty())
        merged.push_back({1, 1, 1});
    return merged;
}

// Regions that are digested again and again, by one call for all.
class DigestedRegions {
  public:
    template <typename Word>
    void add(nb::ndarray<const Word, nb::device::cpu> words, Ints index_strides, int64_t first) {
        regions_.push_back(
            {nb::ndarray<nb::ro>(words), words.data(), sizeof(Word), rows_of(words, index_strides), first});
        numel_ += words.size();
    }

    void digest(nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) const {
        if (out.shape(0) != regions_.size())
            throw std::invalid_argument("out needs one element for each region");
        uint64_t *digests = out.data();
        std::optional<nb::gil_scoped_release> release;
        if (numel_ > MAX_HELD) // to take the lock again may take longer than small regions
            release.emplace();
        for (const Region &region : regions_) {
            Sums sums;
            if (region.dims.empty())
                ;
            else if (region.word_bytes == 1)
                add_elements(static_cast<const uint8_t *>(region.data), region.dims, region.first, sums);
            else if (region.word_bytes == 2)
                add_elements(static_cast<const uint16_t *>(region.data), region.dims, region.first, sums);
            else
                add_elements(static_cast<const uint32_t *>(region.data), region.dims, region.first, sums);
            *digests++ = digest_of(sums);
        }
    }

  private:
    struct Region {
        nb::ndarray<nb::ro> words; // keeps the memory
        const void *data;
        size_t word_bytes;
        std::vector<Dim> dims;
        int64_t first;
    };
    std::vector<Region> regions_;
    size_t numel_ = 0;
};

} // namespace

void bind_digest(nb::module_ &m) {
    const char *add_doc = "Add a region; see reshard.weights.model.region_digests. Its memory is kept.";
    nb::class_<DigestedRegions>(m, "DigestedRegions")
        .def(nb::init<>())
        .def("add", &DigestedRegions::add<uint32_t>, nb::arg("words").noconvert(), nb::arg("index_strides"),
             nb::arg("first"), add_doc)
        .def("add", &DigestedRegions::add<uint16_t>, nb::arg("words").noconvert(), nb::arg("index_strides"),
             nb::arg("first"), add_doc)
        .def("add", &DigestedRegions::add<uint8_t>, nb::arg("words").noconvert(), nb::arg("index_strides"),
             nb::arg("first"), add_doc)
        .def("digest", &DigestedRegions::digest, nb::arg("out").noconvert(),
             "Write the digest of what each region holds now.");
}
