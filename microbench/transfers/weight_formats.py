"""Time the formats in which a Publisher sends versions, on real updates.

Seven runs continue the training of a small GPT in bf16 with fp32 masters, by AdamW or SGD at different learning rates.
They change from about 1 % to nearly all of the bf16 weights a step. On emulated hosts, four trainer ranks publish each
version to four engines, once in each format, once with ``compression="delta"``, which chooses, and once without
compression ("raw"). All send the same version in turns, and engines compare each result bit for bit. In each run, the
choice begins anew, and learns from four versions before the comparison begins.

``--parts`` measures coding alone, in CPU time, and computes the time of the link: a trainer rank encodes its quarter,
and an engine decodes all. All formats are measured in turns, and the choice takes its formats from the same
measurements. The time of the choice counts, too, divided by the versions that use it. Raw versions need no coding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import PAYLOAD_SHARE
from microbench.harness.benchmark_rank import Stopwatch
from microbench.harness.case_options import add_number, add_rates
from microbench.harness.turns import equal_hosts
from microbench.transfers.publication import NUM_TRAINERS, Publication, make_group
from reshard.cli.progress_bars import print_line, track
from reshard.codecs.encoded_ratios import Sample
from reshard.codecs.formats import known_formats
from reshard.codecs.rates import time_formats
from reshard.scheduler.training.data import TokenLoader, read_tokens
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.topology import Topology
from reshard.weights.routes.encoded_regions import decode_region, encode_region, largest_size
from reshard.weights.routes.encoded_transfers import MAX_KEPT
from reshard.weights.routes.format_choice import FormatChoice, RegionChoice, find_cores, time_setups
from reshard.weights.routes.learned_times import LearnedTimes

CONFIG = GPTConfig(num_layers=3, num_heads=8, head_size=48, sequence=32, vocabulary=256)
ROWS, WARMUP_STEPS, WARMUP_RATE = 2, 10, 1e-3
#: Steps of a run before its first version.
SKIPPED_STEPS = 2
#: Optimizer and learning rate of each run.
RUNS = (
    *(("AdamW", rate) for rate in (3e-7, 3e-6, 1e-5, 5e-5, 2e-4, 1e-3)),
    ("SGD", 0.01),
)
RATES = ("0.1 Gbit/s", "0.4 Gbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s")
#: The first versions of a run, which change buffers, are not timed. Before these, only "auto" sends so many versions,
#: from which it learns.
UNTIMED, WARMUP_VERSIONS = 2, 4
#: Runs of each part, of which the fastest counts.
PARTS_REPEATS = 5
#: Versions of a run in which choices are kept, and comparisons become rare if they end in raw.
LONG_RUN = 256

Weights = dict[str, torch.Tensor]


def make_runs(num_versions: int) -> list[list[Weights]]:
    """The bf16 weights of consecutive versions of each run."""
    torch.manual_seed(0)
    start = make_model(CONFIG, "cpu")
    batches = TokenLoader(read_tokens(None), ROWS, CONFIG.sequence, CONFIG.vocabulary)
    _train(start, torch.optim.AdamW(start.parameters(), WARMUP_RATE), batches, range(WARMUP_STEPS))
    runs = []
    for name, rate in track(RUNS, "training runs"):
        model = make_model(CONFIG, "cpu")
        model.load_state_dict(start.state_dict())
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), rate, **options)
        versions = []
        for number in range(SKIPPED_STEPS + num_versions):
            _train(model, optimizer, batches, range(WARMUP_STEPS + number, WARMUP_STEPS + number + 1))
            versions.append({parameter: value.detach().bfloat16() for parameter, value in model.named_parameters()})
        runs.append(versions[SKIPPED_STEPS:])
    return runs


def _train(masters: Any, optimizer: torch.optim.Optimizer, batches: TokenLoader, steps: range) -> None:
    """Train fp32 masters by the gradients at their bf16 values, computed in fp32, which CPUs do faster."""
    for step in steps:
        rounded = make_model(CONFIG, "cpu")
        rounded.load_state_dict({name: item.bfloat16().float() for name, item in masters.state_dict().items()})
        rounded(**batches.batch(step)).backward()
        for master, parameter in zip(masters.parameters(), rounded.parameters(), strict=True):
            master.grad = parameter.grad
        optimizer.step()


def share_of_changes(old: Weights, new: Weights) -> float:
    """The share of the bf16 weights that differ."""
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in new)
    return changed / sum(item.numel() for item in new.values())


class FixedTimes(LearnedTimes):
    """Learns nothing, so that every version is encoded."""

    def add_version(self, is_encoded: bool, seconds: float, raw_bound: float) -> None:
        """See :class:`LearnedTimes`."""


class FixedChoice(FormatChoice):
    """One format for all regions.

    Args:
        name: name of the format.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def may_pay(self) -> bool:
        """See :class:`FormatChoice`."""
        return True

    def choose(
        self, region: torch.Tensor, base: torch.Tensor | None, last: str | None = None, sample: Sample | None = None
    ) -> RegionChoice:
        """See :class:`FormatChoice`."""
        return RegionChoice("raw" if base is None else self._name, 1.0)


