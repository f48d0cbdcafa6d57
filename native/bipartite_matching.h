// A matching of free senders and receivers (ports) that prefers the first receivers, then the heaviest senders.
//
// Receivers are matched by augmenting paths in the given order. An augmenting path keeps all matched receivers matched,
// so no receiver loses its place to a later one. Then each unmatched sender, in the given order (heaviest first), takes
// the place of a lighter one, along an alternating path that keeps the same receivers matched.
//
// Python reference: tests/reference/bipartite_matching.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

class Matching {
  public:
    /// The sender of each receiver, -1 for none. partners[r] lists the senders that can serve receiver r.
    const std::vector<int64_t> &find_pairs(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers,
                                           const std::vector<std::vector<int64_t>> &partners,
                                           const std::vector<double> &weight) {
        const size_t num_ports = partners.size();
        partners_ = &partners, weight_ = &weight;
        sender_of_.assign(num_ports, -1), receiver_of_.assign(num_ports, -1);
        tried_.assign(num_ports, 0);
        size_t matched = 0;
        for (const int64_t r : receivers) {
            if (matched == senders.size())
                break;
            seen_.assign(num_ports, 0);
            matched += augment(r);
        }
        wanting_.assign(num_ports, {});
        for (const int64_t r : receivers)
            for (const int64_t s : partners[r])
                wanting_[s].push_back(r);
        double lightest = std::numeric_limits<double>::infinity(); // of all matched senders; it only grows
        for (const int64_t s : senders)
            if (receiver_of_[s] >= 0)
                lightest = std::min(lightest, weight[s]);
        for (const int64_t s : senders)
            if (receiver_of_[s] < 0 && weight[s] > lightest) {
                seen_.assign(num_ports, 0);
                replace(s, weight[s]);
            }
        return sender_of_;
    }

  private:
    const std::vector<std::vector<int64_t>> *partners_ = nullptr;
    const std::vector<double> *weight_ = nullptr;
    std::vector<std::vector<int64_t>> wanting_;
    std::vector<int64_t> sender_of_, receiver_of_;
    std::vector<char> seen_;
    std::vector<size_t> tried_; // by receiver: partners known to be matched

    // Matches receiver r along an augmenting path, if there is one.
    bool augment(int64_t r) {
        const std::vector<int64_t> &row = (*partners_)[r];
        for (size_t &i = tried_[r]; i < row.size(); ++i) // a matched sender stays matched
            if (receiver_of_[row[i]] < 0) {
                receiver_of_[row[i]] = r, sender_of_[r] = row[i];
                return true;
            }
        for (const int64_t s : row)
            if (!seen_[s]) {
                seen_[s] = 1;
                if (augment(receiver_of_[s])) {
                    receiver_of_[s] = r, sender_of_[r] = s;
                    return true;
                }
            }
        return false;
    }

    // Matches sender s in place of a sender lighter than `heaviest`, and keeps the same receivers matched.
    bool replace(int64_t s, double heaviest) {
        for (const int64_t r : wanting_[s]) {
            if (seen_[r] || sender_of_[r] < 0)
                continue;
            seen_[r] = 1;
            const int64_t other = sender_of_[r];
            if ((*weight_)[other] < heaviest)
                receiver_of_[other] = -1;
            else if (!replace(other, heaviest))
                continue;
            receiver_of_[s] = r, sender_of_[r] = s;
            return true;
        }
        return false;
    }
};
