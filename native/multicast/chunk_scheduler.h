// Schedules the sends of chunks between ports, as ports become free.
//
// The clock is in units of the time of one chunk at rate 1. Whenever ports are free, senders and receivers are sorted
// by remaining work (in time, over all ports of their host) and matched, so that the ports with the most work left are
// busy. Each pair sends the rarest chunk that the sender's host has and the receiver's host misses. The clock then
// advances to the next end of a send. If all rates are equal, all sends of a step end together, and the schedule fills
// slot by slot. Otherwise the speeds of concurrent sends are proportionally fair (see fluid/proportional_fairness.h).
//
// Reference implementations: tests/reference/chunk_scheduler.py and others. They take the same decisions in the same
// order.

#pragma once

#include "chunk_state.h"
#include "bipartite_matching.h"
#include "../fluid/proportional_fairness.h"

constexpr double MIN_FREE_FRACTION = 0.25; // a send starts only if its path has this fraction of its full rate free
constexpr double TIME_TOLERANCE = 1e-9;   // ends within this fraction of a step are simultaneous

class ChunkScheduler {
  public:
    std::vector<ChunkSend> chunk_sends;

    ChunkScheduler(const Nics &nics, const ChunkWorkload &workload) : nics_(nics), chunk_state_(nics, workload) {
        const auto add = [&](std::vector<Port> &ports, const std::vector<double> &rates) {
            for (const double rate : rates) {
                ports.emplace_back(static_cast<int64_t>(capacity_.size()), rate);
                capacity_.push_back(rate);
            }
        };
        add(out_, nics.out), add(into_, nics.into), add(up_, nics.up), add(down_, nics.down);
        sharing_.price.assign(capacity_.size(), 0);
        host_out_.resize(nics.num_hosts), host_into_.resize(nics.num_hosts);
        for (int64_t p = 0; p < nics.count(); ++p)
            if (!nics.ranks[p].empty())
                host_out_[nics.host[p]] += nics.out[p], host_into_[nics.host[p]] += nics.into[p];
        is_even_ = nics.have_equal_rates();
        partner_.assign(nics.host.size(), -1);
        keeps_partners_ = workload.keeps_partners;
        served_.assign(nics.host.size(), -1);
        to_get_.resize(nics.host.size()), to_give_.resize(nics.host.size());
        partners_.resize(nics.host.size()), num_rows_ = std::max<size_t>(nics.host.size(), nics.num_hosts);
    }
    virtual ~ChunkScheduler() = default;

    // Schedules everything; false if some chunk cannot reach a host that needs it.
    bool run() {
        while (true) {
            interruption_.poll();
            while (match())
                may_be_late_ = false;
            if (!flows_.empty())
                advance();
            else if (may_be_late_ || !has_more())
                break;
            else // a chunk was left to a faster port that cannot send it: allow slower ports
                may_be_late_ = true;
        }
        return !has_more();
    }

  protected:
    const Nics &nics_;
    ChunkState chunk_state_;
    std::vector<Port> out_, into_, up_, down_;
    std::vector<double> to_get_, to_give_; // remaining time of each receiver and sender, by its host
    std::vector<double> host_out_, host_into_; // total rate of the ports of each host
    std::vector<int64_t> partner_; // by receiver: its last sender
    std::vector<int64_t> served_; // by sender: its receiver, if partners are kept
    bool keeps_partners_ = false;
    bool may_be_late_ = false; // whether would_be_late() is ignored

    bool has_more() const {
        for (int64_t h = 0; h < nics_.num_hosts; ++h)
            if (chunk_state_.to_get(h))
                return true;
        return false;
    }

    Matching matching_;
    std::vector<Partners> partners_; // by receiver; rows are receiving hosts if rates are equal, else receivers
    std::vector<char> is_sender_;    // by NIC
    size_t num_rows_;

