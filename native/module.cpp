// The module reshard._native: loops over flat arrays. tests/reference/ has a Python reference of each function.

#include <nanobind/nanobind.h>

void bind_runs(nanobind::module_ &m);
void bind_fluid(nanobind::module_ &m);
void bind_greedy(nanobind::module_ &m);
void bind_schedule(nanobind::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Loops over flat arrays; each has a Python twin in tests/reference.";
    bind_runs(m);
    bind_fluid(m);
    bind_greedy(m);
    bind_schedule(m);
}
