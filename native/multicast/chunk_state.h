// The chunks that each host has and lacks, and the remaining work of each host and pod.
//
// States of a chunk at a host that needs it: missing until a send of the chunk starts, in flight until the send has
// landed, then held. With pods, a chunk enters each pod over the pod's uplink once. Later receivers get the chunk from
// hosts of the pod. So once a host cannot send a chunk to another host, it never can, and can_send() looks at each
// chunk of a host once for each receiving host.
//
// choose() takes a chunk that the sending host has and the receiving host misses, by these criteria in this order:
//
//   1. the rarest chunk
//   2. a chunk that ranks at the sending port hold
//   3. a chunk that ranks at the receiving port need
//   4. the chunk with the lowest number
//
// With near_first, criteria 2 and 3 come before criterion 1.
//
// Reference implementation: tests/reference/chunk_state.py, which recomputes these sets where needed.

#pragma once

#include <limits>

#include "../types.h"

class ChunkState {
  public:
    ChunkState(const Nics &nics, const ChunkWorkload &workload)
        : nics_(nics), workload_(workload), hosts_(nics.num_hosts), have_(hosts_, none()), miss_(hosts_, none()),
          in_pod_(nics.up.size(), none()), has_(chunks(), Bits(hosts_)), arrived_(hosts_),
          copies_(chunks()), first_missing_(hosts_), source_(chunks()), passed_(hosts_ * hosts_), passed_pods_(has_pods() ? hosts_ * hosts_ : 0),
          untaken_(hosts_), held_(hosts_), to_get_(hosts_), to_give_(hosts_), to_enter_(nics.up.size()),
          to_leave_(nics.up.size()), is_fresh_(none()), pods_with_(has_pods() ? chunks() : 0, Bits(nics.up.size())),
          pods_without_(pods_with_),
          possible_senders_(has_pods() ? hosts_ : 0, Bits(hosts_)) {
        for (size_t i = 0; i < chunks(); ++i) {
            const auto destinations = workload.host_class_receivers[workload.host_class_of[i]];
            if (!destinations.empty())
                place(static_cast<int64_t>(i), workload.host_class_holders[workload.host_class_of[i]], destinations);
        }
        if (nics.have_multi_nic_hosts)
            place_ranks();
    }

    // Remaining work, as summed sizes of chunks:
    //   to_get: chunks that have not arrived at a host.
    //   to_give: chunks of a host that only their first holders have.
    //   to_enter: chunks that a pod lacks.
    //   to_leave: chunks that only this pod has. A chunk counts once for each pod that lacks it.
    int64_t to_get(int64_t host) const { return to_get_[host]; }
    int64_t to_give(int64_t host) const { return to_give_[host]; }
    int64_t to_enter(size_t pod) const { return to_enter_[pod]; }
    int64_t to_leave(size_t pod) const { return to_leave_[pod]; }
    int64_t untaken(int64_t host) const { return untaken_[host]; } // chunks missing and not in flight
    int64_t held(int64_t host) const { return held_[host]; }
    bool has(int64_t chunk, int64_t host) const { return has_[chunk].has(host); }
    int64_t size(int64_t chunk) const { return workload_.host_class_size[workload_.host_class_of[chunk]]; }
    // The send that brought a chunk to a host, -1 if the host held it from the start.
    int64_t source(int64_t chunk, int64_t host) const {
        for (const auto &[h, chunk_send] : source_[chunk])
            if (h == host)
                return chunk_send;
        return -1;
    }

    bool can_send(int64_t s, int64_t r) const {
        const int64_t a = nics_.host[s], b = nics_.host[r];
        const bool enters = has_pods() && nics_.pod[a] != nics_.pod[b];
        const Bits *in_pod = enters ? &in_pod_[nics_.pod[b]] : nullptr;
        const std::vector<int64_t> &row = arrived_[a];
        uint32_t &next = (enters ? passed_pods_ : passed_)[b * hosts_ + a];
        while (next < row.size() && (!miss_[b].has(row[next]) || (in_pod && in_pod->has(row[next]))))
            ++next;
        if (has_pods() && next == row.size())
            possible_senders_[b].clear(a);
        return next < row.size();
    }

    // With pods: the hosts of all senders that can send a chunk to a NIC, and perhaps other hosts.
    const Bits &possible_senders(int64_t r) const { return possible_senders_[nics_.host[r]]; }

