// The chunk scheduler for topologies with pods, where several pairs of ports compete for the uplinks of pods.
//
// A port is one direction of a NIC or of an uplink. Its worth is 1 if its remaining time is the longest of all, and
// steeply less if it is shorter. The weight of a possible send is the sum of the worths of its ports. A port of a NIC
// takes one send at a time, one of an uplink as many as its rate allows. A set of sends is chosen greedily, heaviest
// first. Exchanges then improve the set as long as its weight grows: an exchange adds one send, drops the sends that
// block it, and adds other sends that then fit. A chunk enters a pod over its uplink once. Uplinks with time to spare
// may also bring chunks that the pod already has (help_pods).
//
// Reference implementation: tests/reference/pod_chunk_scheduler.py.

#pragma once

#include "chunk_scheduler.h"

constexpr int PASSES = 8;        // limit on rounds of exchanges
constexpr double GAIN = 1e-9;    // tolerance of rates, and least gain of an exchange

class PodChunkScheduler final : public ChunkScheduler {
  public:
    PodChunkScheduler(const Nics &nics, const ChunkWorkload &workload)
        : ChunkScheduler(nics, workload) {
        first_uplink_ = up_.front().number;
        by_.resize(down_.back().number + 1), worth_.resize(by_.size()), is_busy_.resize(by_.size());
        place_.resize(by_.size()), taken_.resize(by_.size()), heaviest_.resize(by_.size());
    }

  protected:
    bool pair(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) override {
        find_worth(senders, receivers);
        choices_.clear();
        for (const int64_t r : receivers)
            for (const int64_t s : senders)
                if (can_start(s, r)) {
                    Choice choice{s, r, rate(s, r)};
                    each_port(s, r, [&](const Port &port) {
                        choice.passes[choice.num_passed++] = port.number;
                        choice.weight += worth_[port.number];
                    });
                    choices_.push_back(choice);
                }
        std::stable_sort(choices_.begin(), choices_.end(), [](const Choice &a, const Choice &b) {
            return a.weight != b.weight ? a.weight > b.weight : a.r != b.r ? a.r < b.r : a.s < b.s;
        });
        number_pairs(senders, receivers);
        choose();
        bool started = false;
        for (const Choice &choice : choices_)
            if (choice.is_chosen)
                started |= start(choice.s, choice.r);
        return help_pods(senders, receivers) || started;
    }

  private:
    // A send that could start. passes: the numbers of its ports, sender's port first.
    struct Choice {
        int64_t s, r;
        double rate;
        int64_t passes[4] = {};
        int num_passed = 0;
        double weight = 0;
        bool is_chosen = false;
        int64_t first() const { return passes[0]; }
        int64_t last() const { return passes[num_passed - 1]; }
    };
    using Row = std::vector<int>; // indices of choices

    int64_t first_uplink_;
    std::vector<double> worth_;
    std::vector<Choice> choices_;
    std::vector<Row> by_;       // by port: the chosen sends that pass it
    std::vector<double> taken_; // by uplink: see taken(), -1 where it is not known
    std::vector<double> heaviest_; // by port: the weight of its heaviest choice
    size_t num_chosen_ = 0;
    std::vector<char> is_busy_; // by port: whether a chosen send begins or ends there
    std::vector<int64_t> from_, to_, place_; // ports of senders, ports of receivers; place of each port in its list
    Row index_; // by pair of sender and receiver: its choice, or -1
    Row gone_, added_, others_, free_; // scratch

    Port &uplink(int64_t number) {
        const int64_t i = number - first_uplink_, n = static_cast<int64_t>(up_.size());
        return i < n ? up_[i] : down_[i - n];
    }

    // Lists the ports, and the choice of each pair.
    void number_pairs(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        const auto list = [&](std::vector<int64_t> &ports, const std::vector<Port> &ends, const auto &which) {
            ports.clear();
            for (const int64_t port : which) {
                place_[ends[port].number] = static_cast<int64_t>(ports.size());
                ports.push_back(ends[port].number);
            }
        };
        list(from_, out_, senders), list(to_, into_, receivers);
        index_.assign(from_.size() * to_.size(), -1);
        for (size_t i = 0; i < choices_.size(); ++i)
            index_[place_[choices_[i].first()] * to_.size() + place_[choices_[i].last()]] = static_cast<int>(i);
    }

