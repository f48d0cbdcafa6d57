// The end of each stage in an order of computations, with transfers at the places that reshard.scheduler gives them.
// Reference implementation: simulate_schedule(add_transfers(...)), in scheduler/simulation/replay.py and
// scheduler/ir/communication.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "link_rates.h"
#include "model.h"

namespace pipeline {

// One action of a pp rank: a computation, or one end of a transfer of a channel, for a microbatch.
struct Action {
    int64_t computation; // its code, -1 for a transfer
    int64_t channel, microbatch;
    bool is_send;
};

using Actions = std::vector<std::vector<Action>>;

// The computations in the order in which they end, if transfers use a shared link one after another. It has fewer
// entries if the pp ranks deadlock.
inline std::vector<int64_t> sort_by_end(const Model &model, const RankOrders &order) {
    const int64_t num_pp_ranks = model.num_pp_ranks, num_channels = static_cast<int64_t>(model.channels.size());
    std::vector<size_t> at(num_pp_ranks, 0);
    std::vector<double> free(num_pp_ranks, 0.0), channel_free(num_channels, 0.0), link_free(model.num_links, 0.0);
    std::vector<double> arrived(num_channels * model.num_microbatches, -1.0);
    std::vector<int64_t> waiting(num_channels * model.num_microbatches, -1), sorted;
    using End = std::pair<double, int64_t>;
    std::priority_queue<End, std::vector<End>, std::greater<End>> running;
    const auto start = [&](int64_t pp_rank) {
        if (at[pp_rank] == order[pp_rank].size())
            return;
        const Computation item = model.computation(order[pp_rank][at[pp_rank]]);
        double begin = free[pp_rank];
        if (item.kind != W)
            for (const int64_t channel : model.receives_of(item)) {
                const int64_t needed = channel * model.num_microbatches + item.microbatch;
                if (arrived[needed] < 0.0) {
                    waiting[needed] = pp_rank;
                    return;
                }
                begin = std::max(begin, arrived[needed]);
            }
        running.emplace(begin + model.stages[item.stage].seconds[item.kind], pp_rank);
    };
    for (int64_t pp_rank = 0; pp_rank < num_pp_ranks; ++pp_rank)
        start(pp_rank);
    std::vector<int64_t> woken;
    while (!running.empty()) {
        const auto [end, pp_rank] = running.top();
        running.pop();
        const int64_t code = order[pp_rank][at[pp_rank]];
        const Computation item = model.computation(code);
        sorted.push_back(code);
        ++at[pp_rank], free[pp_rank] = end;
        woken.assign(1, pp_rank);
        if (item.kind != W)
            for (const int64_t index : model.sends_of(item)) {
                const Channel &channel = model.channels[index];
                double arrival = end;
                if (channel.crosses_pp_ranks) {
                    double begin = std::max(end, channel_free[index]);
                    for (const int64_t link : channel.all_links)
                        begin = std::max(begin, link_free[link]);
                    for (size_t k = 0; k < channel.all_links.size(); ++k)
                        link_free[channel.all_links[k]] = begin + channel.all_busy[k];
                    arrival = channel_free[index] = begin + channel.seconds;
                }
                const int64_t needed = index * model.num_microbatches + item.microbatch;
                arrived[needed] = arrival;
                if (waiting[needed] >= 0)
                    woken.push_back(waiting[needed]), waiting[needed] = -1;
            }
        std::sort(woken.begin(), woken.end());
        woken.erase(std::unique(woken.begin(), woken.end()), woken.end());
        for (const int64_t other : woken)
            start(other);
    }
    return sorted;
}

// The actions of each pp rank: a send right after its producer, and a receive as early as the common order of transfers
// and the limit of receives ahead allow. Empty if the pp ranks deadlock.
inline Actions add_transfers(const Model &model, const RankOrders &order, size_t recvs_ahead) {
    const std::vector<int64_t> sorted = sort_by_end(model, order);
    const int64_t num_microbatches = model.num_microbatches;
    size_t total = 0;
    std::vector<int64_t> place_of(model.num_stages() * num_microbatches * 2, -1); // of forwards and backwards
    for (const auto &codes : order) {
        total += codes.size();
        for (size_t i = 0; i < codes.size(); ++i) {
            const Computation item = model.computation(codes[i]);
            if (item.kind != W)
                place_of[(item.stage * num_microbatches + item.microbatch) * 2 + (item.kind == F)] = static_cast<int64_t>(i);
        }
    }
    if (sorted.size() != total)
        return {};
    Actions posts(model.num_pp_ranks);
    for (const int64_t code : sorted) {
        const Computation item = model.computation(code);
        if (item.kind == W)
            continue;
        for (const int64_t index : model.sends_of(item)) {
            const Channel &channel = model.channels[index];
            if (!channel.crosses_pp_ranks)
                continue;
            posts[model.stages[channel.sender].pp_rank].push_back({-1, index, item.microbatch, true});
            posts[model.stages[channel.receiver].pp_rank].push_back({-1, index, item.microbatch, false});
        }
    }
    Actions actions(model.num_pp_ranks);
    std::vector<std::vector<int64_t>> latest_of(model.channels.size());
    std::vector<int64_t> latest;
    for (int64_t pp_rank = 0; pp_rank < model.num_pp_ranks; ++pp_rank) {
        const auto &own = posts[pp_rank];
        latest.resize(own.size());
        for (size_t i = 0; i < own.size(); ++i) {
            const Channel &channel = model.channels[own[i].channel];
            const bool is_forward = own[i].channel % 2 == 0;
            const int64_t stage = own[i].is_send ? channel.sender : channel.receiver;
            const int64_t place = place_of[(stage * num_microbatches + own[i].microbatch) * 2 + is_forward];
            latest[i] = own[i].is_send ? place + 1 : place;
        }
        for (size_t i = own.size(); i-- > 1;)
            latest[i - 1] = std::min(latest[i - 1], latest[i]);
        auto &out = actions[pp_rank];
        out.reserve(own.size() + order[pp_rank].size());
        int64_t num_out = 0;
        const auto compute_until = [&](int64_t place) {
            for (; num_out < place; ++num_out)
                out.push_back({order[pp_rank][num_out], -1, 0, false});
        };
        for (size_t i = 0; i < own.size(); ++i) {
            int64_t place = latest[i];
            if (!own[i].is_send) {
                auto &places = latest_of[own[i].channel];
                places.push_back(place);
                place = places.size() > recvs_ahead ? places[places.size() - 1 - recvs_ahead] : 0;
            }
            compute_until(place);
            out.push_back(own[i]);
        }
        compute_until(static_cast<int64_t>(order[pp_rank].size()));
    }
    return actions;
}

// Runs the actions of all pp ranks.
class Replay {
  public:
    Replay(const Model &model, const Actions &actions)
        : model_(model), actions_(actions), movement_(model), at_(model.num_pp_ranks, 0),
          until_(model.num_pp_ranks, INFINITE),
          is_done_(model.num_stages() * model.num_microbatches * 2, 0),
          arrived_(model.channels.size() * model.num_microbatches, 0), sent_(model.channels.size()),
          num_received_(model.channels.size(), 0), num_moved_(model.channels.size(), 0), to_try_(model.num_pp_ranks, 1),
          ends_(model.num_stages(), 0.0) {}

