"""Checkpoints with flipped bits, cut and missing files: errors on all ranks that name the file, and nothing changes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard.scheduler as rs
from reshard.errors import ArgumentError
from reshard.scheduler.pipe.checkpoint import find_checkpoints
from reshard.testing import run_processes

from .test_checkpoint import CUTS
from .test_pipe import Chain, make_batch, make_chain


def flip(file: Path, fraction: float) -> None:
    """Change one bit at this fraction of the file."""
    content = bytearray(file.read_bytes())
    content[int(fraction * (len(content) - 1))] ^= 16
    file.write_bytes(content)


def cut(file: Path, fraction: float) -> None:
    file.write_bytes(file.read_bytes()[: int(fraction * file.stat().st_size)])


DAMAGES = {
    **{f"flip {part}": lambda file, part=part: flip(file, part / 10) for part in range(11)},
    "empty": lambda file: cut(file, 0.0),
    "half": lambda file: cut(file, 0.5),
    "missing": Path.unlink,
}


def save_and_damage(rank, folder):
    """Names of the files damaged in turn, and (damage, file, error) where the error does not name the file."""
    torch.set_num_threads(1)
    unnamed = []
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for step in (1, 2):
            engine.save(folder, optimizer, step=step)
            engine.step(make_batch(0))
            optimizer.step()
        expected = engine.evaluate(make_batch(0)).loss
        newest = find_checkpoints(folder)[-1][1]
        names = sorted(each.name for each in newest.iterdir())
        if rank == 0:
            subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=newest, check=True)
        for name in names:
            for kind, damage in DAMAGES.items():
                if (kind, name) == ("missing", "SHA256SUMS"):  # as if torch alone had written the checkpoint
                    continue
                if rank == 0:
                    shutil.copy(newest / name, f"{folder}/kept")
                    damage(newest / name)
                with pytest.raises(ArgumentError, match="pass step=1") as caught:
                    engine.load(folder, optimizer)
                # One flipped bit of the digests may look like damage of the file whose digest it is.
                if f"{newest.name}/{name}" not in str(caught.value) and name != "SHA256SUMS":
                    unnamed.append((kind, name, str(caught.value)))
                assert engine.evaluate(make_batch(0)).loss == expected
                if rank == 0:
                    shutil.copy(f"{folder}/kept", newest / name)
        assert engine.load(folder, optimizer, step=1) == 1
        assert engine.load(folder, optimizer) == 2
        with pytest.raises(ArgumentError, match=r"no complete checkpoint of step 3; it has steps \[1, 2\]"):
            engine.load(folder, optimizer, step=3)
    return names, unnamed


def test_any_damage_is_an_error_that_names_the_file_and_offers_the_checkpoint_before(tmp_path):
    for names, unnamed in run_processes(save_and_damage, 2, str(tmp_path)):
        assert len(names) == 4
        assert not unnamed


def load_cut(rank, folder):
    torch.set_num_threads(1)
    errors = []
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        for name in ("__0_0.distcp", ".metadata"):
            if rank == 0:
                cut(Path(folder) / "step-00000001" / name, 0.4)
            with pytest.raises(ArgumentError) as caught:
                engine.load(folder)
            errors.append(str(caught.value))
    return errors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_cut_files_without_digests_are_errors_on_all_ranks(tmp_path):
    torch.manual_seed(0)
    dcp.save({"model": Chain().state_dict()}, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    for data, metadata in run_processes(load_cut, 2, str(tmp_path)):
        assert "cannot read the checkpoint" in data
        assert "cannot read" in metadata
        assert ".metadata" in metadata
