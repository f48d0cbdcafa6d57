// Who sends which chunk to whom, and when. The Python twin, with the explanation, is reshard.schedule; both take the
// same decisions in the same order.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "matching.h"
#include "parts.h"
#include "sharing.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double LEAST_PART = 0.25;
constexpr double TOGETHER = 1e-9;

class Scheduler {
  public:
    Schedule schedule;

    Scheduler(const Ints &host, const Floats &out, const Floats &into, const Ints &of_rank, const Ints &pod,
              const Floats &up, const Floats &down, const Ints &holders_at, const Ints &holders,
              const Ints &receivers_at, const Ints &receivers, const Ints &class_of)
        : host_(host.data(), host.data() + host.shape(0)), of_rank_(of_rank.data(), of_rank.data() + of_rank.shape(0)),
          pod_(pod.data(), pod.data() + pod.shape(0)), class_of_(class_of.data(), class_of.data() + class_of.shape(0)) {
        const auto add = [&](std::vector<Resource> &resources, const Floats &rates) {
            for (size_t i = 0; i < rates.shape(0); ++i) {
                resources.emplace_back(static_cast<int64_t>(capacity_.size()), rates.data()[i]);
                capacity_.push_back(rates.data()[i]);
            }
        };
        add(out_, out), add(into_, into), add(up_, up), add(down_, down);
        sharing_.price.assign(capacity_.size(), 0);
        is_even_ = std::all_of(capacity_.begin(), capacity_.end(), [&](double rate) { return rate == capacity_[0]; });
        num_hosts_ = static_cast<size_t>(*std::max_element(host_.begin(), host_.end())) + 1;
        ranks_of_port_.resize(host_.size());
        for (size_t rank = 0; rank < of_rank_.size(); ++rank)
            if (of_rank_[rank] >= 0)
                ranks_of_port_[of_rank_[rank]].push_back(static_cast<int64_t>(rank));
        sent_.assign(of_rank_.size(), 0), landed_.assign(of_rank_.size(), 0);
        for (size_t k = 0; k + 1 < holders_at.shape(0); ++k) {
            holders_.push_back(by_host(holders, holders_at.data()[k], holders_at.data()[k + 1]));
            receivers_.push_back(by_host(receivers, receivers_at.data()[k], receivers_at.data()[k + 1]));
        }
        prepare();
    }

    bool run() {
        while (true) {
            while (match()) {
            }
            if (flows_.empty())
                break;
            advance();
        }
        return std::all_of(missing_.begin(), missing_.end(), [](int64_t left) { return left == 0; });
    }

  private:
    std::vector<int64_t> host_, of_rank_, pod_, class_of_;
    std::vector<Resource> out_, into_, up_, down_;
    size_t num_hosts_ = 0;
    std::vector<std::vector<int64_t>> ranks_of_port_;
    std::vector<int64_t> sent_, landed_;
    std::vector<ByHost> holders_, receivers_;
    std::vector<Bits> have_, miss_, in_pod_;
    std::vector<int64_t> copies_, missing_;
    Bits fresh_;
    std::unordered_map<int64_t, std::vector<std::pair<int64_t, int64_t>>> where_;
    std::vector<Flow> flows_, rest_;
    double now_ = 0;
    Matching matching_;
    Sharing sharing_;
    std::vector<double> capacity_;
    bool is_even_ = true;
    std::vector<Path> paths_;
    std::vector<int64_t> numbers_;

    ByHost by_host(const Ints &ranks, int64_t first, int64_t last) const {
        ByHost found;
        for (int64_t i = first; i < last; ++i) {
            const int64_t rank = ranks.data()[i], host = host_[of_rank_[rank]];
            auto row = std::find_if(found.begin(), found.end(), [&](const auto &entry) { return entry.first == host; });
            if (row == found.end())
                row = found.insert(found.end(), {host, {}});
            row->second.push_back(rank);
        }
        return found;
    }

    static const std::vector<int64_t> *at_host(const ByHost &ranks, int64_t host) {
        for (const auto &entry : ranks)
            if (entry.first == host)
                return &entry.second;
        return nullptr;
    }

    void prepare() {
        const size_t count = class_of_.size();
        have_.assign(num_hosts_, Bits(count)), miss_.assign(num_hosts_, Bits(count));
        in_pod_.assign(up_.size(), Bits(count));
        copies_.assign(count, 0), missing_.assign(num_hosts_, 0), fresh_ = Bits(count);
        for (size_t chunk = 0; chunk < count; ++chunk) {
            const int64_t c = static_cast<int64_t>(chunk);
            const ByHost &holders = holders_[class_of_[chunk]];
            bool is_needed = false;
            for (const auto &entry : receivers_[class_of_[chunk]])
                if (!at_host(holders, entry.first)) {
                    miss_[entry.first].set(c);
                    ++missing_[entry.first];
                    is_needed = true;
                }
            if (!is_needed)
                continue;
            for (const auto &entry : holders) {
                have_[entry.first].set(c);
                if (!pod_.empty())
                    in_pod_[pod_[entry.first]].set(c);
            }
            copies_[chunk] = static_cast<int64_t>(holders.size());
            fresh_.set(c);
        }
        for (size_t chunk = 0; chunk < count; ++chunk)
            for (const auto &entry : receivers_[class_of_[chunk]])
                if (const auto *near = at_host(holders_[class_of_[chunk]], entry.first)) {
                    const int64_t holder = least(*near, sent_);
                    for (const int64_t rank : entry.second)
                        inside(static_cast<int64_t>(chunk), holder, rank, -1);
                }
    }