    // The choices that begin or end at a port and whose other port is free, heaviest first.
    void find_free(int64_t number, Row &found) const {
        found.clear();
        const bool sends = number < static_cast<int64_t>(out_.size());
        const std::vector<int64_t> &others = sends ? to_ : from_;
        for (size_t i = 0; i < others.size(); ++i)
            if (!is_busy_[others[i]])
                if (const int choice = index_[sends ? place_[number] * to_.size() + i : i * to_.size() + place_[number]];
                    choice >= 0)
                    found.push_back(choice);
        std::sort(found.begin(), found.end());
    }

    void add(int i) {
        choices_[i].is_chosen = true, ++num_chosen_;
        is_busy_[choices_[i].first()] = is_busy_[choices_[i].last()] = true;
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            by_[choices_[i].passes[j]].push_back(i);
            taken_[choices_[i].passes[j]] = -1;
        }
    }

    void remove(int i) {
        choices_[i].is_chosen = false, --num_chosen_;
        is_busy_[choices_[i].first()] = is_busy_[choices_[i].last()] = false; // a port takes one send at a time
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            Row &row = by_[choices_[i].passes[j]];
            row.erase(std::find(row.begin(), row.end(), i));
            taken_[choices_[i].passes[j]] = -1;
        }
    }

    // Finds the chosen sends that must be dropped so that choice i fits: sends at its ports, and on an uplink the
    // lightest sends.
    void in_the_way(int i, Row &found) {
        found.clear();
        const Choice &choice = choices_[i];
        for (const int64_t port : {choice.first(), choice.last()})
            found.insert(found.end(), by_[port].begin(), by_[port].end());
        for (int j = 1; j + 1 < choice.num_passed; ++j) {
            const int64_t number = choice.passes[j];
            others_.clear();
            double taken = 0;
            for (const int other : by_[number])
                if (std::find(found.begin(), found.end(), other) == found.end())
                    others_.push_back(other), taken += choices_[other].rate;
            double left = uplink(number).free * (1 + GAIN) - choice.rate - taken;
            if (left >= 0)
                continue;
            std::stable_sort(others_.begin(), others_.end(),
                             [&](int a, int b) { return choices_[a].weight < choices_[b].weight; });
            for (size_t k = 0; left < 0 && k < others_.size(); ++k) {
                left += choices_[others_[k]].rate;
                found.push_back(others_[k]);
            }
        }
    }

    // The rate that the chosen sends take from an uplink.
    double taken(int64_t number) {
        double &sum = taken_[number];
        if (sum < 0) { // not known
            sum = 0;
            for (const int other : by_[number])
                sum += choices_[other].rate;
        }
        return sum;
    }

    // Whether in_the_way() finds nothing.
    bool fits(int i) {
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            const int64_t number = choices_[i].passes[j];
            if (number < first_uplink_) {
                if (is_busy_[number])
                    return false;
                continue;
            }
            if (!by_[number].empty() && uplink(number).free * (1 + GAIN) - choices_[i].rate - taken(number) < 0)
                return false;
        }
        return true;
    }

    void choose() {
        for (Row &row : by_)
            row.clear();
        is_busy_.assign(is_busy_.size(), false), taken_.assign(taken_.size(), -1);
        num_chosen_ = 0, heaviest_.assign(heaviest_.size(), 0);
        for (const Choice &choice : choices_)
            for (const int64_t port : {choice.first(), choice.last()})
                heaviest_[port] = std::max(heaviest_[port], choice.weight);
        const int count = static_cast<int>(choices_.size());
        for (int i = 0; i < count; ++i)
            if (fits(i))
                add(i);
        for (int pass = 0; pass < PASSES; ++pass) {
            bool is_better = false;
            for (int i = 0; i < count; ++i)
                is_better |= exchange(i);
            if (!is_better)
                break;
        }
    }

    // An upper bound of the gain of exchange(i), infinite where an uplink is in the way. Each choice that it adds
    // begins or ends at a port that a dropped send leaves: at most one for each, and its other port must be free or
    // left too.
    double max_gain(int i) {
        const Choice &choice = choices_[i];
        const int from = chosen_at(choice.first()), to = chosen_at(choice.last()); // the sends that choice i replaces
        for (int j = 1; j + 1 < choice.num_passed; ++j) {
            double rates = taken(choice.passes[j]) + choice.rate;
            for (const int other : {from, to})
                if (other >= 0 && passes(choices_[other], choice.passes[j]))
                    rates -= choices_[other].rate;
            if (rates > uplink(choice.passes[j]).free)
                return std::numeric_limits<double>::infinity();
        }
        double gain = choice.weight, from_left = 0, to_left = 0; // heaviest choices of the ports that are left
        if (to >= 0)
            gain -= choices_[to].weight, from_left = heaviest_[choices_[to].first()];
        if (from >= 0)
            gain -= choices_[from].weight, to_left = heaviest_[choices_[from].last()];
        const bool can_send = from_.size() > num_chosen_ + (from < 0), can_receive = to_.size() > num_chosen_ + (to < 0);
        if (can_send && can_receive)
            return gain + from_left + to_left;
        return gain + (can_send ? to_left : can_receive ? from_left : std::min(from_left, to_left));
    }

    int chosen_at(int64_t port) const { return by_[port].empty() ? -1 : by_[port].front(); }

    static bool passes(const Choice &choice, int64_t number) {
        return std::find(choice.passes, choice.passes + choice.num_passed, number) != choice.passes + choice.num_passed;
    }

    // Takes choice i in place of the sends that block it, and others that then fit; undoes it unless weight is gained.
    bool exchange(int i) {
        if (choices_[i].is_chosen || max_gain(i) < GAIN / 2) // half: the sums are rounded in another order
            return false;
        Row &gone = gone_;
        in_the_way(i, gone);
        double lost = 0;
        for (const int other : gone)
            lost += choices_[other].weight;
        double gain = choices_[i].weight - lost;
        for (const int other : gone)
            remove(other);
        add(i);
        added_.assign(1, i);
        for (const int other : gone)
            for (const int64_t number : {choices_[other].first(), choices_[other].last()}) {
                if (is_busy_[number])
                    continue;
                find_free(number, free_);
                for (const int more : free_) {
                    if (fits(more)) {
                        add(more);
                        added_.push_back(more);
                        gain += choices_[more].weight;
                    }
                }
            }
        if (gain > GAIN)
            return true;
        for (const int more : added_)
            remove(more);
        for (const int other : gone)
            add(other);
        return false;
    }

    // Sets the worth of keeping each port busy, from its remaining time.
    void find_worth(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        std::vector<std::pair<int64_t, double>> left;
        for (const int64_t r : receivers)
            left.emplace_back(into_[r].number, to_get_[r]);
        for (const int64_t s : senders)
            left.emplace_back(out_[s].number, to_give_[s]);
        for (size_t q = 0; q < up_.size(); ++q) {
            left.emplace_back(
                down_[q].number, static_cast<double>(chunk_state_.to_enter(q)) / CHUNK_UNITS / down_[q].rate);
            left.emplace_back(up_[q].number, static_cast<double>(chunk_state_.to_leave(q)) / CHUNK_UNITS / up_[q].rate);
        }
        double most = 0;
        for (const auto &[number, load] : left)
            most = std::max(most, load);
        for (const auto &[number, load] : left) {
            const double near = 1.0 / (1.0 + (most - load));
            worth_[number] = near * near * near + 0.001 * (load / most);
        }
    }

    // Lets idle senders of other pods serve idle receivers whose pod's uplink has time to spare.
    bool help_pods(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        bool started = false;
        for (const int64_t r : receivers) {
            const int64_t q = nics_.pod[nics_.host[r]];
            if (static_cast<double>(chunk_state_.to_enter(q)) / CHUNK_UNITS / down_[q].rate + 1 > to_get_[r])
                continue;
            for (const int64_t s : senders)
                if (nics_.pod[nics_.host[s]] != q && rate(s, r) > 0 && start(s, r, true)) {
                    started = true;
                    break;
                }
        }
        return started;
    }
};
