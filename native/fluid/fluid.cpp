// Python binding of the simulator's event loop (event_loop.h): checks the arrays and builds the tables of the loop.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "../interruption.h"
#include "../large_array.h"
#include "event_loop.h"

namespace nb = nanobind;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

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

// Checks all indices of messages, streams and ports.
void check_network(const Ints &queue, const Ints &stream, const Ints &receiver, const Ints &after_offsets, const Ints &after,
                   const Ints &port_offsets, const Ints &port, const Ints &overhead_port, size_t num_ports) {
    const size_t n = queue.shape(0), num_streams = overhead_port.shape(0);
    check_range(queue, n, "queue", n);
    check_range(receiver, n, "receiver", n);
    check_range(stream, n, "stream", num_streams);
    check_range(after, after.shape(0), "after", n);
    check_range(port, port.shape(0), "port", num_ports);
    check_range(overhead_port, num_streams, "overhead_port", num_ports);
    check_ends(after_offsets, n, after.shape(0), "after_offsets");
    check_ends(port_offsets, num_streams, port.shape(0), "port_offsets");
}

// Groups messages by key: row k lists the messages i with keys[i] == k, ascending.
Rows group_by_key(const int64_t *keys, size_t count) {
    Rows rows;
    const int64_t num_rows = count ? *std::max_element(keys, keys + count) + 1 : 0;
    rows.at.assign(num_rows + 1, 0);
    for (size_t i = 0; i < count; ++i)
        ++rows.at[keys[i] + 1];
    for (int64_t k = 0; k < num_rows; ++k)
        rows.at[k + 1] += rows.at[k];
    std::vector<int64_t> free_at(rows.at.begin(), rows.at.end() - 1); // by row: its first free entry
    rows.values.resize(count);
    for (size_t i = 0; i < count; ++i)
        rows.values[free_at[keys[i]]++] = static_cast<int64_t>(i);
    return rows;
}

