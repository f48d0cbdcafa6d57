// Which hosts have and lack which chunks, and how much each place has left to do. The Python twin, with the
// explanation, is reshard.planner.multicast.chunk_state; here the chunks that one host can send another are counted as they change.

#pragma once

#include <limits>

#include "types.h"

class ChunkState {
  public:
    ChunkState(const Ports &ports, const Workload &workload)
        : ports_(ports), workload_(workload), hosts_(ports.num_hosts), have_(hosts_, none()), miss_(hosts_, none()),
          in_pod_(ports.up.size(), none()), has_(chunks(), Bits(hosts_)), lacks_(chunks(), Bits(hosts_)),
          copies_(chunks()), first_missing_(hosts_), source_(chunks()), can_(hosts_ * hosts_), can_enter_(has_pods() ? hosts_ * hosts_ : 0),
          untaken_(hosts_), held_(hosts_), to_get_(hosts_), to_give_(hosts_), to_enter_(ports.up.size()),
          to_leave_(ports.up.size()), is_fresh_(none()), pods_with_(has_pods() ? chunks() : 0, Bits(ports.up.size())),
          pods_without_(pods_with_) {
        for (size_t i = 0; i < chunks(); ++i) {
            const auto destinations = workload.host_class_receivers[workload.host_class_of[i]];
            if (!destinations.empty())
                place(static_cast<int64_t>(i), workload.host_class_holders[workload.host_class_of[i]], destinations);
        }
        if (ports.are_shared)
            place_ranks();
    }

    // What has not arrived at a host, what it alone holds, what its pod lacks, what only its pod can give.
    int64_t to_get(int64_t host) const { return to_get_[host]; }
    int64_t to_give(int64_t host) const { return to_give_[host]; }
    int64_t to_enter(size_t pod) const { return to_enter_[pod]; }
    int64_t to_leave(size_t pod) const { return to_leave_[pod]; }
    int64_t untaken(int64_t host) const { return untaken_[host]; } // chunks that are not even on the way
    int64_t held(int64_t host) const { return held_[host]; }
    bool has(int64_t chunk, int64_t host) const { return has_[chunk].has(host); }
    int64_t size(int64_t chunk) const { return workload_.host_class_size[workload_.host_class_of[chunk]]; }
    int64_t source(int64_t chunk, int64_t host) const {
        for (const auto &[h, chunk_send] : source_[chunk])
            if (h == host)
                return chunk_send;
        return -1;
    }

    bool can_send(int64_t s, int64_t r) const {
        const int64_t a = ports_.host[s], b = ports_.host[r];
        const bool enters = has_pods() && ports_.pod[a] != ports_.pod[b];
        return (enters ? can_enter_ : can_)[a * hosts_ + b] > 0;
    }

    int64_t choose(int64_t s, int64_t r, bool may_enter_again) const {
        const int64_t a = ports_.host[s], b = ports_.host[r];
        const bool enters = has_pods() && ports_.pod[a] != ports_.pod[b] && !may_enter_again;
        int64_t best = -1, fewest = std::numeric_limits<int64_t>::max(), nearest = -1;
        const int64_t most_near = ports_.are_shared ? 3 : 0;
        size_t &first = first_missing_[b];
        while (first < is_fresh_.num_words() && !miss_[b].word(first))
            ++first; // what a host misses only becomes less
        for (size_t i = first; i < is_fresh_.num_words(); ++i) {
            uint64_t word = have_[a].word(i) & miss_[b].word(i);
            if (enters)
                word &= ~in_pod_[ports_.pod[b]].word(i);
            for (; word; word &= word - 1) {
                const int64_t chunk = static_cast<int64_t>(64 * i) + std::countr_zero(word);
                if (!workload_.near_first && copies_[chunk] > fewest)
                    continue;
                const int64_t near = ports_.are_shared ? 2 * near_out_[s].has(chunk) + near_in_[r].has(chunk) : 0;
                const bool is_rarer = copies_[chunk] < fewest, is_nearer = near > nearest;
                if (workload_.near_first ? is_nearer || (near == nearest && is_rarer)
                                        : is_rarer || (copies_[chunk] == fewest && is_nearer))
                    fewest = copies_[chunk], nearest = near, best = chunk;
                if (fewest == least_copies_ && nearest == most_near)
                    return best; // none is rarer or nearer, and of those alike the first is taken
            }
        }
        return best;
    }

