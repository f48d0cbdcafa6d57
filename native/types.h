// Types of the chunk scheduler: arrays from Python, bit sets, ports, NICs, the workload, and transfers.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "interruption.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double NO_RATE = 1e-9; // rates up to this count as 0
constexpr double CHUNK_UNITS = 1024; // size of a chunk that a NIC of rate 1 sends in one clock step

// Rows of integers: row k is values[at[k]:at[k + 1]].
class Members {
  public:
    Members(const Ints &at, const Ints &values) : at_(at.data()), values_(values.data()), size_(at.shape(0) - 1) {}
    struct Row {
        const int64_t *first, *last;
        const int64_t *begin() const { return first; }
        const int64_t *end() const { return last; }
        bool empty() const { return first == last; }
        int64_t size() const { return last - first; }
    };
    Row operator[](int64_t k) const { return {values_ + at_[k], values_ + at_[k + 1]}; }
    size_t size() const { return size_; }

  private:
    const int64_t *at_, *values_;
    size_t size_;
};

// A bit set of fixed size.
class Bits {
  public:
    explicit Bits(size_t size = 0) : words_((size + 63) / 64) {}
    void set(int64_t i) { words_[static_cast<size_t>(i) / 64] |= uint64_t{1} << (i % 64); }
    void clear(int64_t i) { words_[static_cast<size_t>(i) / 64] &= ~(uint64_t{1} << (i % 64)); }
    bool has(int64_t i) const { return words_[static_cast<size_t>(i) / 64] >> (i % 64) & 1; }
    uint64_t word(size_t i) const { return words_[i]; }
    int64_t count() const {
        int64_t found = 0;
        for (const uint64_t word : words_)
            found += std::popcount(word);
        return found;
    }
    size_t num_words() const { return words_.size(); }
    template <typename F> void each(F f) const {
        for (size_t i = 0; i < words_.size(); ++i)
            for (uint64_t word = words_[i]; word; word &= word - 1)
                f(static_cast<int64_t>(64 * i) + std::countr_zero(word));
    }

  private:
    std::vector<uint64_t> words_;
};

// One direction of a NIC or uplink. Flows share its rate. `free_parts` lists the free parts of the rate, oldest
// first. Each part names the send whose end freed it (-1: free from the start) and that send's sender. A send that
// reserves a part must start after the send that freed the part.
struct Port {
    int64_t number;
    double rate, free;
    struct FreePart {
        int64_t chunk_send, sender;
        double rate;
    };
    std::vector<FreePart> free_parts;
    Port(int64_t n, double r) : number(n), rate(r), free(r), free_parts{{-1, -1, r}} {}
    // Reserves a part of the rate, from parts freed by the same sender first. Calls before() with each send that freed one
    // of those parts.
    template <typename F> void reserve(double reserved, int64_t sender, F before) {
        free -= reserved;
        std::stable_partition(free_parts.begin(), free_parts.end(),
                              [&](const FreePart &part) { return part.sender == sender; });
        while (reserved > NO_RATE && !free_parts.empty()) {
            const FreePart part = free_parts.front();
            free_parts.erase(free_parts.begin());
            if (part.chunk_send >= 0)
                before(part.chunk_send);
            if (part.rate > reserved + NO_RATE)
                free_parts.insert(free_parts.begin(), {part.chunk_send, part.sender, part.rate - reserved});
            reserved -= part.rate;
        }
    }
    void release(double released, int64_t chunk_send, int64_t sender) {
        free += released;
        free_parts.push_back({chunk_send, sender, released});
    }
};

// The network: NICs, their ranks, and uplinks.
struct Nics {
    std::vector<int64_t> host;    // of each NIC
    std::vector<int64_t> of_rank; // NIC of each rank, -1 for ranks that do not participate
    std::vector<int64_t> pod;     // of each host; empty without pods
    std::vector<double> out, into, up, down; // egress and ingress rates of NICs, then of pod uplinks
    std::vector<std::vector<int64_t>> ranks; // of each NIC
    int64_t num_hosts = 0;
    bool have_multi_nic_hosts = false; // some host has several NICs with ranks

    // Whether all NICs and uplinks have the same rate.
    bool have_equal_rates() const {
        for (const auto *rates : {&out, &into, &up, &down})
            for (const double rate : *rates)
                if (rate != out[0])
                    return false;
        return true;
    }
    int64_t count() const { return static_cast<int64_t>(host.size()); }
    void find_ranks() {
        ranks.resize(host.size());
        for (size_t rank = 0; rank < of_rank.size(); ++rank)
            if (of_rank[rank] >= 0)
                ranks[of_rank[rank]].push_back(static_cast<int64_t>(rank));
        num_hosts = *std::max_element(host.begin(), host.end()) + 1;
        std::vector<char> used(num_hosts);
        for (size_t nic = 0; nic < host.size(); ++nic)
            if (!ranks[nic].empty()) {
                have_multi_nic_hosts |= used[host[nic]] != 0;
                used[host[nic]] = 1;
            }
    }
};

// The chunks to schedule; see ChunkWorkload in planner/multicast/chunk_workload.py. A chunk belongs to a host class, which lists
// the hosts that hold it and the hosts that need it. A chunk consists of pieces. A piece belongs to a class, which lists
// the ranks that hold it and the ranks that need it.
struct ChunkWorkload {
    Members host_class_holders, host_class_receivers;
    std::vector<int64_t> host_class_size, host_class_of;
    Members class_holders, class_receivers;
    std::vector<int64_t> piece_offsets, piece_class, piece_bytes;
    int64_t max_lead;    // a rank is used until it is this many pieces ahead of the least loaded rank at its NIC
    bool near_first;     // whether NICs prefer chunks that their own ranks hold or need over the rarest chunks
    bool keeps_partners; // whether a sender keeps its first receiver for as long as it can
    bool is_broadcast;   // whether one host sends all chunks to all others, see circulant_broadcast.h
    double inside_each, inside_per_byte; // time of a message inside a host, per message and per byte, in clock steps
};

// A send of one chunk from NIC to NIC. source: the send that brought the chunk to the sending host, -1 if the host
// holds it from the start. after: the sends whose ends freed the rate that this send uses.
struct ChunkSend {
    int64_t chunk, sender, receiver, source;
    std::vector<int64_t> after;
    double start, end;
};

// A send in progress from NIC s to NIC r. rate: the rate reserved at its ports; speed: its current rate, which
// may be higher; left: the part of the chunk that remains.
struct Flow {
    int64_t s, r, chunk;
    double rate;
    int64_t chunk_send;
    double left, speed;
};
