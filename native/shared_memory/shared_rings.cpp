// Messages between ranks on one host through rings of slots in shared memory. Linux only. On other systems, these
// messages use Gloo.
//
// Each rank owns a segment of shared memory, which the other ranks of the host map. A segment has
//
//   - a doorbell (`bell`): a futex on which the threads of the owner sleep until another rank has written something;
//   - for each other rank, a ring of slots with data, which the owner sends to that rank;
//   - for each other rank, a ring of credits (`grants`), which that rank writes, one for each posted receive.
//
// A sender fills slots only with messages for which it has a credit. So the receiver empties every slot without waiting
// for another message. Counters are 32-bit words that wrap around. Shared memory holds no lock, so a killed rank leaves
// no lock behind. A rank checks every value that another rank wrote before it uses the value.

#include <nanobind/nanobind.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace nb = nanobind;

#ifdef SYS_memfd_create

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

constexpr uint32_t NUM_SLOTS = 4;
constexpr size_t SLOT_BYTES = size_t{1} << 18;
constexpr uint32_t NUM_GRANTS = 64;
constexpr int64_t SLICE_NANOSECONDS = 100'000'000; // how often a thread that sleeps looks for the end of another process

struct Header { // of a segment
    alignas(64) Word bell;
    alignas(64) Word sleepers; // threads of the owner that sleep, or are about to
    alignas(64) Word closed;
};

struct ShmRing { // from the owner of the segment to one other rank
    struct Frame {
        uint32_t tag, nbytes;
    };
    struct Grant {
        uint32_t tag, unused;
        uint64_t nbytes;
    };
    alignas(64) Word produced; // slots filled, by the sender
    alignas(64) Word consumed; // slots emptied, by the receiver
    alignas(64) Word granted;  // grants written, by the receiver
    alignas(64) Word taken;    // grants read, by the sender
    alignas(64) Word mapped;   // 1 when the receiver has mapped the segment
    alignas(64) Frame frames[NUM_SLOTS];
    alignas(64) Grant grants[NUM_GRANTS];
};

constexpr size_t PAGE = 4096;
constexpr size_t SHM_RING_BYTES = PAGE + NUM_SLOTS * SLOT_BYTES;
static_assert(sizeof(Header) <= PAGE && sizeof(ShmRing) <= PAGE);

size_t segment_bytes(size_t num_ranks) { return PAGE + num_ranks * SHM_RING_BYTES; }

constexpr int POPULATE_WRITE = 23; // MADV_POPULATE_WRITE, since Linux 5.14

// Takes the memory of whole pages. Without it, a write to them would end the process by SIGBUS.
void take_memory(uint8_t *pages, size_t nbytes) {
    if (madvise(pages, nbytes, POPULATE_WRITE) < 0 && errno != EINVAL)
        throw std::bad_alloc();
}

void sleep_on(Word &word, uint32_t value, int64_t nanoseconds) {
    const timespec slice{nanoseconds / 1'000'000'000, static_cast<long>(nanoseconds % 1'000'000'000)};
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

