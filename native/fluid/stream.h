// Streams of the simulator's event loop, and rows of integers.

#pragma once

#include <cstdint>
#include <vector>

#include "proportional_fairness.h"

// Rows of integers: row k is values[at[k]:at[k + 1]].
struct Rows {
    std::vector<int64_t> at, values;
    int64_t size(int64_t k) const { return at[k + 1] - at[k]; }
    const int64_t *operator[](int64_t k) const { return values.data() + at[k]; }
};

// Messages [first:started] of a stream have started and not arrived; those before `released` have left the window of
// their queue. The three numbers are positions in the stream's row of
// messages.
struct Stream {
    int64_t first = 0, released = 0, started = 0;
    double unreleased_bytes = 0; // left to send, up to the end of the next message to be released
    double remaining = 0, rate = 0; // bytes left in the phase of the first message
    Path path{nullptr, nullptr}; // ports of this phase, none if no message flows
    bool in_overhead = false; // whether the first message still occupies its sender's port before its bytes
    bool is_found = false; // scratch of find_component()
    bool is_idle() const { return first == started; }
};