    static int64_t least(const std::vector<int64_t> &ranks, const std::vector<int64_t> &load) {
        return *std::min_element(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return load[a] < load[b]; });
    }

    int64_t inside(int64_t chunk, int64_t sender, int64_t receiver, int64_t source) {
        ++sent_[sender];
        return schedule.add(chunk, sender, receiver, source,
                            source < 0 ? std::vector<int64_t>{} : std::vector<int64_t>{source}, now_);
    }

    bool match() {
        std::vector<int64_t> senders, receivers;
        const int64_t num_ports = static_cast<int64_t>(host_.size());
        for (int64_t p = 0; p < num_ports; ++p) {
            if (ranks_of_port_[p].empty())
                continue;
            if (out_[p].free > LEAST_PART / 4 * out_[p].rate && have_[host_[p]].any())
                senders.push_back(p);
            if (into_[p].free > LEAST_PART / 4 * into_[p].rate && miss_[host_[p]].any())
                receivers.push_back(p);
        }
        if (senders.empty() || receivers.empty())
            return false;
        std::vector<double> to_get(num_ports);
        std::vector<double> weight(num_ports);
        for (const int64_t p : receivers)
            to_get[p] = static_cast<double>(missing_[host_[p]]) / into_[p].rate;
        std::vector<int64_t> fresh(num_hosts_, -1);
        for (const int64_t p : senders) {
            const size_t host = static_cast<size_t>(host_[p]);
            if (fresh[host] < 0) {
                fresh[host] = 0;
                for (size_t i = 0; i < fresh_.num_words(); ++i)
                    fresh[host] += std::popcount(have_[host].word(i) & fresh_.word(i));
            }
            weight[p] = static_cast<double>(fresh[host]) / out_[p].rate;
        }
        std::stable_sort(receivers.begin(), receivers.end(), [&](auto a, auto b) { return to_get[a] > to_get[b]; });
        std::stable_sort(senders.begin(), senders.end(), [&](auto a, auto b) { return weight[a] > weight[b]; });
        std::vector<int8_t> known(num_hosts_ * num_hosts_, -1);
        std::vector<std::vector<int64_t>> partners(num_ports);
        for (const int64_t r : receivers)
            for (const int64_t s : senders)
                if (rate(s, r) > 0) {
                    int8_t &can = known[host_[s] * num_hosts_ + host_[r]];
                    if (can < 0)
                        can = has_candidates(s, r);
                    if (can)
                        partners[r].push_back(s);
                }
        const std::vector<int64_t> &sender_of = matching_.find_pairs(senders, receivers, partners, weight);
        std::vector<std::pair<int64_t, int64_t>> pairs;
        for (const int64_t r : receivers)
            if (sender_of[r] >= 0)
                pairs.emplace_back(sender_of[r], r);
        if (!pod_.empty())
            std::stable_sort(pairs.begin(), pairs.end(), [&](const auto &x, const auto &y) {
                const bool a = crosses_pods(host_[x.first], host_[x.second]);
                const bool b = crosses_pods(host_[y.first], host_[y.second]);
                return a != b ? a : weight[x.first] > weight[y.first];
            });
        bool started = false;
        for (const auto &[s, r] : pairs)
            started |= start(s, r);
        return started;
    }

    bool crosses_pods(int64_t a, int64_t b) const { return !pod_.empty() && pod_[a] != pod_[b]; }

    uint64_t candidate_word(int64_t a, int64_t b, bool crosses, size_t i) const {
        const uint64_t found = have_[a].word(i) & miss_[b].word(i);
        return crosses ? found & ~in_pod_[pod_[b]].word(i) : found;
    }

    bool has_candidates(int64_t s, int64_t r) const {
        const int64_t a = host_[s], b = host_[r];
        const bool crosses = crosses_pods(a, b);
        for (size_t i = 0; i < fresh_.num_words(); ++i)
            if (candidate_word(a, b, crosses, i))
                return true;
        return false;
    }

    int64_t rarest(int64_t s, int64_t r) const {
        const int64_t a = host_[s], b = host_[r];
        const bool crosses = crosses_pods(a, b);
        int64_t best = -1, fewest = std::numeric_limits<int64_t>::max();
        for (size_t i = 0; i < fresh_.num_words(); ++i)
            for (uint64_t word = candidate_word(a, b, crosses, i); word; word &= word - 1) {
                const int64_t chunk = static_cast<int64_t>(64 * i) + std::countr_zero(word);
                if (copies_[chunk] < fewest)
                    fewest = copies_[chunk], best = chunk;
            }
        return best;
    }

    template <typename F> void each_resource(int64_t s, int64_t r, F f) {
        const int64_t a = host_[s], b = host_[r];
        f(out_[s]);
        if (crosses_pods(a, b)) {
            f(up_[pod_[a]]);
            f(down_[pod_[b]]);
        }
        f(into_[r]);
    }

    double rate(int64_t s, int64_t r) {
        double free = std::numeric_limits<double>::infinity(), full = free;
        each_resource(s, r, [&](const Resource &resource) {
            free = std::min(free, resource.free);
            full = std::min(full, resource.rate);
        });
        return free >= LEAST_PART * full ? free : 0;
    }

    bool start(int64_t s, int64_t r) {
        const double taken = rate(s, r);
        const int64_t chunk = rarest(s, r);
        if (chunk < 0 || taken <= 0)
            return false;
        const int64_t a = host_[s], b = host_[r];
        miss_[b].clear(chunk);
        ++copies_[chunk];
        fresh_.clear(chunk);
        if (!pod_.empty())
            in_pod_[pod_[b]].set(chunk);
        const auto [sender, source] = find_sender(chunk, a, s);
        const int64_t receiver = find_landing(chunk, b, r);
        std::vector<int64_t> order;
        if (source >= 0)
            order.push_back(source);
        each_resource(s, r, [&](Resource &resource) {
            for (const int64_t message : resource.take(taken))
                if (std::find(order.begin(), order.end(), message) == order.end())
                    order.push_back(message);
        });
        const int64_t message = schedule.add(chunk, sender, receiver, source, order, now_);
        ++sent_[sender];
        ++landed_[receiver];
        flows_.push_back({s, r, chunk, taken, message, receiver, 1, 0});
        return true;
    }

    std::vector<std::pair<int64_t, int64_t>> &brought(int64_t chunk, int64_t host) {
        return where_[chunk * static_cast<int64_t>(num_hosts_) + host];
    }

    std::pair<int64_t, int64_t> find_sender(int64_t chunk, int64_t host, int64_t port) {
        auto &known = brought(chunk, host);
        if (known.empty())
            if (const auto *holders = at_host(holders_[class_of_[chunk]], host))
                for (const int64_t rank : *holders)
                    known.emplace_back(rank, -1);
        const std::pair<int64_t, int64_t> *here = nullptr, *near = nullptr;
        for (const auto &entry : known) {
            if (of_rank_[entry.first] == port && (!here || sent_[entry.first] < sent_[here->first]))
                here = &entry;
            if (!near || sent_[entry.first] < sent_[near->first])
                near = &entry;
        }
        if (here)
            return *here;
        const int64_t rank = least(ranks_of_port_[port], landed_);
        const int64_t message = inside(chunk, near->first, rank, near->second);
        known.emplace_back(rank, message);
        return {rank, message};
    }

    int64_t find_landing(int64_t chunk, int64_t host, int64_t port) const {
        int64_t best = -1;
        for (const int64_t rank : *at_host(receivers_[class_of_[chunk]], host))
            if (of_rank_[rank] == port && (best < 0 || landed_[rank] < landed_[best]))
                best = rank;
        return best >= 0 ? best : least(ranks_of_port_[port], landed_);
    }

    void advance() {
        set_speeds();
        double step = std::numeric_limits<double>::infinity();
        for (const Flow &flow : flows_)
            step = std::min(step, flow.left / flow.speed);
        const double limit = step * (1 + TOGETHER);
        now_ += step;
        rest_.clear();
        for (Flow &flow : flows_) {
            if (flow.left / flow.speed > limit) {
                flow.left -= flow.speed * step;
                rest_.push_back(flow);
                continue;
            }
            schedule.end[flow.message] = now_;
            each_resource(flow.s, flow.r, [&](Resource &resource) { resource.give(flow.rate, flow.message); });
            const int64_t host = host_[flow.r];
            have_[host].set(flow.chunk);
            --missing_[host];
            auto &known = brought(flow.chunk, host);
            known.emplace_back(flow.rank, flow.message);
            for (const int64_t needer : *at_host(receivers_[class_of_[flow.chunk]], host))
                if (needer != flow.rank)
                    known.emplace_back(needer, inside(flow.chunk, flow.rank, needer, flow.message));
        }
        flows_.swap(rest_);
    }

    void set_speeds() {
        if (is_even_) {
            for (Flow &flow : flows_)
                flow.speed = flow.rate;
            return;
        }
        numbers_.clear();
        std::vector<size_t> ends;
        for (const Flow &flow : flows_) {
            each_resource(flow.s, flow.r, [&](const Resource &resource) { numbers_.push_back(resource.number); });
            ends.push_back(numbers_.size());
        }
        paths_.clear();
        for (size_t i = 0; i < ends.size(); ++i)
            paths_.push_back({numbers_.data() + (i ? ends[i - 1] : 0), numbers_.data() + ends[i]});
        sharing_.share(paths_, capacity_);
        for (size_t i = 0; i < flows_.size(); ++i)
            flows_[i].speed = sharing_.rate[i];
    }
};