// The outcome as a number for Python.
int flow(Ints queue, Ints stream, Ints receiver, Ints window, Ints ahead, Floats nbytes, Ints after_offsets, Ints after,
          Ints port_offsets, Ints port, Ints overhead_port, Floats overhead_bytes, Floats buffer, Floats rate, Floats burst,
          Times start, Times finish, double cutoff, int64_t most_operations) {
    const size_t n = queue.shape(0), num_streams = overhead_port.shape(0), num_ports = rate.shape(0);
    check_network(queue, stream, receiver, after_offsets, after, port_offsets, port, overhead_port, num_ports);
    if (window.shape(0) != n || ahead.shape(0) != n || nbytes.shape(0) != n || start.shape(0) != n ||
        finish.shape(0) != n || overhead_bytes.shape(0) != n || burst.shape(0) != num_ports ||
        buffer.shape(0) != num_streams)
        throw std::invalid_argument("flow: arrays differ in size");
    nb::gil_scoped_release release;
    EventLoop loop;
    loop.queue = queue.data(), loop.stream = stream.data(), loop.receiver = receiver.data();
    loop.window = window.data(), loop.ahead = ahead.data(), loop.nbytes = nbytes.data();
    loop.port_offsets = port_offsets.data(), loop.port = port.data(), loop.overhead_port = overhead_port.data();
    loop.overhead_bytes = overhead_bytes.data(), loop.buffer = buffer.data();
    loop.port_rate = rate.data(), loop.num_ports = num_ports, loop.burst = burst.data();
    loop.sharing.price.assign(num_ports, 0), loop.sharing.joint = true;
    loop.capacity.assign(rate.data(), rate.data() + num_ports);
    loop.passing.resize(num_ports), loop.is_dirty.resize(num_ports), loop.is_found_port.resize(num_ports);
    loop.saved.assign(burst.data(), burst.data() + num_ports), loop.saving.assign(num_ports, 0);
    loop.bursts = std::any_of(loop.saved.begin(), loop.saved.end(), [](double bytes) { return bytes > 0; });
    loop.start = start.data(), loop.finish = finish.data();
    loop.left.resize(n), loop.position.resize(n), loop.streams.resize(num_streams), loop.work.resize(num_ports);
    std::vector<int64_t> &next_at = loop.next.at;
    next_at.assign(n + 1, 0);
    for (size_t i = 0; i < after.shape(0); ++i)
        ++next_at[after.data()[i] + 1];
    for (size_t i = 0; i < n; ++i)
        next_at[i + 1] += next_at[i];
    loop.next.values.resize(after.shape(0));
    std::vector<int64_t> free_at(next_at.begin(), next_at.end() - 1);
    for (size_t i = 0; i < n; ++i) {
        loop.left[i] = after_offsets.data()[i + 1] - after_offsets.data()[i];
        for (int64_t j = after_offsets.data()[i]; j < after_offsets.data()[i + 1]; ++j)
            loop.next.values[free_at[after.data()[j]]++] = static_cast<int64_t>(i);
    }
    loop.of_queue = group_by_key(loop.queue, n), loop.of_receiver = group_by_key(loop.receiver, n);
    loop.of_stream = group_by_key(loop.stream, n);
    loop.of_stream.at.resize(num_streams + 1, static_cast<int64_t>(n));
    for (size_t s = 0; s < num_streams; ++s)
        for (int64_t i = loop.of_stream.at[s] + 1; i < loop.of_stream.at[s + 1]; ++i)
            if (loop.queue[loop.of_stream.values[i]] != loop.queue[loop.of_stream.values[i - 1]])
                throw std::invalid_argument("flow: messages of one stream are in several queues");
    for (size_t i = 0; i < n; ++i) {
        const int64_t s = loop.stream[i];
        loop.work[loop.overhead_port[s]] += loop.overhead_bytes[i];
        for (int64_t j = loop.port_offsets[s]; j < loop.port_offsets[s + 1]; ++j)
            loop.work[loop.port[j]] += loop.nbytes[i];
    }
    const size_t num_queues = loop.of_queue.at.size() - 1, num_receivers = loop.of_receiver.at.size() - 1;
    for (size_t to = 0; to < num_receivers; ++to)
        for (int64_t i = 0; i < loop.of_receiver.size(to); ++i)
            loop.position[loop.of_receiver[to][i]] = i;
    loop.head.resize(num_queues), loop.done.resize(num_queues), loop.is_blocked.resize(num_queues);
    loop.released.resize(n);
    loop.first.resize(num_receivers), loop.blocked.resize(num_receivers);
    const Outcome outcome = loop.run(cutoff, most_operations);
    if (outcome != Outcome::ended)
        return static_cast<int>(outcome);
    for (size_t i = 0; i < n; ++i)
        if (loop.finish[i] < 0) // as the caller has filled it
            throw std::invalid_argument("message " + std::to_string(i) + " can never start");
    return static_cast<int>(outcome);
}

// The last ends of the messages of each key, as many as a rule looks back, in order.
class Ends {
  public:
    explicit Ends(size_t keys) : at_(keys + 1), count_(keys) {}
    void expect(int64_t key) { ++at_[key + 1]; }
    void begin(int64_t most) { // `most`: how far a rule looks back
        for (size_t k = 1; k < at_.size(); ++k)
            at_[k] = at_[k - 1] + std::min(at_[k], most);
        ends_.resize(at_.back());
    }
    // The end of the message `back` before the next one, 0 without it.
    double before(int64_t key, int64_t back) const {
        return count_[key] < back ? 0 : ends_[at_[key] + (count_[key] - back) % (at_[key + 1] - at_[key])];
    }
    // Adds a message; it has ended when all earlier ones have too. Returns that end.
    double add(int64_t key, double end) {
        const double last = count_[key] ? std::max(end, before(key, 1)) : end;
        ends_[at_[key] + count_[key] % (at_[key + 1] - at_[key])] = last;
        ++count_[key];
        return last;
    }

  private:
    std::vector<int64_t> at_, count_;
    LargeArray<double> ends_;
};

// When each link passes bytes. The link passes the bytes of one message after the other, in the order in which messages
// are added. A message that is ready only later leaves a gap, and messages that are added after it fill the gap. Links
// keep one gap each: the one that arose last.
class Links {
  public:
    explicit Links(size_t count) : free_from_(count), gap_from_(count), gap_to_(count) {}
    // The first time from `begin` on at which a link is free.
    double first_free(int64_t link, double begin) const {
        return std::max(begin < gap_to_[link] ? gap_from_[link] : free_from_[link], begin);
    }
    // Lets a link pass something for so many seconds, from `begin` on, and returns when it has passed.
    double pass(int64_t link, double begin, double seconds) {
        double &from = gap_from_[link], &to = gap_to_[link], &free = free_from_[link];
        const double first = std::max(from, begin);
        if (first < to) {
            if (first + seconds < to)
                return from = first + seconds;
            seconds -= to - first;
            to = first;
        }
        if (begin > free)
            from = free, to = free = begin;
        return free += seconds;
    }

