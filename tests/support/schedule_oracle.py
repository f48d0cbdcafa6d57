"""The optimal makespan of a small pipeline, by constraint programming."""

from __future__ import annotations

from reshard.scheduler import Pipeline


def min_makespan(
    pipeline: Pipeline, num: int, memory_limit: int | None, can_split: bool, deterministic_seconds: float
) -> tuple[int, bool]:
    """The best makespan found, and whether it is proved optimal.

    Costs must be integers. Each row has one stage. The transfers of a channel do not overlap; channels share no link.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    stages, edges = pipeline.stages, pipeline.edges
    total = num * int(
        sum(s.forward_seconds + s.backward_seconds + s.input_grad_seconds + s.weight_grad_seconds for s in stages)
        + sum(e.forward_seconds + e.backward_seconds for e in edges)
    )
    on_row: list[list[object]] = [[] for _ in stages]
    ends: dict[tuple[str, int, int], object] = {}
    starts: dict[tuple[str, int, int], object] = {}
    spans: list[list[object]] = [[] for _ in stages]
    makespan = model.new_int_var(0, total, "makespan")

    def task(kind, s, m, cost, is_present=None):
        start = model.new_int_var(0, total, f"{kind}{s}.{m}")
        end = model.new_int_var(0, total, f"{kind}{s}.{m} end")
        if is_present is None:
            on_row[s].append(model.new_interval_var(start, int(cost), end, f"{kind}{s}.{m} on"))
        else:
            on_row[s].append(model.new_optional_interval_var(start, int(cost), end, is_present, f"{kind}{s}.{m} on"))
        starts[kind, s, m], ends[kind, s, m] = start, end
        return start, end

    for s, stage in enumerate(stages):
        for m in range(num):
            begun, forward = task("F", s, m, stage.forward_seconds)
            split = model.new_bool_var(f"split {s}.{m}")
            if not can_split:
                model.add(split == 0)
            whole_start, whole_end = task("B", s, m, stage.backward_seconds, split.negated())
            input_start, input_end = task("I", s, m, stage.input_grad_seconds, split)
            weight_start, weight_end = task("W", s, m, stage.weight_grad_seconds, split)
            # start and end of the input gradient, and end of the whole backward, split or not
            begin, out, last = (model.new_int_var(0, total, f"{name}{s}.{m}") for name in ("begin", "out", "last"))
            for of_whole, of_split, variable in (
                (whole_start, input_start, begin),
                (whole_end, input_end, out),
                (whole_end, weight_end, last),
            ):
                model.add(variable == of_whole).only_enforce_if(split.negated())
                model.add(variable == of_split).only_enforce_if(split)
            model.add(weight_start >= input_end).only_enforce_if(split)
            model.add(begin >= forward)
            model.add(makespan >= last)
            starts["G", s, m], ends["G", s, m] = begin, out
            kept = model.new_int_var(0, total, f"kept {s}.{m}")
            spans[s].append(model.new_interval_var(begun, kept, last, f"keeps {s}.{m}"))
    for edge in edges:
        for kind, sender, receiver, cost in (
            ("F", edge.src, edge.dst, edge.forward_seconds),
            ("G", edge.dst, edge.src, edge.backward_seconds),
        ):
            transfers = []
            for m in range(num):
                start = model.new_int_var(0, total, "")
                transfers.append(model.new_fixed_size_interval_var(start, int(cost), ""))
                model.add(start >= ends[kind, sender, m])
                model.add(starts[kind, receiver, m] >= start + int(cost))
            model.add_no_overlap(transfers)
    for s, stage in enumerate(stages):
        model.add_no_overlap(on_row[s])
        if memory_limit is not None:
            model.add_cumulative(spans[s], [stage.activation_bytes] * num, memory_limit)
        for kind in ("F", "G"):  # microbatches have equal costs, so fix their order
            for m in range(1, num):
                model.add(starts[kind, s, m] >= starts[kind, s, m - 1])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = deterministic_seconds  # alike on a busy machine
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return int(solver.objective_value), status == cp_model.OPTIMAL
