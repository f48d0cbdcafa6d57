"""Conversion of topologies to and from JSON and YAML, in files and inside plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.errors import ReshardError, TopologyError
from reshard.formatting import brief, did_you_mean
from reshard.topology.topology import (
    MAX_HOSTS,
    MAX_RANKS,
    TEN_GBIT,
    CodecRate,
    Host,
    Link,
    Topology,
    check_indices,
    check_rate,
)

MAX_TOPOLOGY_BYTES = 2**26
MAX_YAML_CHARACTERS = 2**20
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
#: JSON keys with a single number; each has the name of a field of :class:`Topology`.
_LATENCIES = ("latency_seconds", "inside_latency_seconds")
#: JSON keys of the rates inside a host, with the field of each.
_INSIDE = {"inside": "inside_bytes_per_second", "inside_total": "inside_total_bytes_per_second"}
_POD_KEYS = ("hosts_per_pod", "oversubscription")
_NUMBERS = (
    *_LATENCIES,
    "sender_change_seconds",
    "start_seconds",
    "send_buffer_bytes",
    "burst_bytes",
)
#: Keys of a topology of hosts.
_KEYS = {"hosts", "pods", *_INSIDE, "codecs", *_POD_KEYS, *_NUMBERS}


def read_topology(path: str | Path) -> Topology:
    """Read a topology from a JSON file, or from a YAML file (``.yaml`` or ``.yml``) of the same structure.

    Raises:
        TopologyError: the file cannot be read, or does not describe a topology.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TOPOLOGY_BYTES + 1)
        if len(data) > MAX_TOPOLOGY_BYTES:
            raise TopologyError(f"the file is larger than {MAX_TOPOLOGY_BYTES} bytes")
        text = data.decode("utf-8-sig")
        if Path(path).suffix in (".yaml", ".yml"):
            return topology_from_json(_load_yaml(text))
        return topology_from_json(json.loads(text, object_pairs_hook=_reject_duplicates))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ReshardError):
            raise TopologyError(f"{path}: {error}") from None
        shown = path if isinstance(path, (str, Path)) else brief(path)
        reason = error.strerror or error if isinstance(error, OSError) else error  # str(error) repeats the name
        raise TopologyError(f"cannot read {shown}: {reason}") from None


