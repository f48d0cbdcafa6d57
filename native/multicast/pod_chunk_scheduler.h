// The chunk scheduler for topologies with pods, where several pairs of ports compete for the uplinks of pods.
//
// A port is one direction of a NIC or of an uplink. Its worth is 1 if its remaining time is the longest of all, and
// steeply less if it is shorter. The weight of a possible send is the sum of the worths of its ports. A port of a NIC
// takes one send at a time, one of an uplink as many as its rate allows. A set of sends is chosen greedily, heaviest
// first. Exchanges then improve the set as long as its weight grows: an exchange adds one send, drops the sends that
// block it, and adds other sends that then fit. A round of exchanges ends after MAX_FAILURES in a row without a gain. A
// chunk enters a pod over its uplink once. Uplinks with time to spare may also bring chunks that the pod already has
// (help_pods).
//
// Reference implementation: tests/reference/pod_chunk_scheduler.py.

#pragma once

#include <numeric>

#include "choice_order.h"
#include "chunk_scheduler.h"

constexpr int PASSES = 8;          // limit on rounds of exchanges
constexpr int MAX_FAILURES = 1024; // limit on exchanges in a row without a gain
constexpr double GAIN = 1e-9;      // tolerance of rates, and least gain of an exchange

class PodChunkScheduler final : public ChunkScheduler {
  public:
    PodChunkScheduler(const Nics &nics, const ChunkWorkload &workload)
        : ChunkScheduler(nics, workload) {
        first_uplink_ = up_.front().number;
        by_.resize(down_.back().number + 1), worth_.resize(by_.size()), is_busy_.resize(by_.size());
        place_.resize(by_.size()), taken_.resize(by_.size()), heaviest_.resize(by_.size());
        min_rate_ = std::numeric_limits<double>::infinity();
        for (const std::vector<Port> *ports : {&out_, &into_, &up_, &down_})
            for (const Port &port : *ports)
                if (port.rate > 0)
                    min_rate_ = std::min(min_rate_, MIN_FREE_FRACTION * port.rate);
    }

  protected:
    bool pair(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) override {
        find_worth(senders, receivers);
        list_ends(senders, receivers);
        choose();
        bool started = false;
        for (const int i : chosen())
            started |= start(choices_[i].s, choices_[i].r);
        return help_pods(senders, receivers) || started;
    }

  private:
    // A send that could start. passes: the numbers of its ports, sender's port first.
    struct Choice {
        int64_t s, r;
        double rate;
        int64_t passes[4] = {};
        int num_passed = 0;
        double weight = 0;
        bool is_chosen = false;
        int64_t first() const { return passes[0]; }
        int64_t last() const { return passes[num_passed - 1]; }
    };
    using Row = std::vector<int>; // indices of choices
    static constexpr int NONE = -1, UNKNOWN = -2;

    int64_t first_uplink_;
    double min_rate_; // no send has a lower rate
    std::vector<double> worth_;
    std::vector<int64_t> senders_, receivers_; // ascending
    std::vector<ChoiceOrder::End> sender_ends_, receiver_ends_;
    std::vector<size_t> first_of_; // by host: the place of its first sender; NICs are numbered host by host
    Bits idle_;                    // hosts with senders that are not busy
    std::vector<int64_t> place_;   // by port of a sender or a receiver: its place in that list
    std::vector<Choice> choices_;  // in the order in which they were first needed
    Row index_;                    // by pair of places of a sender and a receiver: its choice, NONE or UNKNOWN
    ChoiceOrder order_;
    Row sorted_;                   // the heaviest choices, sorted
    std::vector<Row> by_;          // by port: the chosen sends that pass it
    std::vector<double> taken_;    // by uplink: see taken(), -1 where it is not known
    std::vector<double> heaviest_; // by port: an upper bound of the weights of its choices
    size_t num_chosen_ = 0;
    std::vector<char> is_busy_;                 // by port: whether a chosen send begins or ends there
    Row gone_, added_, others_, free_, chosen_; // scratch