    // Starts sends between free ports; returns whether one started.
    bool match() {
        std::vector<int64_t> senders, receivers;
        for (int64_t p = 0; p < nics_.count(); ++p) {
            if (nics_.ranks[p].empty())
                continue;
            const int64_t host = nics_.host[p];
            if (out_[p].free > MIN_FREE_FRACTION / 4 * out_[p].rate && chunk_state_.held(host))
                senders.push_back(p);
            if (into_[p].free > MIN_FREE_FRACTION / 4 * into_[p].rate && chunk_state_.untaken(host))
                receivers.push_back(p);
        }
        if (senders.empty() || receivers.empty())
            return false;
        for (const int64_t p : receivers)
            to_get_[p] =
                static_cast<double>(chunk_state_.to_get(nics_.host[p])) / CHUNK_UNITS / host_into_[nics_.host[p]];
        for (const int64_t p : senders)
            to_give_[p] =
                static_cast<double>(chunk_state_.to_give(nics_.host[p])) / CHUNK_UNITS / host_out_[nics_.host[p]];
        std::stable_sort(receivers.begin(), receivers.end(), [&](auto a, auto b) {
            return to_get_[a] != to_get_[b] ? to_get_[a] > to_get_[b] : into_[a].rate > into_[b].rate;
        });
        std::stable_sort(senders.begin(), senders.end(), [&](auto a, auto b) {
            return to_give_[a] != to_give_[b] ? to_give_[a] > to_give_[b] : out_[a].rate > out_[b].rate;
        });
        return pair(senders, receivers);
    }

    // Starts sends between free ports; both lists are sorted by remaining work, most first.
    virtual bool pair(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        if (keeps_partners_)
            return pair_again(senders, receivers);
        // With equal rates, all ports of a host have the same partners, and all ports in the lists are free.
        const auto can = [this](int64_t r, int64_t s) { return is_even_ ? chunk_state_.can_send(s, r) : can_start(s, r); };
        is_sender_.assign(nics_.host.size(), false);
        for (const int64_t s : senders)
            is_sender_[s] = true;
        for (const int64_t r : receivers) {
            partners_[r] = {static_cast<size_t>(is_even_ ? nics_.host[r] : r)};
            // A change of sender costs a turn, so prefer the last one, unless it has chunks that only it can give.
            if (const int64_t last = partner_[r]; last >= 0 && is_sender_[last] && to_give_[last] == 0 && can(r, last))
                partners_[r].lead = last;
        }
        const std::vector<int64_t> &sender_of =
            matching_.find_pairs(senders, receivers, partners_, num_rows_, to_give_, can);
        bool started = false;
        for (const int64_t r : receivers)
            if (sender_of[r] >= 0 && start(sender_of[r], r)) {
                partner_[r] = sender_of[r];
                started = true;
            }
        return started;
    }

    // Starts sends to the receivers that senders already serve. If there are none, starts one new pair: the receiver
    // with the most left to get (ties: the most free rate) and the fastest sender that can serve it. So each receiver
    // gets senders of as much rate as it can take, and no more.
    bool pair_again(std::vector<int64_t> senders, std::vector<int64_t> receivers) {
        bool started = false;
        for (const int64_t s : senders) {
            const int64_t r = served_[s];
            if (std::find(receivers.begin(), receivers.end(), r) != receivers.end() && can_start(s, r))
                started |= start(s, r);
        }
        if (started)
            return true;
        std::stable_sort(receivers.begin(), receivers.end(), [&](auto a, auto b) {
            return to_get_[a] != to_get_[b] ? to_get_[a] > to_get_[b] : into_[a].free > into_[b].free;
        });
        std::stable_sort(senders.begin(), senders.end(), [&](auto a, auto b) { return out_[a].rate > out_[b].rate; });
        for (const int64_t r : receivers)
            for (const int64_t s : senders)
                if (can_start(s, r) && start(s, r)) {
                    served_[s] = r;
                    return true;
                }
        return false;
    }

    bool crosses_pods(int64_t s, int64_t r) const {
        return !nics_.pod.empty() && nics_.pod[nics_.host[s]] != nics_.pod[nics_.host[r]];
    }

    bool can_start(int64_t s, int64_t r) {
        return chunk_state_.can_send(s, r) && rate(s, r) > 0 && !would_be_late(s, r);
    }

