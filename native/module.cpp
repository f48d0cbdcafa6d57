// Defines the Python module reshard._native.

#include <nanobind/nanobind.h>

void bind_runs(nanobind::module_ &m);
void bind_fluid(nanobind::module_ &m);
void bind_greedy(nanobind::module_ &m);
void bind_schedule(nanobind::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Loops over flat arrays. Each function has a Python reference in tests/reference.";
    bind_runs(m);
    bind_fluid(m);
    bind_greedy(m);
    bind_schedule(m);
}
