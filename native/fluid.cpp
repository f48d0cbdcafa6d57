// The event loop of the simulator, on the fluid model of reshard.cost.fluid.Network.
//
// Messages of one stream (a pair of ranks) flow one at a time. The first message of each stream is in one of two
// phases: it holds the sender's port for its latency, or its bytes pass all ports of the stream. The rates of all
// active streams are proportionally fair (see proportional_fairness.h) and change only at events: a phase ends, a
// message leaves the window of its queue because the rest of it fits the send buffer, or a token bucket becomes empty.
// Each step advances the clock to the next event. A port with saved tokens has no limit on its rate (AT_ONCE) until
// they are spent, except while a latency holds it, since a latency takes as long with a full bucket.
//
// A message starts when the rules of Network allow it; start_from() is called for each queue that an event may unblock.
//
// tests/reference/fluid.py does the same floating point operations in the same order.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "interruption.h"
#include "proportional_fairness.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

constexpr double TIME_TOLERANCE = 1e-9; // events within this fraction of a step are simultaneous
constexpr double AT_ONCE = 1e18;  // bytes per second of a port with saved tokens
constexpr double EMPTY = 1.0;     // a bucket of fewer bytes is empty

struct Stream {
    std::deque<int64_t> line;    // started messages that have not arrived, oldest first
    size_t num_released = 0;     // first messages of the line that have left the window of their queue
    double unreleased_bytes = 0; // left to send, up to the end of the next message to be released
    bool holds = false;          // whether the first message is in its latency phase
    double remaining = 0, rate = 0; // bytes left in the phase of the first message
};

struct Flow {
    const int64_t *queue, *stream, *receiver, *window, *ahead, *port_at, *port, *hold_port;
    const double *nbytes, *hold_work, *buffer, *port_rate, *burst;
    size_t num_ports;
    double *start, *finish;
    std::vector<std::vector<int64_t>> next; // by message: the messages that start after it
    std::vector<std::vector<int64_t>> of_queue, of_receiver; // messages in order
    std::vector<std::vector<int64_t>> blocked; // by receiver: queues whose head waits for it
    std::vector<int64_t> left, position; // by message: unfinished messages before it; its position at its receiver
    std::vector<int64_t> head, done;  // by queue: first message not started; first in the window
    std::vector<int64_t> first;       // by receiver: position of its first unfinished message
    std::vector<bool> released;       // by message: whether it has left the window of its queue
    std::vector<Stream> streams;
    std::vector<int64_t> active; // streams that flow, ascending
    std::vector<double> capacity;
    std::vector<Path> paths; // of active streams
    Sharing sharing;
    std::vector<bool> held;
    std::vector<double> saved, saving; // by port: saved bytes, and their change in bytes per second
    bool bursts = false;
    double now = 0;
    bool changed = true; // whether rates must be computed again

    // Starts messages of a queue as long as the next one may start.
    void start_from(int64_t q) {
        auto &row = of_queue[q];
        while (head[q] < static_cast<int64_t>(row.size())) {
            const int64_t message = row[head[q]];
            if (left[message] || head[q] - done[q] >= window[message])
                return;
            const int64_t to = receiver[message];
            if (position[message] >= first[to] + ahead[message]) {
                blocked[to].push_back(q);
                return;
            }
            ++head[q];
            const int64_t s = stream[message];
            Stream &flowing = streams[s];
            if (flowing.num_released == flowing.line.size())
                flowing.unreleased_bytes = nbytes[message] + unsent_bytes(s);
            flowing.line.push_back(message);
            if (flowing.line.size() == 1) {
                begin(s);
                active.insert(std::lower_bound(active.begin(), active.end(), s), s);
                changed = true;
            }
            release(s);
        }
    }

