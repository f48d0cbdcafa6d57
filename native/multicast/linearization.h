// Puts all messages in one total order that follows the start times at senders and the end times at receivers.
//
// A plan is a total order: each rank starts its messages and completes its receives in that order. The order is a
// topological sort. Of the messages that are ready, the one with the smallest end time is next. The constraints:
//
//   - A message comes after all messages in its `after`.
//   - The messages of each sender to other hosts are ordered by start time.
//   - The messages of each receiver are ordered by end time.
//   - If a sender stages a piece from its own host, it receives the piece at most STAGED_BEFORE of its sends to other
//     hosts before the send of the piece.
//   - If a receiver only stages a piece from another host, it forwards the piece inside its host before its
//     STAGED_AFTER-th further receive.
// The constraints may form a cycle. Then the next message is the first to end among the messages whose `after` is done.
//
// Reference implementation: tests/reference/linearization.py.

#pragma once

#include <map>
#include <queue>
#include <tuple>

#include "rank_assignment.h"

constexpr size_t STAGED_BEFORE = 2; // how many sends to other hosts ahead a sender may stage a piece
constexpr size_t STAGED_AFTER = 4;  // a staged piece is forwarded before this many further receives

class Linearization {
  public:
    LargeArray<int32_t> order;

    explicit Linearization(const Messages &messages)
        : m_(messages), later_(messages.piece.size()), num_before_(messages.piece.size()),
          is_done_(messages.piece.size()) {
        const int64_t count = static_cast<int64_t>(messages.piece.size());
        std::vector<int64_t> everything(count), between_hosts;
        for (int64_t i = 0; i < count; ++i) {
            everything[i] = i;
            if (m_.crosses[i])
                between_hosts.push_back(i);
        }
        LargeArray<uint8_t> waiting = m_.staged;
        for (const auto &[rank, row] :
             chain(between_hosts, m_.sender, [&](int64_t a, int64_t b) { return m_.start[a] < m_.start[b]; }))
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
        for (const auto &[rank, row] :
             chain(everything, m_.receiver, [&](int64_t a, int64_t b) { return m_.ends_before(a, b); }))
            for (size_t k = STAGED_AFTER; k < row.size(); ++k)
                if (const auto found = uses.find(row[k - STAGED_AFTER]); found != uses.end())
                    for (const int64_t use : found->second)
                        put(use, row[k]);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t at = m_.after_offsets[i]; at < m_.after_offsets[i + 1]; ++at)
                put(m_.after[at], i);
        const LargeArray<int32_t> by_end = m_.by_end();
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
    using Entry = std::tuple<double, bool, int64_t>; // end time, whether it stays inside a host, message
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready_;

    void make_ready(int64_t i) { ready_.emplace(m_.end[i], !m_.crosses[i], i); }

    // Adds the constraint that `first` comes before `second`.
    void put(int64_t first, int64_t second) {
        later_[first].push_back(second);
        ++num_before_[second];
    }

    // Groups members by owner, sorts each group, and adds constraints that keep its order. Returns the groups by owner.
    template <typename Less>
    std::map<int64_t, std::vector<int64_t>> chain(const std::vector<int64_t> &members,
                                                  const LargeArray<int32_t> &owner, Less less) {
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

    // Whether message i is not in the order yet, but all messages in its `after` are.
    bool can_come(int64_t i) const {
        return !is_done_[i] &&
               std::all_of(m_.after.begin() + m_.after_offsets[i], m_.after.begin() + m_.after_offsets[i + 1],
                           [&](int64_t first) { return is_done_[first] != 0; });
    }

    // Appends ready messages to the order, and the messages that become ready, until none is ready.
    void drain() {
        while (!ready_.empty()) {
            const int64_t i = std::get<2>(ready_.top());
            ready_.pop();
            if (is_done_[i])
                continue;
            is_done_[i] = 1;
            order.push_back(static_cast<int32_t>(i));
            for (const int64_t second : later_[i])
                if (!--num_before_[second] && !is_done_[second])
                    make_ready(second);
        }
    }
};
