// Loops over all regions and messages of a large exchange: numbers of equal rows, the messages of
// rotate_hosts, and the loads of direct sends.
// Reference implementations: tests/reference/exchange.py.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../large_array.h"
#include "../types.h"

using namespace nb::literals;

using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutInts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutFloats = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

constexpr int64_t NO_RANK = -1;
constexpr int64_t ROWS_PER_POLL = 4096;

void check(bool holds, const char *function, const char *rule) {
    if (!holds)
        throw std::invalid_argument(std::string(function) + ": " + rule);
}

// Throws if a value is not in [least, below).
void check_range(const int64_t *values, size_t count, int64_t least, size_t below, const char *function,
                 const char *name) {
    for (size_t i = 0; i < count; ++i)
        if (values[i] < least || values[i] >= static_cast<int64_t>(below))
            throw std::out_of_range(std::string(function) + ": " + name + " holds an index that does not exist");
}

// The receivers of a class on one host, in the order of their chain.
struct Group {
    int32_t of_class, at, count, nic; // nic: of the first receiver
};

// The number of each value that occurs, ascending; -1 for the others.
struct Numbers {
    std::vector<int64_t> of;
    int64_t count = 0;
    explicit Numbers(size_t size) : of(size, -1) {}
    void mark(int64_t value) { of[value] = 0; }
    void number() {
        for (int64_t &value : of)
            if (value >= 0)
                value = count++;
    }
};

// The groups of all classes, in the order of (slot, sender NIC, class).
struct Groups {
    const int64_t *holder, *nbytes, *host, *nic; // of each class; of each rank
    Numbers senders, reached; // NICs that send, and NICs of first receivers
    LargeArray<Group> groups;
    LargeArray<int32_t> members, order; // receivers of all groups; the groups in order
    int64_t num_slots = 0;

    Groups(Table receivers, const Ints &holder_of, const Ints &bytes_of, const Ints &host_of, const Ints &nic_of,
           size_t num_nics, size_t total, bool rotates)
        : holder(holder_of.data()), nbytes(bytes_of.data()), host(host_of.data()), nic(nic_of.data()),
          senders(num_nics), reached(num_nics) {
        Interruption interruption;
        std::vector<int64_t> row;
        groups.reserve(total), members.reserve(total);
        for (size_t k = 0; k < receivers.shape(0); ++k) {
            if (k % ROWS_PER_POLL == 0)
                interruption.poll();
            row.clear();
            for (size_t i = 0; i < receivers.shape(1); ++i)
                if (receivers(k, i) != NO_RANK)
                    row.push_back(receivers(k, i));
            const auto is_before = [&](int64_t a, int64_t b) { return host[a] < host[b]; };
            if (!std::is_sorted(row.begin(), row.end(), is_before))
                std::stable_sort(row.begin(), row.end(), is_before);
            senders.mark(nic[holder[k]]);
            for (size_t at = 0, end; at < row.size(); at = end) {
                for (end = at + 1; end < row.size() && host[row[end]] == host[row[at]];)
                    ++end;
                add(k, row, at, end - at, rotates ? k % (end - at) : 0);
            }
        }
        senders.number(), reached.number();
        num_slots = std::max(senders.count, reached.count);
        put_in_order();
    }

    void add(size_t k, const std::vector<int64_t> &row, size_t at, size_t count, size_t first) {
        const int64_t to = nic[row[at + first]];
        groups.push_back({static_cast<int32_t>(k), static_cast<int32_t>(members.size()), static_cast<int32_t>(count),
                          static_cast<int32_t>(to)});
        reached.mark(to);
        for (size_t i = 0; i < count; ++i)
            members.push_back(static_cast<int32_t>(row[at + (first + i) % count]));
    }

    // The slot in which a group's first receiver gets its class, -1 if its host holds it.
    int64_t slot(const Group &group) const {
        const int64_t from = holder[group.of_class];
        if (host[from] == host[members[group.at]])
            return -1;
        const int64_t apart = reached.of[group.nic] - senders.of[nic[from]];
        return apart < 0 ? apart + num_slots : apart;
    }
    int64_t sender(const Group &group) const { return senders.of[nic[holder[group.of_class]]]; }

    // Sorts by counting.
    void put_in_order() {
        std::vector<int64_t> place(static_cast<size_t>((num_slots + 1) * senders.count + 1));
        const auto key = [&](const Group &group) { return (slot(group) + 1) * senders.count + sender(group); };
        for (const Group &group : groups)
            ++place[key(group) + 1];
        for (size_t i = 1; i < place.size(); ++i)
            place[i] += place[i - 1];
        order.resize(groups.size());
        for (size_t g = 0; g < groups.size(); ++g)
            order[place[key(groups[g])]++] = static_cast<int32_t>(g);
    }