    // Bytes that the started messages of a stream have still to send.
    double unsent_bytes(int64_t s) const {
        const Stream &flowing = streams[s];
        if (flowing.line.empty())
            return 0;
        double rest = 0;
        for (size_t i = 1; i < flowing.line.size(); ++i)
            rest += nbytes[flowing.line[i]];
        return (flowing.holds ? nbytes[flowing.line[0]] : flowing.remaining) + rest;
    }

    // Removes messages whose rest fits the send buffer from the window of their queue; returns that queue, -1 if none.
    int64_t release(int64_t s) {
        Stream &flowing = streams[s];
        int64_t freed = -1;
        while (flowing.num_released < flowing.line.size() &&
               flowing.unreleased_bytes <= buffer[s] * (1 + TIME_TOLERANCE)) {
            freed = queue[flowing.line[flowing.num_released]];
            pass_window(flowing.line[flowing.num_released]);
            if (++flowing.num_released < flowing.line.size())
                flowing.unreleased_bytes += nbytes[flowing.line[flowing.num_released]];
        }
        return freed;
    }

    // The sender has finished a message. It counts for the window until all earlier messages of its queue are finished.
    void pass_window(int64_t message) {
        released[message] = true;
        const int64_t q = queue[message];
        const auto &row = of_queue[q];
        while (done[q] < static_cast<int64_t>(row.size()) && released[row[done[q]]])
            ++done[q];
    }

    // Starts the flow of the first message of a stream.
    void begin(int64_t s) {
        Stream &flowing = streams[s];
        const int64_t message = flowing.line.front();
        start[message] = now;
        flowing.holds = hold_work[message] > 0;
        if (flowing.holds)
            changed = true;
        flowing.remaining = flowing.holds ? hold_work[message] : nbytes[message];
    }

    // Ends the latency phase of a stream's first message, or finishes the message and starts what waited for it.
    void end_phase(int64_t s) {
        Stream &flowing = streams[s];
        const int64_t message = flowing.line.front();
        if (flowing.holds) {
            flowing.holds = false;
            flowing.remaining = nbytes[message];
            changed = true;
            return;
        }
        const int64_t q = queue[message];
        if (flowing.num_released) {
            --flowing.num_released;
        } else {
            pass_window(message);
            if (flowing.line.size() > 1)
                flowing.unreleased_bytes = nbytes[flowing.line[1]];
        }
        flowing.line.pop_front();
        finish[message] = now;
        if (!flowing.line.empty()) {
            begin(s);
        } else {
            active.erase(std::lower_bound(active.begin(), active.end(), s));
            changed = true;
        }
        const int64_t to = receiver[message];
        auto &row = of_receiver[to];
        const int64_t before = first[to];
        while (first[to] < static_cast<int64_t>(row.size()) && finish[row[first[to]]] >= 0)
            ++first[to];
        const int64_t passed = first[to];
        start_from(q);
        for (int64_t at = before; at < passed; ++at)
            for (const int64_t later : next[row[at]])
                if (--left[later] == 0)
                    start_from(queue[later]);
        if (passed > before) {
            std::vector<int64_t> waiting;
            waiting.swap(blocked[to]);
            for (const int64_t q2 : waiting)
                start_from(q2);
        }
    }

    template <typename F> void each_port(int64_t s, F f) const {
        if (streams[s].holds) {
            f(hold_port[s]);
        } else {
            for (int64_t i = port_at[s]; i < port_at[s + 1]; ++i)
                f(port[i]);
        }
    }

    // Computes the rates of all active streams.
    void share() {
        capacity.assign(port_rate, port_rate + num_ports);
        held.assign(num_ports, false);
        paths.clear();
        for (const int64_t s : active) {
            if (streams[s].holds) {
                held[hold_port[s]] = true;
                paths.push_back({hold_port + s, hold_port + s + 1});
            } else {
                paths.push_back({port + port_at[s], port + port_at[s + 1]});
            }
        }
        for (size_t p = 0; p < num_ports; ++p)
            if (saved[p] > EMPTY && !held[p])
                capacity[p] = AT_ONCE;
        sharing.share(paths, capacity);
        for (size_t i = 0; i < active.size(); ++i)
            streams[active[i]].rate = sharing.rate[i];
        if (bursts) {
            saving.assign(port_rate, port_rate + num_ports);
            for (const int64_t s : active)
                each_port(s, [&](int64_t p) { saving[p] -= streams[s].rate; });
        }
    }

