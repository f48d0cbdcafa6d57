// What the scheduler is made of: sets of chunks, ports and links, messages, and transfers under way.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

class Bits {
  public:
    explicit Bits(size_t size = 0) : words_((size + 63) / 64) {}
    void set(int64_t i) { words_[static_cast<size_t>(i) / 64] |= uint64_t{1} << (i % 64); }
    void clear(int64_t i) { words_[static_cast<size_t>(i) / 64] &= ~(uint64_t{1} << (i % 64)); }
    uint64_t word(size_t i) const { return words_[i]; }
    size_t num_words() const { return words_.size(); }
    bool any() const {
        return std::any_of(words_.begin(), words_.end(), [](uint64_t word) { return word != 0; });
    }

  private:
    std::vector<uint64_t> words_;
};

struct Resource {
    int64_t number;
    double rate, free;
    std::vector<int64_t> unclaimed, claimed;
    Resource(int64_t n, double r) : number(n), rate(r), free(r) {}
    const std::vector<int64_t> &take(double taken) {
        free -= taken;
        if (!unclaimed.empty()) {
            claimed.swap(unclaimed);
            unclaimed.clear();
        }
        return claimed;
    }
    void give(double given, int64_t message) {
        free += given;
        unclaimed.push_back(message);
    }
};

using ByHost = std::vector<std::pair<int64_t, std::vector<int64_t>>>; // in the order in which hosts appear

struct Schedule {
    std::vector<int64_t> chunk, sender, receiver, source, after_at{0}, after;
    std::vector<double> end;
    int64_t add(int64_t c, int64_t s, int64_t r, int64_t from, const std::vector<int64_t> &order, double when) {
        end.push_back(when);
        chunk.push_back(c), sender.push_back(s), receiver.push_back(r), source.push_back(from);
        after.insert(after.end(), order.begin(), order.end());
        after_at.push_back(static_cast<int64_t>(after.size()));
        return static_cast<int64_t>(chunk.size()) - 1;
    }
};

struct Flow {
    int64_t s, r, chunk;
    double rate;
    int64_t message, rank;
    double left, speed;
};
