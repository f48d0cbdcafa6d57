// best_stages: the recurrence of reshard.scheduler.autoparallel, for one bottleneck time. Reference
// implementation: tests/reference/recurrence.py, with the same floating point operations in the same order.
//
// A state is (first layer, devices left, class of the first stage) of a suffix of the model, and the end of its first
// stage if the model has skip connections. For each state, the suffixes on a Pareto front are kept: no other suffix is
// as good in both the round trip and the sum of round trip and excess of gradient sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

template <typename T, int N> using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// A suffix of stages. `next` is the position in `points` of the suffix after its first stage, -1 if there is none.
struct Point {
    double trip, excess;
    int32_t end, option, next_class;
    int64_t next;

    double total() const { return trip + excess; }
};

using Front = std::vector<Point>;

// Adds a point unless another is as good. Earlier points win ties. A front ascends by trip and descends by total.
void add(Front &front, const Point &point) {
    auto at = std::upper_bound(front.begin(), front.end(), point.trip,
                               [](double trip, const Point &other) { return trip < other.trip; });
    if (at != front.begin() && std::prev(at)->total() <= point.total())
        return;
    if (at != front.begin() && std::prev(at)->trip == point.trip)
        --at;
    const auto stop = std::find_if(at, front.end(), [&](const Point &other) { return other.total() < point.total(); });
    if (at == stop) {
        front.insert(at, point);
    } else {
        *at = point;
        front.erase(std::next(at), stop);
    }
}

struct Search {
    int64_t num_layers, size, num_classes, num_ends, num_options;
    bool is_chain;
    const int64_t *option_class, *next_at;
    const uint8_t *allowed;
    const double *forward, *backward, *activation, *fixed, *sync, *ending, *port_in, *port_out, *memory;
    const double *received, *sent, *cut_bytes, *factor, *latency;
    int64_t microbatches;
    double bottleneck_seconds;
    std::unordered_map<int64_t, std::pair<double, double>> prices;
    std::vector<std::vector<int64_t>> options_of_class;
    std::vector<Point> points;                         // of all final fronts
    std::vector<std::pair<int64_t, int64_t>> fronts;   // by state: [begin, end) in `points`
    std::vector<Front> merged;                         // by (cut, class, at): suffixes after a stage; for chains
    std::vector<char> is_merged;
    std::vector<char> can_stand;                       // by (class, first, end): whether an option is fast and fits
    std::vector<char> in_plan;                         // by (first, at): whether both sides can be divided

    int64_t state(int64_t first, int64_t end, int64_t at, int64_t c) const {
        const int64_t ends = is_chain ? 1 : size;
        return ((first * ends + (is_chain ? 0 : end)) * num_ends + at) * num_classes + c;
    }

    std::pair<double, double> price(int64_t first, int64_t cut, int64_t end, int64_t c, int64_t at, int64_t d) const {
        if (is_chain)
            first = end = 0;
        const int64_t edge = (first * size + cut) * size + end;
        if (!prices.empty()) {
            const auto found = prices.find(((edge * num_classes + c) * num_ends + at) * num_classes + d);
            if (found != prices.end())
                return found->second;
        }
        const double nbytes = cut_bytes[is_chain ? cut : edge];
        const int64_t place = (c * num_ends + at) * num_classes + d;
        const double seconds = nbytes > 0 ? nbytes * factor[place] + latency[place] : 0.0;
        return {seconds, seconds};
    }

    // Bytes of a device with some microbatches in flight.
    double needed(int64_t entry, double held) const {
        return std::max(fixed[entry] + held * activation[entry], ending[entry]);
    }

