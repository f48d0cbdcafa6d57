"""Run a benchmark: ``python -m microbench NAME [options]``. Without a name, the command lists all names."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from microbench.harness.case_options import BenchmarkOptionError
from microbench.harness.machine_description import describe_machine, format_machine, stderr
from reshard.cli.progress_bars import print_line
from reshard.errors import ReshardError

#: Name of a case -> its module below ``microbench``, and what it measures.
CASES = {
    "hosts": (
        "transfers.hosts",
        "pairs of layouts on emulated hosts, compared with other libraries; under torchrun on machines",
    ),
    "report": ("harness.hosts_report", "tables and plots of a file that hosts --out wrote"),
    "loopback": ("transfers.loopback", "transfers over loopback, compared with hand-written exchanges and torch"),
    "one_host": (
        "transfers.one_host",
        "a model of many tensors inside one host, compared with awex, and its prediction",
    ),
    "verification": ("transfers.verification_cost", "the cost of verify=True"),
    "ray_actors": ("transfers.ray_actors", "one actor to three hosts of a Ray cluster, compared with Ray's methods"),
    "compression": ("transfers.compression", "encoded transfers, compared with raw ones"),
    "auto_compression": ("transfers.auto_compression", 'compression="auto", compared with raw, 0.1 to 10 Gbit/s'),
    "gradient_sums": ("transfers.gradient_sums", "all-reduces of gradients, compared with Gloo's"),
    "weights": ("transfers.weights", "a whole model from a trainer to engines, compared with other methods"),
    "weight_deltas": ("transfers.weight_deltas", "weights as differences, compared with raw ones"),
    "weight_formats": (
        "transfers.weight_formats",
        "formats of weights on real updates; --parts: without a network",
    ),
    "quality": ("planner.quality", "simulated time over the lower bound, on 1,667 layout pairs"),
    "auto_quality": ("planner.auto_quality", "the auto strategy, compared with all strategies that it chooses from"),
    "planning_time": ("planner.planning_time", "time to plan nine layout pairs on three networks"),
    "scaling": ("planner.scaling", "planning time and memory by number of ranks"),
    "large": ("planner.large_plans", "plans for thousands of ranks and for whole models"),
    "per_host": ("planner.per_host", "plans made once per host, compared with plans made by each of its ranks"),
    "check_speed": ("planner.check_speed", "time and memory of check_plan by number of messages"),
    "strategy_search": (
        "planner.strategy_search",
        "methods of the strategy search on random clusters, and their speed",
    ),
    "native": ("kernels.native", "native code, compared with its reference implementations"),
    "codecs": ("kernels.codec_rates", "rates of the codecs on one core"),
    "memory": ("training_plans.predicted_memory", "predicted and counted bytes of training strategies"),
    "variants": ("training_plans.variants", "the choice of the search, compared with six training plans of a U-Net"),
    "accuracy": ("training_plans.accuracy", "predicted and measured steps of strategies"),
    "all_divisions": (
        "training_plans.all_divisions",
        "the choice of the search, compared with all divisions into stages",
    ),
    "true_profile": ("training_plans.true_profile", "gain of overlapped transfers and of a true profile"),
    "balance": ("training_plans.balance", "methods of the strategy search under varying memory"),
    "compare_schedules": ("training.compare_schedules", "pipeline schedules of GPT and U-Transformer"),
    "drawn_pipelines": (
        "training.drawn_pipelines",
        "steps of random pipelines with sleeping stages under our schedules, compared with others and torch's",
    ),
    "engine_overhead": (
        "training.engine_overhead",
        "CPU time of the pipeline engine, compared with torch's runtime, on the same schedules",
    ),
    "ready_order": (
        "training.ready_order_gain",
        "steps that compute what has arrived, compared with steps in planned order, with varying times",
    ),
    "compression_loss": ("training.compression_loss", "loss and speed of training with codecs"),
    "grid_times": ("parallel.grid_times", "linear layers on grids, compared with the bound and DTensor"),
    "wire_bytes": ("parallel.wire_bytes", "bytes on the wire of grids, compared with the formulas"),
    "choices": ("parallel.grid_choices", "the choice of choose_grid, compared with all grids"),
    "weak_scaling": ("parallel.weak_scaling", "predicted speed of 2.5-D over 2-D grids on 64 GPUs"),
    "gpu_transfers": ("gpu.gpu_transfers", "Movers, compared with torch.distributed on a GPU"),
    "gpu_engine": ("gpu.gpu_engine", "the pipeline engine, compared with a plain loop on a GPU"),
    "gpu_codecs": ("gpu.gpu_codecs", "kernels of the codecs on a GPU, compared with copy_"),
    "gpu_packing": ("kernels.packing", "packing of strided boxes on a GPU, compared with copy_"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a case.

    Returns:
        The exit status of the case: 0 on success, 1 if a result is wrong or misses its goal; 2 if it could not run; 130
        after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m microbench",
        description=__doc__,
        epilog="\n".join(f"{name:18} {text}" for name, (_, text) in CASES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=CASES, metavar="NAME", help="the case to run; NAME --help has its options")
    name = parser.parse_args(words[:1] or ["--help"]).name
    case = importlib.import_module(f"microbench.{CASES[name][0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m microbench {name}",
        description=case.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    case.add_options(parser)
    options = parser.parse_args(words[1:], argparse.Namespace(words=words))
    try:
        if os.environ.get("RANK", "0") == "0":
            print_line(format_machine(describe_machine(words)))
        return int(case.run(options) or 0)
    except BenchmarkOptionError as error:
        parser.error(str(error))
    except (ReshardError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            stderr(f"{name}: {type(error).__name__}: {error}")
        return 2
    except KeyboardInterrupt:
        stderr(f"{name}: interrupted")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