def _reject_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of (name, value) pairs; raises TopologyError if a name repeats."""
    mapping: dict[Any, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise TopologyError(f"{brief(name)} is given twice")
        mapping[name] = value
    return mapping


def _load_yaml(text: str) -> Any:
    if len(text) > MAX_YAML_CHARACTERS:
        raise TopologyError(
            f"a YAML file of more than {MAX_YAML_CHARACTERS:,} characters is slow to parse; write it as JSON"
        )
    try:
        import yaml
    except ImportError:
        raise TopologyError("YAML needs PyYAML: pip install 'reshard[yaml]', or write it as JSON") from None

    class TopologyLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # nested aliases can grow to any size
                raise yaml.YAMLError("aliases such as *name are not supported; repeat the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            return _reject_duplicates(
                [(self.construct_object(k, True), self.construct_object(v, True)) for k, v in node.value]
            )

        def construct_number(self, node: Any) -> int:
            value = str(self.construct_scalar(node))
            if not _INTEGER.fullmatch(value):  # YAML 1.1 reads 010 as 8 and 1:30 as 90
                raise yaml.YAMLError(f"{value} is not a plain whole number")
            return int(value)

    TopologyLoader.add_constructor("tag:yaml.org,2002:int", TopologyLoader.construct_number)
    # By default PyYAML reads 1e-5 and 2e9 as strings.
    TopologyLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader=TopologyLoader)
    except (RecursionError, TopologyError):
        raise
    except Exception as error:  # PyYAML raises errors of many types for values that do not fit tags like !!timestamp
        raise TopologyError(f"not YAML: {' '.join(str(error).split())[:300]}") from None


def topology_from_json(data: Any) -> Topology:
    """Make a topology from its JSON object.

    If every host has one NIC of the same rate, the object may list the host of each rank::

        {"host_of_rank": [0, 0, 1, 1], "nic_bytes_per_second": 1.25e9, "latency_seconds": 2e-5, ...}

    Otherwise it lists the hosts::

        {"hosts": [{"devices": 8, "nics": "8 x 400 Gbit/s", "count": 2, "pod": 0}, ...],
         "pods": ["3.2 Tbit/s", {"egress": ..., "ingress": ...}],
         "inside": "400 Gbit/s", "inside_total": "1 Tbit/s", "latency_seconds": 2e-5, "inside_latency_seconds": 5e-6,
         "send_buffer_bytes": 0, "burst_bytes": 0,
         "codecs": {"int8x128": {"encode": "6 GB/s", "decode": "8 GB/s"}}}

    In place of ``pods``, ``"oversubscription": 2`` gives each pod an uplink of half the rates of its NICs, and
    ``"hosts_per_pod": 4`` puts four consecutive hosts into each pod.

    ``count`` repeats a host. Ranks are assigned to hosts consecutively, in the order of the list. To assign them
    explicitly, replace ``"devices"`` by ``"ranks": [...]`` in every host. A host with several NICs may give the NIC of
    each device, as ``"nic_of_device": [0, 0, 1, 1]``. Both forms accept the times and byte counts of :class:`Topology`.

    Raises:
        TopologyError: the object does not describe a topology.
    """
    if not isinstance(data, dict):
        raise TopologyError("a topology must be a JSON object")
    if "host_of_rank" in data:
        _check_keys(data, {"host_of_rank", "nic_bytes_per_second", "codecs", *_NUMBERS}, "topology", {})
        if not isinstance(data["host_of_rank"], list):
            raise TopologyError("host_of_rank must be a list")
        topology = Topology.uniform(data["host_of_rank"], parse_rate(data.get("nic_bytes_per_second", TEN_GBIT)))
        return replace(topology, **_options(data))
    hints = {name: f"; write {key!r}: '100 GB/s'" for key, name in _INSIDE.items()}
    _check_keys(data, _KEYS, "topology", hints)
    hosts, ranks_of, nics_of = _read_hosts(data.get("hosts"))
    host_of_rank, nic_of_rank = _place_ranks(ranks_of, nics_of, [len(host.nics) for host in hosts])
    hosts, pods = _read_pods(data, hosts)
    inside: dict[str, Any] = {_INSIDE[key]: parse_rate(data[key]) for key in _INSIDE if data.get(key) is not None}
    return Topology(host_of_rank, hosts, nic_of_rank, pods, **inside, **_options(data))


def _options(data: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: data[name] for name in _NUMBERS if name in data}
    return numbers | {"codec_rates": _read_codecs(data.get("codecs", {}))}


def _read_pods(data: dict[str, Any], hosts: tuple[Host, ...]) -> tuple[tuple[Host, ...], tuple[Link, ...]]:
    """The hosts with their pods, and the uplink of each pod."""
    uplinks, per_pod = data.get("pods"), data.get("hosts_per_pod")
    if uplinks is not None and not isinstance(uplinks, list):
        raise TopologyError("pods must be a list of links")
    if per_pod is not None:
        if isinstance(per_pod, bool) or not isinstance(per_pod, int) or per_pod < 1:
            raise TopologyError(f"hosts_per_pod is {brief(per_pod)}; it must be a positive integer")
        if uplinks is None and "oversubscription" not in data:
            raise TopologyError("hosts_per_pod needs the uplinks of the pods: give oversubscription, or pods")
        if any(host.pod is not None for host in hosts):
            raise TopologyError("hosts_per_pod and the pod of a host exclude each other: give one of them")
        hosts = tuple(replace(host, pod=number // per_pod) for number, host in enumerate(hosts))
    if "oversubscription" not in data:
        return hosts, tuple(map(_read_link, uplinks or []))
    if uplinks is not None:
        raise TopologyError("pods and oversubscription exclude each other: both give the uplinks of the pods")
    if any(host.pod is None for host in hosts):
        raise TopologyError("oversubscription needs hosts_per_pod, or the pod of every host")
    factor = data["oversubscription"]
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
        raise TopologyError(f"oversubscription is {brief(factor)}; it must be a positive number, such as 2 for 2:1")
    members: dict[int, list[Host]] = {}
    for host in hosts:
        assert host.pod is not None
        members.setdefault(host.pod, []).append(host)
    if sorted(members) != list(range(len(members))):
        raise TopologyError(f"with oversubscription, pods are numbered from 0 without gaps, not {sorted(members)[:8]}")
    return hosts, tuple(
        Link(
            sum(host.egress_bytes_per_second for host in members[pod]) / factor,
            sum(host.ingress_bytes_per_second for host in members[pod]) / factor,
        )
        for pod in range(len(members))
    )


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """The inverse of :func:`topology_from_json`. Rates are in bytes per second.

    The object always has both latencies, because an omitted latency means the default, not 0.
    """
    if not isinstance(topology, Topology):
        raise TopologyError(f"topology_to_json needs a Topology, not {type(topology).__name__}")
    numbers = {name: getattr(topology, name) for name in _NUMBERS if name in _LATENCIES or getattr(topology, name) != 0}
    first = topology.hosts[0]
    one_nic = len(topology.hosts) == 1 and len(first.nics) == 1 and not topology.pods
    rate = first.nics[0].egress_bytes_per_second
    if one_nic and topology == Topology.uniform(topology.host_of_rank, rate).without_latency():
        return {"host_of_rank": list(topology.host_of_rank), "nic_bytes_per_second": rate, **numbers}
    ranks_of: dict[int, list[int]] = {}
    for rank, number in enumerate(topology.host_of_rank):
        ranks_of.setdefault(number, []).append(rank)
    entries: list[dict[str, Any]] = []
    for number in range(max(topology.num_hosts, len(topology.hosts))):
        host, ranks = topology.host(number), ranks_of.get(number, [])
        entry: dict[str, Any] = {"ranks": ranks, "nics": [_link_to_json(nic) for nic in host.nics]}
        if len(host.nics) > 1:
            entry["nic_of_device"] = [topology.nic_of_rank[rank] for rank in ranks]
        if host.pod is not None:
            entry["pod"] = host.pod
        entries.append(entry)
    data: dict[str, Any] = {"hosts": entries}
    if topology.pods:
        data["pods"] = [_link_to_json(pod) for pod in topology.pods]
    data |= {key: getattr(topology, name) for key, name in _INSIDE.items() if getattr(topology, name) is not None}
    if topology.codec_rates:
        data["codecs"] = {
            rate.codec: {"encode": rate.encode_bytes_per_second, "decode": rate.decode_bytes_per_second}
            for rate in topology.codec_rates
        }
    return data | numbers


def _read_codecs(data: Any) -> tuple[CodecRate, ...]:
    if not isinstance(data, dict):
        raise TopologyError('codecs must be an object {name: {"encode": rate, "decode": rate}}')
    for name, rates in data.items():
        if not isinstance(rates, dict) or set(rates) != {"encode", "decode"}:
            raise TopologyError(f'codec {brief(name)} needs {{"encode": rate, "decode": rate}}')
    return tuple(
        CodecRate(name, parse_rate(rates["encode"]), parse_rate(rates["decode"])) for name, rates in data.items()
    )


def _read_link(data: Any) -> Link:
    if not isinstance(data, dict):
        return Link.of(parse_rate(data))
    if set(data) != {"egress", "ingress"}:
        raise TopologyError(
            f'a link must be a rate or {{"egress": rate, "ingress": rate}}, not keys {sorted(map(str, data))}'
        )
    return Link(parse_rate(data["egress"]), parse_rate(data["ingress"]))


def _link_to_json(link: Link) -> Any:
    if link.egress_bytes_per_second == link.ingress_bytes_per_second:
        return link.egress_bytes_per_second
    return {"egress": link.egress_bytes_per_second, "ingress": link.ingress_bytes_per_second}


_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)\s*([kKMGT]?)(i?)(bits?|b|B)(?:/s|ps)\s*")
_PREFIXES = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
#: Several equal NICs, such as ``"8 x 400 Gbit/s"``.
_COUNTED = re.compile(r"\s*([0-9]{1,4})\s*[xX*]\s*(.+)")


def parse_rate(value: Any) -> float:
    """Convert a rate to bytes per second: a number stays as it is, text is such as ``"25 Gbit/s"`` or ``"450 GB/s"``.

    ``Gbit/s``, ``Gb/s`` and ``Gbps`` are 10^9 bits, ``GB/s`` are 10^9 and ``GiB/s`` 2^30 bytes.

    Raises:
        TopologyError: the value is not a rate, or the rate is not positive and finite.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return check_rate(value, "a rate")
    match = _RATE.fullmatch(value) if isinstance(value, str) and len(value) < 60 else None
    if match is None:
        raise TopologyError(
            "a rate must be a positive number of bytes per second or text such as '25 Gbit/s', '25Gbps' or '3 GiB/s', "
            f"not {brief(value)}"
        )
    unit = (1024.0 if match[3] else 1000.0) ** _PREFIXES[match[2]]
    return check_rate(float(match[1]) * unit / (1 if match[4] == "B" else 8), "a rate")