    void find_behind(Front &front, int64_t first, int64_t cut, int64_t c, int64_t at) const {
        const int64_t rest = next_at[c * num_ends + at];
        for (int64_t end = is_chain ? 0 : cut + 1; end < (is_chain ? 1 : size); ++end)
            for (int64_t d = 0; d < num_classes; ++d) {
                if (next_at[d * num_ends + rest] < 0)
                    continue;
                const auto [begin, stop] = fronts[state(cut, end, rest, d)];
                if (begin == stop)
                    continue;
                const auto [there, back] = price(first, cut, end, c, at, d);
                if (std::max(there, back) > bottleneck_seconds)
                    continue;
                for (int64_t i = begin; i < stop; ++i)
                    add(front, {there + back + points[i].trip, points[i].excess - back, 0, 0,
                                static_cast<int32_t>(d), i});
            }
    }

    const Front &behind(Front &scratch, int64_t first, int64_t cut, int64_t c, int64_t at) {
        if (!is_chain) {
            scratch.clear();
            find_behind(scratch, first, cut, c, at);
            return scratch;
        }
        const int64_t key = (cut * num_classes + c) * num_ends + at;
        if (!is_merged[key]) {
            is_merged[key] = 1;
            find_behind(merged[key], first, cut, c, at);
        }
        return merged[key];
    }

    // Adds the stages of layers first to end - 1 to a front. Returns whether any option is fast enough.
    bool extend(Front &front, Front &scratch, int64_t first, int64_t end, int64_t c, int64_t at, bool is_last) {
        static const Front none{{0.0, -INFINITE, 0, 0, -1, -1}};
        const int64_t place = c * num_ends + at, range = first * size + end;
        const double ports = received[range] * port_in[place] + sent[range] * port_out[place];
        bool is_fast = false;
        for (const int64_t o : options_of_class[c]) {
            if (!allowed[o * num_ends + at])
                continue;
            const int64_t entry = o * size * size + range;
            const double seconds = forward[entry] + backward[entry];
            if (seconds > bottleneck_seconds)
                continue;
            is_fast = true;
            if (ports > bottleneck_seconds || is_last != (next_at[place] == 0))
                continue;
            for (const Point &tail : is_last ? none : behind(scratch, first, end, c, at)) {
                const double trip = seconds + tail.trip;
                const double held = std::min(static_cast<double>(microbatches), std::max(1.0, std::ceil(trip / bottleneck_seconds)));
                if (needed(entry, held) > memory[place])
                    continue;
                add(front, {trip, std::max(sync[entry], tail.excess - backward[entry]), static_cast<int32_t>(end),
                            static_cast<int32_t>(o), tail.next_class, tail.next});
                if (tail.excess - backward[entry] <= sync[entry])
                    break; // longer tails gain nothing
            }
        }
        return is_fast;
    }

    // Finds the states that a plan may pass through. Two conditions hold for such a state: its suffix can be divided
    // into stages that are fast enough and fit with one microbatch, and so can the layers before the suffix on the
    // devices before it. All others are skipped.
    void find_states() {
        std::vector<double> most_memory(num_classes, -INFINITE);
        for (int64_t c = 0; c < num_classes; ++c)
            for (int64_t at = 1; at < num_ends; ++at)
                if (next_at[c * num_ends + at] >= 0)
                    most_memory[c] = std::max(most_memory[c], memory[c * num_ends + at]);
        can_stand.assign(num_classes * size * size, 0);
        for (int64_t o = 0; o < num_options; ++o)
            for (int64_t first = 0; first < num_layers; ++first)
                for (int64_t end = first + 1; end < size; ++end) {
                    const int64_t entry = (o * size + first) * size + end, c = option_class[o];
                    if (forward[entry] + backward[entry] <= bottleneck_seconds && needed(entry, 1.0) <= most_memory[c])
                        can_stand[(c * size + first) * size + end] = 1;
                }
        const auto for_stages = [&](int64_t first, int64_t at, const auto &visit) {
            for (int64_t c = 0; c < num_classes; ++c) {
                const int64_t rest = next_at[c * num_ends + at];
                for (int64_t end = first + 1; rest >= 0 && end < size; ++end)
                    if (can_stand[(c * size + first) * size + end] && visit(end * num_ends + rest))
                        return true;
            }
            return false;
        };
        std::vector<char> has_rest(size * num_ends, 0); // whether the layers from here on can be divided
        has_rest[num_layers * num_ends] = 1;
        for (int64_t first = num_layers - 1; first >= 0; --first)
            for (int64_t at = 1; at < num_ends; ++at)
                has_rest[first * num_ends + at] = for_stages(first, at, [&](int64_t next) { return has_rest[next] != 0; });
        in_plan.assign(size * num_ends, 0);
        in_plan[num_ends - 1] = has_rest[num_ends - 1];
        for (int64_t first = 0; first < num_layers; ++first)
            for (int64_t at = num_ends - 1; at > 0; --at)
                if (in_plan[first * num_ends + at])
                    for_stages(first, at, [&](int64_t next) {
                        in_plan[next] = has_rest[next];
                        return false;
                    });
    }

