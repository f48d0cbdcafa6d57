// The greedy order of broadcasts of the 2023 cross-mesh resharding study: rounds of tasks that share no port.
//
// A class is a group of tasks with the same choice of options (here "ways"). An option has a sending host (home) and a
// set of ports. Each round draws `tries` random sets of options with disjoint ports: it visits the classes in random
// order and gives each the free option whose host has sent least. The set with the most bytes wins. Ties go to the set
// that spreads the bytes most evenly over sending hosts, by the sum of squares of the hosts' bytes: the mean is the
// same for sets of equal size. The round then takes up to `at_once` tasks of each class in the set, the last task
// first.
//
// Random numbers are those of Python's random.Random, so that the order is that of the Python reference,
// tests/reference/greedy.py.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "interruption.h"

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

  private:
    static constexpr size_t SIZE = 624, SHIFT = 397;
    uint32_t words_[SIZE];
    size_t at_;

    uint32_t next() {
        if (at_ >= SIZE) {
            for (size_t i = 0; i < SIZE; ++i) {
                const uint32_t y = (words_[i] & 0x80000000u) | (words_[(i + 1) % SIZE] & 0x7fffffffu);
                words_[i] = words_[(i + SHIFT) % SIZE] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0u);
            }
            at_ = 0;
        }
        uint32_t y = words_[at_++];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        return y ^ (y >> 18);
    }
};

using Wide = __int128;

struct Greedy {
    const int64_t *way_at, *home, *crosses, *port_at, *port, *task_at, *nbytes;
    std::vector<int64_t> load, sent, left, alive, hosts;
    std::vector<uint64_t> taken; // by port: the last set that uses it
    uint64_t set = 0;
    std::vector<std::pair<uint64_t, int64_t>> order;
    std::vector<std::pair<int64_t, int64_t>> chosen, best; // (class, option)

    bool is_free(int64_t way) const {
        for (int64_t i = port_at[way]; i < port_at[way + 1]; ++i)
            if (taken[port[i]] == set)
                return false;
        return true;
    }

    // Draws one random set into `chosen`; returns its bytes and its negative spread over hosts.
    std::pair<Wide, Wide> choose(Twister &rng) {
        order.clear(), chosen.clear(), hosts.clear();
        for (const int64_t i : alive)
            order.emplace_back(rng.bits53(), i);
        std::sort(order.begin(), order.end()); // ties keep the classes in ascending order
        ++set;
        Wide total = 0, spread = 0;
        for (const auto &entry : order) {
            const int64_t i = entry.second;
            int64_t way = -1;
            for (int64_t w = way_at[i]; w < way_at[i + 1]; ++w)
                if (is_free(w) && (way < 0 || load[home[w]] + sent[home[w]] < load[home[way]] + sent[home[way]]))
                    way = w;
            if (way < 0)
                continue;
            for (int64_t at = port_at[way]; at < port_at[way + 1]; ++at)
                taken[port[at]] = set;
            const int64_t size = nbytes[left[i] - 1];
            total += size;
            sent[home[way]] += size;
            hosts.push_back(home[way]);
            chosen.emplace_back(i, way);
        }
        for (const int64_t host : hosts) {
            const Wide size = sent[host];
            spread += size * (2 * static_cast<Wide>(load[host]) + size);
            sent[host] = 0;
        }
        return {total, -spread};
    }

    void run(int64_t tries, int64_t at_once, Twister rng, int64_t *classes, int64_t *ways) {
        Interruption interruption;
        while (!alive.empty()) {
            std::pair<Wide, Wide> most;
            for (int64_t round = 0; round < tries; ++round) {
                interruption.look();
                const auto score = choose(rng);
                if (round == 0 || score > most)
                    most = score, best.swap(chosen);
            }
            std::sort(best.begin(), best.end());
            for (const auto &[i, way] : best)
                for (int64_t count = std::min(at_once, left[i] - task_at[i]); count > 0; --count) {
                    --left[i];
                    *classes++ = i, *ways++ = way;
                    if (crosses[way])
                        load[home[way]] += nbytes[left[i]];
                }
            std::erase_if(alive, [&](int64_t i) { return left[i] <= task_at[i]; });
        }
    }
};

void check(bool fits, const char *what) {
    if (!fits)
        throw std::invalid_argument(std::string("order_greedily: ") + what);
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

void order_greedily(Ints way_at, Ints home, Ints crosses, Ints port_at, Ints port, Ints task_at, Ints nbytes,
                    int64_t num_hosts, int64_t num_ports, int64_t tries, int64_t at_once, Ints state, Found classes,
                    Found ways) {
    const size_t num_ways = home.shape(0), num_tasks = nbytes.shape(0);
    check(divides(way_at, num_ways) && divides(task_at, num_tasks) && way_at.shape(0) == task_at.shape(0),
          "classes do not divide ways and tasks");
    check(divides(port_at, port.shape(0)) && port_at.shape(0) == num_ways + 1, "ways do not divide ports");
    check(crosses.shape(0) == num_ways && is_below(home, num_hosts) && is_below(port, num_ports), "no such host or port");
    check(classes.shape(0) == num_tasks && ways.shape(0) == num_tasks && state.shape(0) == 625, "arrays differ in size");
    for (size_t i = 0; i + 1 < way_at.shape(0); ++i)
        check(way_at.data()[i] < way_at.data()[i + 1], "a class has no way");
    check(tries > 0 && at_once > 0, "nothing is tried");
    nb::gil_scoped_release release;
    Greedy g;
    g.way_at = way_at.data(), g.home = home.data(), g.crosses = crosses.data(), g.port_at = port_at.data();
    g.port = port.data(), g.task_at = task_at.data(), g.nbytes = nbytes.data();
    g.load.resize(num_hosts), g.sent.resize(num_hosts), g.taken.resize(num_ports);
    for (size_t i = 0; i + 1 < task_at.shape(0); ++i) {
        g.left.push_back(task_at.data()[i + 1]);
        if (task_at.data()[i] < task_at.data()[i + 1])
            g.alive.push_back(static_cast<int64_t>(i));
    }
    g.run(tries, at_once, Twister(state.data()), classes.data(), ways.data());
}

} // namespace

void bind_greedy(nb::module_ &m) {
    m.def("order_greedily", &order_greedily, nb::arg("way_at"), nb::arg("home"), nb::arg("crosses"), nb::arg("port_at"),
          nb::arg("port"), nb::arg("task_at"), nb::arg("nbytes"), nb::arg("num_hosts"), nb::arg("num_ports"),
          nb::arg("tries"), nb::arg("at_once"), nb::arg("state"), nb::arg("classes"), nb::arg("ways"),
          "Fill classes and ways with the class of each task in turn and the way it is sent.");
}
