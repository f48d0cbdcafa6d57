// Loops of strategies over regions: the choice of senders by load, broadcast trees, and the greedy order of broadcasts.
// Reference implementations: pick_sender() in planner/strategies/sender_selection.py, and trees.py and greedy.py in
// tests/reference.
//
// The greedy order of the 2023 cross-mesh resharding study: rounds of tasks that share no port. A class is a group of
// tasks with the same choice of options (here "ways"). An option has a sending host (home) and a set of ports. Each
// round draws `tries` random sets of options with disjoint ports: it visits the classes in random order and gives each
// the free option whose host has sent least. The set with the most bytes wins. Ties go to the set that spreads the
// bytes most evenly over sending hosts, by the sum of squares of the hosts' bytes: the mean is the same for sets of
// equal size. The round then takes up to `at_once` tasks of each class in the set, the last task first. Random numbers
// are those of Python's random.Random.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "../interruption.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Found = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

// The Mersenne Twister of Python's random.Random, continued from its state.
class Twister {
  public:
    explicit Twister(const int64_t *state) : at_(static_cast<size_t>(state[SIZE])) {
        for (size_t i = 0; i < SIZE; ++i)
            words_[i] = static_cast<uint32_t>(state[i]);
    }
    uint64_t bits53() { // random() * 2**53
        const uint64_t high = next() >> 5, low = next() >> 6;
        return high << 26 | low;
    }
    void skip(uint64_t count) { // as if bits53() were called so often
        for (count *= 2; count > 0;) {
            if (at_ >= SIZE)
                refill();
            const uint64_t step = std::min<uint64_t>(count, SIZE - at_);
            at_ += step, count -= step;
        }
    }

  private:
    static constexpr size_t SIZE = 624, SHIFT = 397;
    uint32_t words_[SIZE];
    size_t at_;

    void refill() {
        for (size_t i = 0; i < SIZE; ++i) {
            const uint32_t y = (words_[i] & 0x80000000u) | (words_[(i + 1) % SIZE] & 0x7fffffffu);
            words_[i] = words_[(i + SHIFT) % SIZE] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0u);
        }
        at_ = 0;
    }

    uint32_t next() {
        if (at_ >= SIZE)
            refill();
        uint32_t y = words_[at_++];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        return y ^ (y >> 18);
    }
};

using Wide = __int128;

struct Greedy {
    const int64_t *way_offsets, *home, *crosses, *port_offsets, *port, *task_offsets, *nbytes;
    std::vector<int64_t> load, sent, left, alive, hosts;
    std::vector<uint64_t> taken; // by port: the last set that uses it
    uint64_t set = 0;
    std::vector<std::pair<uint64_t, int64_t>> order, drawn; // (random number, class)
    std::vector<size_t> bucket_offsets;
    std::vector<std::pair<int64_t, int64_t>> chosen, best; // (class, option)
    std::vector<int64_t> largest; // by host: bytes of its largest task, -1 without any
    size_t most_chosen = 0; // limit on the sends of a set
    bool homes_exclude = false; // whether no two options of one home fit in a set

    // Orders the classes by random numbers; ties keep them in ascending order. Numbers of 53 random bits spread evenly
    // over as many buckets as there are classes, so that sorting by bucket leaves few pairs to exchange.
    void shuffle(Twister &rng) {
        const size_t n = alive.size();
        drawn.resize(n), order.resize(n), bucket_offsets.assign(n + 1, 0);
        const auto bucket_of = [&](uint64_t number) {
            return static_cast<size_t>(static_cast<unsigned __int128>(number) * n >> 53);
        };
        for (size_t k = 0; k < n; ++k) {
            drawn[k] = {rng.bits53(), alive[k]};
            ++bucket_offsets[bucket_of(drawn[k].first) + 1];
        }
        for (size_t k = 0; k < n; ++k)
            bucket_offsets[k + 1] += bucket_offsets[k];
        for (const auto &entry : drawn)
            order[bucket_offsets[bucket_of(entry.first)]++] = entry;
        for (size_t k = 1; k < n; ++k) {
            const auto entry = order[k];
            size_t at = k;
            for (; at > 0 && order[at - 1] > entry; --at)
                order[at] = order[at - 1];
            order[at] = entry;
        }
    }

    bool is_free(int64_t way) const {
        for (int64_t i = port_offsets[way]; i < port_offsets[way + 1]; ++i)
            if (taken[port[i]] == set)
                return false;
        return true;
    }

