// Turns sends of chunks between NICs into messages of pieces between ranks.
//
// A chunk is sent piece by piece. The sender of a piece is a rank at the sending NIC that has the piece. The receiver
// is a rank at the receiving NIC that needs it. If a NIC has no such rank, another rank at the NIC stages the piece.
// The receiver forwards the piece to all ranks of its host that need it, along a chain or, for many ranks, a binary
// tree. Among several candidates, the NIC keeps the rank that it used last, until that rank is `max_lead` pieces ahead of
// the least loaded rank. Each change of rank costs time, because one rank waits for the other.
//
// A rank stages at most MAX_STAGED pieces for others. Beyond that it drops the oldest one. If the piece is needed
// later, the rank receives it again.
//
// Reference implementation: tests/reference/rank_assignment.py.

#pragma once

#include <map>
#include <stdexcept>

#include "../large_array.h"
#include "../types.h"

// All messages. Message i starts after messages after[after_offsets[i]:after_offsets[i + 1]] have ended.
//   source: the message that brings the piece to the sender, -1 if the sender holds the piece. It is first in `after`.
//   start, end: planned times. `start` is empty if all rates are equal.
// Plans have millions of messages, and the kernel takes longer to clear new pages than loops to fill them. So numbers
// have 32 bits here.
struct Messages {
    LargeArray<int32_t> piece, sender, receiver, source, after;
    LargeArray<int64_t> after_offsets{0};
    LargeArray<double> start, end;
    LargeArray<char> crosses; // whether sender and receiver are on different hosts
    LargeArray<uint8_t> staged; // whether the receiver only forwards the piece
    bool ends_before(int64_t a, int64_t b) const { // on a tie, messages between hosts come first
        return end[a] != end[b] ? end[a] < end[b] : crosses[a] > crosses[b];
    }

    void reserve(size_t count) {
        for (auto *column : {&piece, &sender, &receiver, &source})
            column->reserve(count);
        after_offsets.reserve(count + 1), after.reserve(2 * count);
        end.reserve(count), crosses.reserve(count), staged.reserve(count);
    }

    // The messages in the order of their ends.
    LargeArray<int32_t> by_end() const {
        struct Key {
            double end;
            uint32_t message; // the highest bit is set if it stays inside a host
        };
        constexpr uint32_t INSIDE = uint32_t{1} << 31;
        LargeArray<Key> keys;
        keys.reserve(end.size());
        for (size_t i = 0; i < end.size(); ++i)
            keys.push_back({end[i], static_cast<uint32_t>(i) | (crosses[i] ? 0 : INSIDE)});
        std::sort(keys.begin(), keys.end(), [](const Key &a, const Key &b) {
            return a.end != b.end ? a.end < b.end : a.message < b.message;
        });
        LargeArray<int32_t> order;
        order.reserve(keys.size());
        for (const Key &key : keys)
            order.push_back(static_cast<int32_t>(key.message & ~INSIDE));
        return order;
    }
};

// Messages in the order of a plan, renumbered, as arrays of Python.
struct OrderedMessages {
    LargeArray<int64_t> piece, sender, receiver, source, after_offsets, after;
    LargeArray<uint8_t> staged;

    // Message order[i] becomes message i. Frees the columns of `given` on the way.
    OrderedMessages(Messages &&given, const LargeArray<int32_t> &order) {
        given.start = {}, given.end = {}, given.crosses = {};
        take(given.piece, order, piece), take(given.sender, order, sender), take(given.receiver, order, receiver);
        take(given.staged, order, staged);
        LargeArray<int32_t> number(order.size());
        for (size_t i = 0; i < order.size(); ++i)
            number[order[i]] = static_cast<int32_t>(i);
        for (int32_t &earlier : given.source)
            if (earlier >= 0)
                earlier = number[earlier];
        take(given.source, order, source);
        after_offsets.reserve(order.size() + 1), after.reserve(given.after.size());
        after_offsets.push_back(0);
        for (const int32_t old : order) {
            for (int64_t at = given.after_offsets[old]; at < given.after_offsets[old + 1]; ++at)
                after.push_back(number[given.after[at]]);
            after_offsets.push_back(static_cast<int64_t>(after.size()));
        }
    }

