// Lets Ctrl-C end loops that run without the GIL.

#pragma once

#include <chrono>

#include <nanobind/nanobind.h>

// Runs the Python handlers of pending signals, at most every 100 ms, and throws what they raise. Call poll() with the
// GIL released.
class Interruption {
  public:
    void poll() {
        const auto now = std::chrono::steady_clock::now();
        if (now < next_)
            return;
        next_ = now + std::chrono::milliseconds(100);
        nanobind::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals())
            throw nanobind::python_error();
    }

  private:
    std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
};