struct Segment {
    uint8_t *base = nullptr;
    Header &header() const { return *reinterpret_cast<Header *>(base); }
    ShmRing &shm_ring(size_t to) const { return *reinterpret_cast<ShmRing *>(base + PAGE + to * SHM_RING_BYTES); }
    uint8_t *slot(size_t to, uint32_t number) const {
        return base + 2 * PAGE + to * SHM_RING_BYTES + (number % NUM_SLOTS) * SLOT_BYTES;
    }
    void ring(bool always = false) const {
        header().bell.fetch_add(1);
        if (always || header().sleepers.load())
            syscall(SYS_futex, reinterpret_cast<uint32_t *>(&header().bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
};

// The bytes of boxes of arrays, in row-major order, one box after another.
class Cursor {
  public:
    // Rows of a table: address, contiguous bytes, then count and stride of each outer dim, major first.
    explicit Cursor(const Table &table) {
        if (table.shape(1) < 2 || table.shape(1) % 2)
            throw std::invalid_argument("rings: a row has an address, a length, and pairs of a count and a stride");
        dims_ = table.shape(1) / 2 - 1;
        for (size_t i = 0; i < table.shape(0); ++i) {
            const int64_t *row = &table(i, 0);
            int64_t nbytes = row[1];
            for (size_t d = 0; d < dims_; ++d)
                nbytes *= row[2 + 2 * d];
            if (nbytes < 0 || row[1] < 0)
                throw std::invalid_argument("rings: a length is negative");
            if (nbytes)
                rows_.insert(rows_.end(), row, row + table.shape(1));
            left_ += static_cast<uint64_t>(nbytes);
        }
        index_.resize(dims_);
        if (left_)
            at_ = reinterpret_cast<uint8_t *>(rows_[0]);
    }
    uint64_t left() const { return left_; }
    // Copies the next bytes to or from a buffer.
    template <bool TO_BUFFER> void copy(uint8_t *buffer, size_t nbytes) {
        left_ -= nbytes;
        while (nbytes) {
            const int64_t inner = rows_[row_ + 1];
            const size_t part = std::min(nbytes, static_cast<size_t>(inner - done_));
            if constexpr (TO_BUFFER)
                std::memcpy(buffer, at_ + done_, part);
            else
                std::memcpy(at_ + done_, buffer, part);
            buffer += part, nbytes -= part, done_ += static_cast<int64_t>(part);
            if (done_ == inner)
                advance();
        }
    }

  private:
    void advance() {
        done_ = 0;
        const int64_t *row = &rows_[row_];
        for (size_t d = dims_; d-- > 0;) {
            const int64_t count = row[2 + 2 * d], stride = row[3 + 2 * d];
            if (++index_[d] < count) {
                at_ += stride;
                return;
            }
            at_ -= stride * (count - 1);
            index_[d] = 0;
        }
        row_ += 2 + 2 * dims_;
        if (row_ < rows_.size())
            at_ = reinterpret_cast<uint8_t *>(rows_[row_]);
    }
    size_t dims_ = 0, row_ = 0;
    std::vector<int64_t> rows_, index_;
    uint8_t *at_ = nullptr;
    int64_t done_ = 0; // bytes of the contiguous part at `at_`
    uint64_t left_ = 0;
};

struct Operation {
    size_t peer;
    uint32_t tag;
    Cursor cursor;
    bool is_granted = false; // of a send: the receiver has asked for it
    std::atomic<bool> done{false};
    Operation(size_t peer, uint32_t tag, const Table &table) : peer(peer), tag(tag), cursor(table) {}
};
using Posted = std::deque<std::shared_ptr<Operation>>;

class Rings {
  public:
    // own: the segment of this rank. index: its number among the ranks of the host.
    Rings(Bytes own, size_t index) : process_(getpid()), index_(index) {
        if (own.shape(0) < PAGE || (own.shape(0) - PAGE) % SHM_RING_BYTES || index >= (own.shape(0) - PAGE) / SHM_RING_BYTES)
            throw std::invalid_argument("rings: a segment has another size");
        peers_.resize((own.shape(0) - PAGE) / SHM_RING_BYTES);
        own_ = {own.data()};
        nbytes_ = own.shape(0);
        take_memory(own_.base, PAGE);
        for (size_t number = 0; number < peers_.size(); ++number)
            take_memory(own_.base + PAGE + number * SHM_RING_BYTES, PAGE);
        kept_.push_back(own);
    }
    ~Rings() {
        close();
        for (auto &peer : peers_)
            if (peer && peer->descriptor >= 0)
                ::close(peer->descriptor);
    }
    // Adds the segment of another rank, and tells it. Returns false if the end of its process could not be noticed.
    bool add(size_t number, Bytes segment, int process) {
        if (number >= peers_.size() || number == index_ || segment.shape(0) != nbytes_)
            throw std::invalid_argument("rings: no such rank, or a segment of another size");
        const long descriptor = syscall(SYS_pidfd_open, process, 0u);
        if (descriptor < 0)
            return false;
        peers_[number] = std::make_unique<Peer>();
        peers_[number]->segment = {segment.data()};
        peers_[number]->descriptor = static_cast<int>(descriptor);
        kept_.push_back(segment);
        peers_[number]->segment.shm_ring(index_).mapped.store(1);
        return true;
    }
    // Whether both ranks have mapped the segment of the other. Call it when all have added theirs.
    bool reaches(size_t number) const {
        return number < peers_.size() && peers_[number] && own_.shm_ring(number).mapped.load() == 1;
    }
    std::shared_ptr<Operation> send(size_t number, uint32_t tag, Table boxes) {
        Peer &peer = peer_of(number);
        auto op = std::make_shared<Operation>(number, tag, boxes);
        std::lock_guard lock(peer.sending);
        check_open();
        if (!peer.has_slots) {
            take_memory(own_.slot(number, 0), NUM_SLOTS * SLOT_BYTES);
            peer.has_slots = true;
        }
        peer.sends.push_back(op);
        return op;
    }
    std::shared_ptr<Operation> recv(size_t number, uint32_t tag, Table boxes) {
        Peer &peer = peer_of(number);
        auto op = std::make_shared<Operation>(number, tag, boxes);
        std::lock_guard lock(peer.receiving);
        check_open();
        peer.recvs.push_back(op);
        peer.ungranted.push_back(op);
        grant(peer);
        return op;
    }
    // Moves data of all operations until one is done. Returns whether it is; throws if it never will be.
    // Once the rings are closed, it throws after the last copy, so that the caller may use its arrays again.
    bool wait(const std::shared_ptr<Operation> &op, double seconds) {
        nb::gil_scoped_release release;
        try {
            return move_until_done(op, seconds);
        } catch (...) {
            if (closed_.load())
                clear();
            throw;
        }
    }
    // Ends all waits, here and on the other ranks. Afterwards nothing reads or writes the arrays of operations, also if
    // another thread has begun to close.
    void close() {
        if (getpid() != process_) // a forked child must not touch what it shares
            return;
        if (!closed_.exchange(true)) {
            own_.header().closed.store(1);
            own_.ring(true);
            for (auto &peer : peers_)
                if (peer)
                    peer->segment.ring(true);
        }
        clear();
    }

  private:
    // Forgets all operations, after the threads that copy have ended. No thread begins to: the rings are closed.
    void clear() {
        for (auto &peer : peers_)
            if (peer) {
                std::scoped_lock locks(peer->sending, peer->receiving);
                peer->sends.clear(), peer->recvs.clear(), peer->ungranted.clear();
            }
    }
    bool move_until_done(const std::shared_ptr<Operation> &op, double seconds) {
        const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                 std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e6)));
        Header &header = own_.header();
        Peer &peer = peer_of(op->peer);
        const char *gone = nullptr;
        for (;;) {
            const uint32_t seen = header.bell.load();
            if (op->done.load())
                break;
            check_open();
            if (peer.segment.header().closed.load())
                gone = "it closed its connections";
            // No more data will come from a rank that is gone. So wait for a thread that is moving what it left.
            bool moved = progress(peer, *op, gone != nullptr);
            for (auto &other : peers_)
                if (other && other.get() != &peer && !op->done.load())
                    moved |= progress_once(*other);
            if (moved)
                continue;
            if (op->done.load())
                break;
            if (gone)
                throw std::runtime_error(gone);
            const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
            if (left <= 0)
                return false;
            header.sleepers.fetch_add(1);
            sleep_on(header.bell, seen, std::min<int64_t>(left, SLICE_NANOSECONDS));
            header.sleepers.fetch_sub(1);
            pollfd ended{peer.descriptor, POLLIN, 0};
            if (poll(&ended, 1, 0) > 0)
                gone = "its process has ended";
        }
        own_.ring(); // another thread may have left work to this one, also if it does not sleep yet
        return true;
    }

