// A matching of free senders and receivers (ports) that prefers the first receivers, then the heaviest senders.
//
// Receivers are matched by augmenting paths in the given order. An augmenting path keeps all matched receivers matched,
// so no receiver loses its place to a later one. Then each unmatched sender, in the given order (heaviest first), takes
// the place of a lighter one, along an alternating path that keeps the same receivers matched.
//
// Reference implementation: tests/reference/bipartite_matching.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

// The senders that can serve a receiver: row[lead], then the others in the order of the row. Receivers may share a row.
struct Partners {
    size_t row;      // its number
    size_t lead = 0; // position in the row
};

class Matching {
  public:
    /// The sender of each receiver, -1 for none. partners[r] are the senders that can serve receiver r, of these rows.
    const std::vector<int64_t> &find_pairs(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers,
                                           const std::vector<Partners> &partners,
                                           const std::vector<std::vector<int64_t>> &rows,
                                           const std::vector<double> &weight) {
        const size_t num_ports = partners.size();
        partners_ = &partners, rows_ = &rows, weight_ = &weight;
        sender_of_.assign(num_ports, -1), receiver_of_.assign(num_ports, -1);
        tried_.assign(rows.size(), 0);
        seen_.resize(num_ports);
        size_t matched = 0;
        for (const int64_t r : receivers) {
            if (matched == senders.size())
                break;
            matched += take_free(r);
            if (sender_of_[r] < 0) {
                ++search_;
                matched += augment(r);
            }
        }
        double lightest = std::numeric_limits<double>::infinity(); // of all matched senders; it only grows
        for (const int64_t s : senders)
            if (receiver_of_[s] >= 0)
                lightest = std::min(lightest, weight[s]);
        bool has_wanting = false;
        for (const int64_t s : senders)
            if (receiver_of_[s] < 0 && weight[s] > lightest) {
                if (!has_wanting)
                    find_wanting(receivers);
                has_wanting = true;
                ++search_;
                replace(s, weight[s]);
            }
        return sender_of_;
    }

  private:
    const std::vector<Partners> *partners_ = nullptr;
    const std::vector<std::vector<int64_t>> *rows_ = nullptr;
    const std::vector<double> *weight_ = nullptr;
    std::vector<std::vector<int64_t>> wanting_; // by sender: receivers that it can serve
    std::vector<int64_t> sender_of_, receiver_of_;
    uint64_t search_ = 0;
    std::vector<uint64_t> seen_; // by sender or receiver: the last search that has visited it
    std::vector<size_t> tried_;  // by row: senders known to be matched

    // Calls f with each partner of receiver r, in order, until it returns true; returns whether it did.
    template <typename F> bool any_partner(int64_t r, F f) const {
        const Partners &partners = (*partners_)[r];
        const std::vector<int64_t> &row = (*rows_)[partners.row];
        if (row.empty())
            return false;
        if (f(row[partners.lead]))
            return true;
        for (size_t i = 0; i < row.size(); ++i)
            if (i != partners.lead && f(row[i]))
                return true;
        return false;
    }

    void match(int64_t s, int64_t r) { receiver_of_[s] = r, sender_of_[r] = s; }

    // Matches receiver r with its first free partner, if it has one.
    bool take_free(int64_t r) {
        const Partners &partners = (*partners_)[r];
        const std::vector<int64_t> &row = (*rows_)[partners.row];
        if (!row.empty() && receiver_of_[row[partners.lead]] < 0) {
            match(row[partners.lead], r);
            return true;
        }
        for (size_t &i = tried_[partners.row]; i < row.size(); ++i) // a matched sender stays matched
            if (receiver_of_[row[i]] < 0) {
                match(row[i], r);
                return true;
            }
        return false;
    }

    // Matches receiver r along an augmenting path, if there is one.
    bool augment(int64_t r) {
        if (take_free(r))
            return true;
        return any_partner(r, [&](int64_t s) {
            if (seen_[s] == search_)
                return false;
            seen_[s] = search_;
            if (!augment(receiver_of_[s]))
                return false;
            match(s, r);
            return true;
        });
    }

    void find_wanting(const std::vector<int64_t> &receivers) {
        wanting_.resize(partners_->size());
        for (auto &row : wanting_)
            row.clear();
        for (const int64_t r : receivers)
            for (const int64_t s : (*rows_)[(*partners_)[r].row])
                wanting_[s].push_back(r);
    }

    // Matches sender s in place of a sender lighter than `heaviest`, and keeps the same receivers matched.
    bool replace(int64_t s, double heaviest) {
        for (const int64_t r : wanting_[s]) {
            if (seen_[r] == search_ || sender_of_[r] < 0)
                continue;
            seen_[r] = search_;
            const int64_t other = sender_of_[r];
            if ((*weight_)[other] < heaviest)
                receiver_of_[other] = -1;
            else if (!replace(other, heaviest))
                continue;
            match(s, r);
            return true;
        }
        return false;
    }
};
