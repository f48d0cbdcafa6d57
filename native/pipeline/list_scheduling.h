// List scheduling: runs a pipeline forward in time, and lets each idle pp rank start its most urgent computation.
// Reference implementation: tests/reference/list_scheduling.py.

#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "link_rates.h"
#include "model.h"

namespace pipeline {

struct Policy {
    std::vector<int64_t> max_in_flight; // by stage
    std::vector<double> pp_rank_bytes;  // by pp rank
    std::vector<char> splits;           // by stage
    bool forward_first, weights_first;
    double patience;
    int64_t group; // of microbatches; 0: none
};

class ListScheduler {
  public:
    ListScheduler(const Model &model, const Policy &policy)
        : model_(model), policy_(policy), movement_(model), states_(model.num_stages()),
          arrived_(model.channels.size(), 0), sent_(model.channels.size(), 0), used_(model.num_pp_ranks, 0.0),
          running_(model.num_pp_ranks, -1), waits_(model.num_pp_ranks, 0), changed_(model.num_pp_ranks, 1),
          order_(model.num_pp_ranks) {}

    // The computations of each pp rank. Incomplete if the policy deadlocks.
    RankOrders run() {
        while (true) {
            for (int64_t pp_rank = 0; pp_rank < model_.num_pp_ranks; ++pp_rank)
                if (running_[pp_rank] < 0 && (changed_[pp_rank] || waits_[pp_rank])) {
                    changed_[pp_rank] = waits_[pp_rank] = 0;
                    const int64_t chosen = choose(pp_rank);
                    if (chosen >= 0)
                        begin(pp_rank, chosen);
                }
            double step = movement_.seconds_to_next();
            if (!ends_.empty())
                step = std::min(step, ends_.top().first - now_);
            if (step == INFINITE)
                return order_;
            now_ += step;
            for (const int64_t channel : movement_.advance(step)) {
                arrive(channel);
                start_next(channel);
            }
            while (!ends_.empty() && ends_.top().first <= now_ * (1 + TOLERANCE)) {
                const int64_t pp_rank = ends_.top().second;
                ends_.pop();
                end(pp_rank);
            }
        }
    }

  private:
    struct State {
        int64_t forwards = 0, backwards = 0, weights = 0, finished = 0;
    };

    bool has_arrived(const std::vector<int64_t> &channels, int64_t microbatch) const {
        for (const int64_t channel : channels)
            if (arrived_[channel] <= microbatch)
                return false;
        return true;
    }

    // Whether the pp rank may keep one more microbatch of a stage. Each later stage of it must be able to go on.
    // Either it keeps a microbatch, which it will finish, or there is room for one.
    bool has_room(int64_t stage) const {
        const State &at = states_[stage];
        if (at.forwards - at.finished >= policy_.max_in_flight[stage])
            return false;
        const int64_t pp_rank = model_.stages[stage].pp_rank;
        double needed = used_[pp_rank] + model_.stages[stage].bytes;
        for (const int64_t later : model_.stages_of_pp_rank[pp_rank])
            if (later > stage && states_[later].forwards == states_[later].finished &&
                states_[later].forwards < model_.num_microbatches)
                needed += model_.stages[later].bytes;
        return needed <= policy_.pp_rank_bytes[pp_rank];
    }

    // Whether one computation of the same kind is more urgent than another.
    bool is_before(const Computation &a, const Computation &b) const {
        if (policy_.group == 0)
            return a.microbatch != b.microbatch ? a.microbatch < b.microbatch : a.stage > b.stage;
        const int64_t group_a = a.microbatch / policy_.group, group_b = b.microbatch / policy_.group;
        if (group_a != group_b)
            return group_a < group_b;
        if (a.stage != b.stage)
            return a.kind == F ? a.stage < b.stage : a.stage > b.stage;
        return a.microbatch < b.microbatch;
    }