    // The end of the last computation of each stage; empty if the pp ranks deadlock.
    std::vector<double> run() {
        while (true) {
            start_all();
            double step = movement_.seconds_to_next();
            for (const double end : until_)
                if (end != INFINITE)
                    step = std::min(step, end - now_);
            if (step == INFINITE)
                break;
            now_ += step;
            for (const int64_t channel : movement_.advance(step)) {
                movement_.end(channel);
                end_transfer(channel);
            }
            const double done = now_ * (1 + TOLERANCE);
            for (int64_t pp_rank = 0; pp_rank < model_.num_pp_ranks; ++pp_rank)
                if (until_[pp_rank] <= done)
                    finish(pp_rank);
        }
        for (int64_t pp_rank = 0; pp_rank < model_.num_pp_ranks; ++pp_rank)
            if (at_[pp_rank] < actions_[pp_rank].size())
                return {};
        return ends_;
    }

  private:
    void start_all() {
        while (!none_to_try() || !channels_.empty()) {
            for (int64_t pp_rank = 0; pp_rank < model_.num_pp_ranks; ++pp_rank) {
                if (!to_try_[pp_rank])
                    continue;
                to_try_[pp_rank] = 0;
                while (until_[pp_rank] == INFINITE && at_[pp_rank] < actions_[pp_rank].size() && advance(pp_rank))
                    ;
            }
            trying_.swap(channels_);
            channels_.clear();
            for (const int64_t channel : trying_)
                start_next(channel);
        }
    }

