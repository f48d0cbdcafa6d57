// Defines the Python module reshard._native, and copy_runs, which copies many short runs of contiguous bytes. Python
// reference of copy_runs: tests/reference/byte_runs.py.

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Copies length[i] bytes from src[src_offsets[i]] to dst[dst_offsets[i]], for every i. Checks all runs before it copies.
static void copy_runs(ConstBytes src, Bytes dst, Offsets src_offsets, Offsets dst_offsets, Offsets length) {
    const size_t n = length.shape(0);
    if (src_offsets.shape(0) != n || dst_offsets.shape(0) != n)
        throw std::invalid_argument("copy_runs: src_offsets, dst_offsets and length must have the same size");
    const int64_t src_size = static_cast<int64_t>(src.shape(0)), dst_size = static_cast<int64_t>(dst.shape(0));
    const uint8_t *from = src.data();
    uint8_t *to = dst.data();
    const int64_t *a = src_offsets.data(), *b = dst_offsets.data(), *len = length.data();
    for (size_t i = 0; i < n; ++i) {
        if (len[i] < 0 || a[i] < 0 || b[i] < 0 || len[i] > src_size || len[i] > dst_size ||
            a[i] > src_size - len[i] || b[i] > dst_size - len[i])
            throw std::out_of_range("copy_runs: a run lies outside its array");
    }
    nb::gil_scoped_release release;
    for (size_t i = 0; i < n; ++i)
        std::memcpy(to + b[i], from + a[i], static_cast<size_t>(len[i]));
}

void bind_block_codecs(nb::module_ &m);
void bind_delta_codec(nb::module_ &m);
void bind_digest(nb::module_ &m);
void bind_exchange(nb::module_ &m);
void bind_exponent_codec(nb::module_ &m);
void bind_fluid(nb::module_ &m);
void bind_strategies(nb::module_ &m);
void bind_schedule(nb::module_ &m);
void bind_recurrence(nb::module_ &m);
void bind_pipeline(nb::module_ &m);
void bind_shared_memory(nb::module_ &m);
void bind_shared_rings(nb::module_ &m);

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false); // a program may end while globals of a module or threads hold objects
    m.doc() = "Loops over flat arrays, with reference implementations in tests/reference; memory that ranks share.";
    m.def("copy_runs", &copy_runs, nb::arg("src"), nb::arg("dst"), nb::arg("src_offsets"), nb::arg("dst_offsets"),
          nb::arg("length"), "Copy length[i] bytes from src[src_offsets[i]] to dst[dst_offsets[i]], for every i.");
    bind_block_codecs(m);
    bind_delta_codec(m);
    bind_digest(m);
    bind_exchange(m);
    bind_exponent_codec(m);
    bind_fluid(m);
    bind_strategies(m);
    bind_schedule(m);
    bind_recurrence(m);
    bind_pipeline(m);
    bind_shared_memory(m);
    bind_shared_rings(m);
}