    int64_t choose(int64_t pp_rank) {
        Computation best[3]; // forward, backward, weight gradient
        bool ready[3] = {false, false, false};
        const auto offer = [&](int place, const Computation &item) {
            if (!ready[place] || is_before(item, best[place]))
                best[place] = item, ready[place] = true;
        };
        for (const int64_t stage : model_.stages_of_pp_rank[pp_rank]) {
            const State &at = states_[stage];
            const Stage &costs = model_.stages[stage];
            if (at.backwards < at.forwards && has_arrived(costs.backward_in, at.backwards))
                offer(1, {policy_.splits[stage] ? I : B, stage, at.backwards});
            if (at.forwards < model_.num_microbatches && has_room(stage) && has_arrived(costs.forward_in, at.forwards))
                offer(0, {F, stage, at.forwards});
            if (policy_.splits[stage] && at.weights < at.backwards)
                offer(2, {W, stage, at.weights});
        }
        const int first = policy_.forward_first ? 0 : 1, second = 1 - first;
        const int places[3] = {first, policy_.weights_first ? 2 : second, policy_.weights_first ? second : 2};
        for (const int place : places)
            if (ready[place]) {
                if (place == 2 && should_wait(pp_rank, best[2].stage)) {
                    waits_[pp_rank] = 1;
                    return -1;
                }
                return model_.code(best[place].kind, best[place].stage, best[place].microbatch);
            }
        return -1;
    }

    // Whether an input of a more urgent computation arrives soon.
    bool should_wait(int64_t pp_rank, int64_t weights_of) const {
        const double limit = policy_.patience * model_.stages[weights_of].seconds[W];
        if (limit == 0.0)
            return false;
        for (const int64_t stage : model_.stages_of_pp_rank[pp_rank]) {
            const State &at = states_[stage];
            for (const int64_t channel : model_.stages[stage].forward_in)
                if (movement_.seconds_remaining(channel) < limit && arrived_[channel] == at.forwards && has_room(stage))
                    return true;
            for (const int64_t channel : model_.stages[stage].backward_in)
                if (movement_.seconds_remaining(channel) < limit && arrived_[channel] == at.backwards)
                    return true;
        }
        return false;
    }

    void begin(int64_t pp_rank, int64_t code) {
        const Computation item = model_.computation(code);
        State &at = states_[item.stage];
        if (item.kind == F)
            ++at.forwards, used_[pp_rank] += model_.stages[item.stage].bytes;
        else if (item.kind == W)
            ++at.weights;
        else
            ++at.backwards;
        order_[pp_rank].push_back(code);
        running_[pp_rank] = code;
        ends_.emplace(now_ + model_.stages[item.stage].seconds[item.kind], pp_rank);
    }

    void end(int64_t pp_rank) {
        const Computation item = model_.computation(running_[pp_rank]);
        running_[pp_rank] = -1;
        changed_[pp_rank] = 1;
        if (item.kind == B || item.kind == W)
            ++states_[item.stage].finished, used_[pp_rank] -= model_.stages[item.stage].bytes;
        if (item.kind == W)
            return;
        for (const int64_t channel : model_.sends_of(item)) {
            if (!model_.channels[channel].crosses_pp_ranks) {
                ++arrived_[channel];
                continue;
            }
            ++sent_[channel];
            start_next(channel);
        }
    }

    void arrive(int64_t channel) {
        movement_.end(channel);
        deliver(channel);
    }

    void deliver(int64_t channel) {
        ++arrived_[channel];
        changed_[model_.stages[model_.channels[channel].receiver].pp_rank] = 1;
    }

    void start_next(int64_t channel) {
        while (!movement_.is_active(channel) && arrived_[channel] < sent_[channel]) {
            if (model_.channels[channel].seconds == 0.0)
                deliver(channel);
            else
                movement_.begin(channel);
        }
    }

    using End = std::pair<double, int64_t>; // of a computation, and its pp rank

    const Model &model_;
    const Policy &policy_;
    Movement movement_;
    std::vector<State> states_;
    std::vector<int64_t> arrived_, sent_; // microbatches, by channel
    std::vector<double> used_;            // bytes, by pp rank
    std::vector<int64_t> running_;        // computation of each pp rank, -1 if idle
    std::vector<char> waits_, changed_;   // whether a pp rank waits for an input that arrives soon; whether to choose
    RankOrders order_;
    std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;
    double now_ = 0.0;
};

} // namespace pipeline
