// The pipeline that the loops in this folder schedule: stages on pp ranks, and two channels per edge.

#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace pipeline {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
// Smaller relative differences of times, and of transferred shares, are rounding errors.
constexpr double TOLERANCE = 1e-12;

enum Kind : int64_t { F, B, I, W };

// A computation as one number: (microbatch * number of stages + stage) * 4 + kind.
struct Computation {
    int64_t kind, stage, microbatch;
};

// One direction of an edge. Channel 2 e carries the activations of edge e, and 2 e + 1 its gradients.
struct Channel {
    int64_t sender, receiver;
    double seconds;
    bool crosses_pp_ranks;
    std::vector<int64_t> all_links;
    std::vector<double> all_busy;   // seconds for which a transfer keeps each link busy
    std::vector<int64_t> links;     // links that a transfer keeps busy for more than 0 s
    std::vector<double> shares;     // fraction of the capacity of each of them that a transfer uses at rate 1
};

struct Stage {
    double seconds[4]; // by kind
    double bytes;      // of the activations of a microbatch
    int64_t pp_rank;
    std::vector<int64_t> inputs, outputs;   // other stages, ascending
    // Channels by which a forward receives and sends, and by which a backward does.
    std::vector<int64_t> forward_in, forward_out, backward_in, backward_out;
};

struct Model {
    int64_t num_microbatches = 0, num_pp_ranks = 0, num_links = 0;
    std::vector<Stage> stages;
    std::vector<Channel> channels;
    std::vector<std::vector<int64_t>> stages_of_pp_rank; // ascending
    bool shares_links = false;

    int64_t num_stages() const { return static_cast<int64_t>(stages.size()); }

    int64_t code(int64_t kind, int64_t stage, int64_t microbatch) const {
        return (microbatch * num_stages() + stage) * 4 + kind;
    }

    Computation computation(int64_t code) const {
        return {code & 3, (code >> 2) % num_stages(), (code >> 2) / num_stages()};
    }

    const std::vector<int64_t> &sends_of(const Computation &item) const {
        return item.kind == F ? stages[item.stage].forward_out : stages[item.stage].backward_out;
    }

    const std::vector<int64_t> &receives_of(const Computation &item) const {
        return item.kind == F ? stages[item.stage].forward_in : stages[item.stage].backward_in;
    }
};

// The computations of each pp rank, in order.
using RankOrders = std::vector<std::vector<int64_t>>;

} // namespace pipeline
