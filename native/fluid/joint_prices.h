// Prices of all ports at once, found by Newton's method on the dual of proportional fairness (see proportional_fairness.h):
// minimize the sum of price times capacity over the ports, minus the sum of the logarithms of the costs of the flows.
// The flows of one path are one bundle. Newton's method needs a few rounds. Setting one price after another needs tens
// of sweeps.
//
// tests/reference/proportional_fairness.py does the same floating point operations in the same order.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

struct Path {
    const int64_t *first, *last;
    const int64_t *begin() const { return first; }
    const int64_t *end() const { return last; }
};

struct Flows {
    const std::vector<Path> &paths;
    const std::vector<int64_t> &used;      // ports with flows, ascending
    const std::vector<int64_t> &number_of; // by port: its number among the used ones
    const std::vector<double> &capacity;   // by port
    const std::vector<double> &cost;       // by flow: the sum of the prices on its path, above 0
    double exact;                          // relative error of a port's load at which the search stops
};

class JointPrices {
  public:
    // Sets prices and rates and returns true if the loads fit after a few rounds; else changes nothing.
    bool search(const Flows &flows, std::vector<double> &price, std::vector<double> &rate) {
        const std::vector<int64_t> &used = flows.used;
        const std::vector<double> &capacity = flows.capacity;
        const size_t n = used.size();
        bundle_flows(flows);
        prices_.resize(n), move_.resize(n), load_.resize(n), is_fixed_.resize(n);
        for (size_t i = 0; i < n; ++i)
            prices_[i] = price[used[i]];
        for (int round = 0; round < ROUNDS; ++round) {
            add_loads(n);
            double worst = 0;
            for (size_t i = 0; i < n; ++i) {
                const double off = load_[i] / capacity[used[i]] - 1;
                is_fixed_[i] = prices_[i] == 0 && off < 0; // stays free of charge
                if (!is_fixed_[i])
                    worst = std::max(worst, std::abs(off));
                move_[i] = load_[i] - capacity[used[i]];
            }
            if (worst <= flows.exact) {
                for (size_t i = 0; i < n; ++i) {
                    price[used[i]] = prices_[i];
                    load_[i] /= capacity[used[i]];
                }
                for (Bundle &bundle : bundles_) { // scale down where a port is over capacity
                    double most = 1;
                    for (size_t at = bundle.first; at < bundle.last; ++at)
                        most = std::max(most, load_[bundle_ports_[at]]);
                    bundle.cost = 1 / (bundle.cost * most);
                }
                for (size_t flow = 0; flow < flows.paths.size(); ++flow)
                    rate[flow] = bundles_[bundle_of_[flow]].cost;
                return true;
            }
            solve_moves(n);
            if (!move_prices(n))
                return false;
        }
        return false;
    }

  private:
    static constexpr int ROUNDS = 12;
    static constexpr double SINGULAR = 1e-9, LARGEST_CUT = 0.9;
    struct Bundle { // flows of one path: bundle_ports_[first:last]
        size_t first, last;
        double count, cost;
    };
    std::vector<Bundle> bundles_;
    std::vector<int64_t> bundle_of_, bundle_of_pair_, bundle_ports_;
    std::vector<double> prices_, move_, load_, hessian_; // by number of port
    std::vector<char> is_fixed_;

    // Groups the flows by path. Paths of more than two ports are rare, and each is a separate bundle.
    void bundle_flows(const Flows &flows) {
        const std::vector<Path> &paths = flows.paths;
        const std::vector<int64_t> &number_of = flows.number_of;
        const size_t n = flows.used.size();
        bundles_.clear(), bundle_ports_.clear();
        bundle_of_.resize(paths.size());
        bundle_of_pair_.assign(n * n, -1);
        for (size_t flow = 0; flow < paths.size(); ++flow) {
            const Path &path = paths[flow];
            if (path.last - path.first <= 2) {
                int64_t &known = bundle_of_pair_[number_of[*path.first] * n + number_of[*(path.last - 1)]];
                if (known >= 0) {
                    ++bundles_[known].count;
                    bundle_of_[flow] = known;
                    continue;
                }
                known = static_cast<int64_t>(bundles_.size());
            }
            bundle_of_[flow] = static_cast<int64_t>(bundles_.size());
            const size_t first = bundle_ports_.size();
            for (const int64_t port : path)
                bundle_ports_.push_back(number_of[port]);
            bundles_.push_back({first, bundle_ports_.size(), 1, flows.cost[flow]});
        }
    }

    // Sets the load of each port, and the Hessian of the dual (its lower half).
    void add_loads(size_t n) {
        std::fill(load_.begin(), load_.end(), 0);
        hessian_.assign(n * n, 0);
        for (const Bundle &bundle : bundles_) {
            const double each = 1 / bundle.cost, part = bundle.count * each, curvature = part * each;
            for (size_t a = bundle.first; a < bundle.last; ++a) {
                const size_t i = bundle_ports_[a];
                load_[i] += part;
                for (size_t b = bundle.first; b <= a; ++b) {
                    const size_t j = bundle_ports_[b];
                    hessian_[std::max(i, j) * n + std::min(i, j)] += curvature;
                }
            }
        }
    }

    // Solves hessian * move = move for the ports that are not fixed, by an LDL decomposition in place. A port whose
    // row depends on earlier rows does not move: its price is not unique.
    void solve_moves(size_t n) {
        for (size_t i = 0; i < n; ++i) {
            double *row = &hessian_[i * n], pivot = row[i], right = move_[i];
            if (is_fixed_[i]) {
                std::fill(row, row + i, 0);
                move_[i] = 0;
                continue;
            }
            for (size_t j = 0; j < i; ++j) {
                if (is_fixed_[j]) {
                    row[j] = 0;
                    continue;
                }
                double sum = row[j];
                const double *above = &hessian_[j * n];
                for (size_t k = 0; k < j; ++k)
                    sum -= row[k] * above[k];
                row[j] = sum;
            }
            for (size_t j = 0; j < i; ++j) {
                if (is_fixed_[j])
                    continue;
                const double scaled = row[j] / hessian_[j * n + j];
                pivot -= scaled * row[j];
                right -= scaled * move_[j];
                row[j] = scaled;
            }
            is_fixed_[i] = pivot <= SINGULAR * row[i];
            if (is_fixed_[i])
                std::fill(row, row + i, 0);
            row[i] = pivot;
            move_[i] = is_fixed_[i] ? 0 : right;
        }
        for (size_t i = n; i-- > 0;) {
            if (is_fixed_[i])
                continue;
            move_[i] /= hessian_[i * n + i];
        }
        for (size_t i = n; i-- > 0;)
            for (size_t j = 0; j < i; ++j)
                move_[j] -= hessian_[i * n + j] * move_[i];
    }

    // Moves the prices, but reduces the cost of no flow below a tenth. False if the cost of a flow would be 0.
    bool move_prices(size_t n) {
        double part = 1;
        for (const Bundle &bundle : bundles_) {
            double change = 0;
            for (size_t at = bundle.first; at < bundle.last; ++at)
                change += move_[bundle_ports_[at]];
            if (change < -LARGEST_CUT * bundle.cost)
                part = std::min(part, -LARGEST_CUT * bundle.cost / change);
        }
        for (size_t i = 0; i < n; ++i)
            prices_[i] = std::max(prices_[i] + part * move_[i], 0.0);
        for (Bundle &bundle : bundles_) {
            bundle.cost = 0;
            for (size_t at = bundle.first; at < bundle.last; ++at)
                bundle.cost += prices_[bundle_ports_[at]];
            if (bundle.cost <= 0)
                return false;
        }
        return true;
    }
};