  private:
    std::vector<double> free_from_, gap_from_, gap_to_;
};

// Messages of equal size that begin to flow over a shared link at nearly the same time. The messages of a round share
// the rate of the link. So all end when the link has passed the last one.
class Rounds {
  public:
    static constexpr int64_t NONE = -1;
    explicit Rounds(size_t links) : latest_(links, NONE) {}
    // Adds a message whose bytes have passed the link at `end`: to the latest round, or to a new one. Returns the
    // round.
    int64_t add(int64_t link, double begin, double seconds, int64_t nbytes, double end) {
        const int64_t latest = latest_[link];
        if (latest != NONE && rounds_[latest].nbytes == nbytes &&
            std::abs(begin - rounds_[latest].begin) <= NEARLY * rounds_[latest].seconds) {
            rounds_[latest].end = std::max(rounds_[latest].end, end);
            return latest;
        }
        rounds_.push_back({begin, seconds, end, nbytes});
        return latest_[link] = static_cast<int64_t>(rounds_.size()) - 1;
    }
    double end(int64_t round) const { return rounds_[round].end; }

  private:
    static constexpr double NEARLY = 0.5; // of the time of a message
    struct Round {
        double begin, seconds, end;
        int64_t nbytes;
    };
    std::vector<int64_t> latest_; // by link
    std::vector<Round> rounds_;
};