    struct Peer {
        Segment segment;
        int descriptor = -1; // of the process
        std::mutex sending, receiving; // guard the following
        bool has_slots = false; // whether this rank has taken the memory of the slots to the peer
        Posted sends, recvs, ungranted;
        std::map<uint32_t, std::deque<uint64_t>> asked; // bytes of the messages that the peer waits for, by tag
    };

    Peer &peer_of(size_t number) {
        if (number >= peers_.size() || !peers_[number])
            throw std::invalid_argument("rings: no such rank");
        return *peers_[number];
    }
    void check_open() const {
        if (closed_.load())
            throw std::runtime_error("the connection was closed");
        if (broken_.load())
            throw std::runtime_error(broken_.load());
    }
    void require(bool holds, const char *rule) {
        if (holds)
            return;
        broken_.store(rule);
        throw std::runtime_error(rule);
    }
    size_t number_of(const Peer &peer) const {
        size_t number = 0;
        while (peers_[number].get() != &peer)
            ++number;
        return number;
    }

    // Moves data to and from a rank until an operation is done or nothing can move.
    // waits: for other threads that are moving data of the same ranks. Otherwise leaves the work to them.
    bool progress(Peer &peer, const Operation &op, bool waits) {
        bool moved = false;
        while (!op.done.load() && progress_once(peer, waits))
            moved = true;
        return moved;
    }
    bool progress_once(Peer &peer, bool waits = false) {
        bool moved = false;
        if (const auto lock = hold(peer.sending, waits); lock && !closed_.load() && !peer.sends.empty())
            moved |= push(peer);
        if (const auto lock = hold(peer.receiving, waits); lock && !closed_.load() && !peer.recvs.empty())
            moved |= pull(peer);
        return moved;
    }
    static std::unique_lock<std::mutex> hold(std::mutex &mutex, bool waits) {
        return waits ? std::unique_lock(mutex) : std::unique_lock(mutex, std::try_to_lock);
    }