    void start(int64_t chunk, int64_t b) {
        has_[chunk].each([&](int64_t a) { --can_[a * hosts_ + b]; });
        if (has_pods() && !in_pod_[ports_.pod[b]].has(chunk))
            enter_pod(chunk, ports_.pod[b]);
        miss_[b].clear(chunk), lacks_[chunk].clear(b);
        --untaken_[b];
        ++copies_[chunk];
        if (is_fresh_.has(chunk)) {
            for (const int64_t h : workload_.host_class_holders[workload_.host_class_of[chunk]])
                to_give_[h] -= size(chunk);
            is_fresh_.clear(chunk);
        }
    }

    void land(int64_t chunk, int64_t port, int64_t chunk_send) {
        const int64_t host = ports_.host[port];
        have_[host].set(chunk), has_[chunk].set(host);
        ++held_[host];
        to_get_[host] -= size(chunk);
        source_[chunk].emplace_back(host, chunk_send);
        lacks_[chunk].each([&](int64_t b) {
            ++can_[host * hosts_ + b];
            if (has_pods() && !in_pod_[ports_.pod[b]].has(chunk))
                ++can_enter_[host * hosts_ + b];
        });
        if (ports_.are_shared)
            near_out_[port].set(chunk);
    }

  private:
    const Ports &ports_;
    const Workload &workload_;
    int64_t hosts_;
    std::vector<Bits> have_, miss_, in_pod_; // chunks
    std::vector<Bits> has_, lacks_;          // hosts
    std::vector<int64_t> copies_;
    int64_t least_copies_ = std::numeric_limits<int64_t>::max(); // of any chunk at the beginning; they only grow
    mutable std::vector<size_t> first_missing_;                  // of each host a word before which it misses nothing
    std::vector<std::vector<std::pair<int64_t, int64_t>>> source_;
    std::vector<int32_t> can_, can_enter_; // chunks that one host can send to another, into a pod that lacks them
    std::vector<int64_t> untaken_, held_, to_get_, to_give_, to_enter_, to_leave_;
    Bits is_fresh_;
    std::vector<Bits> pods_with_, pods_without_; // of each chunk
    std::vector<Bits> near_out_, near_in_;

    size_t chunks() const { return workload_.host_class_of.size(); }
    Bits none() const { return Bits(chunks()); }
    bool has_pods() const { return !ports_.pod.empty(); }

    void place(int64_t c, const Members::Row &holders, const Members::Row &destinations) {
        for (const int64_t h : destinations) {
            miss_[h].set(c), lacks_[c].set(h);
            ++untaken_[h];
            to_get_[h] += size(c);
        }
        for (const int64_t h : holders) {
            have_[h].set(c), has_[c].set(h);
            ++held_[h];
            to_give_[h] += size(c);
            for (const int64_t b : destinations)
                ++can_[h * hosts_ + b];
        }
        copies_[c] = holders.size();
        least_copies_ = std::min(least_copies_, copies_[c]);
        is_fresh_.set(c);
        if (!has_pods())
            return;
        for (const int64_t h : holders)
            pods_with_[c].set(ports_.pod[h]), in_pod_[ports_.pod[h]].set(c);
        for (const int64_t b : destinations)
            if (!in_pod_[ports_.pod[b]].has(c)) {
                pods_without_[c].set(ports_.pod[b]);
                for (const int64_t a : holders)
                    ++can_enter_[a * hosts_ + b];
            }
        pods_without_[c].each([&](int64_t q) { to_enter_[q] += size(c); });
        if (pods_with_[c].count() == 1)
            pods_with_[c].each([&](int64_t p) { to_leave_[p] += size(c) * pods_without_[c].count(); });
    }

    void place_ranks() {
        near_out_.assign(ports_.host.size(), none());
        near_in_ = near_out_;
        for (size_t i = 0; i < chunks(); ++i) {
            const int64_t k = workload_.piece_class[workload_.piece_at[i]], c = static_cast<int64_t>(i);
            for (const int64_t rank : workload_.class_holders[k])
                near_out_[ports_.of_rank[rank]].set(c);
            for (const int64_t rank : workload_.class_receivers[k])
                near_in_[ports_.of_rank[rank]].set(c);
        }
    }

    void enter_pod(int64_t chunk, int64_t q) {
        lacks_[chunk].each([&](int64_t h) {
            if (ports_.pod[h] == q)
                has_[chunk].each([&](int64_t a) { --can_enter_[a * hosts_ + h]; });
        });
        if (pods_with_[chunk].count() == 1)
            pods_with_[chunk].each([&](int64_t p) { to_leave_[p] -= size(chunk) * pods_without_[chunk].count(); });
        to_enter_[q] -= size(chunk);
        pods_without_[chunk].clear(q), pods_with_[chunk].set(q);
        in_pod_[q].set(chunk);
    }
};
