// The scheduler as a function of arrays, which are checked.

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "schedule.h"

namespace {

template <typename T> nb::object give(std::vector<T> &&values) {
    auto *kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

void check_below(const Ints &values, size_t below, int64_t least, const char *name) {
    for (size_t i = 0; i < values.shape(0); ++i)
        if (values.data()[i] < least || values.data()[i] >= static_cast<int64_t>(below))
            throw std::out_of_range(std::string("make_schedule: ") + name + " holds an index that does not exist");
}

size_t check_members(const Ints &at, const Ints &ranks, const Ints &of_rank, const char *name) {
    const size_t n = at.shape(0);
    bool fits = n > 0 && at.data()[0] == 0 && at.data()[n - 1] == static_cast<int64_t>(ranks.shape(0));
    for (size_t i = 1; fits && i < n; ++i)
        fits = at.data()[i - 1] <= at.data()[i];
    if (!fits)
        throw std::invalid_argument(std::string("make_schedule: ") + name + " are not divided into classes");
    check_below(ranks, of_rank.shape(0), 0, name);
    for (size_t i = 0; i < ranks.shape(0); ++i)
        if (of_rank.data()[ranks.data()[i]] < 0)
            throw std::out_of_range(std::string("make_schedule: ") + name + " hold a rank without a port");
    return n - 1;
}

nb::tuple make_schedule(Ints host, Floats out, Floats into, Ints of_rank, Ints pod, Floats up, Floats down,
                        Ints holders_at, Ints holders, Ints receivers_at, Ints receivers, Ints class_of) {
    check_below(of_rank, host.shape(0), -1, "of_rank");
    check_below(host, 1 << 20, 0, "host");
    if (out.shape(0) != host.shape(0) || into.shape(0) != host.shape(0) || up.shape(0) != down.shape(0))
        throw std::invalid_argument("make_schedule: arrays differ in size");
    const size_t num_classes = check_members(holders_at, holders, of_rank, "holders");
    if (check_members(receivers_at, receivers, of_rank, "receivers") != num_classes)
        throw std::invalid_argument("make_schedule: holders and receivers differ in size");
    check_below(class_of, num_classes, 0, "class_of");
    check_below(pod, up.shape(0), 0, "pod");
    for (size_t p = 0; p < host.shape(0) && pod.shape(0); ++p)
        if (static_cast<size_t>(host.data()[p]) >= pod.shape(0))
            throw std::invalid_argument("make_schedule: a host has no pod");
    Scheduler scheduler(host, out, into, of_rank, pod, up, down, holders_at, holders, receivers_at, receivers,
                        class_of);
    bool done;
    {
        nb::gil_scoped_release release;
        done = scheduler.run();
    }
    if (!done)
        throw std::invalid_argument("a chunk cannot reach a host that needs it");
    Schedule &made = scheduler.schedule;
    return nb::make_tuple(give(std::move(made.chunk)), give(std::move(made.sender)), give(std::move(made.receiver)),
                          give(std::move(made.source)), give(std::move(made.after_at)), give(std::move(made.after)),
                          give(std::move(made.end)));
}

} // namespace

void bind_schedule(nb::module_ &m) {
    m.def("make_schedule", &make_schedule, nb::arg("host"), nb::arg("out"), nb::arg("into"), nb::arg("of_rank"),
          nb::arg("pod"), nb::arg("up"), nb::arg("down"), nb::arg("holders_at"), nb::arg("holders"),
          nb::arg("receivers_at"), nb::arg("receivers"), nb::arg("class_of"), "The messages of a schedule.");
}