    // The smaller of `step` and the time until a bucket is empty.
    double until_empty(double step) const {
        for (size_t p = 0; p < num_ports; ++p)
            if (saving[p] < 0 && saved[p] > 0)
                step = std::min(step, saved[p] / -saving[p]);
        return step;
    }

    // Updates the saved bytes of each port after a step.
    void save(double step, double limit) {
        for (size_t p = 0; p < num_ports; ++p) {
            if (saving[p] < 0 && saved[p] > 0 && saved[p] / -saving[p] <= limit) {
                saved[p] = 0;
                changed = true;
            } else {
                saved[p] = std::min(std::max(saved[p] + saving[p] * step, 0.0), burst[p]);
            }
        }
    }

    // Bytes that a stream sends until its next event.
    double until_event(int64_t s) const {
        const Stream &flowing = streams[s];
        if (!flowing.holds && flowing.num_released < flowing.line.size()) {
            const double until_release = flowing.unreleased_bytes - buffer[s];
            if (0 < until_release && until_release < flowing.remaining)
                return until_release;
        }
        return flowing.remaining;
    }

    void run() {
        for (size_t q = 0; q < of_queue.size(); ++q)
            start_from(static_cast<int64_t>(q));
        std::vector<int64_t> ended, releasing;
        Interruption interruption;
        while (!active.empty()) {
            interruption.look();
            if (changed) {
                share();
                changed = false;
            }
            double step = -1;
            for (const int64_t s : active) {
                const double seconds = until_event(s) / streams[s].rate;
                if (step < 0 || seconds < step)
                    step = seconds;
            }
            if (bursts)
                step = until_empty(step);
            const double limit = step * (1 + TIME_TOLERANCE);
            now += step;
            if (bursts)
                save(step, limit);
            ended.clear();
            releasing.clear();
            for (const int64_t s : active) {
                Stream &flowing = streams[s];
                const bool ends = flowing.remaining / flowing.rate <= limit;
                if (ends)
                    ended.push_back(s);
                else
                    flowing.remaining -= flowing.rate * step;
                if (!flowing.holds) {
                    flowing.unreleased_bytes -= flowing.rate * step;
                    if (ends || flowing.num_released < flowing.line.size())
                        releasing.push_back(s);
                }
            }
            for (const int64_t s : releasing) {
                const int64_t q = release(s);
                if (q >= 0)
                    start_from(q);
            }
            for (const int64_t s : ended)
                end_phase(s);
        }
    }
};

void check_range(const Ints &values, size_t size, const char *name, size_t below) {
    if (values.shape(0) != size)
        throw std::invalid_argument(std::string("flow: ") + name + " has the wrong size");
    for (size_t i = 0; i < size; ++i)
        if (values.data()[i] < 0 || static_cast<size_t>(values.data()[i]) >= below)
            throw std::out_of_range(std::string("flow: ") + name + " holds an index that does not exist");
}

void check_ends(const Ints &ends, size_t rows, size_t total, const char *name) {
    bool fits = ends.shape(0) == rows + 1 && ends.data()[0] == 0 && ends.data()[rows] == static_cast<int64_t>(total);
    for (size_t i = 0; fits && i < rows; ++i)
        fits = ends.data()[i] <= ends.data()[i + 1];
    if (!fits)
        throw std::invalid_argument(std::string("flow: ") + name + " does not divide its rows");
}

