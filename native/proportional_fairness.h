// Rates of flows that share ports: proportional fairness, which maximizes the sum of the logarithms of the rates.
//
// It models connections with a fixed number of bytes in flight and lossless queues. The rate of a connection is these
// bytes divided by its delay, and a queue delays all flows through it by the same time, so only these rates are stable.
// Flows with one bottleneck share it equally. A flow with two bottlenecks gets less at each than other flows: of flows
// through A, through A and B, and through B, the rates are 2/3, 1/3 and 2/3 of a port.
//
// Each port has a price, and the rate of a flow is 1 over the sum of the prices on its path. At the optimum the load of
// a port is its capacity, or its price is 0. The search takes two steps:
//
// 1. share_single_bottlenecks finds max-min fair rates by filling the tightest port first. If prices exist that give
//    these rates, they are the result.
// 2. Otherwise search_prices sets one port's price after another, by Newton's method on 1 over the load (which is
//    concave in the price), until all loads fit. It starts from the prices of the previous call. Rates are scaled down
//    at the end so that no port is over capacity.
//
// tests/reference/proportional_fairness.py does the same floating point operations in the same order.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

struct Path {
    const int64_t *first, *last;
    const int64_t *begin() const { return first; }
    const int64_t *end() const { return last; }
};

// Keeps the prices between calls as the start of the next search.
class Sharing {
  public:
    std::vector<double> price; // of each port
    std::vector<double> rate;  // of each flow

    void share(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        if (!share_single_bottlenecks(paths, capacity))
            search_prices(paths, capacity);
    }

  private:
    static constexpr double EQUAL = 1e-9; // relative difference of equal shares
    static constexpr double EXACT = 1e-6; // relative error of a port's load at which the search stops
    static constexpr int SWEEPS = 200, STEPS = 20;
    struct Held { // a bottleneck port, the rate of its flows, and these flows: here_[first:last]
        int64_t port;
        double least;
        size_t first, last;
    };
    std::vector<double> left_, share_, cost_, over_, exact_;
    std::vector<int64_t> count_, used_, here_, touched_;
    std::vector<char> is_open_;
    std::vector<std::pair<double, int64_t>> heap_; // (share of each open flow, port); may be stale
    std::vector<Held> held_;
    std::vector<std::vector<int64_t>> flows_;

    // Finds the tightest port with a heap; the Python reference scans all ports and flows. Returns false if no prices
    // fit.
    bool share_single_bottlenecks(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        const size_t num_ports = capacity.size();
        left_ = capacity;
        count_.assign(num_ports, 0);
        flows_.resize(num_ports);
        for (const int64_t port : used_)
            flows_[port].clear();
        used_.clear();
        for (size_t flow = 0; flow < paths.size(); ++flow)
            for (const int64_t port : paths[flow]) {
                if (++count_[port] == 1)
                    used_.push_back(port);
                flows_[port].push_back(static_cast<int64_t>(flow));
            }
        share_.assign(num_ports, 0);
        heap_.clear();
        for (const int64_t port : used_) {
            share_[port] = left_[port] / static_cast<double>(count_[port]);
            heap_.push_back({share_[port], port});
        }
        std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
        rate.assign(paths.size(), 0);
        is_open_.assign(paths.size(), true);
        held_.clear(), here_.clear();
        while (!heap_.empty()) {
            const auto [least, tightest] = heap_.front();
            std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
            heap_.pop_back();
            if (!count_[tightest] || share_[tightest] != least)
                continue; // stale: a newer entry of the port is in the heap
            Held held{tightest, least, here_.size(), 0};
            touched_.clear();
            for (const int64_t flow : flows_[tightest]) {
                if (!is_open_[flow])
                    continue;
                is_open_[flow] = false;
                here_.push_back(flow);
                rate[flow] = least;
                for (const int64_t port : paths[flow]) {
                    left_[port] = std::max(left_[port] - least, 0.0);
                    --count_[port];
                    touched_.push_back(port);
                }
            }
            for (const int64_t port : touched_) {
                const double now = left_[port] / static_cast<double>(count_[port]);
                if (!count_[port] || now == share_[port])
                    continue;
                share_[port] = now;
                heap_.push_back({now, port});
                std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
            }
            held.last = here_.size();
            held_.push_back(held);
        }
        exact_.assign(num_ports, 0);
        for (size_t i = held_.size(); i-- > 0;) {
            const Held &held = held_[i];
            double cheapest = std::numeric_limits<double>::infinity(), dearest = 0;
            for (size_t at = held.first; at < held.last; ++at) {
                double others = 0;
                for (const int64_t port : paths[here_[at]])
                    others += exact_[port];
                cheapest = std::min(cheapest, others), dearest = std::max(dearest, others);
            }
            if ((dearest - cheapest) * held.least > EQUAL || dearest * held.least > 1 + EQUAL)
                return false;
            exact_[held.port] = std::max(1 / held.least - dearest, 0.0);
        }
        return true;
    }

    void search_prices(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        cost_.assign(paths.size(), 0);
        for (size_t flow = 0; flow < paths.size(); ++flow)
            for (const int64_t port : paths[flow])
                cost_[flow] += price[port];
        for (size_t flow = 0; flow < paths.size(); ++flow)
            if (cost_[flow] == 0) {
                const int64_t port = *paths[flow].begin();
                price[port] = static_cast<double>(flows_[port].size()) / capacity[port];
                for (const int64_t other : flows_[port])
                    cost_[other] += price[port];
            }
        for (int sweep = 0; sweep < SWEEPS; ++sweep) {
            double worst = 0;
            for (size_t port = 0; port < capacity.size(); ++port)
                if (!flows_[port].empty())
                    worst = std::max(worst, set_price(port, capacity[port]));
            if (worst <= EXACT)
                break;
        }
        over_.assign(capacity.size(), 0);
        for (size_t port = 0; port < capacity.size(); ++port) {
            for (const int64_t flow : flows_[port])
                over_[port] += 1 / cost_[flow];
            over_[port] /= capacity[port];
        }
        for (size_t flow = 0; flow < paths.size(); ++flow) {
            double most = 1;
            for (const int64_t port : paths[flow])
                most = std::max(most, over_[port]);
            rate[flow] = 1 / (cost_[flow] * most);
        }
    }

    // Sets the price at which the load of a port is its capacity, or 0; returns how far off the load was.
    double set_price(size_t port, double capacity) {
        const double old = price[port];
        double load = 0, others = std::numeric_limits<double>::infinity();
        for (const int64_t flow : flows_[port]) {
            load += 1 / cost_[flow];
            others = std::min(others, cost_[flow] - old);
        }
        const double off = load / capacity - 1;
        if (off < 0 && old == 0)
            return 0;
        if (std::abs(off) <= EXACT / 4)
            return std::abs(off);
        // below this price, a single flow would exceed the capacity
        const double lowest = std::max(1 / capacity - std::max(others, 0.0), 0.0);
        double now = std::max(old, lowest);
        for (int step = 0; step < STEPS; ++step) {
            load = 0;
            double slope = 0;
            for (const int64_t flow : flows_[port]) {
                const double part = 1 / (cost_[flow] - old + now);
                load += part;
                slope += part * part;
            }
            const double following = std::max(now + (load / capacity - 1) * load / slope, lowest);
            const bool close = std::abs(following - now) <= EXACT / 8 * following;
            now = following;
            if (close)
                break;
        }
        price[port] = now;
        for (const int64_t flow : flows_[port])
            cost_[flow] += now - old;
        return std::abs(off);
    }
};
