// The chunk scheduler for topologies with pods, where several pairs of ports compete for the uplinks of pods.
//
// A resource (port direction or uplink) is worth more the closer its remaining time is to the longest one: 1 for the
// longest, and steeply less for others. The weight of a possible send is the sum over its resources. A port takes one
// send at a time, an uplink as many as its rate allows. A set of sends is chosen greedily, heaviest first, and improved
// by exchanges: take one more send, drop those that block it, and add others that then fit, as long as the weight
// grows. A chunk enters a pod over its uplink once. Uplinks with time to spare may also bring chunks that the pod
// already has (help_pods).
//
// Python reference: tests/reference/pod_chunk_scheduler.py.

#pragma once

#include "chunk_scheduler.h"

constexpr int PASSES = 8;        // limit on rounds of exchanges
constexpr double GAIN = 1e-9;    // tolerance of rates, and least gain of an exchange

class PodChunkScheduler final : public ChunkScheduler {
  public:
    PodChunkScheduler(const Ports &ports, const Workload &workload)
        : ChunkScheduler(ports, workload) {
        first_uplink_ = up_.front().number;
        by_.resize(down_.back().number + 1), around_.resize(by_.size()), worth_.resize(by_.size());
    }

  protected:
    bool pair(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) override {
        find_worth(senders, receivers);
        choices_.clear();
        for (const int64_t r : receivers)
            for (const int64_t s : senders)
                if (can_start(s, r)) {
                    Choice choice{s, r, rate(s, r)};
                    each_resource(s, r, [&](const Resource &resource) {
                        choice.passes[choice.num_passed++] = resource.number;
                        choice.weight += worth_[resource.number];
                    });
                    choices_.push_back(choice);
                }
        std::stable_sort(choices_.begin(), choices_.end(), [](const Choice &a, const Choice &b) {
            return a.weight != b.weight ? a.weight > b.weight : a.r != b.r ? a.r < b.r : a.s < b.s;
        });
        choose();
        bool started = false;
        for (const Choice &choice : choices_)
            if (choice.is_chosen)
                started |= start(choice.s, choice.r);
        return help_pods(senders, receivers) || started;
    }

  private:
    // A send that could start. passes: the numbers of its resources, sender's port first.
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
    std::vector<Row> by_, around_; // by resource: the chosen sends that pass it; all choices that begin or end there
    Row gone_, added_, others_;

    Resource &uplink(int64_t number) {
        const int64_t i = number - first_uplink_, n = static_cast<int64_t>(up_.size());
        return i < n ? up_[i] : down_[i - n];
    }

    void add(int i) {
        choices_[i].is_chosen = true;
        for (int j = 0; j < choices_[i].num_passed; ++j)
            by_[choices_[i].passes[j]].push_back(i);
    }

    void remove(int i) {
        choices_[i].is_chosen = false;
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            Row &row = by_[choices_[i].passes[j]];
            row.erase(std::find(row.begin(), row.end(), i));
        }
    }

    // Finds the chosen sends that must go so that choice i fits: on an uplink, the lightest ones first.
    void in_the_way(int i, Row &found) {
        found.clear();
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            const int64_t number = choices_[i].passes[j];
            others_.clear();
            for (const int other : by_[number])
                if (std::find(found.begin(), found.end(), other) == found.end())
                    others_.push_back(other);
            if (number < first_uplink_) {
                found.insert(found.end(), others_.begin(), others_.end());
                continue;
            }
            double taken = 0;
            for (const int other : others_)
                taken += choices_[other].rate;
            double left = uplink(number).free * (1 + GAIN) - choices_[i].rate - taken;
            std::stable_sort(others_.begin(), others_.end(),
                             [&](int a, int b) { return choices_[a].weight < choices_[b].weight; });
            for (size_t k = 0; left < 0 && k < others_.size(); ++k) {
                left += choices_[others_[k]].rate;
                found.push_back(others_[k]);
            }
        }
    }

    void choose() {
        for (Row &row : by_)
            row.clear();
        for (Row &row : around_)
            row.clear();
        const int count = static_cast<int>(choices_.size());
        for (int i = 0; i < count; ++i) {
            in_the_way(i, gone_);
            if (gone_.empty())
                add(i);
            around_[choices_[i].first()].push_back(i), around_[choices_[i].last()].push_back(i);
        }
        for (int pass = 0; pass < PASSES; ++pass) {
            bool is_better = false;
            for (int i = 0; i < count; ++i)
                is_better |= exchange(i);
            if (!is_better)
                break;
        }
    }

    // Takes choice i in place of the sends that block it, and others that then fit; undoes it unless weight is gained.
    bool exchange(int i) {
        if (choices_[i].is_chosen)
            return false;
        Row gone, blocking;
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
            for (const int64_t number : {choices_[other].first(), choices_[other].last()})
                for (const int more : around_[number]) {
                    if (choices_[more].is_chosen)
                        continue;
                    in_the_way(more, blocking);
                    if (blocking.empty()) {
                        add(more);
                        added_.push_back(more);
                        gain += choices_[more].weight;
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

    // Sets the worth of keeping each resource busy, from its remaining time.
    void find_worth(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        std::vector<std::pair<int64_t, double>> left;
        for (const int64_t r : receivers)
            left.emplace_back(into_[r].number, to_get_[r]);
        for (const int64_t s : senders)
            left.emplace_back(out_[s].number, to_give_[s]);
        for (size_t q = 0; q < up_.size(); ++q) {
            left.emplace_back(down_[q].number, static_cast<double>(chunk_state_.to_enter(q)) / UNITS / down_[q].rate);
            left.emplace_back(up_[q].number, static_cast<double>(chunk_state_.to_leave(q)) / UNITS / up_[q].rate);
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
            const int64_t q = ports_.pod[ports_.host[r]];
            if (static_cast<double>(chunk_state_.to_enter(q)) / UNITS / down_[q].rate + 1 > to_get_[r])
                continue;
            for (const int64_t s : senders)
                if (ports_.pod[ports_.host[s]] != q && rate(s, r) > 0 && start(s, r, true)) {
                    started = true;
                    break;
                }
        }
        return started;
    }
};