    // Asks the peer for messages.
    bool grant(Peer &peer) {
        ShmRing &shm_ring = peer.segment.shm_ring(index_);
        bool moved = false;
        while (!peer.ungranted.empty()) {
            const uint32_t number = shm_ring.granted.load();
            if (number - shm_ring.taken.load() >= NUM_GRANTS)
                break;
            const auto &op = *peer.ungranted.front();
            shm_ring.grants[number % NUM_GRANTS] = {op.tag, 0, op.cursor.left()};
            shm_ring.granted.store(number + 1);
            peer.ungranted.pop_front();
            moved = true;
        }
        if (moved)
            peer.segment.ring();
        return moved;
    }
    // Fills a slot.
    bool push(Peer &peer) {
        const size_t number = number_of(peer);
        ShmRing &shm_ring = own_.shm_ring(number);
        const uint32_t granted = shm_ring.granted.load();
        uint32_t taken = shm_ring.taken.load();
        const uint32_t unread = granted - taken;
        require(unread <= NUM_GRANTS, "a rank of this host damaged shared memory: too many grants");
        for (; taken != granted; ++taken) {
            const ShmRing::Grant item = shm_ring.grants[taken % NUM_GRANTS];
            peer.asked[item.tag].push_back(item.nbytes);
        }
        shm_ring.taken.store(taken);
        if (shm_ring.granted.load() - (taken - unread) >= NUM_GRANTS) // the peer, which writes more, may wait for room
            peer.segment.ring();
        const uint32_t produced = shm_ring.produced.load();
        const uint32_t full = produced - shm_ring.consumed.load();
        require(full <= NUM_SLOTS, "a rank of this host damaged shared memory: too many slots");
        if (full == NUM_SLOTS)
            return false;
        const auto op = next_send(peer);
        if (!op)
            return false;
        const size_t nbytes = std::min<uint64_t>(op->cursor.left(), SLOT_BYTES);
        op->cursor.copy<true>(own_.slot(number, produced), nbytes);
        shm_ring.frames[produced % NUM_SLOTS] = {op->tag, static_cast<uint32_t>(nbytes)};
        shm_ring.produced.store(produced + 1);
        peer.segment.ring();
        if (!op->cursor.left())
            finish(peer.sends, op);
        return true;
    }
    // The first send that the peer waits for. Sends of one tag go in order.
    std::shared_ptr<Operation> next_send(Peer &peer) {
        std::set<uint32_t> waiting;
        for (const auto &op : peer.sends) {
            if (op->is_granted)
                return op;
            auto asked = peer.asked.find(op->tag);
            if (waiting.count(op->tag) || asked == peer.asked.end()) {
                waiting.insert(op->tag);
                continue;
            }
            require(asked->second.front() == op->cursor.left(), "a rank of this host expects another number of bytes");
            asked->second.pop_front();
            if (asked->second.empty())
                peer.asked.erase(asked);
            op->is_granted = true;
            return op;
        }
        return nullptr;
    }
    // Empties a slot.
    bool pull(Peer &peer) {
        const bool moved = grant(peer);
        ShmRing &shm_ring = peer.segment.shm_ring(index_);
        const uint32_t consumed = shm_ring.consumed.load(), full = shm_ring.produced.load() - consumed;
        require(full <= NUM_SLOTS, "a rank of this host damaged shared memory: too many slots");
        if (!full)
            return moved;
        const ShmRing::Frame frame = shm_ring.frames[consumed % NUM_SLOTS];
        const auto posted = std::find_if(peer.recvs.begin(), peer.recvs.end(),
                                         [&](const auto &op) { return op->tag == frame.tag; });
        require(posted != peer.recvs.end(), "a rank of this host sent a message that nothing waits for");
        const auto op = *posted;
        require(frame.nbytes <= SLOT_BYTES && frame.nbytes <= op->cursor.left(),
                "a rank of this host sent another number of bytes");
        op->cursor.copy<false>(peer.segment.slot(index_, consumed), frame.nbytes);
        shm_ring.consumed.store(consumed + 1);
        if (full <= NUM_SLOTS / 2 + 1) // wake a sender when it has room for some slots
            peer.segment.ring();
        if (!op->cursor.left())
            finish(peer.recvs, op);
        return true;
    }
    void finish(Posted &posted, const std::shared_ptr<Operation> &op) {
        posted.erase(std::find(posted.begin(), posted.end(), op));
        op->done.store(true);
        own_.ring(); // another thread of this rank may wait for it, or be about to
    }