    // The chunk for NICs s and r, -1 for none. may_enter_again: also chunks that the receiver's pod already has.
    int64_t choose(int64_t s, int64_t r, bool may_enter_again) const {
        const int64_t a = nics_.host[s], b = nics_.host[r];
        const bool enters = has_pods() && nics_.pod[a] != nics_.pod[b] && !may_enter_again;
        size_t &first = first_missing_[b];
        while (first < is_fresh_.num_words() && !miss_[b].word(first))
            ++first; // the set of missing chunks only shrinks
        const auto candidates = [&](size_t i) {
            const uint64_t word = have_[a].word(i) & miss_[b].word(i);
            return enters ? word & ~in_pod_[nics_.pod[b]].word(i) : word;
        };
        if (workload_.near_first)
            return choose_nearest(s, r, first, candidates);
        words_.clear(); // most pairs have few candidates
        for (size_t i = first; i < is_fresh_.num_words(); ++i)
            if (const uint64_t word = candidates(i))
                words_.emplace_back(i, word);
        if (words_.empty())
            return -1;
        for (size_t copies = 0; copies < with_copies_.size(); ++copies) {
            if (!num_with_copies_[copies])
                continue;
            const int64_t best = find_nearest(s, r, with_copies_[copies]);
            if (best >= 0)
                return best;
        }
        return -1;
    }

    // A send of a chunk to host b starts.
    void start(int64_t chunk, int64_t b) {
        if (has_pods() && !in_pod_[nics_.pod[b]].has(chunk))
            enter_pod(chunk, nics_.pod[b]);
        miss_[b].clear(chunk);
        --untaken_[b];
        set_copies(chunk, copies_[chunk] + 1);
        if (is_fresh_.has(chunk)) {
            for (const int64_t h : workload_.host_class_holders[workload_.host_class_of[chunk]])
                to_give_[h] -= size(chunk);
            is_fresh_.clear(chunk);
        }
    }

    // A chunk has arrived at a NIC.
    void land(int64_t chunk, int64_t nic, int64_t chunk_send) {
        const int64_t host = nics_.host[nic];
        have_[host].set(chunk), has_[chunk].set(host);
        arrived_[host].push_back(chunk);
        ++held_[host];
        to_get_[host] -= size(chunk);
        source_[chunk].emplace_back(host, chunk_send);
        allow_sends(chunk, host);
        if (nics_.have_multi_nic_hosts)
            near_out_[nic].set(chunk);
    }

  private:
    const Nics &nics_;
    const ChunkWorkload &workload_;
    int64_t hosts_;
    std::vector<Bits> have_, miss_, in_pod_; // by host or pod: chunks; in_pod_ includes chunks that are entering
    std::vector<Bits> has_;                  // hosts of each chunk
    std::vector<std::vector<int64_t>> arrived_; // by host: its chunks, in the order in which it got them
    std::vector<int64_t> copies_; // hosts that have each chunk or are receiving it
    std::vector<Bits> with_copies_; // by number of copies: chunks
    std::vector<int64_t> num_with_copies_; // by number of copies: number of chunks
    int64_t least_copies_ = std::numeric_limits<int64_t>::max(); // over all chunks at the start; copies only grow
    mutable std::vector<std::pair<size_t, uint64_t>> words_; // of choose(): numbers and words of its candidates
    mutable std::vector<size_t> first_missing_; // by host: no chunk is missing in words before this one
    std::vector<std::vector<std::pair<int64_t, int64_t>>> source_;
    // by host pair: leading entries of arrived_ that cannot be sent, or could not enter another pod
    mutable std::vector<uint32_t> passed_, passed_pods_;
    std::vector<int64_t> untaken_, held_, to_get_, to_give_, to_enter_, to_leave_;
    Bits is_fresh_; // chunks that only their first holders have
    std::vector<Bits> pods_with_, pods_without_; // pods of each chunk
    std::vector<Bits> near_out_, near_in_; // by NIC: chunks that its ranks have, chunks that they need

    // With pods, by receiving host: the hosts that have got a chunk it needs since can_send() was last false.
    mutable std::vector<Bits> possible_senders_;

    size_t chunks() const { return workload_.host_class_of.size(); }
    Bits none() const { return Bits(chunks()); }
    bool has_pods() const { return !nics_.pod.empty(); }