  private:
    template <typename T, typename U>
    static void take(LargeArray<T> &column, const LargeArray<int32_t> &order, LargeArray<U> &moved) {
        moved.reserve(order.size());
        for (const int32_t old : order)
            moved.push_back(column[old]);
        column = {};
    }
};

constexpr size_t LONGEST_CHAIN = 8; // most ranks of a host that form a chain; more form a tree
constexpr size_t MAX_CHILDREN = 2;  // ranks to which a rank of that tree sends
constexpr size_t MAX_MESSAGES = size_t{1} << 30; // relays add fewer than as many again
constexpr size_t MAX_STAGED = 2;   // most pieces that a rank stages for others at a time

class RankAssignment {
  public:
    Messages messages;

    RankAssignment(const Nics &nics, const ChunkWorkload &workload, const std::vector<ChunkSend> &chunk_sends)
        : nics_(nics), workload_(workload), chunk_sends_(chunk_sends), sent_(nics.of_rank.size()),
          landed_(nics.of_rank.size()), last_sender_(nics.host.size(), -1), last_receiver_(nics.host.size(), -1),
          where_(workload.piece_class.size()), receivers_(workload.class_receivers.size()), staged_(nics.of_rank.size()),
          keeps_start_(!nics.have_equal_rates()) {
        for (const int64_t nic : nics.of_rank)
            host_of_.push_back(nic < 0 ? -1 : nics.host[nic]);
    }

    void run() {
        size_t count = 0; // a message for each receiver of each piece; relays need a few more
        for (const int64_t k : workload_.piece_class)
            count += static_cast<size_t>(workload_.class_receivers[k].size());
        if (count > MAX_MESSAGES)
            throw std::length_error("make_schedule: there are too many messages");
        messages.reserve(count), last_use_.reserve(count);
        for (size_t i = 0; i < workload_.piece_class.size(); ++i) {
            const int64_t piece = static_cast<int64_t>(i), k = workload_.piece_class[i];
            const ByHost &receivers = receivers_of(k);
            for (const int64_t host : receivers.hosts) {
                receivers.ranks_on(host, here_);
                near_.clear();
                for (const int64_t rank : workload_.class_holders[k])
                    if (host_of_[rank] == host)
                        near_.push_back(rank);
                if (near_.empty())
                    continue;
                const int64_t holder = least(near_, sent_);
                Place place{host, {}};
                for (const int64_t rank : near_)
                    place.copies.push_back({narrow(rank), -1});
                fan_out(piece, holder, -1, here_, place, 0, 0);
                where_[piece].add(std::move(place));
            }
        }
        std::vector<int64_t> last(chunk_sends_.size(), -1), after;
        for (size_t chunk_send = 0; chunk_send < chunk_sends_.size(); ++chunk_send) {
            interruption_.poll();
            const int64_t chunk = chunk_sends_[chunk_send].chunk;
            const int64_t first = workload_.piece_offsets[chunk], end = workload_.piece_offsets[chunk + 1];
            int64_t total = 0, passed = 0;
            for (int64_t piece = first; piece < end; ++piece)
                total += workload_.piece_bytes[piece];
            const double start = chunk_sends_[chunk_send].start, took = chunk_sends_[chunk_send].end - start;
            after.clear();
            for (const int64_t earlier : chunk_sends_[chunk_send].after)
                after.push_back(last[earlier]);
            double begun = start;
            for (int64_t piece = first; piece < end; ++piece) {
                passed += workload_.piece_bytes[piece];
                const double part = static_cast<double>(passed) / static_cast<double>(total);
                const double end_of_piece = start + took * part;
                last[chunk_send] = pass_on(piece, chunk_sends_[chunk_send], after, begun, end_of_piece);
                after.assign(1, last[chunk_send]);
                begun = end_of_piece;
            }
        }
    }