    const pid_t process_;
    const size_t index_;
    size_t nbytes_;
    Segment own_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<Bytes> kept_; // keeps the mappings
    std::atomic<bool> closed_{false};
    std::atomic<const char *> broken_{nullptr};
};

} // namespace

void bind_shared_rings(nb::module_ &m) {
    m.def("ring_segment_bytes", &segment_bytes, nb::arg("num_ranks"), "Bytes of the segment of one of so many ranks.");
    nb::class_<Operation>(m, "RingOperation");
    nb::class_<Rings>(m, "Rings", nb::is_weak_referenceable())
        .def(nb::init<Bytes, size_t>(), nb::arg("own"), nb::arg("index"))
        .def("add", &Rings::add, nb::arg("number"), nb::arg("segment"), nb::arg("process"),
             "Add the segment of another rank; return False if the end of its process could not be noticed.")
        .def("reaches", &Rings::reaches, nb::arg("number"), "Whether both ranks have mapped the segment of the other.")
        .def("send", &Rings::send, nb::arg("number"), nb::arg("tag"), nb::arg("boxes"),
             "Post a send of boxes; MemoryError if there is too little memory for the slots.")
        .def("recv", &Rings::recv, nb::arg("number"), nb::arg("tag"), nb::arg("boxes"), "Post a receive into boxes.")
        .def("wait", &Rings::wait, nb::arg("operation"), nb::arg("seconds"),
             "Move data until an operation is done; return whether it is.")
        .def("close", &Rings::close, nb::call_guard<nb::gil_scoped_release>(),
             "End all waits; afterwards nothing reads or writes the arrays of operations.");
}

#else

void bind_shared_rings(nb::module_ &) {}

#endif
