// Memory that ranks on one host share, with counters on which other processes can wait. Linux only; ranks do without it
// elsewhere. Counters are 32-bit words of a mapping. They wrap around.

#include <nanobind/nanobind.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace nb = nanobind;

#ifdef SYS_memfd_create

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <stdexcept>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nanobind/ndarray.h>

#include "../interruption.h"

using Words = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static uint32_t *word_at(const Words &words, size_t index) {
    if (index >= words.shape(0))
        throw std::out_of_range("the index of a counter lies outside its array");
    return words.data() + index;
}

[[noreturn]] static void throw_os_error() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

// Flags of memfd_create and fcntl that old headers lack.
constexpr unsigned CLOSE_ON_EXEC = 1, ALLOW_SEALING = 2, NEVER_EXECUTABLE = 8;
constexpr int ADD_SEALS = 1033, GET_SEALS = 1034, SEAL_SEALS = 1, SEAL_SHRINK = 2, SEAL_GROW = 4, SEAL_WRITE = 8;

// An unnamed file in memory. Python's own os.memfd_create is missing in builds for old versions of glibc.
static int create_memory(const char *name) {
    const unsigned flags = CLOSE_ON_EXEC | ALLOW_SEALING;
    long descriptor = syscall(SYS_memfd_create, name, flags | NEVER_EXECUTABLE); // some systems refuse others
    if (descriptor < 0 && errno == EINVAL)
        descriptor = syscall(SYS_memfd_create, name, flags); // before Linux 6.3
    if (descriptor < 0)
        throw_os_error();
    return static_cast<int>(descriptor);
}

// A process that touches a mapping after the file was cut dies of SIGBUS. So no process may cut it any more.
static void seal_memory(int descriptor, bool grows, bool writes) {
    const int seals = SEAL_SEALS | SEAL_SHRINK | (grows ? 0 : SEAL_GROW) | (writes ? 0 : SEAL_WRITE);
    if (fcntl(descriptor, ADD_SEALS, seals) < 0)
        throw_os_error();
}

struct Mapping {
    void *address;
    size_t nbytes;
};

// Maps a part of a sealed file. The mapping ends with the last array that refers to it.
static nb::ndarray<nb::numpy, uint8_t> map_shared(int descriptor, int64_t offset, size_t nbytes, bool writes) {
    const int seals = fcntl(descriptor, GET_SEALS);
    struct stat status;
    if (seals < 0 || fstat(descriptor, &status) < 0)
        throw_os_error();
    const bool is_whole = offset >= 0 && offset <= status.st_size && nbytes <= size_t(status.st_size - offset);
    if (!(seals & SEAL_SHRINK) || !is_whole) {
        errno = EPERM;
        throw_os_error();
    }
    void *address = mmap(nullptr, nbytes, writes ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, descriptor, offset);
    if (address == MAP_FAILED)
        throw_os_error();
    nb::capsule owner(new Mapping{address, nbytes}, [](void *pointer) noexcept {
        auto *mapping = static_cast<Mapping *>(pointer);
        munmap(mapping->address, mapping->nbytes);
        delete mapping;
    });
    return nb::ndarray<nb::numpy, uint8_t>(address, {nbytes}, owner);
}

// Adds to a counter. What this process wrote before, another one sees that reads the new value; and the reverse.
static uint32_t add_to_counter(Words words, size_t index, int64_t added) {
    return __atomic_add_fetch(word_at(words, index), static_cast<uint32_t>(added), __ATOMIC_ACQ_REL);
}

// Sets a counter and wakes the processes that wait for it.
static void publish_number(Words words, size_t index, uint32_t number) {
    uint32_t *word = word_at(words, index);
    __atomic_store_n(word, number, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleeps until a counter has reached a number. Returns whether it has.
static bool wait_for_number(Words words, size_t index, uint32_t number, double seconds) {
    uint32_t *word = word_at(words, index);
    nb::gil_scoped_release release;
    Interruption interruption;
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e6)));
    for (;;) {
        const uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (static_cast<int32_t>(value - number) >= 0)
            return true;
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
        if (left <= 0)
            return false;
        const timespec slice{0, static_cast<long>(std::min<int64_t>(left, 100'000'000))}; // Ctrl-C ends the wait
        syscall(SYS_futex, word, FUTEX_WAIT, value, &slice, nullptr, 0); // returns at once if the counter has changed
        interruption.poll();
    }
}

void bind_shared_memory(nb::module_ &m) {
    m.def("create_memory", &create_memory, nb::arg("name"), "Create an unnamed file in memory; return its descriptor.");
    m.def("seal_memory", &seal_memory, nb::arg("descriptor"), nb::arg("grows"), nb::arg("writes"),
          "Let no process cut a file any more, nor, unless it says so, extend or write it.");
    m.def("map_shared", &map_shared, nb::arg("descriptor"), nb::arg("offset"), nb::arg("nbytes"),
          nb::arg("writes") = true, "Map a part of a sealed file as bytes. Without writes, the array must not be written.");
    m.def("add_to_counter", &add_to_counter, nb::arg("words"), nb::arg("index"), nb::arg("added"),
          "Add to a counter; return its new value.");
    m.def("publish_number", &publish_number, nb::arg("words"), nb::arg("index"), nb::arg("number"),
          "Set a counter, and wake the processes that wait for it.");
    m.def("wait_for_number", &wait_for_number, nb::arg("words"), nb::arg("index"), nb::arg("number"),
          nb::arg("seconds"), "Sleep until a counter reaches a number; return whether it has.");
}

#else

void bind_shared_memory(nb::module_ &) {}

#endif
