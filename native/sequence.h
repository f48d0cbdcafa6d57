// One order of all messages. The Python twin, with the explanation, is reshard.sequence.

#pragma once

#include <map>
#include <queue>

#include "landing.h"

class Sequence {
  public:
    std::vector<int64_t> order;

    explicit Sequence(const Messages &messages)
        : m_(messages), later_(messages.piece.size()), num_before_(messages.piece.size()),
          is_done_(messages.piece.size()) {
        const int64_t count = static_cast<int64_t>(messages.piece.size());
        std::vector<int64_t> everything(count), crossing;
        for (int64_t i = 0; i < count; ++i) {
            everything[i] = i;
            if (m_.crosses[i])
                crossing.push_back(i);
        }
        chain(crossing, m_.sender, m_.start);
        chain(everything, m_.receiver, m_.end);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t at = m_.after_at[i]; at < m_.after_at[i + 1]; ++at)
                put(m_.after[at], i);
        std::vector<int64_t> by_end = everything;
        std::stable_sort(by_end.begin(), by_end.end(), [&](auto a, auto b) { return m_.end[a] < m_.end[b]; });
        for (const int64_t i : everything)
            if (!num_before_[i])
                ready_.emplace(m_.end[i], i);
        for (auto first = by_end.begin();;) {
            drain();
            first = std::find_if(first, by_end.end(), [&](int64_t i) { return !is_done_[i]; });
            if (first == by_end.end())
                break;
            const int64_t stuck = *std::find_if(first, by_end.end(), [&](int64_t i) { return can_come(i); });
            ready_.emplace(m_.end[stuck], stuck);
        }
    }

  private:
    const Messages &m_;
    std::vector<std::vector<int64_t>> later_;
    std::vector<int64_t> num_before_;
    std::vector<char> is_done_;
    std::priority_queue<std::pair<double, int64_t>, std::vector<std::pair<double, int64_t>>, std::greater<>> ready_;

    void put(int64_t first, int64_t second) {
        later_[first].push_back(second);
        ++num_before_[second];
    }

    void chain(const std::vector<int64_t> &members, const std::vector<int64_t> &owner, const std::vector<double> &key) {
        std::map<int64_t, std::vector<int64_t>> rows;
        for (const int64_t i : members)
            rows[owner[i]].push_back(i);
        for (auto &[rank, row] : rows) {
            std::stable_sort(row.begin(), row.end(), [&](auto a, auto b) { return key[a] < key[b]; });
            for (size_t k = 1; k < row.size(); ++k)
                put(row[k - 1], row[k]);
        }
    }

    bool can_come(int64_t i) const {
        return !is_done_[i] &&
               std::all_of(m_.after.begin() + m_.after_at[i], m_.after.begin() + m_.after_at[i + 1],
                           [&](int64_t first) { return is_done_[first] != 0; });
    }

    void drain() {
        while (!ready_.empty()) {
            const int64_t i = ready_.top().second;
            ready_.pop();
            if (is_done_[i])
                continue;
            is_done_[i] = 1;
            order.push_back(i);
            for (const int64_t second : later_[i])
                if (!--num_before_[second] && !is_done_[second])
                    ready_.emplace(m_.end[second], second);
        }
    }
};