    Port &uplink(int64_t number) {
        const int64_t i = number - first_uplink_, n = static_cast<int64_t>(up_.size());
        return i < n ? up_[i] : down_[i - n];
    }

    // Lists the senders and the receivers, and bounds of the weights of their choices.
    void list_ends(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        double most_out = 0, most_into = 0; // across pods
        std::vector<double> pod_out(up_.size()), pod_into(up_.size());
        const auto list = [&](std::vector<int64_t> &nics, std::vector<ChoiceOrder::End> &ends, const auto &ports,
                              const auto &uplinks, double &most, std::vector<double> &most_inside) {
            std::sort(nics.begin(), nics.end());
            ends.clear();
            for (const int64_t nic : nics) {
                const int64_t pod = nics_.pod[nics_.host[nic]];
                place_[ports[nic].number] = static_cast<int64_t>(ends.size());
                ends.push_back({nics_.host[nic], pod, worth_[ports[nic].number], worth_[uplinks[pod].number]});
                most = std::max(most, ends.back().worth + ends.back().uplink);
                most_inside[pod] = std::max(most_inside[pod], ends.back().worth);
            }
        };
        senders_ = senders, receivers_ = receivers;
        list(senders_, sender_ends_, out_, up_, most_out, pod_out);
        list(receivers_, receiver_ends_, into_, down_, most_into, pod_into);
        for (size_t i = 0; i < senders_.size(); ++i)
            heaviest_[out_[senders_[i]].number] = max_weight(sender_ends_[i], most_into, pod_into);
        for (size_t j = 0; j < receivers_.size(); ++j)
            heaviest_[into_[receivers_[j]].number] = max_weight(receiver_ends_[j], most_out, pod_out);
        choices_.clear(), index_.assign(senders_.size() * receivers_.size(), UNKNOWN);
        first_of_.assign(nics_.num_hosts + 1, 0), idle_ = Bits(nics_.num_hosts);
        for (const ChoiceOrder::End &end : sender_ends_)
            ++first_of_[end.host + 1], idle_.set(end.host);
        std::partial_sum(first_of_.begin(), first_of_.end(), first_of_.begin());
    }

    static double max_weight(const ChoiceOrder::End &end, double most, const std::vector<double> &most_inside) {
        return end.worth + std::max(end.uplink + most, most_inside[end.pod]);
    }

    // The choice of a sender and a receiver, given by their places; NONE if the send cannot start.
    int find(size_t i, size_t j) {
        if (!chunk_state_.possible_senders(receivers_[j]).has(sender_ends_[i].host))
            return NONE;
        int &number = index_[j * senders_.size() + i];
        return number == UNKNOWN ? number = describe(i, j) : number;
    }

    int describe(size_t i, size_t j) {
        const int64_t s = senders_[i], r = receivers_[j];
        if (!can_start(s, r))
            return NONE;
        Choice choice{s, r, rate(s, r)};
        each_port(s, r, [&](const Port &port) {
            choice.passes[choice.num_passed++] = port.number;
            choice.weight += worth_[port.number];
        });
        choices_.push_back(choice);
        return static_cast<int>(choices_.size()) - 1;
    }

    // Sorts choices: heaviest first, then by receiver, then by sender.
    void sort(Row &row) const {
        std::sort(row.begin(), row.end(), [&](int i, int j) {
            const Choice &a = choices_[i], &b = choices_[j];
            return a.weight != b.weight ? a.weight > b.weight : a.r != b.r ? a.r < b.r : a.s < b.s;
        });
    }

