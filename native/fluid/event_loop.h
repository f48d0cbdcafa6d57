// The event loop of the simulator, on the fluid model of reshard.cost.fluid.Network.
//
// Messages of one stream (a pair of ranks) flow one at a time. The first message of each stream is in one of two
// phases: it occupies the sender's port for its latency, or its bytes pass all ports of the stream. The rates of all
// active streams are proportionally fair (see proportional_fairness.h) and change only at events: a phase ends, a
// message leaves the window of its queue because the rest of it fits the send buffer, or a token bucket becomes empty.
// Each step advances the clock to the next event.
//
// A port with saved tokens has no limit on its rate (AT_ONCE) until the tokens are spent. While a latency occupies the
// port, the limit holds, since a full bucket makes no latency shorter.
//
// A component is a set of streams that share ports, directly or through other streams. Components do not affect each
// other. So an event changes rates only in the components whose streams or capacities it changes, and the rates of each
// component are computed alone.
//
// A message starts when the rules of Network allow it; start_from() is called for each queue that an event may unblock.
//
// tests/reference/fluid.py does the same floating point operations in the same order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../interruption.h"
#include "stream.h"

constexpr double TIME_TOLERANCE = 1e-9; // events within this fraction of a step are simultaneous
constexpr double AT_ONCE = 1e18;  // bytes per second of a port with saved tokens
constexpr double EMPTY = 1.0;     // a bucket of fewer bytes is empty
constexpr int STEPS_PER_FLOOR = 8; // steps between two looks at the work that is left
constexpr int64_t OPERATIONS_PER_STEP = 100; // of a few nanoseconds each
// Relative error of a lower bound: ports carry up to 1e-9 more than their capacity.
constexpr double FLOOR_TOLERANCE = 1e-6;

// All messages finished, the last one would finish after the cutoff, or the simulation takes too much work.
enum class Outcome { ended, late, unknown };

struct EventLoop {
    const int64_t *queue, *stream, *receiver, *window, *ahead, *port_offsets, *port, *overhead_port;
    const double *nbytes, *overhead_bytes, *buffer, *port_rate, *burst;
    size_t num_ports;
    double *start, *finish;
    Rows next; // by message: the messages that start after it
    Rows of_queue, of_receiver, of_stream; // messages in order
    std::vector<std::vector<int64_t>> blocked; // by receiver: queues whose head waits for it
    std::vector<char> is_blocked; // by queue: whether it is in a row of `blocked`
    std::vector<int64_t> left, position; // by message: unfinished messages before it; its position at its receiver
    std::vector<int64_t> head, done;  // by queue: first message not started; first in the window
    std::vector<int64_t> first;       // by receiver: position of its first unfinished message
    std::vector<char> released;       // by message: whether it has left the window of its queue
    std::vector<Stream> streams;
    std::vector<int64_t> active; // streams that flow, ascending
    std::vector<std::vector<int64_t>> passing; // by port: active streams that pass it in their phase
    std::vector<double> capacity;
    std::vector<int64_t> dirty; // ports whose streams have changed since rates were computed
    std::vector<char> is_dirty;
    std::vector<int64_t> component, found_ports; // of find_component()
    std::vector<char> is_found_port;
    std::vector<Path> paths; // of the streams of a component
    Sharing sharing;
    std::vector<char> held;
    std::vector<double> saved, saving; // by port: saved bytes, and their change in bytes per second
    std::vector<double> work, ahead_work; // by port: bytes and latencies of messages that have not begun; scratch
    bool bursts = false;
    double now = 0;
    bool changed = true; // whether rates must be computed again