    // Draws one random set into `chosen`; returns its bytes and its negative spread over hosts.
    std::pair<Wide, Wide> choose(Twister &rng) {
        chosen.clear(), hosts.clear();
        shuffle(rng);
        ++set;
        Wide total = 0, spread = 0;
        for (const auto &entry : order) {
            const int64_t i = entry.second;
            int64_t way = -1;
            for (int64_t w = way_offsets[i]; w < way_offsets[i + 1]; ++w)
                if (is_free(w) && (way < 0 || load[home[w]] + sent[home[w]] < load[home[way]] + sent[home[way]]))
                    way = w;
            if (way < 0)
                continue;
            for (int64_t at = port_offsets[way]; at < port_offsets[way + 1]; ++at)
                taken[port[at]] = set;
            const int64_t size = nbytes[left[i] - 1];
            total += size;
            sent[home[way]] += size;
            hosts.push_back(home[way]);
            chosen.emplace_back(i, way);
            if (chosen.size() == most_chosen)
                break;
        }
        for (const int64_t host : hosts) {
            const Wide size = sent[host];
            spread += size * (2 * static_cast<Wide>(load[host]) + size);
            sent[host] = 0;
        }
        return {total, -spread};
    }

    // Finds whether all options of each home have a common port.
    void compare_homes(size_t num_ways) {
        std::vector<std::vector<int64_t>> common(load.size());
        std::vector<char> is_known(load.size());
        homes_exclude = true;
        for (size_t way = 0; way < num_ways; ++way) {
            const int64_t *first = port + port_offsets[way], *last = port + port_offsets[way + 1];
            std::vector<int64_t> &ports = common[home[way]];
            if (!is_known[home[way]])
                ports.assign(first, last);
            std::erase_if(ports, [&](int64_t p) { return std::find(first, last, p) == last; });
            is_known[home[way]] = true;
            homes_exclude &= !ports.empty();
        }
    }

    // The best score that a set can have, where no home sends twice: each home sends its largest task. Sets
    // most_chosen.
    std::pair<Wide, Wide> best_score() {
        std::fill(largest.begin(), largest.end(), -1);
        for (const int64_t i : alive)
            for (int64_t way = way_offsets[i]; way < way_offsets[i + 1]; ++way)
                largest[home[way]] = std::max(largest[home[way]], nbytes[left[i] - 1]);
        most_chosen = 0;
        Wide total = 0, spread = 0;
        for (size_t host = 0; host < largest.size(); ++host) {
            if (largest[host] < 0)
                continue;
            const Wide size = largest[host];
            ++most_chosen;
            total += size, spread += size * (2 * static_cast<Wide>(load[host]) + size);
        }
        return {total, -spread};
    }

    void run(int64_t tries, int64_t at_once, Twister rng, int64_t *classes, int64_t *ways) {
        Interruption interruption;
        while (!alive.empty()) {
            std::pair<Wide, Wide> most, limit;
            if (homes_exclude)
                limit = best_score();
            for (int64_t round = 0; round < tries; ++round) {
                interruption.poll();
                const auto score = choose(rng);
                if (round == 0 || score > most)
                    most = score, best.swap(chosen);
                if (homes_exclude && most == limit) { // no set is better
                    rng.skip(static_cast<uint64_t>(tries - round - 1) * alive.size());
                    break;
                }
            }
            std::sort(best.begin(), best.end());
            for (const auto &[i, way] : best)
                for (int64_t count = std::min(at_once, left[i] - task_offsets[i]); count > 0; --count) {
                    --left[i];
                    *classes++ = i, *ways++ = way;
                    if (crosses[way])
                        load[home[way]] += nbytes[left[i]];
                }
            std::erase_if(alive, [&](int64_t i) { return left[i] <= task_offsets[i]; });
        }
    }
};

// Grows one broadcast tree after another; see along_trees() in planner/strategies/trees.py.
class Trees {
  public:
    Trees(const int64_t *host_of, size_t num_ranks, const int64_t *pod_of, int64_t num_pods, const int64_t *most_arriving)
        : host_of_(host_of), pod_of_(pod_of), most_arriving_(most_arriving), num_pods_(num_pods), entered_(num_ranks),
          sent_(num_ranks) {}

