// Rates of transfers that share links. Reference implementation: scheduler/simulation/channels.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "model.h"

namespace pipeline {

// A transfer that moves. `remaining` falls from 1 to 0; `rate` is relative to its speed without contention.
struct Moving {
    double remaining = -1.0; // negative between transfers
    double rate = 0.0;

    bool is_active() const { return remaining >= 0.0; }
};

// Max-min fair rates of the channels that move, by the links that they share. The rates of each set are kept.
class LinkRates {
  public:
    explicit LinkRates(const Model &model) : model_(model) {}

    void set(const std::vector<int64_t> &active, std::vector<Moving> &moving) {
        if (!model_.shares_links) {
            for (const int64_t channel : active)
                moving[channel].rate = 1.0;
            return;
        }
        auto found = known_.find(active);
        if (found == known_.end())
            found = known_.emplace(active, find(active)).first;
        for (size_t i = 0; i < active.size(); ++i)
            moving[active[i]].rate = found->second[i];
    }

  private:
    std::vector<double> find(const std::vector<int64_t> &active) const {
        const size_t count = active.size();
        bool any = false;
        for (const int64_t channel : active)
            any = any || !model_.channels[channel].links.empty();
        if (!any)
            return std::vector<double>(count, 1.0);
        std::vector<int64_t> links; // in order of first use
        for (const int64_t channel : active)
            for (const int64_t link : model_.channels[channel].links)
                if (std::find(links.begin(), links.end(), link) == links.end())
                    links.push_back(link);
        std::vector<double> capacity(model_.num_links, 1.0), rate(count, 0.0);
        std::vector<char> frozen(count, 0), full(model_.num_links, 0);
        size_t left = count;
        while (left) {
            double fastest = 0.0;
            for (size_t i = 0; i < count; ++i)
                if (!frozen[i])
                    fastest = std::max(fastest, rate[i]);
            double increase = 1.0 - fastest;
            for (const int64_t link : links) {
                double total = 0.0;
                for (size_t i = 0; i < count; ++i)
                    if (!frozen[i])
                        total += share(active[i], link);
                if (total != 0.0)
                    increase = std::min(increase, capacity[link] / total);
            }
            for (size_t i = 0; i < count; ++i) {
                if (frozen[i])
                    continue;
                rate[i] += increase;
                const Channel &channel = model_.channels[active[i]];
                for (size_t k = 0; k < channel.links.size(); ++k)
                    capacity[channel.links[k]] -= channel.shares[k] * increase;
            }
            for (const int64_t link : links)
                full[link] = capacity[link] <= TOLERANCE;
            left = 0;
            for (size_t i = 0; i < count; ++i) {
                if (frozen[i])
                    continue;
                bool stops = !(rate[i] < 1 - TOLERANCE);
                for (const int64_t link : model_.channels[active[i]].links)
                    stops = stops || full[link];
                frozen[i] = stops;
                left += !stops;
            }
        }
        return rate;
    }

    double share(int64_t channel, int64_t link) const {
        const Channel &item = model_.channels[channel];
        for (size_t k = 0; k < item.links.size(); ++k)
            if (item.links[k] == link)
                return item.shares[k];
        return 0.0;
    }

    const Model &model_;
    std::map<std::vector<int64_t>, std::vector<double>> known_;
};

// The transfers that move now: channels in ascending order.
class Movement {
  public:
    explicit Movement(const Model &model) : moving(model.channels.size()), model_(model), rates_(model) {}

    std::vector<Moving> moving;

    bool is_active(int64_t channel) const { return moving[channel].is_active(); }

    void begin(int64_t channel) {
        moving[channel].remaining = 1.0, moving[channel].rate = 0.0;
        active_.insert(std::lower_bound(active_.begin(), active_.end(), channel), channel);
    }

    void end(int64_t channel) {
        moving[channel].remaining = -1.0;
        active_.erase(std::lower_bound(active_.begin(), active_.end(), channel));
    }

    // Sets the rates, and returns the time until the first transfer ends.
    double seconds_to_next() {
        rates_.set(active_, moving);
        double seconds = INFINITE;
        for (const int64_t channel : active_)
            seconds = std::min(seconds, seconds_remaining(channel));
        return seconds;
    }

    double seconds_remaining(int64_t channel) const {
        const Moving &item = moving[channel];
        return item.is_active() && item.rate != 0.0 ? item.remaining * model_.channels[channel].seconds / item.rate
                                                    : INFINITE;
    }

    // Moves all transfers, and returns the channels whose transfer is complete. They stay active until `end`.
    const std::vector<int64_t> &advance(double step) {
        complete_.clear();
        for (const int64_t channel : active_) {
            Moving &item = moving[channel];
            item.remaining -= step * item.rate / model_.channels[channel].seconds;
            if (item.remaining <= TOLERANCE)
                complete_.push_back(channel), item.remaining = 0.0;
        }
        return complete_;
    }

  private:
    const Model &model_;
    LinkRates rates_;
    std::vector<int64_t> active_, complete_;
};

} // namespace pipeline