    // Bytes until the last slot ends, or that the busiest sender passes if they are more: a slot takes as long as its
    // longest exchange of two NICs.
    double busy_bytes() const {
        std::vector<double> sent(senders.count), pair(senders.count);
        double total = 0;
        int64_t now = -1;
        for (size_t i = 0; i <= order.size(); ++i) {
            const int64_t next = i < order.size() ? slot(groups[order[i]]) : num_slots;
            if (next != now) {
                total += *std::max_element(pair.begin(), pair.end());
                pair.assign(pair.size(), 0);
                now = next;
            }
            if (i == order.size() || next < 0)
                continue;
            const Group &group = groups[order[i]];
            pair[sender(group)] += static_cast<double>(nbytes[group.of_class]);
            sent[sender(group)] += static_cast<double>(nbytes[group.of_class]);
        }
        return std::max(total, *std::max_element(sent.begin(), sent.end()));
    }
};

// Writes the messages of a rotation: each piece of a class passes along the chain of receivers of each host. Returns
// the number of entries of `after`, or -1, with nothing written, if the ports are busy for more than `most_bytes`.
int64_t rotate(Table receivers, Ints holder, Ints nbytes, Ints piece_offsets, Ints host_of, Ints nic_of, int64_t num_nics,
               bool rotates, double most_bytes, int64_t window_across, int64_t window_inside, OutInts region,
               OutInts sender, OutInts receiver, OutInts window, OutInts after_offsets, OutInts after, OutInts source) {
    const char *name = "rotate";
    const size_t classes = receivers.shape(0), width = receivers.shape(1), ranks = host_of.shape(0);
    check(classes && holder.shape(0) == classes && nbytes.shape(0) == classes && piece_offsets.shape(0) == classes + 1 &&
              nic_of.shape(0) == ranks,
          name, "arrays differ in size");
    check_range(receivers.data(), classes * width, NO_RANK, ranks, name, "receivers");
    check_range(holder.data(), classes, 0, ranks, name, "holder");
    check(num_nics >= 0 && num_nics < INT32_MAX, name, "there are too many NICs");
    check_range(nic_of.data(), ranks, 0, static_cast<size_t>(num_nics), name, "nic_of");
    check(std::is_sorted(piece_offsets.data(), piece_offsets.data() + classes + 1), name, "piece_offsets does not rise");
    size_t total = 0, needed = 0;
    for (size_t k = 0; k < classes; ++k) {
        const int64_t *row = receivers.data() + k * width;
        const size_t real = width - static_cast<size_t>(std::count(row, row + width, NO_RANK));
        total += real, needed += real * static_cast<size_t>(piece_offsets(k + 1) - piece_offsets(k));
    }
    check(total < INT32_MAX && classes < INT32_MAX && ranks < INT32_MAX, name, "there are too many receivers");
    for (const OutInts *array : {&region, &sender, &receiver, &window, &source})
        check(array->shape(0) == needed, name, "an output has the wrong size");
    check(after_offsets.shape(0) == needed + 1 && after.shape(0) >= 2 * needed, name, "an output has the wrong size");
    nb::gil_scoped_release release;
    const Groups found(receivers, holder, nbytes, host_of, nic_of, static_cast<size_t>(num_nics), total, rotates);
    if (found.busy_bytes() > most_bytes)
        return -1;
    Interruption interruption;
    std::vector<int64_t> last_sent(found.senders.count, -1), last_received(found.reached.count, -1);
    int64_t message = 0, num_after = 0;
    for (size_t g = 0; g < found.order.size(); ++g) {
        if (g % ROWS_PER_POLL == 0)
            interruption.poll();
        const Group &group = found.groups[found.order[g]];
        const int64_t k = group.of_class;
        const bool may_cross = found.slot(group) >= 0;
        int64_t &sent = last_sent[found.sender(group)], &received = last_received[found.reached.of[group.nic]];
        for (int64_t piece = piece_offsets(k); piece < piece_offsets(k + 1); ++piece)
            for (int32_t hop = 0; hop < group.count; ++hop, ++message) {
                const bool crosses = !hop && may_cross;
                region.data()[message] = piece;
                sender.data()[message] = hop ? found.members[group.at + hop - 1] : holder(k);
                receiver.data()[message] = found.members[group.at + hop];
                window.data()[message] = crosses ? window_across : window_inside;
                source.data()[message] = hop ? message - 1 : -1;
                after_offsets.data()[message] = num_after;
                if (hop)
                    after.data()[num_after++] = message - 1;
                if (!crosses)
                    continue;
                if (sent >= 0)
                    after.data()[num_after++] = sent;
                if (received >= 0 && received != sent)
                    after.data()[num_after++] = received;
                sent = received = message;
            }
    }
    after_offsets.data()[needed] = num_after;
    return num_after;
}