    // Writes the edges of a tree to `from` and `to`, one for each receiver, and advances both past them.
    void grow(int64_t sender, const std::vector<int64_t> &receivers, int64_t nbytes, int64_t *&from, int64_t *&to) {
        const int64_t home = host_of_[sender];
        near_.clear(), far_.clear(), inside_.clear();
        for (const int64_t rank : receivers) {
            const int64_t host = host_of_[rank];
            if (host == home)
                near_.push_back(rank);
            else
                far_.emplace_back(pods_after(home, host), host < home, host, rank);
        }
        const int64_t *first = from;
        const auto put = [&](int64_t a, int64_t b) { *from++ = a, *to++ = b; };
        std::sort(far_.begin(), far_.end());
        int64_t last = sender;
        for (size_t begin = 0, end = 0; begin < far_.size(); begin = end) {
            size_t entry = begin;
            for (end = begin; end < far_.size() && std::get<2>(far_[end]) == std::get<2>(far_[begin]); ++end)
                if (entered_[std::get<3>(far_[end])] < entered_[std::get<3>(far_[entry])])
                    entry = end;
            const int64_t rank = std::get<3>(far_[entry]);
            entered_[rank] += nbytes;
            put(last, rank);
            last = rank;
            for (size_t i = 1; i < end - begin; ++i) // the others in cyclic order
                inside_.emplace_back(std::get<3>(far_[begin + (entry - begin + i - 1) % (end - begin)]),
                                     std::get<3>(far_[begin + (entry - begin + i) % (end - begin)]));
        }
        for (const auto &[a, b] : inside_)
            put(a, b);
        std::sort(near_.begin(), near_.end(), [&](int64_t a, int64_t b) {
            return std::pair(a < sender, a) < std::pair(b < sender, b);
        });
        const int64_t in_a_star = sent_[sender] + nbytes * static_cast<int64_t>(near_.size());
        for (size_t i = 0; i < near_.size(); ++i)
            put(i == 0 || in_a_star <= most_arriving_[home] ? sender : near_[i - 1], near_[i]);
        for (; first != from; ++first)
            sent_[*first] += nbytes;
    }

  private:
    const int64_t *host_of_, *pod_of_, *most_arriving_;
    int64_t num_pods_;
    std::vector<int64_t> entered_, sent_; // bytes that each rank has received from other hosts, and sent
    std::vector<int64_t> near_;
    std::vector<std::tuple<int64_t, bool, int64_t, int64_t>> far_; // receivers on other hosts, in the order of hosts
    std::vector<std::pair<int64_t, int64_t>> inside_;

    int64_t pods_after(int64_t home, int64_t host) const {
        return num_pods_ ? (pod_of_[host] - pod_of_[home] + num_pods_) % num_pods_ : 0;
    }
};

void check(bool fits, const char *what, const char *where = "order_greedily") {
    if (!fits)
        throw std::invalid_argument(std::string(where) + ": " + what);
}

bool divides(const Ints &ends, size_t total) {
    const size_t rows = ends.shape(0);
    bool fits = rows > 0 && ends.data()[0] == 0 && ends.data()[rows - 1] == static_cast<int64_t>(total);
    for (size_t i = 0; fits && i + 1 < rows; ++i)
        fits = ends.data()[i] <= ends.data()[i + 1];
    return fits;
}

bool is_below(const Ints &values, int64_t most) {
    return std::all_of(values.data(), values.data() + values.shape(0), [&](int64_t v) { return 0 <= v && v < most; });
}

// Picks a sender for each message in turn: a holder on the receiver's host if there is one, else any holder. Among
// these, the host that has sent the fewest bytes to other hosts comes first, then the rank that has sent the fewest
// bytes, then the first holder.
void pick_senders(Ints holder_offsets, Ints holders, Ints task, Ints receiver, Ints nbytes, Ints host_of, Found sender) {
    const size_t num_tasks = nbytes.shape(0), num_ranks = host_of.shape(0), n = task.shape(0);
    const auto fits = [](bool is_fit, const char *what) { check(is_fit, what, "pick_senders"); };
    fits(divides(holder_offsets, holders.shape(0)) && holder_offsets.shape(0) == num_tasks + 1, "tasks do not divide holders");
    fits(receiver.shape(0) == n && sender.shape(0) == n, "arrays differ in size");
    fits(is_below(task, num_tasks) && is_below(receiver, num_ranks) && is_below(holders, num_ranks), "no such rank");
    fits(is_below(host_of, INT64_MAX), "no such host");
    nb::gil_scoped_release release;
    const int64_t *host = host_of.data();
    std::vector<int64_t> by_host(num_ranks ? *std::max_element(host, host + num_ranks) + 1 : 0), by_rank(num_ranks);
    for (size_t i = 0; i < n; ++i) {
        const int64_t t = task.data()[i], home = host[receiver.data()[i]];
        int64_t best = -1;
        bool is_near = false;
        for (int64_t at = holder_offsets.data()[t]; at < holder_offsets.data()[t + 1]; ++at) {
            const int64_t rank = holders.data()[at];
            const bool is_here = host[rank] == home;
            if (is_near && !is_here)
                continue;
            if (best < 0 || is_here > is_near ||
                std::pair(by_host[host[rank]], by_rank[rank]) < std::pair(by_host[host[best]], by_rank[best]))
                best = rank, is_near = is_here;
        }
        if (best < 0)
            throw std::invalid_argument("pick_senders: a task has no holder");
        by_rank[best] += nbytes.data()[t];
        if (!is_near)
            by_host[host[best]] += nbytes.data()[t];
        sender.data()[i] = best;
    }
}