  private:
    struct Copy { // a rank that has a piece, and the message that brought it (-1: the rank holds it)
        int32_t rank, message;
    };
    struct Place { // a host and its copies of one piece
        int64_t host;
        std::vector<Copy> copies;
    };
    struct Places { // of one piece, and their hosts for a fast search
        std::vector<int64_t> hosts;
        std::vector<Place> places;
        Place &add(Place place) {
            hosts.push_back(place.host);
            places.push_back(std::move(place));
            return places.back();
        }
        Place *find(int64_t host) {
            const auto at = std::find(hosts.begin(), hosts.end(), host);
            return at == hosts.end() ? nullptr : &places[at - hosts.begin()];
        }
    };
    struct ByHost { // ranks by host: those on hosts[i] are ranks[at[i]:at[i + 1]]; hosts in order of first appearance
        std::vector<int64_t> hosts, at, ranks;
        // Writes the ranks on a host to `found`.
        void ranks_on(int64_t host, std::vector<int64_t> &found) const {
            const size_t i = std::find(hosts.begin(), hosts.end(), host) - hosts.begin();
            found.clear();
            if (i < hosts.size())
                found.assign(ranks.begin() + at[i], ranks.begin() + at[i + 1]);
        }
    };

    Interruption interruption_;
    const Nics &nics_;
    const ChunkWorkload &workload_;
    const std::vector<ChunkSend> &chunk_sends_;
    std::vector<int64_t> host_of_, sent_, landed_, near_, here_; // sent_, landed_: bytes sent and received by each rank
    std::vector<int64_t> last_sender_, last_receiver_; // by NIC: the rank used last, -1 for none
    std::vector<int64_t> after_;
    LargeArray<int32_t> last_use_; // by message: the last message that passes on what it stages, -1 for none
    std::vector<Places> where_; // by piece: the hosts that have copies
    std::vector<ByHost> receivers_; // by class; filled by receivers_of()
    std::vector<int64_t> num_on_; // scratch of receivers_of(): by host, its receivers
    std::vector<std::vector<std::pair<int64_t, int64_t>>> staged_; // by rank: (piece, host) staged, oldest first
    // By piece and host: copies that ranks no longer stage. The last one of each rank counts.
    std::map<std::pair<int64_t, int64_t>, std::vector<Copy>> given_up_;

    const bool keeps_start_;

    static int32_t narrow(int64_t number) { return static_cast<int32_t>(number); }

    // The receivers of a class by host.
    const ByHost &receivers_of(int64_t k) {
        ByHost &found = receivers_[k];
        if (!found.at.empty())
            return found;
        const auto ranks = workload_.class_receivers[k];
        num_on_.resize(nics_.num_hosts);
        for (const int64_t rank : ranks)
            if (num_on_[host_of_[rank]]++ == 0)
                found.hosts.push_back(host_of_[rank]);
        found.at.push_back(0);
        for (const int64_t host : found.hosts) {
            found.at.push_back(found.at.back() + num_on_[host]);
            num_on_[host] = found.at[found.at.size() - 2]; // from here on, the place of its next rank
        }
        found.ranks.resize(ranks.size());
        for (const int64_t rank : ranks)
            found.ranks[num_on_[host_of_[rank]]++] = rank;
        for (const int64_t host : found.hosts)
            num_on_[host] = 0;
        return found;
    }