    // The choices that begin or end at a port and whose other port is free, sorted.
    void find_free(int64_t number, Row &found) {
        found.clear();
        const bool sends = number < static_cast<int64_t>(out_.size());
        const auto add = [&](size_t i, size_t j) {
            if (!is_busy_[sends ? into_[receivers_[j]].number : out_[senders_[i]].number])
                if (const int choice = find(i, j); choice != NONE)
                    found.push_back(choice);
        };
        if (sends)
            for (size_t j = 0; j < receivers_.size(); ++j)
                add(place_[number], j);
        else
            each_sender(place_[number], idle_, idle_, [&](size_t i) { add(i, place_[number]); });
        sort(found);
    }

    void add(int i) {
        choices_[i].is_chosen = true, ++num_chosen_;
        is_busy_[choices_[i].first()] = is_busy_[choices_[i].last()] = true;
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            by_[choices_[i].passes[j]].push_back(i);
            taken_[choices_[i].passes[j]] = -1;
        }
        find_idle(nics_.host[choices_[i].s]);
    }

    void remove(int i) {
        choices_[i].is_chosen = false, --num_chosen_;
        is_busy_[choices_[i].first()] = is_busy_[choices_[i].last()] = false; // a port takes one send at a time
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            Row &row = by_[choices_[i].passes[j]];
            row.erase(std::find(row.begin(), row.end(), i));
            taken_[choices_[i].passes[j]] = -1;
        }
        find_idle(nics_.host[choices_[i].s]);
    }

    void find_idle(int64_t host) {
        idle_.clear(host);
        for (size_t i = first_of_[host]; i < first_of_[host + 1]; ++i)
            if (!is_busy_[out_[senders_[i]].number])
                idle_.set(host);
    }

    // Calls f with the place of each sender that may have a chunk for a receiver and whose host is in both sets.
    template <typename F> void each_sender(size_t j, const Bits &some, const Bits &others, F f) const {
        const Bits &possible = chunk_state_.possible_senders(receivers_[j]);
        for (size_t k = 0; k < possible.num_words(); ++k)
            for (uint64_t word = possible.word(k) & some.word(k) & others.word(k); word; word &= word - 1) {
                const size_t host = 64 * k + std::countr_zero(word);
                for (size_t i = first_of_[host]; i < first_of_[host + 1]; ++i)
                    f(i);
            }
    }

    // Finds the chosen sends that must be dropped so that choice i fits: sends at its ports, and on an uplink the
    // lightest sends.
    void in_the_way(int i, Row &found) {
        found.clear();
        const Choice &choice = choices_[i];
        for (const int64_t port : {choice.first(), choice.last()})
            found.insert(found.end(), by_[port].begin(), by_[port].end());
        for (int j = 1; j + 1 < choice.num_passed; ++j) {
            const int64_t number = choice.passes[j];
            others_.clear();
            double taken = 0;
            for (const int other : by_[number])
                if (std::find(found.begin(), found.end(), other) == found.end())
                    others_.push_back(other), taken += choices_[other].rate;
            double left = uplink(number).free * (1 + GAIN) - choice.rate - taken;
            if (left >= 0)
                continue;
            std::stable_sort(others_.begin(), others_.end(),
                             [&](int a, int b) { return choices_[a].weight < choices_[b].weight; });
            for (size_t k = 0; left < 0 && k < others_.size(); ++k) {
                left += choices_[others_[k]].rate;
                found.push_back(others_[k]);
            }
        }
    }

    // The rate that the chosen sends take from an uplink.
    double taken(int64_t number) {
        double &sum = taken_[number];
        if (sum < 0) { // not known
            sum = 0;
            for (const int other : by_[number])
                sum += choices_[other].rate;
        }
        return sum;
    }

    // Whether in_the_way() finds nothing.
    bool fits(int i) {
        for (int j = 0; j < choices_[i].num_passed; ++j) {
            const int64_t number = choices_[i].passes[j];
            if (number < first_uplink_) {
                if (is_busy_[number])
                    return false;
                continue;
            }
            if (!by_[number].empty() && uplink(number).free * (1 + GAIN) - choices_[i].rate - taken(number) < 0)
                return false;
        }
        return true;
    }

    // Whether an uplink has no room for any further send.
    bool is_full(int64_t number) {
        return !by_[number].empty() && uplink(number).free * (1 + GAIN) - min_rate_ - taken(number) < 0;
    }

    void choose() {
        for (Row &row : by_)
            row.clear();
        is_busy_.assign(is_busy_.size(), false), taken_.assign(taken_.size(), -1), num_chosen_ = 0;
        const auto is_served = [&](size_t j) { return is_busy_[into_[receivers_[j]].number]; };
        order_.start(sender_ends_, receiver_ends_, nics_.num_hosts);
        while (num_chosen_ < std::min(senders_.size(), receivers_.size()) && order_.next(is_served))
            if (const size_t j = order_.receiver(); !is_served(j))
                if (const int i = first_that_fits(j); i != NONE)
                    add(i);
        order_.restart(), sorted_.clear();
        for (int pass = 0; pass < PASSES; ++pass) {
            bool is_better = false;
            int num_failures = 0;
            for (size_t k = 0; num_failures < MAX_FAILURES && (k < sorted_.size() || sort_more()); ++k)
                if (choices_[sorted_[k]].is_chosen)
                    continue;
                else if (exchange(sorted_[k]))
                    is_better = true, num_failures = 0;
                else
                    ++num_failures;
            if (!is_better)
                break;
        }
    }

    // The choice of the first sender, among the senders of the current weight, whose send to a receiver fits, or NONE.
    int first_that_fits(size_t j) {
        const int64_t pod = receiver_ends_[j].pod;
        const bool is_closed = is_full(down_[pod].number);
        size_t first = senders_.size();
        order_.each_class([&](const Bits &hosts, bool crosses) {
            if (crosses && is_closed)
                return;
            each_sender(j, hosts, idle_, [&](size_t i) {
                const int64_t from = sender_ends_[i].pod;
                if (i < first && !(crosses && (from == pod || is_full(up_[from].number))))
                    if (const int choice = find(i, j); choice != NONE && fits(choice))
                        first = i;
            });
        });
        return first < senders_.size() ? find(first, j) : NONE;
    }

    // Adds the next choices to sorted_; false if there are none.
    bool sort_more() {
        const size_t before = sorted_.size();
        while (sorted_.size() == before && order_.next([](size_t) { return false; })) {
            const size_t j = order_.receiver();
            Row &row = others_;
            row.clear();
            order_.each_class([&](const Bits &hosts, bool crosses) {
                each_sender(j, hosts, hosts, [&](size_t i) {
                    if (!crosses || sender_ends_[i].pod != receiver_ends_[j].pod)
                        if (const int choice = find(i, j); choice != NONE)
                            row.push_back(choice);
                });
            });
            sort(row);
            sorted_.insert(sorted_.end(), row.begin(), row.end());
        }
        return sorted_.size() > before;
    }

    // The chosen sends, sorted.
    const Row &chosen() {
        chosen_.clear();
        for (const int64_t s : senders_)
            if (const int i = chosen_at(out_[s].number); i != NONE)
                chosen_.push_back(i);
        sort(chosen_);
        return chosen_;
    }

    // An upper bound of the gain of exchange(i), infinite where an uplink is in the way. Each choice that it adds
    // begins or ends at a port that a dropped send leaves: at most one for each, and its other port must be free or
    // left too.
    double max_gain(int i) {
        const Choice &choice = choices_[i];
        const int from = chosen_at(choice.first()), to = chosen_at(choice.last()); // the sends that choice i replaces
        for (int j = 1; j + 1 < choice.num_passed; ++j) {
            double rates = taken(choice.passes[j]) + choice.rate;
            for (const int other : {from, to})
                if (other >= 0 && passes(choices_[other], choice.passes[j]))
                    rates -= choices_[other].rate;
            if (rates > uplink(choice.passes[j]).free)
                return std::numeric_limits<double>::infinity();
        }
        double gain = choice.weight, from_left = 0, to_left = 0; // heaviest choices of the ports that are left
        if (to >= 0)
            gain -= choices_[to].weight, from_left = heaviest_[choices_[to].first()];
        if (from >= 0)
            gain -= choices_[from].weight, to_left = heaviest_[choices_[from].last()];
        const bool can_send = senders_.size() > num_chosen_ + (from < 0);
        const bool can_receive = receivers_.size() > num_chosen_ + (to < 0);
        if (can_send && can_receive)
            return gain + from_left + to_left;
        return gain + (can_send ? to_left : can_receive ? from_left : std::min(from_left, to_left));
    }

    int chosen_at(int64_t port) const { return by_[port].empty() ? NONE : by_[port].front(); }

    static bool passes(const Choice &choice, int64_t number) {
        return std::find(choice.passes, choice.passes + choice.num_passed, number) != choice.passes + choice.num_passed;
    }

    // Takes choice i in place of the sends that block it, and others that then fit; undoes it unless weight is gained.
    bool exchange(int i) {
        if (choices_[i].is_chosen || max_gain(i) < GAIN / 2) // half: the sums are rounded in another order
            return false;
        Row &gone = gone_;
        in_the_way(i, gone);
        double lost = 0;
        for (const int other : gone)
            lost += choices_[other].weight;
        double gain = choices_[i].weight - lost;
        for (const int other : gone)
            remove(other);
        add(i);
        added_.assign(1, i);
        for (const int other : gone)
            for (const int64_t number : {choices_[other].first(), choices_[other].last()}) {
                if (is_busy_[number])
                    continue;
                find_free(number, free_);
                for (const int more : free_) {
                    if (fits(more)) {
                        add(more);
                        added_.push_back(more);
                        gain += choices_[more].weight;
                    }
                }
            }
        if (gain > GAIN)
            return true;
        for (const int more : added_)
            remove(more);
        for (const int other : gone)
            add(other);
        return false;
    }

    // Sets the worth of keeping each port busy, from its remaining time.
    void find_worth(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        std::vector<std::pair<int64_t, double>> left;
        for (const int64_t r : receivers)
            left.emplace_back(into_[r].number, to_get_[r]);
        for (const int64_t s : senders)
            left.emplace_back(out_[s].number, to_give_[s]);
        for (size_t q = 0; q < up_.size(); ++q) {
            left.emplace_back(
                down_[q].number, static_cast<double>(chunk_state_.to_enter(q)) / CHUNK_UNITS / down_[q].rate);
            left.emplace_back(up_[q].number, static_cast<double>(chunk_state_.to_leave(q)) / CHUNK_UNITS / up_[q].rate);
        }
        double most = 0;
        for (const auto &[number, load] : left)
            most = std::max(most, load);
        for (const auto &[number, load] : left) {
            const double near = 1.0 / (1.0 + (most - load));
            worth_[number] = near * near * near + 0.001 * (load / most);
        }
    }

    // Lets idle senders of other pods serve idle receivers whose pod's uplink has time to spare.
    bool help_pods(const std::vector<int64_t> &senders, const std::vector<int64_t> &receivers) {
        bool started = false;
        for (const int64_t r : receivers) {
            const int64_t q = nics_.pod[nics_.host[r]];
            if (static_cast<double>(chunk_state_.to_enter(q)) / CHUNK_UNITS / down_[q].rate + 1 > to_get_[r] ||
                into_[r].free < min_rate_ || down_[q].free < min_rate_)
                continue;
            for (const int64_t s : senders)
                if (out_[s].free >= min_rate_ && nics_.pod[nics_.host[s]] != q && rate(s, r) > 0 && start(s, r, true)) {
                    started = true;
                    break;
                }
        }
        return started;
    }
};