void grow_trees(Ints sender, Ints receiver_offsets, Ints receivers, Ints nbytes, Ints host_of, Ints pod_of, int64_t num_pods,
                Ints most_arriving, Found from, Found to) {
    const size_t n = sender.shape(0), num_ranks = host_of.shape(0), num_hosts = pod_of.shape(0);
    const auto fits = [](bool is_fit, const char *what) { check(is_fit, what, "grow_trees"); };
    fits(divides(receiver_offsets, receivers.shape(0)) && receiver_offsets.shape(0) == n + 1, "trees do not divide receivers");
    fits(nbytes.shape(0) == n && from.shape(0) == receivers.shape(0) && to.shape(0) == receivers.shape(0) &&
             most_arriving.shape(0) == num_hosts,
         "arrays differ in size");
    fits(is_below(sender, num_ranks) && is_below(receivers, num_ranks), "no such rank");
    fits(is_below(host_of, num_hosts) && is_below(pod_of, std::max<int64_t>(num_pods, 1)), "no such host or pod");
    nb::gil_scoped_release release;
    Trees trees(host_of.data(), num_ranks, pod_of.data(), num_pods, most_arriving.data());
    int64_t *a = from.data(), *b = to.data();
    std::vector<int64_t> row;
    for (size_t i = 0; i < n; ++i) {
        row.assign(receivers.data() + receiver_offsets.data()[i], receivers.data() + receiver_offsets.data()[i + 1]);
        trees.grow(sender.data()[i], row, nbytes.data()[i], a, b);
    }
}

void order_greedily(Ints way_offsets, Ints home, Ints crosses, Ints port_offsets, Ints port, Ints task_offsets, Ints nbytes,
                    int64_t num_hosts, int64_t num_ports, int64_t tries, int64_t at_once, Ints state, Found classes,
                    Found ways) {
    const size_t num_ways = home.shape(0), num_tasks = nbytes.shape(0);
    check(divides(way_offsets, num_ways) && divides(task_offsets, num_tasks) && way_offsets.shape(0) == task_offsets.shape(0),
          "classes do not divide ways and tasks");
    check(divides(port_offsets, port.shape(0)) && port_offsets.shape(0) == num_ways + 1, "ways do not divide ports");
    check(crosses.shape(0) == num_ways && is_below(home, num_hosts) && is_below(port, num_ports), "no such host or port");
    check(classes.shape(0) == num_tasks && ways.shape(0) == num_tasks && state.shape(0) == 625, "arrays differ in size");
    for (size_t i = 0; i + 1 < way_offsets.shape(0); ++i)
        check(way_offsets.data()[i] < way_offsets.data()[i + 1], "a class has no way");
    check(tries > 0 && at_once > 0, "nothing is tried");
    nb::gil_scoped_release release;
    Greedy g;
    g.way_offsets = way_offsets.data(), g.home = home.data(), g.crosses = crosses.data(), g.port_offsets = port_offsets.data();
    g.port = port.data(), g.task_offsets = task_offsets.data(), g.nbytes = nbytes.data();
    g.load.resize(num_hosts), g.sent.resize(num_hosts), g.taken.resize(num_ports), g.largest.resize(num_hosts);
    g.compare_homes(num_ways);
    for (size_t i = 0; i + 1 < task_offsets.shape(0); ++i) {
        g.left.push_back(task_offsets.data()[i + 1]);
        if (task_offsets.data()[i] < task_offsets.data()[i + 1])
            g.alive.push_back(static_cast<int64_t>(i));
    }
    g.run(tries, at_once, Twister(state.data()), classes.data(), ways.data());
}

} // namespace

void bind_strategies(nb::module_ &m) {
    m.def("pick_senders", &pick_senders, nb::arg("holder_offsets"), nb::arg("holders"), nb::arg("task"), nb::arg("receiver"),
          nb::arg("nbytes"), nb::arg("host_of"), nb::arg("sender"), "Fill sender with the sender of each message.");
    m.def("grow_trees", &grow_trees, nb::arg("sender"), nb::arg("receiver_offsets"), nb::arg("receivers"), nb::arg("nbytes"),
          nb::arg("host_of"), nb::arg("pod_of"), nb::arg("num_pods"), nb::arg("most_arriving"), nb::arg("from_"),
          nb::arg("to"), "Fill from_ and to with the edges of the broadcast trees, tree after tree.");
    m.def("order_greedily", &order_greedily, nb::arg("way_offsets"), nb::arg("home"), nb::arg("crosses"), nb::arg("port_offsets"),
          nb::arg("port"), nb::arg("task_offsets"), nb::arg("nbytes"), nb::arg("num_hosts"), nb::arg("num_ports"),
          nb::arg("tries"), nb::arg("at_once"), nb::arg("state"), nb::arg("classes"), nb::arg("ways"),
          "Fill classes and ways with the class of each task in turn and the way it is sent.");
}