    // The first rank with the least load.
    static int64_t least(const std::vector<int64_t> &ranks, const std::vector<int64_t> &load) {
        return *std::min_element(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return load[a] < load[b]; });
    }

    // Returns the rank used last, unless its load is at least `max_lead` pieces above that of the least loaded rank.
    int64_t keep_or_least(const std::vector<int64_t> &ranks, const std::vector<int64_t> &load, int64_t last,
                          int64_t nbytes) const {
        const int64_t first = least(ranks, load);
        const bool is_one = std::find(ranks.begin(), ranks.end(), last) != ranks.end();
        return is_one && load[last] < load[first] + workload_.max_lead * nbytes ? last : first;
    }

    // Adds a message that starts when `source` and all messages in `after` have ended. Returns its index.
    int64_t send(int64_t piece, int64_t sender, int64_t receiver, int64_t source, const std::vector<int64_t> &after,
                 double start, double end) {
        sent_[sender] += workload_.piece_bytes[piece];
        Messages &m = messages;
        m.piece.push_back(narrow(piece)), m.sender.push_back(narrow(sender)), m.receiver.push_back(narrow(receiver));
        m.source.push_back(narrow(source));
        m.crosses.push_back(host_of_[sender] != host_of_[receiver]), m.staged.push_back(0);
        if (source >= 0)
            m.after.push_back(narrow(source));
        last_use_.push_back(-1);
        if (source >= 0 && m.staged[source])
            last_use_[source] = narrow(static_cast<int64_t>(m.piece.size()) - 1);
        for (const int64_t earlier : after)
            if (earlier != source)
                m.after.push_back(narrow(earlier));
        double ready = start;
        for (size_t i = static_cast<size_t>(m.after_offsets.back()); i < m.after.size(); ++i)
            ready = std::max(ready, m.end[m.after[i]]);
        if (keeps_start_)
            m.start.push_back(ready);
        m.end.push_back(ready > start ? ready + (end - start) : end);
        m.after_offsets.push_back(static_cast<int64_t>(m.after.size()));
        return static_cast<int64_t>(m.piece.size()) - 1;
    }

    // Sends a piece to another host, and there to all ranks that need it. Returns the message between the hosts.
    int64_t pass_on(int64_t piece, const ChunkSend &chunk_send, const std::vector<int64_t> &after, double start,
                    double end) {
        const int64_t nic = chunk_send.receiver, host = nics_.host[nic];
        const auto [sender, source] = find_sender(piece, chunk_send.sender, start);
        receivers_of(workload_.piece_class[piece]).ranks_on(host, near_);
        here_.clear();
        for (const int64_t rank : near_)
            if (nics_.of_rank[rank] == nic)
                here_.push_back(rank);
        if (here_.empty())
            here_ = nics_.ranks[nic];
        const int64_t receiver = keep_or_least(here_, landed_, last_receiver_[nic], workload_.piece_bytes[piece]);
        last_receiver_[nic] = receiver;
        const int64_t message = send(piece, sender, receiver, source, after, start, end);
        landed_[receiver] += workload_.piece_bytes[piece];
        Place place{host, {}};
        place.copies.reserve(near_.size() + 1);
        place.copies.push_back({narrow(receiver), narrow(message)});
        const double took =
            workload_.inside_each + static_cast<double>(workload_.piece_bytes[piece]) * workload_.inside_per_byte;
        const bool is_relay = !near_.empty() && std::find(near_.begin(), near_.end(), receiver) == near_.end();
        messages.staged[message] = is_relay;
        fan_out(piece, receiver, message, near_, place, end, took);
        where_[piece].add(std::move(place));
        if (is_relay)
            stage(piece, host, receiver);
        return message;
    }

    // Records that a rank stages a piece. If the rank now stages too many pieces, it drops the oldest one.
    void stage(int64_t piece, int64_t host, int64_t rank) {
        auto &kept = staged_[rank];
        kept.push_back({piece, host});
        if (kept.size() <= MAX_STAGED)
            return;
        Place &place = *where_[kept.front().first].find(kept.front().second);
        const auto gone = std::find_if(place.copies.begin(), place.copies.end(),
                                       [&](const Copy &copy) { return copy.rank == rank; });
        given_up_[kept.front()].push_back(*gone);
        place.copies.erase(gone);
        kept.erase(kept.begin());
    }

    // Sends a piece from `root` to the other `ranks` of its host, along a chain or a binary tree: first to the ranks
    // above the root, then to those below. brought_by: the message that brought the piece to the root, -1 if the root
    // holds it. when: the time when the root has the piece. took: seconds per message.
    void fan_out(int64_t piece, int64_t root, int64_t brought_by, const std::vector<int64_t> &ranks, Place &place,
                 double when, double took) {
        struct Node {
            int64_t rank, message;
            double free_at; // when it can send next
        };
        std::vector<Node> nodes{{root, brought_by, when}};
        for (const bool is_above : {true, false})
            for (const int64_t rank : ranks)
                if (rank != root && (rank > root) == is_above)
                    nodes.push_back({rank, -1, 0});
        const size_t children = nodes.size() <= LONGEST_CHAIN ? 1 : MAX_CHILDREN;
        // A relay must free its buffer before its next receive, so its own sends are planned to take no time.
        const bool is_relay = brought_by >= 0 && std::find(ranks.begin(), ranks.end(), root) == ranks.end();
        for (size_t i = 1; i < nodes.size(); ++i) {
            Node &parent = nodes[(i - 1) / children];
            const double start = parent.free_at, end = is_relay && (i - 1) / children == 0 ? start : start + took;
            parent.free_at = nodes[i].free_at = end;
            nodes[i].message = send(piece, parent.rank, nodes[i].rank, parent.message, {}, start, end);
            place.copies.push_back({narrow(nodes[i].rank), narrow(nodes[i].message)});
        }
    }

    // Returns a rank at a NIC that has a piece, and the message that brought it (-1: the rank holds it). If no rank at
    // the NIC has the piece, one of them first receives it from a rank at another NIC of the host and stages it.
    std::pair<int64_t, int64_t> find_sender(int64_t piece, int64_t nic, double when) {
        const int64_t host = nics_.host[nic];
        Place *place = where_[piece].find(host);
        if (!place) {
            place = &where_[piece].add({host, {}});
            for (const int64_t rank : workload_.class_holders[workload_.piece_class[piece]])
                if (host_of_[rank] == host)
                    place->copies.push_back({narrow(rank), -1});
        }
        std::vector<Copy> &copies = place->copies;
        const bool is_held = std::any_of(copies.begin(), copies.end(), [](const Copy &c) { return c.message < 0; });
        // Prefers holders. Without one, prefers the rank where the piece arrived, or no rank if `max_lead` is at most 1.
        const auto comes_first = [&](const Copy &copy) {
            return is_held ? copy.message < 0 : workload_.max_lead <= 1 || &copy == &copies.front();
        };
        const Copy *near = nullptr;
        for (const bool takes_any : {false, true}) {
            here_.clear();
            for (const Copy &copy : copies) {
                if (!takes_any && !comes_first(copy))
                    continue;
                if (nics_.of_rank[copy.rank] == nic)
                    here_.push_back(copy.rank);
                if (!takes_any && (!near || sent_[copy.rank] < sent_[near->rank]))
                    near = &copy;
            }
            if (!here_.empty()) {
                const int64_t rank = keep_or_least(here_, sent_, last_sender_[nic], workload_.piece_bytes[piece]);
                last_sender_[nic] = rank;
                return {rank, std::find_if(copies.begin(), copies.end(), [&](const Copy &copy) {
                                  return copy.rank == rank;
                              })->message};
            }
        }
        const int64_t rank = least(nics_.ranks[nic], landed_);
        after_.clear();
        if (const auto found = given_up_.find({piece, host}); found != given_up_.end())
            for (const Copy &copy : found->second)
                if (copy.rank == rank && last_use_[copy.message] >= 0)
                    after_.assign(1, last_use_[copy.message]); // the rank's earlier copy must be passed on first
        const int64_t message = send(piece, near->rank, rank, near->message, after_, when, when);
        messages.staged[message] = 1;
        copies.push_back({narrow(rank), narrow(message)});
        stage(piece, host, rank);
        return {rank, message};
    }
};
