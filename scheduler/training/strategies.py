"""Find a strategy for a preset: measure its layers on one rank, and search."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.topology import MACHINES, Topology

from ..autoparallel import Cluster, Profile, StateBytes, Strategy, TracedModel, profile_layers, search, trace_module
from ..autoparallel.command import find_topology, parse_bytes, parse_keep
from .loop import Job, make_loaders
from .models import layer_paths, make_model
from .presets import GPTConfig

#: Rows of a forward that are measured, as far as a step has so many.
ROWS = (1, 2, 4, 8)
#: AdamW with float32 parameters and gradients.
STATES = StateBytes(4.0, 4.0, 8.0)
#: Part of the memory of a device that a strategy may use unless ``--memory`` is given.
USABLE = 0.9
#: Rate inside a host for which no topology is given, in bytes per second.
INSIDE_BYTES_PER_SECOND = 5e9


@dataclass(frozen=True)
class SearchOptions:
    """What a search for a strategy of a preset needs beside the preset.

    Attributes:
        devices: number of ranks; None: that of the topology. topology: a machine or a file; None: one host.
        memory: of a device, such as ``"16GB"``; None: what the device has.
        keep: parts that are fixed, as :func:`reshard.scheduler.autoparallel.search` takes them.
    """

    devices: int | None = None
    topology: str | None = None
    memory: str | None = None
    keep: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, options: Any) -> SearchOptions:
        """From options of the command line.

        Raises:
            ArgumentError: an option is malformed.
        """
        if options.devices is not None and options.devices < 1:
            raise ArgumentError(f"--devices is {options.devices}; it must be positive")
        keep = parse_keep(options.keep)
        if options.microbatches is not None:
            keep.setdefault("microbatches", options.microbatches)
        if options.memory is not None:
            parse_bytes(options.memory)
        return cls(options.devices, options.topology, options.memory, tuple(sorted(keep.items())))

    def find_topology(self, num_ranks: int | None) -> Topology:
        """The hosts and links of all ranks.

        Args:
            num_ranks: ranks that a launcher has started; None if there is none.

        Raises:
            ArgumentError: the number of ranks is unknown, or differs from that of the launcher.
        """
        devices = self.devices if self.devices is not None else num_ranks
        if self.topology is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", devices or 0))
            if devices is None:
                raise ArgumentError("--strategy auto needs --devices N, the number of ranks, or --topology FILE")
            if num_ranks is not None and local < num_ranks:
                raise ArgumentError(
                    f"the launcher started {num_ranks} ranks with {local} on each host; pass --topology with the rates "
                    "of the links between hosts"
                )
            found = replace(Topology.uniform((0,) * devices), inside_bytes_per_second=INSIDE_BYTES_PER_SECOND)
        else:
            found = find_topology(self.topology, devices if self.topology in MACHINES else None)
        if num_ranks is not None and num_ranks != (self.devices or len(found.host_of_rank)):
            raise ArgumentError(
                f"the strategy is for {self.devices or len(found.host_of_rank)} devices, but the launcher started "
                f"{num_ranks} ranks"
            )
        return found


def trace_job(job: Job) -> TracedModel:
    """The model of a job as layers: each block is one, and what lies before and behind them."""
    config = job.preset.config
    return trace_module(
        make_model(config),
        make_loaders(job)[0].batch(0),
        layer_paths(config),
        max_tp=config.num_heads & -config.num_heads if isinstance(config, GPTConfig) else 1,
        name=job.name,
        autocast=getattr(torch, job.preset.autocast) if job.preset.autocast else None,
    )


def profile_job(traced: TracedModel, job: Job) -> Profile:
    """Times of the layers on the device of this process."""
    rows = [rows for rows in ROWS if rows <= job.preset.rows]
    return profile_layers(traced, job.device, rows=rows, repeats=3)


def find_cluster(options: SearchOptions, device: str, num_ranks: int | None) -> Cluster:
    """The devices of a search, with the memory of this machine's if none is given."""
    topology = options.find_topology(num_ranks)
    if options.memory is not None:
        memory = parse_bytes(options.memory)
    elif device == "cuda":
        memory = USABLE * torch.cuda.mem_get_info()[0]
    else:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = USABLE * whole / max(len(topology.ranks_of_host(host)) for host in range(topology.num_hosts))
    return Cluster(topology, memory, options.devices or 0)


def find_strategy(job: Job, options: SearchOptions, num_ranks: int | None = None) -> Strategy:
    """Measure the layers of a job in this process, and search.

    Raises:
        ArgumentError: nothing fits, or the options do not fit each other.
    """
    cluster = find_cluster(options, job.device, num_ranks)
    traced = trace_job(job)
    profile = profile_job(traced, job)
    return search(traced.graph, cluster, profile, rows=job.preset.rows, keep=dict(options.keep), states=STATES)
