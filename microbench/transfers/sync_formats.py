"""Time the formats of a WeightSync on real updates.

Seven runs continue the training of a small GPT in bf16 with fp32 masters, by AdamW or SGD at different learning rates.
They change from about 1 % to nearly all of the bf16 weights a step. On emulated hosts, four trainer ranks send each
version to four replicas, once in each format, once by ``compression="auto"``, and once with a plain Mover. All send the
same version in turns. Replicas compare each result bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import Cluster
from microbench.emulation.links import PAYLOAD_SHARE
from microbench.harness.options import add_number, add_rates
from microbench.harness.worker import Stopwatch
from reshard.api.lossless.encoding import Choose, decode_bucket, encode_bucket
from reshard.api.lossless.regions import find_buckets
from reshard.cli.progress import print_line, track
from reshard.codecs.formats import known_formats
from reshard.codecs.rates import time_formats
from reshard.compression import WeightSync
from reshard.compression.sync_formats import SyncFormats
from reshard.scheduler.training.data import TokenLoader, read_tokens
from reshard.scheduler.training.models.making import make_model
from reshard.scheduler.training.models.presets import GPTConfig
from reshard.topology import Topology, topology_from_json

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
#: The first versions of a run, which change buffers, are not timed.
UNTIMED = 2

SRC, DST = reshard.Layout(reshard.Mesh.of(4), "S0"), reshard.Layout(reshard.Mesh.of(4, first_rank=4))
#: Runs of each part, of which the fastest counts.
PARTS_REPEATS = 3

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


def measure(rank: int, report: Callable[[Any], None], path: str, topology: Topology) -> None:
    """Report for each run: by contender, seconds of each timed version on this rank, and formats and bytes of it."""
    runs = torch.load(path, mmap=True)
    shapes = {name: tuple(item.shape) for name, item in runs[0][0].items()}
    numel = sum(item.numel() for item in runs[0][0].values()) // 4 * 4
    plan = reshard.make_plan(SRC, DST, (numel,), "bfloat16", topology=topology)
    flat = torch.zeros(numel // 4, dtype=torch.bfloat16) if rank < 4 else None
    syncs = {
        name: WeightSync(SRC, DST, shapes, "bfloat16", topology=topology, compression=name)
        for name in ("auto", *known_formats())
    }
    outs = {
        name: {item: torch.zeros(shape, dtype=torch.bfloat16) for item, shape in shapes.items()} if rank >= 4 else None
        for name in syncs
    }
    stopwatch, number = Stopwatch(), 0
    with reshard.Mover(plan) as mover:
        flat_out = mover.empty_out()
        for which, versions in enumerate(runs):
            found: dict[str, list[tuple[float, Any]]] = {name: [] for name in ("Mover", *syncs)}
            for place, whole in enumerate(versions):
                number += 1
                shards = None
                if rank < 4:
                    shards = {name: item.tensor_split(4)[rank].clone() for name, item in whole.items()}
                for name, timed in found.items():
                    stopwatch.start()
                    sent: Any = None
                    if name == "Mover":
                        mover(flat, out=flat_out)
                    else:
                        sent = syncs[name](shards, outs[name], version=number)
                    seconds = stopwatch.stop().seconds
                    if place >= UNTIMED:
                        timed.append((seconds, sent and (sent.formats, sent.encoded_bytes, sent.plain_bytes)))
                    out = outs.get(name)
                    assert out is None or all(
                        torch.equal(out[item].view(torch.int16), whole[item].view(torch.int16)) for item in shapes
                    )
            report((which, found))


def time_parts(old: Weights, new: Weights) -> dict[str, tuple[float, float, int]]:
    """By format: CPU seconds of a trainer that encodes its quarter and a replica that decodes all, and the bytes."""
    return {name: _fastest_parts(old, new, name) for name in known_formats()}


def _fastest_parts(old: Weights, new: Weights, codec: Any) -> tuple[float, float, int]:
    buffers: dict[int, Any] = {}
    taken = [_code(old, new, codec, buffers) for _ in range(PARTS_REPEATS)]
    return min(item[0] for item in taken), min(item[1] for item in taken), taken[0][2]


def _code(old: Weights, new: Weights, codec: Any, buffers: dict[int, Any]) -> tuple[float, float, int]:
    """One run; ``buffers`` keeps the memory of encoded buckets for the next one, as a WeightSync does."""
    encoded, out = [], {name: item.clone() for name, item in old.items()}
    seconds = []
    for rank in range(4):
        (bucket,) = (item for item in _find_all(new, rank).values() if item.holders == (rank,))
        shards, base = ({name: item.tensor_split(4)[rank] for name, item in side.items()} for side in (new, old))
        begun = time.thread_time()
        made = encode_bucket(bucket, shards, base, codec, buffer=buffers.get(rank))
        encoded.append((rank, made.data))
        seconds.append(time.thread_time() - begun)
        buffers[rank] = made.buffer
    buckets = {bucket.holders: bucket for bucket in _find_all(new, 4).values()}
    begun = time.thread_time()
    for rank, data in encoded:
        decode_bucket(buckets[rank,], data, out, with_digest=False)
    decoding = time.thread_time() - begun
    assert all(torch.equal(out[name].view(torch.int16), item.view(torch.int16)) for name, item in new.items())
    return max(seconds), decoding, sum(len(data) for _, data in encoded)


def _find_all(weights: Weights, rank: int) -> dict[str, Any]:
    """All buckets, with regions as a rank holds them."""
    specs = [reshard.TensorSpec(tuple(weight.shape), "bfloat16", SRC, DST, name) for name, weight in weights.items()]
    return find_buckets(specs, rank)


def print_parts(runs: list[list[Weights]], rates: Sequence[str]) -> None:
    """Print for each rate and run the sum of measured coding times and the time of the bytes on the link."""
    codec_rates = time_formats()
    for versions in runs:
        old, new = versions[-2:]
        parts, plain = time_parts(old, new), sum(item.nbytes for item in new.values())
        for rate in rates:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [rate]}]})
            link = topology.hosts[0].nics[0].egress_bytes_per_second * PAYLOAD_SHARE
            choice = SyncFormats("auto", _find_all(new, 0), plain / link)
            choice.agree({0: choice.report() | {"rates": codec_rates}})
            chosen: dict[str, int] = {}
            parts["auto"] = _fastest_parts(old, new, choice)
            _code(old, new, _counting(choice, chosen), {})
            seconds = {name: encode + nbytes / link + decode for name, (encode, decode, nbytes) in parts.items()}
            auto, raw = seconds.pop("auto"), seconds["raw"]
            best = min(seconds, key=seconds.__getitem__)
            most = ", ".join(f"{name} {n / plain:.0%}" for name, n in chosen.items() if n > 0.02 * plain)
            print_line(
                f"{rate:10} {share_of_changes(old, new):6.1%}  auto {1e3 * auto:8.2f} ms  / {best} "
                f"{auto / seconds[best]:.3f}  / raw {auto / raw:.3f}  ({most})  "
                + "  ".join(
                    f"{name} {1e3 * value:.1f} ms 1/{plain / parts[name][2]:.1f}" for name, value in seconds.items()
                )
            )


def _counting(choice: SyncFormats, chosen: dict[str, int]) -> Choose:
    def choose(words: Any, base: Any, dtype: str, width: int) -> str:
        name = choice(words, base, dtype, width)
        chosen[name] = chosen.get(name, 0) + len(words)
        return name

    return choose


def add_options(parser: argparse.ArgumentParser) -> None:
    add_rates(parser, RATES)
    add_number(parser, "--repeats", 5, "timed versions of each run")
    parser.add_argument(
        "--parts", action="store_true", help="measure coding alone, in CPU time, and compute the time of the link"
    )


def run(options: argparse.Namespace) -> None:
    """Print a row for each rate and run."""
    runs = make_runs(UNTIMED + options.repeats)
    print_line(f"{sum(item.nbytes for item in runs[0][0].values()) / 2**20:.1f} MiB of bf16")
    shares = [share_of_changes(versions[-2], versions[-1]) for versions in runs]
    if options.parts:
        print_parts(runs, options.rate or RATES)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "runs.pt")
        torch.save(runs, path)
        for rate in options.rate or RATES:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [rate]}]})
            with Cluster(topology) as cluster:
                printer = _Printer(rate, shares)
                cluster.run(measure, path, topology, timeout_seconds=1800.0, on_report=printer)


class _Printer:
    """Prints the row of a run when all ranks have reported it."""

    def __init__(self, rate: str, shares: list[float]) -> None:
        self._rate, self._shares = rate, shares
        self._found: dict[int, list[Any]] = {}

    def __call__(self, rank: int, value: Any) -> None:
        which, found = value
        self._found.setdefault(which, []).append(found)
        if len(self._found[which]) == 8:
            name = f"{RUNS[which][0]} {RUNS[which][1]:g}"
            _print_row(self._rate, name, self._shares[which], self._found[which])


def _print_row(rate: str, name: str, share: float, ranks: list[dict[str, list[tuple[float, Any]]]]) -> None:
    medians, ratios = {}, {}
    for contender in ranks[0]:
        turns = [max(times) for times in zip(*([t for t, _ in rank[contender]] for rank in ranks), strict=True)]
        medians[contender] = statistics.median(turns)
        sent = ranks[0][contender][-1][1]
        ratios[contender] = "" if sent is None else f" 1/{sent[2] / sent[1]:.1f}"
    fixed = {median: value for median, value in medians.items() if median not in ("Mover", "auto")}
    best = min(fixed, key=fixed.__getitem__)
    plain = ranks[0]["auto"][-1][1]
    chosen = ", ".join(f"{item} {part:.0%}" for item, nbytes in plain[0].items() if (part := nbytes / plain[2]) > 0.02)
    times = "  ".join(f"{median} {1e3 * value:.1f} ms{ratios[median]}" for median, value in medians.items())
    print_line(
        f"{rate:10} {name:11} {share:6.1%}  auto / {best} {medians['auto'] / fixed[best]:.3f}  / raw "
        f"{medians['auto'] / fixed['raw']:.3f}  ({chosen})  {times}"
    )