// The messages of each key, in order.
std::vector<std::vector<int64_t>> members(const Ints &keys) {
    std::vector<std::vector<int64_t>> rows;
    for (size_t i = 0; i < keys.shape(0); ++i) {
        const size_t key = static_cast<size_t>(keys.data()[i]);
        if (key >= rows.size())
            rows.resize(key + 1);
        rows[key].push_back(static_cast<int64_t>(i));
    }
    return rows;
}

void flow(Ints queue, Ints stream, Ints receiver, Ints window, Ints ahead, Floats nbytes, Ints after_at, Ints after,
          Ints port_at, Ints port, Ints hold_port, Floats hold_work, Floats buffer, Floats rate, Floats burst,
          Times start, Times finish) {
    const size_t n = queue.shape(0), num_streams = hold_port.shape(0), num_ports = rate.shape(0);
    check_range(queue, n, "queue", n);
    check_range(receiver, n, "receiver", n);
    check_range(stream, n, "stream", num_streams);
    check_range(after, after.shape(0), "after", n);
    check_range(port, port.shape(0), "port", num_ports);
    check_range(hold_port, num_streams, "hold_port", num_ports);
    check_ends(after_at, n, after.shape(0), "after_at");
    check_ends(port_at, num_streams, port.shape(0), "port_at");
    if (window.shape(0) != n || ahead.shape(0) != n || nbytes.shape(0) != n || start.shape(0) != n ||
        finish.shape(0) != n || burst.shape(0) != num_ports || hold_work.shape(0) != n || buffer.shape(0) != num_streams)
        throw std::invalid_argument("flow: arrays differ in size");
    nb::gil_scoped_release release;
    Flow f;
    f.queue = queue.data(), f.stream = stream.data(), f.receiver = receiver.data(), f.window = window.data();
    f.ahead = ahead.data(), f.port_at = port_at.data(), f.port = port.data(), f.hold_port = hold_port.data();
    f.nbytes = nbytes.data(), f.hold_work = hold_work.data(), f.buffer = buffer.data(), f.port_rate = rate.data();
    f.num_ports = num_ports, f.burst = burst.data();
    f.sharing.price.assign(num_ports, 0);
    f.saved.assign(burst.data(), burst.data() + num_ports), f.saving.assign(num_ports, 0);
    f.bursts = std::any_of(f.saved.begin(), f.saved.end(), [](double bytes) { return bytes > 0; });
    f.start = start.data(), f.finish = finish.data();
    f.left.resize(n), f.position.resize(n), f.next.resize(n), f.streams.resize(num_streams);
    for (size_t i = 0; i < n; ++i) {
        f.left[i] = after_at.data()[i + 1] - after_at.data()[i];
        for (int64_t j = after_at.data()[i]; j < after_at.data()[i + 1]; ++j)
            f.next[after.data()[j]].push_back(static_cast<int64_t>(i));
    }
    f.of_queue = members(queue), f.of_receiver = members(receiver);
    for (const auto &row : f.of_receiver)
        for (size_t i = 0; i < row.size(); ++i)
            f.position[row[i]] = static_cast<int64_t>(i);
    f.head.resize(f.of_queue.size()), f.done.resize(f.of_queue.size()), f.released.resize(n);
    f.first.resize(f.of_receiver.size()), f.blocked.resize(f.of_receiver.size());
    f.run();
    for (size_t i = 0; i < n; ++i)
        if (f.finish[i] < 0)
            throw std::invalid_argument("message " + std::to_string(i) + " can never start");
}

} // namespace

void bind_fluid(nb::module_ &m) {
    m.def("flow", &flow, nb::arg("queue"), nb::arg("stream"), nb::arg("receiver"), nb::arg("window"),
          nb::arg("ahead"), nb::arg("nbytes"), nb::arg("after_at"), nb::arg("after"), nb::arg("port_at"),
          nb::arg("port"), nb::arg("hold_port"), nb::arg("hold_work"), nb::arg("buffer"), nb::arg("rate"), nb::arg("burst"),
          nb::arg("start"), nb::arg("finish"), "Fill start and finish with the times of all messages.");
}