    void run() {
        find_states();
        fronts.assign(num_layers * (is_chain ? 1 : size) * num_ends * num_classes, {0, 0});
        if (is_chain) {
            merged.resize(size * num_classes * num_ends);
            is_merged.assign(merged.size(), 0);
        }
        Front front, scratch;
        for (int64_t first = num_layers - 1; first >= 0; --first)
            for (int64_t at = 1; at < num_ends; ++at)
                for (int64_t c = 0; c < num_classes; ++c) {
                    const int64_t rest = next_at[c * num_ends + at];
                    if (rest < 0 || !in_plan[first * num_ends + at])
                        continue;
                    front.clear();
                    for (int64_t end = first + 1; end < size; ++end) {
                        if (!can_stand[(c * size + first) * size + end] || !in_plan[end * num_ends + rest])
                            continue;
                        const bool is_fast = extend(front, scratch, first, end, c, at, end == num_layers);
                        if (!is_chain) {
                            keep(front, state(first, end, at, c));
                            front.clear();
                        }
                        if (!is_fast)
                            break; // more layers take longer
                    }
                    if (is_chain)
                        keep(front, state(first, 0, at, c));
                }
    }

    void keep(const Front &front, int64_t number) {
        fronts[number] = {static_cast<int64_t>(points.size()), static_cast<int64_t>(points.size() + front.size())};
        points.insert(points.end(), front.begin(), front.end());
    }
};

using Stages = std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>;