def measure(rank: int, report: Callable[[Any], None], path: str, topology: Topology) -> None:
    """Report for each run: by contender, seconds of each timed version on this rank, and its report."""
    runs = torch.load(path, mmap=True)
    models: dict[str, Weights] = {}
    sides: dict[str, Publication] = {}
    is_trainer, group = rank < NUM_TRAINERS, make_group(rank, 4)
    cut = {item: value.tensor_split(4)[rank] if is_trainer else value for item, value in runs[0][0].items()}

    def open_side(name: str, number: int = 0) -> None:
        models[name] = {item: torch.zeros_like(value) for item, value in cut.items()}
        options: dict[str, Any] = {"name": f"{name} {number}", "topology": topology}
        if is_trainer:
            options["shards"] = {item: _stated(runs[0][0][item], rank) for item in cut}
            options["compression"] = None if name == "raw" else "delta"
        sides[name] = Publication(models[name], group, is_trainer, 4, **options)

    for name in ("raw", "auto", *(known for known in known_formats() if known != "raw")):
        open_side(name)
        publisher = sides[name].publisher
        if publisher is not None and name not in ("raw", "auto"):
            publisher._sender._choice = FixedChoice(name)
            publisher._sender._learned = FixedTimes()
    stopwatch = Stopwatch()
    for which, versions in enumerate(runs):
        if which:  # a job that trains in another way knows nothing of this one
            sides["auto"].close()
            open_side("auto", which)
        times: dict[str, list[tuple[float, Any]]] = {name: [] for name in sides}
        for place, whole in enumerate(versions, -WARMUP_VERSIONS):
            for name, side in sides.items():
                if place < 0 and name != "auto":
                    continue
                if is_trainer:
                    for item, value in whole.items():
                        models[name][item].copy_(value.tensor_split(4)[rank])
                stopwatch.start()
                sent = side.publish()
                seconds = stopwatch.stop().seconds
                if place >= UNTIMED:
                    timed = sent and (dict(sent.formats), sent.encoded_bytes or sent.nbytes, sent.nbytes)
                    times[name].append((seconds, timed))
                side.update()
                if not is_trainer:
                    assert all(torch.equal(models[name][item], value) for item, value in whole.items()), name
        report((which, times))
    for side in sides.values():
        side.close()


def _stated(weight: torch.Tensor, rank: int) -> tuple[Any, list[Any]]:
    """The global shape, and the region that a trainer rank holds."""
    rows = [len(part) for part in weight.tensor_split(NUM_TRAINERS)]
    first = sum(rows[:rank])
    return weight.shape, [[(first, first + rows[rank]), *((0, size) for size in weight.shape[1:])]]


@dataclass(frozen=True)
class EncodedRegion:
    """A region in a format: CPU seconds to encode and to decode it, and its bytes on the link."""

    encode: float
    decode: float
    nbytes: int


Regions = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


def cut_regions(old: Weights, new: Weights) -> Regions:
    """The regions that the trainer ranks hold: ``{(rank, name): (new, old)}``."""
    return {
        (rank, name): tuple(side[name].tensor_split(NUM_TRAINERS)[rank] for side in (new, old))
        for rank in range(NUM_TRAINERS)
        for name in new
    }