    // Whether a send would last longer than everything its receiver's host has left to get, while a faster port could
    // receive or send the chunk.
    bool would_be_late(int64_t s, int64_t r) {
        const double left =
            static_cast<double>(chunk_state_.to_get(nics_.host[r])) / CHUNK_UNITS / host_into_[nics_.host[r]];
        const double passes = rate(s, r) * left;
        if (is_even_ || may_be_late_ || passes >= 1)
            return false;
        const int64_t chunk = chunk_state_.choose(s, r, false);
        if (static_cast<double>(chunk_state_.size(chunk)) / CHUNK_UNITS <= passes)
            return false;
        for (int64_t p = 0; p < nics_.count(); ++p)
            if (!nics_.ranks[p].empty() &&
                ((nics_.host[p] == nics_.host[r] && into_[p].rate > into_[r].rate) ||
                 (out_[p].rate > out_[s].rate && chunk_state_.has(chunk, nics_.host[p]))))
                return true;
        return false;
    }

    // Calls f with each port on the path from NIC s to NIC r.
    template <typename F> void each_port(int64_t s, int64_t r, F f) {
        f(out_[s]);
        if (crosses_pods(s, r)) {
            f(up_[nics_.pod[nics_.host[s]]]);
            f(down_[nics_.pod[nics_.host[r]]]);
        }
        f(into_[r]);
    }

    // The rate that a send would get now, 0 if too little to start.
    double rate(int64_t s, int64_t r) {
        double free = std::numeric_limits<double>::infinity(), full = free;
        each_port(s, r, [&](const Port &port) {
            free = std::min(free, port.free);
            full = std::min(full, port.rate);
        });
        return free >= MIN_FREE_FRACTION * full ? free : 0;
    }

    // Starts a send; false if there is no chunk for it.
    bool start(int64_t s, int64_t r, bool may_enter_again = false) {
        const double reserved = rate(s, r);
        if (reserved <= 0)
            return false;
        const int64_t chunk = chunk_state_.choose(s, r, may_enter_again);
        if (chunk < 0)
            return false;
        const int64_t source = chunk_state_.source(chunk, nics_.host[s]), chunk_send = static_cast<int64_t>(chunk_sends.size());
        chunk_state_.start(chunk, nics_.host[r]);
        std::vector<int64_t> order;
        each_port(s, r, [&](Port &port) {
            port.reserve(reserved, s, [&](int64_t earlier) {
                if (std::find(order.begin(), order.end(), earlier) == order.end())
                    order.push_back(earlier);
            });
        });
        chunk_sends.push_back({chunk, s, r, source, std::move(order), now_, now_});
        const double left = static_cast<double>(chunk_state_.size(chunk)) / CHUNK_UNITS;
        flows_.push_back({s, r, chunk, reserved, chunk_send, left, 0});
        return true;
    }

  private:
    Interruption interruption_;
    std::vector<Flow> flows_, rest_;
    double now_ = 0;
    Sharing sharing_;
    std::vector<double> capacity_;
    bool is_even_ = true;
    std::vector<Path> paths_;
    std::vector<int64_t> numbers_;

    // Advances the clock to the next end of a send.
    void advance() {
        set_speeds();
        double step = std::numeric_limits<double>::infinity();
        for (const Flow &flow : flows_)
            step = std::min(step, flow.left / flow.speed);
        const double limit = step * (1 + TIME_TOLERANCE);
        now_ += step;
        rest_.clear();
        for (Flow &flow : flows_) {
            if (flow.left / flow.speed > limit) {
                flow.left -= flow.speed * step;
                rest_.push_back(flow);
                continue;
            }
            chunk_sends[flow.chunk_send].end = now_;
            each_port(flow.s, flow.r,
                          [&](Port &port) { port.release(flow.rate, flow.chunk_send, flow.s); });
            chunk_state_.land(flow.chunk, flow.r, flow.chunk_send);
        }
        flows_.swap(rest_);
    }

    // Sets the current rate of each send; with equal rates each send has its ports to itself.
    void set_speeds() {
        if (is_even_) {
            for (Flow &flow : flows_)
                flow.speed = flow.rate;
            return;
        }
        numbers_.clear();
        std::vector<size_t> ends;
        for (const Flow &flow : flows_) {
            each_port(flow.s, flow.r, [&](const Port &port) { numbers_.push_back(port.number); });
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
