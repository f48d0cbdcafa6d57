// Binds the simulator's event loop (fluid.h): checks its arrays and builds its tables.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "fluid.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

void check_range(const Ints &values, size_t size, const char *name, size_t below) {
    if (values.shape(0) != size)
        throw std::invalid_argument(std::string("flow: ") + name + " has the wrong size");
    for (size_t i = 0; i < size; ++i)
        if (values.data()[i] < 0 || static_cast<size_t>(values.data()[i]) >= below)
            throw std::out_of_range(std::string("flow: ") + name + " holds an index that does not exist");
}

void check_ends(const Ints &ends, size_t rows, size_t total, const char *name) {
    bool fits = ends.shape(0) == rows + 1 && ends.data()[0] == 0 && ends.data()[rows] == static_cast<int64_t>(total);
    for (size_t i = 0; fits && i < rows; ++i)
        fits = ends.data()[i] <= ends.data()[i + 1];
    if (!fits)
        throw std::invalid_argument(std::string("flow: ") + name + " does not divide its rows");
}

// The messages of each key, in order.
Rows members(const int64_t *keys, size_t count) {
    Rows rows;
    const int64_t num_rows = count ? *std::max_element(keys, keys + count) + 1 : 0;
    rows.at.assign(num_rows + 1, 0);
    for (size_t i = 0; i < count; ++i)
        ++rows.at[keys[i] + 1];
    for (int64_t k = 0; k < num_rows; ++k)
        rows.at[k + 1] += rows.at[k];
    std::vector<int64_t> end(rows.at.begin(), rows.at.end() - 1);
    rows.values.resize(count);
    for (size_t i = 0; i < count; ++i)
        rows.values[end[keys[i]]++] = static_cast<int64_t>(i);
    return rows;
}

bool flow(Ints queue, Ints stream, Ints receiver, Ints window, Ints ahead, Floats nbytes, Ints after_at, Ints after,
          Ints port_at, Ints port, Ints hold_port, Floats hold_work, Floats buffer, Floats rate, Floats burst,
          Times start, Times finish, double cutoff) {
    const size_t n = queue.shape(0), num_streams = hold_port.shape(0), num_ports = rate.shape(0);
    check_range(queue, n, "queue", n);
    check_range(receiver, n, "receiver", n);
    check_range(stream, n, "stream", num_streams);
    check_range(after, after.shape(0), "after", n);
    check_range(port, port.shape(0), "port", num_ports);
    check_range(hold_port, num_streams, "hold_port", num_ports);
    check_ends(after_at, n, after.shape(0), "after_at");
    check_ends(port_at, num_streams, port.shape(0), "port_at");
    if (window.shape(0) != n || ahead.shape(0) != n || nbytes.shape(0) != n || start.shape(0) != n ||
        finish.shape(0) != n || burst.shape(0) != num_ports || hold_work.shape(0) != n || buffer.shape(0) != num_streams)
        throw std::invalid_argument("flow: arrays differ in size");
    nb::gil_scoped_release release;
    EventLoop f;
    f.queue = queue.data(), f.stream = stream.data(), f.receiver = receiver.data(), f.window = window.data();
    f.ahead = ahead.data(), f.port_at = port_at.data(), f.port = port.data(), f.hold_port = hold_port.data();
    f.nbytes = nbytes.data(), f.hold_work = hold_work.data(), f.buffer = buffer.data(), f.port_rate = rate.data();
    f.num_ports = num_ports, f.burst = burst.data();
    f.sharing.price.assign(num_ports, 0);
    f.capacity.assign(rate.data(), rate.data() + num_ports);
    f.passing.resize(num_ports), f.is_dirty.resize(num_ports);
    f.saved.assign(burst.data(), burst.data() + num_ports), f.saving.assign(num_ports, 0);
    f.bursts = std::any_of(f.saved.begin(), f.saved.end(), [](double bytes) { return bytes > 0; });
    f.start = start.data(), f.finish = finish.data();
    f.left.resize(n), f.position.resize(n), f.streams.resize(num_streams), f.work.resize(num_ports);
    std::vector<int64_t> &num_next = f.next.at;
    num_next.assign(n + 1, 0);
    for (size_t i = 0; i < after.shape(0); ++i)
        ++num_next[after.data()[i] + 1];
    for (size_t i = 0; i < n; ++i)
        num_next[i + 1] += num_next[i];
    f.next.values.resize(after.shape(0));
    std::vector<int64_t> end(num_next.begin(), num_next.end() - 1);
    for (size_t i = 0; i < n; ++i) {
        f.left[i] = after_at.data()[i + 1] - after_at.data()[i];
        for (int64_t j = after_at.data()[i]; j < after_at.data()[i + 1]; ++j)
            f.next.values[end[after.data()[j]]++] = static_cast<int64_t>(i);
    }
    f.of_queue = members(f.queue, n), f.of_receiver = members(f.receiver, n), f.of_stream = members(f.stream, n);
    f.of_stream.at.resize(num_streams + 1, static_cast<int64_t>(n));
    for (size_t s = 0; s < num_streams; ++s)
        for (int64_t i = f.of_stream.at[s] + 1; i < f.of_stream.at[s + 1]; ++i)
            if (f.queue[f.of_stream.values[i]] != f.queue[f.of_stream.values[i - 1]])
                throw std::invalid_argument("flow: messages of one stream are in several queues");
    for (size_t i = 0; i < n; ++i) {
        const int64_t s = f.stream[i];
        f.work[f.hold_port[s]] += f.hold_work[i];
        for (int64_t j = f.port_at[s]; j < f.port_at[s + 1]; ++j)
            f.work[f.port[j]] += f.nbytes[i];
    }
    const size_t num_queues = f.of_queue.at.size() - 1, num_receivers = f.of_receiver.at.size() - 1;
    for (size_t to = 0; to < num_receivers; ++to)
        for (int64_t i = 0; i < f.of_receiver.size(to); ++i)
            f.position[f.of_receiver[to][i]] = i;
    f.head.resize(num_queues), f.done.resize(num_queues), f.released.resize(n);
    f.first.resize(num_receivers), f.blocked.resize(num_receivers);
    if (!f.run(cutoff))
        return false;
    for (size_t i = 0; i < n; ++i)
        if (f.finish[i] < 0)
            throw std::invalid_argument("message " + std::to_string(i) + " can never start");
    return true;
}

} // namespace

void bind_fluid(nb::module_ &m) {
    m.def("flow", &flow, nb::arg("queue"), nb::arg("stream"), nb::arg("receiver"), nb::arg("window"),
          nb::arg("ahead"), nb::arg("nbytes"), nb::arg("after_at"), nb::arg("after"), nb::arg("port_at"),
          nb::arg("port"), nb::arg("hold_port"), nb::arg("hold_work"), nb::arg("buffer"), nb::arg("rate"), nb::arg("burst"),
          nb::arg("start"), nb::arg("finish"), nb::arg("cutoff") = std::numeric_limits<double>::infinity(),
          "Fill start and finish with the times of all messages; false if the last one would finish after the cutoff.");
}