    bool none_to_try() const { return std::none_of(to_try_.begin(), to_try_.end(), [](char item) { return item; }); }

    void start_next(int64_t channel) {
        while (!movement_.is_active(channel) &&
               num_moved_[channel] < std::min<int64_t>(static_cast<int64_t>(sent_[channel].size()), num_received_[channel])) {
            if (model_.channels[channel].seconds == 0.0)
                end_transfer(channel);
            else
                movement_.begin(channel);
        }
    }

    void end_transfer(int64_t channel) {
        arrived_[channel * model_.num_microbatches + sent_[channel][num_moved_[channel]++]] = 1;
        channels_.push_back(channel);
        to_try_[model_.stages[model_.channels[channel].receiver].pp_rank] = 1;
    }

    bool advance(int64_t pp_rank) {
        const Action &action = actions_[pp_rank][at_[pp_rank]];
        if (action.computation < 0) {
            if (action.is_send)
                sent_[action.channel].push_back(action.microbatch);
            else
                ++num_received_[action.channel];
            channels_.push_back(action.channel);
            ++at_[pp_rank];
            return true;
        }
        const Computation item = model_.computation(action.computation);
        if (!is_ready(item))
            return false;
        until_[pp_rank] = now_ + model_.stages[item.stage].seconds[item.kind];
        ends_[item.stage] = until_[pp_rank];
        return true;
    }

    char &done(int64_t stage, int64_t microbatch, bool is_forward) {
        return is_done_[(stage * model_.num_microbatches + microbatch) * 2 + is_forward];
    }

    bool is_ready(const Computation &item) {
        if (item.kind == W)
            return done(item.stage, item.microbatch, false);
        if (item.kind != F && !done(item.stage, item.microbatch, true))
            return false;
        for (const int64_t index : model_.receives_of(item)) {
            const Channel &channel = model_.channels[index];
            if (channel.crosses_pp_ranks ? !arrived_[index * model_.num_microbatches + item.microbatch]
                                     : !done(channel.sender, item.microbatch, item.kind == F))
                return false;
        }
        return true;
    }

    void finish(int64_t pp_rank) {
        const Computation item = model_.computation(actions_[pp_rank][at_[pp_rank]].computation);
        if (item.kind != W)
            done(item.stage, item.microbatch, item.kind == F) = 1;
        until_[pp_rank] = INFINITE;
        ++at_[pp_rank];
        to_try_[pp_rank] = 1;
    }

    const Model &model_;
    const Actions &actions_;
    Movement movement_;
    std::vector<size_t> at_;       // current action of each pp rank
    std::vector<double> until_;    // end of its computation, infinite if there is none
    std::vector<char> is_done_;    // by stage, microbatch, and whether it is a forward
    std::vector<char> arrived_;    // by channel and microbatch
    std::vector<std::vector<int64_t>> sent_; // microbatches of the posted sends of each channel
    std::vector<int64_t> num_received_, num_moved_; // posted receives and ended transfers of each channel
    std::vector<char> to_try_;
    std::vector<int64_t> channels_, trying_;
    std::vector<double> ends_;     // of the last computation of each stage so far
    double now_ = 0.0;
};

} // namespace pipeline