def time_coding(regions: Regions, names: Sequence[str]) -> dict[tuple[int, str], dict[str, EncodedRegion]]:
    """Each region in each format, in the fastest of some runs, which take turns. Decoded regions are compared."""
    encoded: dict[tuple[int, str], dict[str, EncodedRegion]] = {key: {} for key in regions}
    buffers = {
        key: np.zeros(largest_size(new), dtype=np.uint8) for key, (new, _) in regions.items()
    }  # as in a Publisher
    for _ in range(PARTS_REPEATS):
        for name in names:
            for key, (new, old) in regions.items():
                out, target = buffers[key], old.clone()
                begun = time.thread_time()
                size = encode_region(new, old, name, out)
                middle = time.thread_time()
                decode_region(out, target)
                ended = time.thread_time()
                assert torch.equal(target.view(torch.int16), new.view(torch.int16))
                before = encoded[key].get(name, EncodedRegion(math.inf, math.inf, size))
                seconds = min(before.encode, middle - begun), min(before.decode, ended - middle)
                encoded[key][name] = EncodedRegion(*seconds, size)
    return encoded


def add_parts(
    encoded: dict[tuple[int, str], dict[str, EncodedRegion]], names: dict[tuple[int, str], str], link: float
) -> float:
    """Seconds of a version: the slowest trainer rank encodes, the link carries all, and an engine decodes all."""
    chosen = {key: encoded[key][name] for key, name in names.items()}
    encode = max(sum(item.encode for (rank, _), item in chosen.items() if rank == own) for own in range(NUM_TRAINERS))
    return encode + sum(item.nbytes for item in chosen.values()) / link + sum(item.decode for item in chosen.values())


def time_choice(regions: Regions, choice: FormatChoice) -> tuple[float, dict[tuple[int, str], str]]:
    """CPU seconds in which the slowest rank chooses its formats, in the fastest of some runs; and the formats."""
    seconds = [math.inf] * NUM_TRAINERS
    names: dict[tuple[int, str], str] = {}
    for _ in range(PARTS_REPEATS):
        gain = 0.0
        for rank in range(NUM_TRAINERS):
            begun = time.thread_time()
            chosen = {key: choice.choose(*pair) for key, pair in regions.items() if key[0] == rank}
            seconds[rank] = min(seconds[rank], time.thread_time() - begun)
            rank_gain = sum(item.saved for item in chosen.values())
            names |= {key: item.name if rank_gain > 0 else "raw" for key, item in chosen.items()}
            gain += rank_gain
    return max(seconds), names if gain > 0 else {}