def _check_keys(data: dict[Any, Any], known: set[str], what: str, hints: Mapping[str, str]) -> None:
    """Raise TopologyError if there are unknown keys; ``hints`` say by key what to do instead."""
    unknown = sorted(map(str, set(data) - known))
    if unknown:
        meant = hints.get(unknown[0]) or did_you_mean(unknown[0], known)
        raise TopologyError(f"unknown keys in {what}: {', '.join(map(brief, unknown[:8]))}{meant}")


def _read_hosts(entries: Any) -> tuple[tuple[Host, ...], list[int | list[int]], list[list[int] | None]]:
    """Return the hosts; the number of devices or the ranks of each; and the NIC of each device, None if not given."""
    if not isinstance(entries, list) or not entries:
        raise TopologyError('a topology must be {"hosts": [...]} with at least one host, or {"host_of_rank": [...]}')
    hosts: list[Host] = []
    ranks: list[int | list[int]] = []
    nics: list[list[int] | None] = []
    for number, entry in enumerate(entries):
        try:
            host, count, devices, nic_of_device = _read_host(entry)
        except TopologyError as error:
            raise TopologyError(f"entry {number} of hosts: {error}") from None
        if len(ranks) + count > MAX_HOSTS or (isinstance(devices, int) and devices * count > MAX_RANKS):
            raise TopologyError(f"a topology has at most {MAX_RANKS} ranks on at most {MAX_HOSTS} hosts")
        ranks.extend([devices] * count)
        hosts.extend([host] * count)
        nics.extend([nic_of_device] * count)
    return tuple(hosts), ranks, nics