// Adds the loads of sending each region from its holder to each of its receivers on other hosts: bytes sent and
// received by each NIC, and pairs of a sender at the NIC and a receiver.
void add_direct_loads(Ints holder, Table receivers, Ints nbytes, Ints host_of, Ints nic_of, OutFloats sent,
                      OutFloats received, OutFloats pairs) {
    const char *name = "add_direct_loads";
    const size_t tasks = receivers.shape(0), width = receivers.shape(1), ranks = host_of.shape(0);
    check(holder.shape(0) == tasks && nbytes.shape(0) == tasks && nic_of.shape(0) == ranks &&
              received.shape(0) == sent.shape(0) && pairs.shape(0) == sent.shape(0),
          name, "arrays differ in size");
    check_range(receivers.data(), tasks * width, NO_RANK, ranks, name, "receivers");
    check_range(holder.data(), tasks, 0, ranks, name, "holder");
    check_range(nic_of.data(), ranks, 0, sent.shape(0), name, "nic_of");
    nb::gil_scoped_release release;
    Interruption interruption;
    LargeArray<int64_t> order(tasks);
    std::vector<int64_t> place(ranks + 1), last(ranks, -1); // last: the last sender to each receiver
    for (size_t i = 0; i < tasks; ++i)
        ++place[holder(i) + 1];
    for (size_t r = 0; r < ranks; ++r)
        place[r + 1] += place[r];
    for (size_t i = 0; i < tasks; ++i)
        order[place[holder(i)]++] = static_cast<int64_t>(i);
    for (size_t n = 0; n < tasks; ++n) {
        if (n % ROWS_PER_POLL == 0)
            interruption.poll();
        const int64_t task = order[n], from = holder(task);
        const double bytes = static_cast<double>(nbytes(task));
        for (size_t i = 0; i < width; ++i) {
            const int64_t to = receivers(task, i);
            if (to == NO_RANK || host_of(to) == host_of(from))
                continue;
            sent.data()[nic_of(from)] += bytes, received.data()[nic_of(to)] += bytes;
            if (last[to] != from)
                pairs.data()[nic_of(from)] += 1;
            last[to] = from;
        }
    }
}

// Numbers equal rows in the order of their first ones: writes the number of each row, and the first row of each number.
// Returns the count of numbers.
int64_t number_rows(Table rows, OutInts first, OutInts number) {
    const size_t count = rows.shape(0), width = rows.shape(1);
    check(first.shape(0) == count && number.shape(0) == count, "number_rows", "an output has the wrong size");
    nb::gil_scoped_release release;
    Interruption interruption;
    const size_t mask = std::bit_ceil(2 * count + 1) - 1;
    LargeArray<int64_t> table(mask + 1, -1); // numbers, at the hashes of their rows
    int64_t found = 0;
    for (size_t i = 0; i < count; ++i) {
        if (i % ROWS_PER_POLL == 0)
            interruption.poll();
        const int64_t *row = rows.data() + i * width;
        uint64_t hash = 0;
        for (size_t column = 0; column < width; ++column)
            hash = (hash ^ (hash >> 29)) * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(row[column]);
        hash = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15;
        size_t at = (hash >> 32) & mask;
        while (table[at] >= 0 && !std::equal(row, row + width, rows.data() + first(table[at]) * width))
            at = (at + 1) & mask;
        if (table[at] < 0) {
            table[at] = found;
            first.data()[found++] = static_cast<int64_t>(i);
        }
        number.data()[i] = table[at];
    }
    return found;
}

} // namespace

void bind_exchange(nb::module_ &m) {
    m.def("rotate", &rotate, "receivers"_a, "holder"_a, "nbytes"_a, "piece_offsets"_a, "host_of"_a, "nic_of"_a,
          "num_nics"_a, "rotates"_a, "most_bytes"_a, "window_across"_a, "window_inside"_a, "region"_a, "sender"_a,
          "receiver"_a, "window"_a, "after_offsets"_a, "after"_a, "source"_a,
          "Write the messages of a rotation and return the number of entries of after, or -1 if ports would wait.");
    m.def("number_rows", &number_rows, "rows"_a, "first"_a, "number"_a,
          "Number equal rows by their first ones; return the count of numbers.");
    m.def("add_direct_loads", &add_direct_loads, "holder"_a, "receivers"_a, "nbytes"_a, "host_of"_a, "nic_of"_a,
          "sent"_a, "received"_a, "pairs"_a,
          "Add the bytes that ports send and receive if each region goes directly to its receivers on other hosts.");
}