def versions_per_choice(choice: FormatChoice, pays: bool) -> float:
    """The number of versions of a long run to each sampling of the regions."""
    num_compared = 0
    for _ in range(LONG_RUN):
        if choice.may_pay():
            num_compared += 1
            choice.note(pays)
    return LONG_RUN / max(1, -(-num_compared // MAX_KEPT))


def print_parts(runs: list[list[Weights]], rates: Sequence[str]) -> None:
    """Print for each rate and run the sum of measured coding times and the time of the bytes on the link."""
    report = {"known": known_formats(), "rates": time_formats(), "setups": time_setups(), "cores": find_cores()}
    within, slower = [], []
    for versions in runs:
        old, new = versions[-2:]
        plain, regions = sum(item.nbytes for item in new.values()), cut_regions(old, new)
        encoded = time_coding(regions, [*known_formats()])
        for rate in rates:
            topology = equal_hosts(rate)
            link = topology.hosts[0].nics[0].egress_bytes_per_second * PAYLOAD_SHARE
            choice = FormatChoice()
            choice.agree({0: report}, encoders=NUM_TRAINERS)
            choice.add_transfer(plain, plain / link, plain, is_first=False)
            fixed = [name for name in known_formats() if name != "raw"]
            seconds = {"raw": plain / link}
            seconds |= {name: add_parts(encoded, dict.fromkeys(regions, name), link) for name in fixed}
            auto, formats, choosing = seconds["raw"], {"raw": plain}, 0.0
            if choice.may_pay():
                choosing, names = time_choice(regions, choice)
                auto += choosing / versions_per_choice(choice, pays=False)
                if names:
                    auto = add_parts(encoded, names, link) + choosing / versions_per_choice(choice, pays=True)
                    formats = {}
                    for key, name in names.items():
                        formats[name] = formats.get(name, 0) + regions[key][0].nbytes
            best = min(seconds, key=seconds.__getitem__)
            within.append(auto / seconds[best])
            slower.append(auto / seconds["raw"])
            used = ", ".join(f"{name} {n / plain:.0%}" for name, n in formats.items() if n > 0.02 * plain)
            print_line(
                f"{rate:10} {share_of_changes(old, new):6.1%}  auto {1e3 * auto:8.2f} ms  / {best} {within[-1]:.3f}  "
                f"/ raw {slower[-1]:.3f}  ({used}; chosen in {1e3 * choosing:.2f} ms)  "
                + "  ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
            )
    _print_summary(within, slower)


def _print_summary(within: list[float], slower: list[float]) -> None:
    """Print how many cases meet each goal, from times over that of the fastest format, and over that of raw."""
    print_line(
        f"within 5 % of the fastest format: {sum(item <= 1.05 for item in within)} of {len(within)}, at worst "
        f"{max(within):.3f}; at most 2 % slower than raw: {sum(item <= 1.02 for item in slower)}, at worst "
        f"{max(slower):.3f}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_rates(parser, RATES)
    add_number(parser, "--repeats", 5, "timed versions of each run")
    parser.add_argument(
        "--parts", action="store_true", help="measure coding alone, in CPU time, and compute the time of the link"
    )


def run(options: argparse.Namespace) -> None:
    """Print a row for each rate and run."""
    runs = make_runs(UNTIMED if options.parts else WARMUP_VERSIONS + UNTIMED + options.repeats)
    print_line(f"{sum(item.nbytes for item in runs[0][0].values()) / 2**20:.1f} MiB of bf16")
    shares = [share_of_changes(versions[-2], versions[-1]) for versions in runs]
    if options.parts:
        print_parts(runs, options.rate or RATES)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "runs.pt")
        torch.save(runs, path)
        within: list[float] = []
        slower: list[float] = []
        for rate in options.rate or RATES:
            topology = equal_hosts(rate)
            with EmulatedCluster(topology) as cluster:
                cluster.run(
                    measure, path, topology, timeout_seconds=1800.0, on_report=_Printer(rate, shares, within, slower)
                )
        _print_summary(within, slower)


class _Printer:
    """Prints the row of a run when all ranks have reported it, and adds its times over the fastest format and raw."""

    def __init__(self, rate: str, shares: list[float], within: list[float], slower: list[float]) -> None:
        self._rate, self._shares, self._within, self._slower = rate, shares, within, slower
        self._reports: dict[int, list[Any]] = {}

    def __call__(self, rank: int, value: Any) -> None:
        which, times = value
        self._reports.setdefault(which, []).append(times)
        if len(self._reports[which]) == 8:
            name = f"{RUNS[which][0]} {RUNS[which][1]:g}"
            ratios = _print_row(self._rate, name, self._shares[which], self._reports[which])
            self._within.append(ratios[0])
            self._slower.append(ratios[1])


def _print_row(
    rate: str, name: str, share: float, ranks: list[dict[str, list[tuple[float, Any]]]]
) -> tuple[float, float]:
    """Print a row; returns the time of the choice over that of the fastest format, and over that of raw."""
    medians, ratios = {}, {}
    for contender in ranks[0]:
        turns = [max(times) for times in zip(*([t for t, _ in rank[contender]] for rank in ranks), strict=True)]
        medians[contender] = statistics.median(turns)
        sent = ranks[0][contender][-1][1]
        ratios[contender] = "" if sent is None else f" 1/{sent[2] / sent[1]:.1f}"
    fixed = {median: value for median, value in medians.items() if median != "auto"}
    best = min(fixed, key=fixed.__getitem__)
    plain = ranks[0]["auto"][-1][1]
    chosen = ", ".join(f"{item} {part:.0%}" for item, nbytes in plain[0].items() if (part := nbytes / plain[2]) > 0.02)
    times = "  ".join(f"{median} {1e3 * value:.1f} ms{ratios[median]}" for median, value in medians.items())
    print_line(
        f"{rate:10} {name:11} {share:6.1%}  auto / {best} {medians['auto'] / fixed[best]:.3f}  / raw "
        f"{medians['auto'] / fixed['raw']:.3f}  ({chosen})  {times}"
    )
    return medians["auto"] / fixed[best], medians["auto"] / fixed["raw"]
