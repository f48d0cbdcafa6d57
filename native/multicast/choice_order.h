// The possible sends of a slot by weight, for topologies with pods.
//
// The weight of a send is the sum of the worths of its ports: NICs, and between pods also uplinks. A sender or a
// receiver is an End. Ends with the same worths form a class, and all sends between two classes have the same weight,
// so only pairs of classes are sorted, not pairs of ends. All NICs of a host have the same worth.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "../types.h"

class ChoiceOrder {
  public:
    // uplink: the worth of the uplink of the pod, in the direction of the sends.
    struct End {
        int64_t host, pod;
        double worth, uplink;
    };

    // Begins with the heaviest sends between some senders and some receivers.
    void start(const std::vector<End> &senders, const std::vector<End> &receivers, int64_t num_hosts) {
        senders_.clear(), receivers_.clear(), groups_.clear();
        for (const End &end : senders)
            for (const Key &key : keys_of(end))
                senders_.try_emplace(key, num_hosts).first->second.set(end.host);
        for (size_t j = 0; j < receivers.size(); ++j)
            for (const Key &key : keys_of(receivers[j]))
                receivers_[key].push_back(j);
        for (const auto &[of_senders, from] : senders_)
            for (const auto &[of_receivers, to] : receivers_) {
                const auto &[pod, out, up] = of_senders;
                const auto &[receiver_pod, into, down] = of_receivers;
                if (pod == receiver_pod)
                    groups_.push_back({pod == ANY ? out + up + down + into : out + into, pod == ANY, &from, &to});
            }
        std::sort(groups_.begin(), groups_.end(), [](const Group &a, const Group &b) { return a.weight > b.weight; });
        restart();
    }

    // Begins again with the heaviest sends.
    void restart() { end_ = 0, rows_.clear(), next_row_ = 0; }

    // Moves on to the next receiver of sends with the same weight, by index, or else to the next lower weight; false
    // after the last one. Leaves out receivers for which skip() is true when their weight begins.
    template <typename F> bool next(F skip) {
        while (next_row_ == rows_.size()) {
            if (end_ == groups_.size())
                return false;
            next_weight(skip);
        }
        row_ = next_row_;
        while (next_row_ < rows_.size() && rows_[next_row_].first == rows_[row_].first)
            ++next_row_;
        return true;
    }

    size_t receiver() const { return rows_[row_].first; }

    // Calls f with the hosts of each class of senders, and whether the sends are those between different pods.
    template <typename F> void each_class(F f) const {
        for (size_t i = row_; i < next_row_; ++i)
            f(*groups_[rows_[i].second].senders, groups_[rows_[i].second].crosses);
    }

  private:
    static constexpr int64_t ANY = -1; // the pod of a class whose sends are those between different pods
    using Key = std::tuple<int64_t, double, double>; // of a class: pod, worth, and worth of the uplink
    struct Group {
        double weight;
        bool crosses;
        const Bits *senders;
        const std::vector<size_t> *receivers;
    };

    std::map<Key, Bits> senders_;                  // hosts
    std::map<Key, std::vector<size_t>> receivers_; // indices, ascending
    std::vector<Group> groups_;                   // heaviest first
    std::vector<std::pair<size_t, size_t>> rows_; // of the current weight: a receiver, and a group that has it
    size_t end_ = 0, row_ = 0, next_row_ = 0;     // end_: of the groups of the current weight

    // Each end is in two classes: for sends inside its pod, and for sends between pods.
    static std::array<Key, 2> keys_of(const End &end) {
        return {Key{end.pod, end.worth, 0}, Key{ANY, end.worth, end.uplink}};
    }

    template <typename F> void next_weight(F skip) {
        rows_.clear(), next_row_ = 0;
        const double weight = groups_[end_].weight;
        for (; end_ < groups_.size() && groups_[end_].weight == weight; ++end_)
            for (const size_t receiver : *groups_[end_].receivers)
                if (!skip(receiver))
                    rows_.emplace_back(receiver, end_);
        std::sort(rows_.begin(), rows_.end());
    }
};