    void place(int64_t c, const Members::Row &holders, const Members::Row &destinations) {
        for (const int64_t h : destinations) {
            miss_[h].set(c);
            ++untaken_[h];
            to_get_[h] += size(c);
        }
        for (const int64_t h : holders) {
            have_[h].set(c), has_[c].set(h);
            arrived_[h].push_back(c);
            ++held_[h];
            to_give_[h] += size(c);
            allow_sends(c, h);
        }
        set_copies(c, holders.size());
        least_copies_ = std::min(least_copies_, copies_[c]);
        is_fresh_.set(c);
        if (!has_pods())
            return;
        for (const int64_t h : holders)
            pods_with_[c].set(nics_.pod[h]), in_pod_[nics_.pod[h]].set(c);
        for (const int64_t b : destinations)
            if (!in_pod_[nics_.pod[b]].has(c))
                pods_without_[c].set(nics_.pod[b]);
        pods_without_[c].each([&](int64_t q) { to_enter_[q] += size(c); });
        if (pods_with_[c].count() == 1)
            pods_with_[c].each([&](int64_t p) { to_leave_[p] += size(c) * pods_without_[c].count(); });
    }

    void allow_sends(int64_t c, int64_t host) {
        if (has_pods())
            for (const int64_t b : workload_.host_class_receivers[workload_.host_class_of[c]])
                if (const int64_t pod = nics_.pod[b];
                    miss_[b].has(c) && (pod == nics_.pod[host] || !in_pod_[pod].has(c)))
                    possible_senders_[b].set(host);
    }

    void set_copies(int64_t c, int64_t number) {
        while (static_cast<int64_t>(with_copies_.size()) <= number)
            with_copies_.push_back(none()), num_with_copies_.push_back(0);
        if (copies_[c])
            with_copies_[copies_[c]].clear(c), --num_with_copies_[copies_[c]];
        copies_[c] = number;
        with_copies_[number].set(c), ++num_with_copies_[number];
    }

    // The first of the nearest candidates of words_ that are in a set; it looks at 64 of them together. -1 for none.
    int64_t find_nearest(int64_t s, int64_t r, const Bits &set) const {
        int64_t best = -1, nearest = -1;
        const auto take = [&](int64_t near, size_t i, uint64_t word) {
            if (word && near > nearest)
                nearest = near, best = static_cast<int64_t>(64 * i) + std::countr_zero(word);
        };
        const int64_t most_near = nics_.have_multi_nic_hosts ? 3 : 0;
        for (const auto &[i, candidates] : words_) {
            const uint64_t word = candidates & set.word(i);
            if (word && most_near) {
                const uint64_t out = near_out_[s].word(i), in = near_in_[r].word(i);
                take(3, i, word & out & in), take(2, i, word & out), take(1, i, word & in);
            }
            take(0, i, word);
            if (nearest >= most_near)
                break;
        }
        return best;
    }

    // The rarest of the nearest candidates.
    template <class Candidates>
    int64_t choose_nearest(int64_t s, int64_t r, size_t first, const Candidates &candidates) const {
        int64_t best = -1, fewest = std::numeric_limits<int64_t>::max(), nearest = -1;
        const int64_t most_near = nics_.have_multi_nic_hosts ? 3 : 0;
        for (size_t i = first; i < is_fresh_.num_words(); ++i)
            for (uint64_t word = candidates(i); word; word &= word - 1) {
                const int64_t chunk = static_cast<int64_t>(64 * i) + std::countr_zero(word);
                const int64_t near = most_near ? 2 * near_out_[s].has(chunk) + near_in_[r].has(chunk) : 0;
                if (near > nearest || (near == nearest && copies_[chunk] < fewest))
                    fewest = copies_[chunk], nearest = near, best = chunk;
                if (fewest == least_copies_ && nearest == most_near)
                    return best; // no chunk is rarer or nearer, and the lowest number wins ties
            }
        return best;
    }

    void place_ranks() {
        near_out_.assign(nics_.host.size(), none());
        near_in_ = near_out_;
        for (size_t i = 0; i < chunks(); ++i) {
            const int64_t k = workload_.piece_class[workload_.piece_offsets[i]], c = static_cast<int64_t>(i);
            for (const int64_t rank : workload_.class_holders[k])
                near_out_[nics_.of_rank[rank]].set(c);
            for (const int64_t rank : workload_.class_receivers[k])
                near_in_[nics_.of_rank[rank]].set(c);
        }
    }

    void enter_pod(int64_t chunk, int64_t q) {
        if (pods_with_[chunk].count() == 1)
            pods_with_[chunk].each([&](int64_t p) { to_leave_[p] -= size(chunk) * pods_without_[chunk].count(); });
        to_enter_[q] -= size(chunk);
        pods_without_[chunk].clear(q), pods_with_[chunk].set(q);
        in_pod_[q].set(chunk);
    }
};
