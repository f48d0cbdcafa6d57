// The module reshard._native: loops over flat arrays, each with a twin in Python.

#include <nanobind/nanobind.h>

void bind_runs(nanobind::module_ &m);
void bind_fluid(nanobind::module_ &m);
void bind_greedy(nanobind::module_ &m);
void bind_schedule(nanobind::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Loops over flat arrays; every function has a twin in Python.";
    bind_runs(m);
    bind_fluid(m);
    bind_greedy(m);
    bind_schedule(m);
}
