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
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

// The senders that can serve a receiver: `lead`, if it is not -1, then the others in the order of all senders.
// Receivers with the same row number have the same senders, apart from the lead.
struct Partners {
    size_t row;
    int64_t lead = -1;
};

class Matching {
  public:
    // The sender of each receiver, -1 for none. can(r, s): whether sender s can serve receiver r. Most receivers get
    // the first free sender, so `can` is called for few pairs.
    const std::vector<int64_t> &find_pairs(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers,
                                           const std::vector<Partners> &partners, size_t num_rows,
                                           const std::vector<double> &weight,
                                           std::function<bool(int64_t, int64_t)> can) {
        const size_t num_ports = partners.size();
        senders_ = &senders, partners_ = &partners, weight_ = &weight, can_ = std::move(can);
        sender_of_.assign(num_ports, -1), receiver_of_.assign(num_ports, -1);
        place_.resize(num_ports);
        for (size_t i = 0; i < senders.size(); ++i)
            place_[senders[i]] = i;
        next_.resize(senders.size() + 1);
        std::iota(next_.begin(), next_.end(), size_t{0});
        tried_.assign(num_rows, 0), is_filled_.assign(num_rows, false);
        rows_.resize(num_rows), seen_.resize(num_ports);
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
    const std::vector<int64_t> *senders_ = nullptr;
    const std::vector<Partners> *partners_ = nullptr;
    const std::vector<double> *weight_ = nullptr;
    std::function<bool(int64_t, int64_t)> can_;
    std::vector<std::vector<int64_t>> rows_; // by row: senders that can serve it, if is_filled_
    std::vector<char> is_filled_;
    std::vector<std::vector<int64_t>> wanting_; // by sender: receivers that it can serve
    std::vector<int64_t> sender_of_, receiver_of_;
    uint64_t search_ = 0;
    std::vector<uint64_t> seen_; // by sender or receiver: the last search that has visited it
    std::vector<size_t> place_;  // by sender: its place in senders_
    std::vector<size_t> next_;   // by place: itself if its sender is free, else a later place, with no free one between
    std::vector<size_t> tried_;  // by row: senders before this place are matched or cannot serve it

    // The senders that can serve receiver r, in order, apart from its lead.
    const std::vector<int64_t> &row_of(int64_t r) {
        const size_t number = (*partners_)[r].row;
        std::vector<int64_t> &row = rows_[number];
        if (!is_filled_[number]) {
            row.clear();
            for (const int64_t s : *senders_)
                if (can_(r, s))
                    row.push_back(s);
            is_filled_[number] = true;
        }
        return row;
    }

    // Calls f with each partner of receiver r, in order, until it returns true; returns whether it did.
    template <typename F> bool any_partner(int64_t r, F f) {
        const int64_t lead = (*partners_)[r].lead;
        if (lead >= 0 && f(lead))
            return true;
        for (const int64_t s : row_of(r))
            if (s != lead && f(s))
                return true;
        return false;
    }

    void match(int64_t s, int64_t r) {
        receiver_of_[s] = r, sender_of_[r] = s;
        if (const size_t place = place_[s]; next_[place] == place)
            next_[place] = place + 1;
    }

    // The first place from this one on whose sender is free.
    size_t next_free(size_t place) {
        while (next_[place] != place)
            place = next_[place] = next_[next_[place]];
        return place;
    }

    // Matches receiver r with its first free partner, if it has one.
    bool take_free(int64_t r) {
        const auto [number, lead] = (*partners_)[r];
        if (lead >= 0 && receiver_of_[lead] < 0) {
            match(lead, r);
            return true;
        }
        size_t &place = tried_[number]; // a matched sender stays matched
        for (place = next_free(place); place < senders_->size(); place = next_free(place + 1))
            if (can_(r, (*senders_)[place])) {
                match((*senders_)[place], r);
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
            for (const int64_t s : row_of(r))
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