def _read_host(entry: Any) -> tuple[Host, int, int | list[int], list[int] | None]:
    """Return a host, its count, its number of devices or its ranks, and the NIC of each device, None if not given."""
    if not isinstance(entry, dict):
        raise TopologyError(f"a host must be an object, not {brief(entry)}")
    known = ("devices", "ranks", "nics", "nic_of_device", "pod", "count")
    hints = {key: f"; {key!r} belongs beside 'hosts', not into a host" for key in _KEYS}
    _check_keys(entry, set(known), f"a host (known keys: {', '.join(known)})", hints)
    if ("devices" in entry) == ("ranks" in entry):
        raise TopologyError("a host must have either devices (a number) or ranks (a list)")
    count = entry.get("count", 1)
    host = Host(_read_nics(entry.get("nics", [TEN_GBIT])), entry.get("pod"))
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_RANKS:
        raise TopologyError(f"count is {brief(count)}; it must be an integer from 1 to {MAX_RANKS}")
    devices: int | list[int]
    if "ranks" in entry:
        if count > 1 or not isinstance(entry["ranks"], list):
            raise TopologyError("ranks must be a list, and only a host with count 1 can have them")
        devices = list(check_indices(entry["ranks"], "ranks"))
    else:
        devices = entry["devices"]
        if isinstance(devices, bool) or not isinstance(devices, int) or not 0 <= devices <= MAX_RANKS:
            raise TopologyError(f"devices is {brief(devices)}; it must be an integer from 0 to {MAX_RANKS}")
    nic_of_device = entry.get("nic_of_device")
    if nic_of_device is not None and not isinstance(nic_of_device, list):
        raise TopologyError("nic_of_device must be a list")
    return host, count, devices, None if nic_of_device is None else list(check_indices(nic_of_device, "NICs"))


