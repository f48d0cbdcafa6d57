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
//    at the end so that no port is over capacity. The simulator first tries all prices at once (joint_prices.h).
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

#include "joint_prices.h"

// Keeps the prices between calls as the start of the next search. A call takes time for the ports of its flows only.
class Sharing {
  public:
    std::vector<double> price; // of each port
    std::vector<double> rate;  // of each flow
    bool joint = false;        // whether to try all prices at once first
    int64_t operations = 0;    // of all calls, roughly: a few nanoseconds each, the same number on every machine

    void share(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        rate.resize(paths.size());
        operations += 8 * static_cast<int64_t>(paths.size());
        if (paths.size() == 1) { // it gets all of its tightest port
            double least = std::numeric_limits<double>::infinity();
            for (const int64_t port : paths[0])
                least = std::min(least, capacity[port]);
            rate[0] = least;
            return;
        }
        group_flows(paths, capacity.size());
        if (share_single_bottlenecks(paths, capacity))
            return;
        std::sort(used_.begin(), used_.end());
        Search &search = searches_[next_search_];
        describe(search, paths, capacity);
        if (recall(search))
            return;
        next_search_ = (next_search_ + 1) % RECALLED;
        search_prices(paths, capacity);
        search.prices.clear();
        for (const int64_t port : used_)
            search.prices.push_back(price[port]);
        search.rates = rate;
    }

  private:
    static constexpr double EQUAL = 1e-9; // relative difference of equal shares
    static constexpr double EXACT = 1e-6; // relative error of a port's load at which the search stops
    static constexpr int SWEEPS = 200, STEPS = 20;
    static constexpr size_t MOST_JOINT_PORTS = 64; // with more ports, one price after another is faster
    static constexpr size_t RECALLED = 16; // searches whose results are kept
    struct Port {
        double left, share, exact; // capacity that is left, for each open flow; price, if single bottlenecks share
        int64_t count = 0;         // open flows
        size_t first = 0, last = 0; // its flows: flows_[first:last]
    };
    struct Held { // a bottleneck port, the rate of its flows, and these flows: here_[first:last]
        int64_t port;
        double least;
        size_t first, last;
    };
    std::vector<Port> ports_;
    // A search for prices and its result. Hosts with several NICs often have one such search per NIC.
    struct Search {
        // Of each used port, ascending: capacity and first price. Then of each flow: its ports, numbered among the used
        // ports, and -1.
        std::vector<double> problem;
        std::vector<double> prices, rates;
    };
    Search searches_[RECALLED];
    size_t next_search_ = 0;
    std::vector<int64_t> number_of_; // by port: its number among used ports
    JointPrices joint_prices_;
    std::vector<double> cost_, over_;
    std::vector<int64_t> used_, flows_, here_, touched_; // used_: ports with flows
    std::vector<char> is_open_;
    std::vector<std::pair<double, int64_t>> heap_; // (share of each open flow, port); may be stale
    std::vector<Held> held_;

    // Lists the flows of each port, ascending.
    void group_flows(const std::vector<Path> &paths, size_t num_ports) {
        ports_.resize(num_ports);
        for (const int64_t port : used_)
            ports_[port].count = 0;
        used_.clear();
        for (const Path &path : paths)
            for (const int64_t port : path)
                if (++ports_[port].count == 1)
                    used_.push_back(port);
        size_t total = 0;
        for (const int64_t port : used_) {
            ports_[port].first = ports_[port].last = total;
            total += static_cast<size_t>(ports_[port].count);
        }
        flows_.resize(total);
        for (size_t flow = 0; flow < paths.size(); ++flow)
            for (const int64_t port : paths[flow])
                flows_[ports_[port].last++] = static_cast<int64_t>(flow);
    }

    template <typename F> void each_flow(const Port &port, F f) const {
        for (size_t i = port.first; i < port.last; ++i)
            f(flows_[i]);
    }