// The end of the last message if every port passes one message at a time, in the order of the messages:
//
//   - The messages of a queue start in order. A message starts when its queue, its receiver, the messages in its
//     `after` and its ports allow it.
//   - A port is busy for the time of the bytes at its own rate. The port of the sender is also busy for the latency.
//   - While a message waits, its ports pass later messages.
//   - A link that many ports share passes several messages at once: the uplink of a pod, or the total rate inside a
//     host. A message ends no earlier than its link has passed all bytes up to it, and those of its round.
//   - Copies within a rank take no time.
//
// Row r of `ports` has the ports of rank r: out of and into the rank inside its host, out of and into its NIC, out of
// and into its pod (-1 without pods), and the total rate inside its host (-1 without a limit).
double flow_serially(Ints sender, Ints receiver, Ints nbytes, Ints window, Ints after_offsets, Ints after, Floats delay,
                    Ints host_of, Table ports, Floats rate, Ints ahead, double latency_across, double latency_inside) {
    constexpr int OUT = 0, IN = 1, EGRESS = 2, INGRESS = 3, UP = 4, DOWN = 5, SHARED = 6, COLUMNS = 7;
    constexpr int PORTS = 2; // of a path; the others are shared links
    const size_t n = sender.shape(0), ranks = host_of.shape(0);
    check_range(sender, n, "sender", ranks);
    check_range(receiver, n, "receiver", ranks);
    check_range(after, after.shape(0), "after", n);
    check_ends(after_offsets, n, after.shape(0), "after_offsets");
    if (window.shape(0) != n || nbytes.shape(0) != n || (delay.shape(0) != n && delay.shape(0)) || !ahead.shape(0) ||
        ports.shape(0) != ranks || ports.shape(1) != COLUMNS)
        throw std::invalid_argument("flow_serially: arrays differ in size");
    for (size_t i = 0; i < COLUMNS * ranks; ++i)
        if (ports.data()[i] < (i % COLUMNS < UP ? 0 : -1) || ports.data()[i] >= static_cast<int64_t>(rate.shape(0)))
            throw std::out_of_range("flow_serially: ports holds an index that does not exist");
    nb::gil_scoped_release release;
    Interruption interruption;
    const auto inside = [&](size_t i) { return host_of(sender(i)) == host_of(receiver(i)); };
    Ends sent(2 * ranks), received(ranks);
    int64_t longest = 1;
    for (size_t i = 0; i < n; ++i) {
        longest = std::max(longest, window(i));
        if (sender(i) != receiver(i))
            sent.expect(2 * sender(i) + inside(i)), received.expect(receiver(i));
    }
    sent.begin(longest), received.begin(*std::max_element(ahead.data(), ahead.data() + ahead.shape(0)));
    LargeArray<double> arrived(n);
    bool shares = false; // whether there are shared links
    for (size_t r = 0; r < ranks; ++r)
        shares |= ports(r, UP) >= 0 || ports(r, SHARED) >= 0;
    LargeArray<int64_t> round(shares ? n : 0); // of the shared link that lets the message end last
    Links links(rate.shape(0));
    Rounds rounds(rate.shape(0));
    std::vector<double> started(2 * ranks); // by queue
    double last = 0;
    for (size_t i = 0; i < n; ++i) {
        if (i % 65536 == 0)
            interruption.poll();
        const int64_t from = sender(i), to = receiver(i);
        arrived[i] = 0;
        if (shares)
            round[i] = Rounds::NONE;
        if (from == to)
            continue;
        const bool is_inside = inside(i);
        const int64_t queue = 2 * from + is_inside;
        double &begin = started[queue];
        for (int64_t at = after_offsets(i); at < after_offsets(i + 1); ++at) {
            if (after(at) >= static_cast<int64_t>(i))
                throw std::out_of_range("flow_serially: a message comes after a later one");
            begin = std::max(begin, arrived[after(at)]);
            if (shares && round[after(at)] != Rounds::NONE)
                begin = std::max(begin, rounds.end(round[after(at)]));
        }
        const int64_t most = ahead(std::min<int64_t>(window(i), static_cast<int64_t>(ahead.shape(0)) - 1));
        begin = std::max({begin, sent.before(queue, window(i)), received.before(to, most)});
        const int64_t *a = &ports(from, 0), *b = &ports(to, 0);
        const bool crosses_pods = !is_inside && a[UP] != b[UP];
        const int64_t path[4] = {is_inside ? a[OUT] : a[EGRESS], is_inside ? b[IN] : b[INGRESS],
                                 is_inside ? a[SHARED] : a[UP], b[DOWN]};
        const int length = crosses_pods ? 4 : is_inside && a[SHARED] >= 0 ? 3 : 2;
        const double bytes = static_cast<double>(nbytes(i));
        double seconds = 0;
        for (int p = 0; p < length; ++p)
            seconds = std::max(seconds, bytes / rate(path[p]));
        const double wait = (is_inside ? latency_inside : latency_across) + (delay.shape(0) ? delay(i) : 0);
        const double flows = links.first_free(path[1], links.first_free(path[0], begin) + wait);
        double end = std::max(flows + seconds, links.pass(path[0], flows - wait, wait + bytes / rate(path[0])));
        double passed = 0;
        for (int p = 1; p < length; ++p) {
            const double ends = links.pass(path[p], flows, bytes / rate(path[p]));
            end = std::max(end, ends);
            if (p >= PORTS && ends >= passed)
                passed = ends, round[i] = rounds.add(path[p], flows, seconds, nbytes(i), ends);
        }
        sent.add(queue, end);
        arrived[i] = received.add(to, end);
        last = std::max(last, end);
    }
    return last;
}

} // namespace

void bind_fluid(nb::module_ &m) {
    m.def("flow", &flow, nb::arg("queue"), nb::arg("stream"), nb::arg("receiver"), nb::arg("window"),
          nb::arg("ahead"), nb::arg("nbytes"), nb::arg("after_offsets"), nb::arg("after"), nb::arg("port_offsets"),
          nb::arg("port"), nb::arg("overhead_port"), nb::arg("overhead_bytes"), nb::arg("buffer"), nb::arg("rate"),
          nb::arg("burst"), nb::arg("start"), nb::arg("finish"),
          nb::arg("cutoff") = std::numeric_limits<double>::infinity(),
          nb::arg("most_operations") = std::numeric_limits<int64_t>::max(),
          "Write start and finish, in seconds, of all messages, and return 0. Return 1 if the last one would finish "
          "after the cutoff, 2 if the simulation takes more operations, of a few nanoseconds each.");
    m.def("flow_serially", &flow_serially, nb::arg("sender"), nb::arg("receiver"), nb::arg("nbytes"), nb::arg("window"),
          nb::arg("after_offsets"), nb::arg("after"), nb::arg("delay"), nb::arg("host_of"), nb::arg("ports"),
          nb::arg("rate"), nb::arg("ahead"), nb::arg("latency_across"), nb::arg("latency_inside"),
          "Return the end of the last message, in seconds, if ports pass one message at a time, in order.");
}
