// One total order of all messages that fits the start times at senders and the end times at receivers.
//
// Each rank starts its messages in the plan's order, and completes its receives in that order. So the messages of each
// sender between hosts are chained by start time, and the messages of each receiver by end time. Two more rules limit
// staging: a sender stages a chunk at most STAGED_BEFORE messages before it passes the chunk on, and a receiver that
// only stages a chunk has passed it on within STAGED_AFTER further receives. A topological sort, smallest end time
// first, gives the order. If chains conflict (a cycle), the next message is the one that ends first among those whose
// `after` is done.
//
// Python reference: tests/reference/linearization.py.

#pragma once

#include <map>
#include <queue>
#include <tuple>

#include "rank_assignment.h"

constexpr size_t STAGED_BEFORE = 2; // messages of a sender between staging a chunk and passing it on
constexpr size_t STAGED_AFTER = 4; // receives after a staged chunk by which it must have been passed on

class Linearization {
  public:
    std::vector<int64_t> order;

    explicit Linearization(const Messages &messages)
        : m_(messages), later_(messages.piece.size()), num_before_(messages.piece.size()),
          is_done_(messages.piece.size()) {
        const int64_t count = static_cast<int64_t>(messages.piece.size());
        std::vector<int64_t> everything(count), crossing;
        for (int64_t i = 0; i < count; ++i) {
            everything[i] = i;
            if (m_.crosses[i])
                crossing.push_back(i);
        }
        std::vector<char> waiting = m_.staged;
        for (const auto &[rank, row] : chain(crossing, m_.sender, [&](int64_t a, int64_t b) { return m_.start[a] < m_.start[b]; }))
            for (size_t k = 0; k < row.size(); ++k) {
                const int64_t source = m_.source[row[k]];
                if (source >= 0 && waiting[source] && !m_.crosses[source]) {
                    waiting[source] = 0;
                    if (k >= STAGED_BEFORE)
                        put(row[k - STAGED_BEFORE], source);
                }
            }
        std::map<int64_t, std::vector<int64_t>> uses;
        for (int64_t i = 0; i < count; ++i)
            if (m_.source[i] >= 0 && m_.staged[m_.source[i]] && m_.crosses[m_.source[i]] && !m_.crosses[i])
                uses[m_.source[i]].push_back(i);
        for (const auto &[rank, row] : chain(everything, m_.receiver, [&](int64_t a, int64_t b) { return m_.ends_before(a, b); }))
            for (size_t k = STAGED_AFTER; k < row.size(); ++k)
                if (const auto found = uses.find(row[k - STAGED_AFTER]); found != uses.end())
                    for (const int64_t use : found->second)
                        put(use, row[k]);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t at = m_.after_at[i]; at < m_.after_at[i + 1]; ++at)
                put(m_.after[at], i);
        std::vector<int64_t> by_end = everything;
        std::stable_sort(by_end.begin(), by_end.end(), [&](auto a, auto b) { return m_.ends_before(a, b); });
        for (const int64_t i : everything)
            if (!num_before_[i])
                make_ready(i);
        for (auto first = by_end.begin();;) {
            drain();
            first = std::find_if(first, by_end.end(), [&](int64_t i) { return !is_done_[i]; });
            if (first == by_end.end())
                break;
            const int64_t stuck = *std::find_if(first, by_end.end(), [&](int64_t i) { return can_come(i); });
            make_ready(stuck);
        }
    }

  private:
    const Messages &m_;
    std::vector<std::vector<int64_t>> later_;
    std::vector<int64_t> num_before_;
    std::vector<char> is_done_;
    using Entry = std::tuple<double, bool, int64_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready_;

    void make_ready(int64_t i) { ready_.emplace(m_.end[i], !m_.crosses[i], i); }

    // Adds the constraint that `first` comes before `second`.
    void put(int64_t first, int64_t second) {
        later_[first].push_back(second);
        ++num_before_[second];
    }

    // Sorts the members of each owner and puts them one after another; returns the sorted rows.
    template <typename Less>
    std::map<int64_t, std::vector<int64_t>> chain(const std::vector<int64_t> &members,
                                                  const std::vector<int64_t> &owner, Less less) {
        std::map<int64_t, std::vector<int64_t>> rows;
        for (const int64_t i : members)
            rows[owner[i]].push_back(i);
        for (auto &[rank, row] : rows) {
            std::stable_sort(row.begin(), row.end(), less);
            for (size_t k = 1; k < row.size(); ++k)
                put(row[k - 1], row[k]);
        }
        return rows;
    }

    bool can_come(int64_t i) const {
        return !is_done_[i] &&
               std::all_of(m_.after.begin() + m_.after_at[i], m_.after.begin() + m_.after_at[i + 1],
                           [&](int64_t first) { return is_done_[first] != 0; });
    }

    void drain() {
        while (!ready_.empty()) {
            const int64_t i = std::get<2>(ready_.top());
            ready_.pop();
            if (is_done_[i])
                continue;
            is_done_[i] = 1;
            order.push_back(i);
            for (const int64_t second : later_[i])
                if (!--num_before_[second] && !is_done_[second])
                    make_ready(second);
        }
    }
};