    // Finds the tightest port with a heap. The reference implementation scans all ports and flows. Returns false if no
    // prices fit.
    bool share_single_bottlenecks(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        heap_.clear();
        for (const int64_t number : used_) {
            Port &port = ports_[number];
            port.left = capacity[number], port.exact = 0;
            port.share = port.left / static_cast<double>(port.count);
            heap_.push_back({port.share, number});
        }
        std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
        is_open_.assign(paths.size(), true);
        held_.clear(), here_.clear();
        while (!heap_.empty() && here_.size() < paths.size()) {
            const auto [least, tightest] = heap_.front();
            std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
            heap_.pop_back();
            if (!ports_[tightest].count || ports_[tightest].share != least)
                continue; // stale: a newer entry of the port is in the heap
            Held held{tightest, least, here_.size(), 0};
            touched_.clear();
            each_flow(ports_[tightest], [&](int64_t flow) {
                if (!is_open_[flow])
                    return;
                is_open_[flow] = false;
                here_.push_back(flow);
                rate[flow] = least;
                for (const int64_t number : paths[flow]) {
                    Port &port = ports_[number];
                    port.left = std::max(port.left - least, 0.0);
                    --port.count;
                    touched_.push_back(number);
                }
            });
            held.last = here_.size();
            held_.push_back(held);
            if (here_.size() == paths.size())
                break;
            for (const int64_t number : touched_) {
                Port &port = ports_[number];
                if (!port.count)
                    continue;
                const double now = port.left / static_cast<double>(port.count);
                if (now == port.share)
                    continue;
                port.share = now;
                heap_.push_back({now, number});
                std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
            }
        }
        for (size_t i = held_.size(); i-- > 0;) {
            const Held &held = held_[i];
            double cheapest = std::numeric_limits<double>::infinity(), dearest = 0;
            for (size_t at = held.first; at < held.last; ++at) {
                double others = 0;
                for (const int64_t port : paths[here_[at]])
                    others += ports_[port].exact;
                cheapest = std::min(cheapest, others), dearest = std::max(dearest, others);
            }
            if ((dearest - cheapest) * held.least > EQUAL || dearest * held.least > 1 + EQUAL)
                return false;
            ports_[held.port].exact = std::max(1 / held.least - dearest, 0.0);
        }
        return true;
    }

    void describe(Search &search, const std::vector<Path> &paths, const std::vector<double> &capacity) {
        number_of_.resize(capacity.size());
        search.problem.clear();
        for (size_t i = 0; i < used_.size(); ++i) {
            number_of_[used_[i]] = static_cast<int64_t>(i);
            search.problem.push_back(capacity[used_[i]]);
            search.problem.push_back(price[used_[i]]);
        }
        for (const Path &path : paths) {
            for (const int64_t port : path)
                search.problem.push_back(static_cast<double>(number_of_[port]));
            search.problem.push_back(-1);
        }
    }

    // Takes prices and rates from an equal search, if one is known. A search does the same operations in the same
    // order whatever the numbers of its ports are, so the result is the same to the last bit.
    bool recall(const Search &asked) {
        for (const Search &known : searches_) {
            if (&known == &asked || known.problem != asked.problem)
                continue;
            for (size_t i = 0; i < used_.size(); ++i)
                price[used_[i]] = known.prices[i];
            rate = known.rates;
            return true;
        }
        return false;
    }

    void search_prices(const std::vector<Path> &paths, const std::vector<double> &capacity) {
        cost_.assign(paths.size(), 0);
        for (size_t flow = 0; flow < paths.size(); ++flow)
            for (const int64_t port : paths[flow])
                cost_[flow] += price[port];
        for (size_t flow = 0; flow < paths.size(); ++flow)
            if (cost_[flow] == 0) {
                const int64_t number = *paths[flow].begin();
                const Port &port = ports_[number];
                price[number] = static_cast<double>(port.last - port.first) / capacity[number];
                each_flow(port, [&](int64_t other) { cost_[other] += price[number]; });
            }
        if (joint && used_.size() <= MOST_JOINT_PORTS)
            operations += static_cast<int64_t>(4 * paths.size() + used_.size() * used_.size() * used_.size() / 2);
        if (joint && used_.size() <= MOST_JOINT_PORTS &&
            joint_prices_.search({paths, used_, number_of_, capacity, cost_, EXACT}, price, rate))
            return;
        for (int sweep = 0; sweep < SWEEPS; ++sweep) {
            double worst = 0;
            operations += 8 * static_cast<int64_t>(paths.size());
            for (const int64_t port : used_)
                worst = std::max(worst, set_price(port, capacity[port]));
            if (worst <= EXACT)
                break;
        }
        over_.resize(capacity.size());
        for (const int64_t port : used_) {
            over_[port] = 0;
            each_flow(ports_[port], [&](int64_t flow) { over_[port] += 1 / cost_[flow]; });
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
    double set_price(int64_t number, double capacity) {
        const Port &port = ports_[number];
        const double old = price[number];
        double load = 0, others = std::numeric_limits<double>::infinity();
        each_flow(port, [&](int64_t flow) {
            load += 1 / cost_[flow];
            others = std::min(others, cost_[flow] - old);
        });
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
            each_flow(port, [&](int64_t flow) {
                const double part = 1 / (cost_[flow] - old + now);
                load += part;
                slope += part * part;
            });
            const double following = std::max(now + (load / capacity - 1) * load / slope, lowest);
            const bool close = std::abs(following - now) <= EXACT / 8 * following;
            now = following;
            if (close)
                break;
        }
        price[number] = now;
        each_flow(port, [&](int64_t flow) { cost_[flow] += now - old; });
        return std::abs(off);
    }
};