    // Starts messages of a queue as long as the next one may start.
    void start_from(int64_t q) {
        const int64_t *row = of_queue[q], count = of_queue.size(q);
        while (head[q] < count) {
            const int64_t message = row[head[q]];
            if (left[message] || head[q] - done[q] >= window[message])
                return;
            const int64_t to = receiver[message];
            if (position[message] >= first[to] + ahead[message]) {
                if (!is_blocked[q])
                    blocked[to].push_back(q);
                is_blocked[q] = true;
                return;
            }
            ++head[q];
            const int64_t s = stream[message];
            Stream &flowing = streams[s];
            if (flowing.released == flowing.started)
                flowing.unreleased_bytes = nbytes[message] + unsent_bytes(s);
            ++flowing.started;
            if (flowing.started - flowing.first == 1) {
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
        if (flowing.is_idle())
            return 0;
        const int64_t *row = of_stream[s];
        double rest = 0;
        for (int64_t i = flowing.first + 1; i < flowing.started; ++i)
            rest += nbytes[row[i]];
        return (flowing.in_overhead ? nbytes[row[flowing.first]] : flowing.remaining) + rest;
    }

    // Removes messages whose rest fits the send buffer from the window of their queue; returns that queue, -1 if none.
    int64_t release(int64_t s) {
        Stream &flowing = streams[s];
        const int64_t *row = of_stream[s];
        int64_t freed = -1;
        while (flowing.released < flowing.started && flowing.unreleased_bytes <= buffer[s] * (1 + TIME_TOLERANCE)) {
            freed = queue[row[flowing.released]];
            pass_window(row[flowing.released]);
            if (++flowing.released < flowing.started)
                flowing.unreleased_bytes += nbytes[row[flowing.released]];
        }
        return freed;
    }

    // The sender has finished a message. It counts for the window until all earlier messages of its queue are finished.
    void pass_window(int64_t message) {
        released[message] = true;
        const int64_t q = queue[message], count = of_queue.size(q);
        const int64_t *row = of_queue[q];
        while (done[q] < count && released[row[done[q]]])
            ++done[q];
    }

    // Starts the flow of the first message of a stream.
    void begin(int64_t s) {
        Stream &flowing = streams[s];
        const int64_t message = of_stream[s][flowing.first];
        start[message] = now;
        flowing.in_overhead = overhead_bytes[message] > 0;
        if (flowing.in_overhead)
            changed = true;
        flowing.remaining = flowing.in_overhead ? overhead_bytes[message] : nbytes[message];
        work[overhead_port[s]] -= overhead_bytes[message];
        for (int64_t i = port_offsets[s]; i < port_offsets[s + 1]; ++i)
            work[port[i]] -= nbytes[message];
        set_path(s);
    }

    // Ends the latency phase of a stream's first message, or finishes the message and starts what waited for it.
    void end_phase(int64_t s) {
        Stream &flowing = streams[s];
        const int64_t message = of_stream[s][flowing.first];
        if (flowing.in_overhead) {
            flowing.in_overhead = false;
            flowing.remaining = nbytes[message];
            changed = true;
            set_path(s);
            return;
        }
        const int64_t q = queue[message];
        ++flowing.first;
        if (flowing.released < flowing.first) {
            flowing.released = flowing.first;
            pass_window(message);
            if (!flowing.is_idle())
                flowing.unreleased_bytes = nbytes[of_stream[s][flowing.first]];
        }
        finish[message] = now;
        if (!flowing.is_idle()) {
            begin(s);
        } else {
            active.erase(std::lower_bound(active.begin(), active.end(), s));
            changed = true;
            set_path(s);
        }
        const int64_t to = receiver[message], count = of_receiver.size(to), before = first[to];
        const int64_t *row = of_receiver[to];
        while (first[to] < count && finish[row[first[to]]] >= 0)
            ++first[to];
        const int64_t passed = first[to];
        start_from(q);
        for (int64_t at = before; at < passed; ++at)
            for (int64_t i = next.at[row[at]]; i < next.at[row[at] + 1]; ++i)
                if (--left[next.values[i]] == 0)
                    start_from(queue[next.values[i]]);
        if (passed > before) {
            std::vector<int64_t> waiting;
            waiting.swap(blocked[to]);
            for (const int64_t q2 : waiting) {
                is_blocked[q2] = false;
                start_from(q2);
            }
        }
    }

    // Moves a stream to the ports of its present phase.
    void set_path(int64_t s) {
        Stream &flowing = streams[s];
        Path path{nullptr, nullptr};
        if (!flowing.is_idle())
            path = flowing.in_overhead ? Path{overhead_port + s, overhead_port + s + 1}
                                       : Path{port + port_offsets[s], port + port_offsets[s + 1]};
        if (path.first == flowing.path.first)
            return;
        for (const int64_t p : flowing.path) {
            auto &row = passing[p];
            *std::find(row.begin(), row.end(), s) = row.back();
            row.pop_back();
            touch(p);
        }
        for (const int64_t p : path) {
            passing[p].push_back(s);
            touch(p);
        }
        flowing.path = path;
    }

    void touch(int64_t p) {
        if (!is_dirty[p]) {
            is_dirty[p] = true;
            dirty.push_back(p);
        }
    }

    // Computes the rates of the streams that the last events affect.
    void share() {
        if (bursts)
            set_capacities();
        std::sort(dirty.begin(), dirty.end());
        for (const int64_t p : dirty) {
            if (!is_dirty[p]) // an earlier port's component has it
                continue;
            find_component(p);
            if (component.empty())
                continue;
            paths.clear();
            for (const int64_t s : component)
                paths.push_back(streams[s].path);
            sharing.share(paths, capacity);
            for (size_t i = 0; i < component.size(); ++i)
                streams[component[i]].rate = sharing.rate[i];
        }
        dirty.clear();
        if (bursts) {
            saving.assign(port_rate, port_rate + num_ports);
            for (const int64_t s : active)
                for (const int64_t p : streams[s].path)
                    saving[p] -= streams[s].rate;
        }
    }

    // Sets the capacity of each port: a port with saved tokens has no limit unless a latency occupies it.
    void set_capacities() {
        held.assign(num_ports, false);
        for (const int64_t s : active)
            if (streams[s].in_overhead)
                held[overhead_port[s]] = true;
        for (size_t p = 0; p < num_ports; ++p) {
            const double most = saved[p] > EMPTY && !held[p] ? AT_ONCE : port_rate[p];
            if (most != capacity[p])
                touch(static_cast<int64_t>(p));
            capacity[p] = most;
        }
    }

    // Finds the active streams that a port connects, ascending, and cleans their ports.
    void find_component(int64_t p) {
        component.clear(), found_ports.clear();
        const auto add = [&](int64_t number) {
            if (is_found_port[number])
                return;
            is_found_port[number] = true;
            found_ports.push_back(number);
            for (const int64_t s : passing[number])
                if (!streams[s].is_found) {
                    streams[s].is_found = true;
                    component.push_back(s);
                }
        };
        add(p);
        for (size_t i = 0; i < component.size(); ++i)
            for (const int64_t number : streams[component[i]].path)
                add(number);
        for (const int64_t s : component)
            streams[s].is_found = false;
        for (const int64_t number : found_ports)
            is_found_port[number] = is_dirty[number] = false;
        if (component.size() == active.size())
            component = active;
        else
            std::sort(component.begin(), component.end());
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
        if (!flowing.in_overhead && flowing.released < flowing.started) {
            const double until_release = flowing.unreleased_bytes - buffer[s];
            if (0 < until_release && until_release < flowing.remaining)
                return until_release;
        }
        return flowing.remaining;
    }

    // A lower bound on the finish of the last message: the port with the most work left is always busy.
    double floor() {
        ahead_work = work;
        for (const int64_t s : active) {
            const Stream &flowing = streams[s];
            if (flowing.in_overhead)
                ahead_work[overhead_port[s]] += flowing.remaining;
            const double rest = flowing.in_overhead ? nbytes[of_stream[s][flowing.first]] : flowing.remaining;
            for (int64_t i = port_offsets[s]; i < port_offsets[s + 1]; ++i)
                ahead_work[port[i]] += rest;
        }
        double most = 0;
        for (size_t p = 0; p < num_ports; ++p)
            most = std::max(most, ahead_work[p] / port_rate[p]);
        return now + most * (1 - FLOOR_TOLERANCE);
    }

    // Runs all messages, unless the last one would finish after `cutoff` or the work exceeds `most_operations`.
    Outcome run(double cutoff, int64_t most_operations) {
        for (size_t q = 0; q < head.size(); ++q)
            start_from(static_cast<int64_t>(q));
        std::vector<int64_t> ended, releasing;
        Interruption interruption;
        const bool has_floor = !bursts && cutoff < std::numeric_limits<double>::infinity();
        int64_t operations = 0;
        for (int64_t steps = 0; !active.empty(); ++steps) {
            interruption.poll();
            operations += 4 * static_cast<int64_t>(active.size()) + OPERATIONS_PER_STEP;
            if (operations + sharing.operations > most_operations)
                return Outcome::unknown;
            if (has_floor && steps % STEPS_PER_FLOOR == 0 && floor() > cutoff)
                return Outcome::late;
            if (changed) {
                share();
                changed = false;
            }
            double step = std::numeric_limits<double>::infinity();
            for (const int64_t s : active)
                step = std::min(step, until_event(s) / streams[s].rate);
            if (bursts)
                step = until_empty(step);
            const double limit = step * (1 + TIME_TOLERANCE);
            now += step;
            if (now > cutoff)
                return Outcome::late;
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
                if (!flowing.in_overhead) {
                    const bool fits = (flowing.unreleased_bytes - buffer[s]) / flowing.rate <= limit;
                    flowing.unreleased_bytes -= flowing.rate * step;
                    if (fits) // no extra event for a rounding error: its step would be too short to advance the clock
                        flowing.unreleased_bytes = std::min(flowing.unreleased_bytes, buffer[s]);
                    if (ends || flowing.released < flowing.started)
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
        return Outcome::ended;
    }
};
