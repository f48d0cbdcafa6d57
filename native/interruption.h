// Ctrl-C in loops that run without the interpreter's lock.

#pragma once

#include <chrono>

#include <nanobind/nanobind.h>

// Looks now and then whether the caller was interrupted, and ends what is under way if so.
class Interruption {
  public:
    void look() { // the GIL is released
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
