// make_schedule checks the arrays of the NICs and the workload. It then runs the chunk scheduler, the rank assignment
// and the linearization. Reference implementation: tests/reference/schedule.py.

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>

#include "circulant_broadcast.h"
#include "pod_chunk_scheduler.h"
#include "linearization.h"

using namespace nb::literals;

namespace {

// Moves the values into a NumPy array, which owns them.
template <typename T> nb::object to_numpy(LargeArray<T> &&values) {
    auto *kept = new LargeArray<T>(std::move(values));
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<LargeArray<T> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// Copies an array. Throws if a value is not in [least, below).
std::vector<int64_t> to_vector(const Ints &values, size_t below, int64_t least, const char *name) {
    std::vector<int64_t> found(values.data(), values.data() + values.shape(0));
    for (const int64_t value : found)
        if (value < least || value >= static_cast<int64_t>(below))
            throw std::out_of_range(std::string("make_schedule: ") + name + " holds an index that does not exist");
    return found;
}

std::vector<double> to_vector(const Floats &values) { return {values.data(), values.data() + values.shape(0)}; }

// Rows of indices: row k is values[at[k]:at[k + 1]]. Throws if the rows do not cover the values, or if a value is not
// in [0, below).
Members members(const Ints &at, const Ints &values, size_t rows, size_t below, const char *name) {
    bool fits = at.shape(0) == rows + 1 && at.data()[0] == 0 &&
                at.data()[rows] == static_cast<int64_t>(values.shape(0)) &&
                std::is_sorted(at.data(), at.data() + rows + 1);
    if (!fits)
        throw std::invalid_argument(std::string("make_schedule: ") + name + " are not divided into rows");
    to_vector(values, below, 0, name);
    return {at, values};
}

// The number of rows that `at` divides values into.
size_t rows(const Ints &at) { return at.shape(0) ? at.shape(0) - 1 : 0; }

// A field of a Python object. Throws if it has another type than T.
template <typename T> T field(nb::handle object, const char *name) {
    try {
        return nb::cast<T>(object.attr(name));
    } catch (const nb::cast_error &) {
        throw std::invalid_argument(std::string("make_schedule: ") + name + " has another type than expected");
    }
}

// A field that holds rows as a pair of arrays, (at, values).
std::pair<Ints, Ints> pair_field(nb::handle object, const char *name) {
    return field<std::pair<Ints, Ints>>(object, name);
}

// Whether each host has one NIC with ranks, and all chunks that move have the same single holder and destinations.
bool is_broadcast(const Nics &nics, const ChunkWorkload &workload) {
    int64_t k = -1;
    for (const int64_t other : workload.host_class_of)
        if (!workload.host_class_receivers[other].empty() && k != other) {
            if (k >= 0)
                return false;
            k = other;
        }
    if (k < 0)
        return true;
    std::vector<char> has_nic(nics.num_hosts);
    for (int64_t p = 0; p < nics.count(); ++p)
        has_nic[nics.host[p]] |= !nics.ranks[p].empty();
    const auto has_all = [&](const Members::Row &hosts) {
        return std::all_of(hosts.begin(), hosts.end(), [&](int64_t host) { return has_nic[host] != 0; });
    };
    return !nics.have_multi_nic_hosts && nics.pod.empty() && workload.host_class_holders[k].size() == 1 &&
           has_all(workload.host_class_holders[k]) && has_all(workload.host_class_receivers[k]);
}

nb::tuple make_schedule(nb::handle given_nics, nb::handle given) {
    const auto host = field<Ints>(given_nics, "host"), of_rank = field<Ints>(given_nics, "of_rank"),
               pod = field<Ints>(given_nics, "pod");
    const auto out = field<Floats>(given_nics, "out"), into = field<Floats>(given_nics, "into"),
               up = field<Floats>(given_nics, "up"), down = field<Floats>(given_nics, "down");
    const auto [host_class_holders_offsets, host_class_holders] = pair_field(given, "host_class_holders");
    const auto [host_class_receivers_at, host_class_receivers] = pair_field(given, "host_class_receivers");
    const auto [class_holders_offsets, class_holders] = pair_field(given, "class_holders");
    const auto [class_receivers_at, class_receivers] = pair_field(given, "class_receivers");
    const auto host_class_size = field<Ints>(given, "host_class_size"), host_class_of = field<Ints>(given, "host_class_of"),
               piece_offsets = field<Ints>(given, "piece_offsets"), piece_class = field<Ints>(given, "piece_class"),
               piece_bytes = field<Ints>(given, "piece_bytes");
    Nics nics{to_vector(host, 1 << 20, 0, "host"), to_vector(of_rank, host.shape(0), -1, "of_rank"),
                to_vector(pod, up.shape(0), 0, "pod"), to_vector(out), to_vector(into), to_vector(up), to_vector(down)};
    if (!nics.count() || out.shape(0) != host.shape(0) || into.shape(0) != host.shape(0) ||
        up.shape(0) != down.shape(0))
        throw std::invalid_argument("make_schedule: NICs are not as many as their rates");
    nics.find_ranks();
    if (pod.shape(0) && static_cast<int64_t>(pod.shape(0)) < nics.num_hosts)
        throw std::invalid_argument("make_schedule: a host has no pod");
    const size_t host_classes = rows(host_class_holders_offsets), classes = rows(class_holders_offsets);
    const size_t hosts = static_cast<size_t>(nics.num_hosts), ranks = of_rank.shape(0);
    const size_t pieces = piece_class.shape(0);
    ChunkWorkload workload{members(host_class_holders_offsets, host_class_holders, host_classes, hosts, "host_class_holders"),
                    members(host_class_receivers_at, host_class_receivers, host_classes, hosts, "host_class_receivers"),
                    to_vector(host_class_size, INT64_MAX, 1, "host_class_size"),
                    to_vector(host_class_of, host_classes, 0, "host_class_of"),
                    members(class_holders_offsets, class_holders, classes, ranks, "class_holders"),
                    members(class_receivers_at, class_receivers, classes, ranks, "class_receivers"),
                    to_vector(piece_offsets, pieces + 1, 0, "piece_offsets"),
                    to_vector(piece_class, classes, 0, "piece_class"),
                    to_vector(piece_bytes, INT64_MAX, 0, "piece_bytes"),
                    field<int64_t>(given, "max_lead"),
                    field<bool>(given, "near_first"),
                    field<bool>(given, "keeps_partners"),
                    field<bool>(given, "is_broadcast"),
                    field<double>(given, "inside_each"),
                    field<double>(given, "inside_per_byte")};
    for (const Ints *table : {&class_holders, &class_receivers})
        for (size_t i = 0; i < table->shape(0); ++i)
            if (nics.of_rank[table->data()[i]] < 0)
                throw std::out_of_range("make_schedule: a rank has no NIC");
    if (host_class_size.shape(0) != host_classes)
        throw std::invalid_argument("make_schedule: host classes are not as many as their sizes");
    if (piece_bytes.shape(0) != pieces || workload.piece_offsets.size() != workload.host_class_of.size() + 1 ||
        workload.piece_offsets.back() != static_cast<int64_t>(pieces) ||
        std::adjacent_find(workload.piece_offsets.begin(), workload.piece_offsets.end(), std::greater_equal<>()) !=
            workload.piece_offsets.end())
        throw std::invalid_argument("make_schedule: chunks are not divided into pieces");
    if (workload.is_broadcast && !is_broadcast(nics, workload))
        throw std::invalid_argument("make_schedule: the chunks are not a broadcast from one host");
    std::optional<OrderedMessages> ordered;
    bool done;
    {
        nb::gil_scoped_release release;
        std::vector<ChunkSend> chunk_sends;
        if (workload.is_broadcast) {
            chunk_sends = std::move(CirculantBroadcast(nics, workload).chunk_sends);
            done = true;
        } else {
            std::unique_ptr<ChunkScheduler> scheduler;
            if (nics.pod.empty())
                scheduler = std::make_unique<ChunkScheduler>(nics, workload);
            else
                scheduler = std::make_unique<PodChunkScheduler>(nics, workload);
            done = scheduler->run();
            chunk_sends = std::move(scheduler->chunk_sends);
        }
        if (done) {
            Messages made;
            {
                RankAssignment assignment(nics, workload, chunk_sends);
                assignment.run();
                made = std::move(assignment.messages);
            }
            chunk_sends = {};
            // With equal rates, the order of end times is right for both senders and receivers.
            const auto order = nics.have_equal_rates() ? made.by_end() : Linearization(made).order;
            ordered.emplace(std::move(made), order);
        }
    }
    if (!done)
        throw std::invalid_argument("make_schedule: a chunk cannot reach a host that needs it");
    OrderedMessages &made = *ordered;
    return nb::make_tuple(to_numpy(std::move(made.piece)), to_numpy(std::move(made.sender)), to_numpy(std::move(made.receiver)),
                          to_numpy(std::move(made.source)), to_numpy(std::move(made.after_offsets)), to_numpy(std::move(made.after)),
                          to_numpy(std::move(made.staged)));
}

} // namespace

void bind_schedule(nb::module_ &m) {
    m.def("make_schedule", &make_schedule, "nics"_a, "workload"_a,
          "Returns piece, sender, receiver, source, after_offsets, after and staged of all messages, in order.");
}