def _read_nics(data: Any) -> tuple[Link, ...]:
    """The NICs of a host: a list of links, or text such as ``"8 x 400 Gbit/s"``."""
    if isinstance(data, str):
        counted = _COUNTED.fullmatch(data)
        number, rate = (int(counted[1]), counted[2]) if counted else (1, data)
        return (_read_link(rate),) * number
    if not isinstance(data, list):
        raise TopologyError(f"nics must be a list of links, or text such as '8 x 400 Gbit/s', not {brief(data)}")
    return tuple(map(_read_link, data))


def _place_ranks(
    ranks_of: list[int | list[int]], nics_of: list[list[int] | None], num_nics: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the host of each rank, and the NIC of each rank: an empty tuple if no host has ``nic_of_device``."""
    if len({isinstance(ranks, int) for ranks in ranks_of}) > 1:
        raise TopologyError("hosts mix devices and ranks: either every host has devices, or every host has ranks")
    num_ranks = 0
    for host, (ranks, nics) in enumerate(zip(ranks_of, nics_of, strict=True)):
        number = ranks if isinstance(ranks, int) else len(ranks)
        num_ranks += number
        if num_ranks > MAX_RANKS:
            raise TopologyError(f"a topology has at most {MAX_RANKS} ranks, not {num_ranks}")
        if nics is not None and len(nics) != number:
            raise TopologyError(f"host {host} has {number} devices, but nic_of_device has NICs for {len(nics)}")
    if all(isinstance(ranks, int) for ranks in ranks_of) and all(nics is None for nics in nics_of):
        return tuple(np.repeat(np.arange(len(ranks_of)), np.array(ranks_of, dtype=np.int64)).tolist()), ()
    placed: dict[int, tuple[int, int]] = {}  # rank -> (host, NIC)
    next_rank = 0
    for host, (ranks, nics) in enumerate(zip(ranks_of, nics_of, strict=True)):
        numbers = range(next_rank, next_rank + ranks) if isinstance(ranks, int) else ranks
        next_rank += len(numbers)
        for position, rank in enumerate(numbers):
            if rank in placed:
                raise TopologyError(f"rank {rank} is on hosts {placed[rank][0]} and {host}")
            default_nic = position * num_nics[host] // len(numbers)
            placed[rank] = (host, default_nic if nics is None else nics[position])
    missing = next((rank for rank in range(len(placed)) if rank not in placed), None)
    if missing is not None:
        raise TopologyError(f"rank {missing} has no host: ranks must be 0 to {len(placed) - 1}")
    host_of_rank = tuple(placed[rank][0] for rank in range(len(placed)))
    if all(nics is None for nics in nics_of):
        return host_of_rank, ()
    return host_of_rank, tuple(placed[rank][1] for rank in range(len(placed)))