std::tuple<double, double, Stages> best_stages(
    int64_t num_layers, bool is_chain, Array<int64_t, 1> option_class, Array<double, 3> forward,
    Array<double, 3> backward, Array<double, 3> activation, Array<double, 3> fixed, Array<double, 3> sync,
    Array<double, 3> ending, Array<uint8_t, 2> allowed, Array<int64_t, 2> next_at, Array<double, 2> port_in,
    Array<double, 2> port_out, Array<double, 2> memory, Array<double, 2> received, Array<double, 2> sent,
    Array<double, 3> cut_bytes, Array<double, 3> factor, Array<double, 3> latency, Array<int64_t, 1> priced_at,
    Array<double, 1> priced_forward, Array<double, 1> priced_backward, int64_t microbatches, double bottleneck_seconds) {
    Search search;
    const int64_t size = num_layers + 1, num_options = static_cast<int64_t>(option_class.shape(0));
    const int64_t num_classes = static_cast<int64_t>(next_at.shape(0)), num_ends = static_cast<int64_t>(next_at.shape(1));
    const int64_t sides = is_chain ? 1 : size;
    const auto is_shape = [](const auto &array, std::initializer_list<int64_t> shape) {
        size_t dim = 0;
        for (const int64_t length : shape)
            if (static_cast<int64_t>(array.shape(dim++)) != length)
                return false;
        return true;
    };
    bool fits = num_layers > 0 && bottleneck_seconds > 0 && priced_at.shape(0) == priced_forward.shape(0) &&
                priced_at.shape(0) == priced_backward.shape(0);
    for (const auto *table : {&forward, &backward, &activation, &fixed, &sync, &ending})
        fits = fits && is_shape(*table, {num_options, size, size});
    for (const auto *table : {&port_in, &port_out, &memory})
        fits = fits && is_shape(*table, {num_classes, num_ends});
    fits = fits && is_shape(allowed, {num_options, num_ends}) && is_shape(received, {size, size}) &&
           is_shape(sent, {size, size}) && is_shape(cut_bytes, {sides, size, sides}) &&
           is_shape(factor, {num_classes, num_ends, num_classes}) &&
           is_shape(latency, {num_classes, num_ends, num_classes});
    if (!fits)
        throw std::invalid_argument("best_stages: sizes of the arrays do not fit each other");
    search.options_of_class.resize(num_classes);
    for (int64_t o = 0; o < num_options; ++o) {
        if (option_class.data()[o] < 0 || option_class.data()[o] >= num_classes)
            throw std::out_of_range("best_stages: an option has an unknown class");
        search.options_of_class[option_class.data()[o]].push_back(o);
    }
    for (int64_t i = 0; i < num_classes * num_ends; ++i)
        if (next_at.data()[i] < -1 || (next_at.data()[i] >= 0 && next_at.data()[i] >= i % num_ends))
            throw std::out_of_range("best_stages: a stage leaves more devices than there are");
    search.num_layers = num_layers, search.size = size, search.is_chain = is_chain;
    search.num_classes = num_classes, search.num_ends = num_ends, search.num_options = num_options;
    search.option_class = option_class.data(), search.next_at = next_at.data(), search.allowed = allowed.data();
    search.forward = forward.data(), search.backward = backward.data(), search.activation = activation.data();
    search.fixed = fixed.data(), search.sync = sync.data(), search.ending = ending.data(), search.port_in = port_in.data();
    search.port_out = port_out.data(), search.memory = memory.data(), search.received = received.data();
    search.sent = sent.data(), search.cut_bytes = cut_bytes.data(), search.factor = factor.data();
    search.latency = latency.data();
    search.microbatches = microbatches, search.bottleneck_seconds = bottleneck_seconds;
    for (size_t i = 0; i < priced_at.shape(0); ++i)
        search.prices[priced_at.data()[i]] = {priced_forward.data()[i], priced_backward.data()[i]};
    nb::gil_scoped_release release;
    search.run();
    const Point *best = nullptr;
    int64_t best_class = -1;
    for (int64_t c = 0; c < num_classes; ++c)
        for (int64_t end = is_chain ? 0 : 1; end < sides; ++end) {
            const auto [begin, stop] = search.fronts[search.state(0, end, num_ends - 1, c)];
            for (int64_t i = begin; i < stop; ++i)
                if (!best || search.points[i].trip + search.points[i].excess < best->trip + best->excess)
                    best = &search.points[i], best_class = c;
        }
    if (!best)
        return {INFINITE, INFINITE, {}};
    Stages stages;
    int64_t first = 0, at = num_ends - 1, c = best_class;
    for (const Point *point = best; point; point = point->next < 0 ? nullptr : &search.points[point->next]) {
        stages.emplace_back(first, point->end, at, point->option);
        const int64_t rest = search.next_at[c * num_ends + at];
        first = point->end, at = rest, c = point->next_class;
    }
    return {best->trip, best->excess, stages};
}

} // namespace

void bind_recurrence(nb::module_ &m) {
    m.def("best_stages", &best_stages, nb::arg("num_layers"), nb::arg("is_chain"), nb::arg("option_class"),
          nb::arg("forward"), nb::arg("backward"), nb::arg("activation"), nb::arg("fixed"), nb::arg("sync"),
          nb::arg("ending"), nb::arg("allowed"), nb::arg("next_at"), nb::arg("port_in"), nb::arg("port_out"),
          nb::arg("memory"), nb::arg("received"), nb::arg("sent"), nb::arg("cut_bytes"), nb::arg("factor"), nb::arg("latency"),
          nb::arg("priced_at"), nb::arg("priced_forward"), nb::arg("priced_backward"), nb::arg("microbatches"),
          nb::arg("bottleneck_seconds"),
          "The best stages for one bottleneck time, as (round trip, excess of gradient sums, "
          "[(first, end, devices left, option)]).");
}
