"""Profiles of dumped tensors: errors, entropies, differences, and training with the policy that they recommend."""

from __future__ import annotations

import pytest
import torch

from reshard.cli.main import main
from reshard.compression import Policy
from reshard.compression.tensor_profile import profile_tensors, read_dump
from reshard.errors import ArgumentError


def test_reports_follow_from_the_tensors():
    torch.manual_seed(0)
    normal = torch.randn(256, 512)
    powers = torch.pow(2.0, torch.randint(0, 8, (64, 128)))  # three bits of exponent
    after = normal.bfloat16().float()
    before = after.clone()
    before[0, ::4] *= 1.5  # 128 of 131,072 weights
    profile = profile_tensors(
        {"activations": [normal], "gradients": [powers, torch.ones(8), torch.ones(2048, dtype=torch.int64)],
         "weights": [after], "weights_before": [before]}, ["pp", "dp"],
    )  # fmt: skip
    kinds = {kind.kind: kind for kind in profile.kinds}
    assert kinds["gradients"].num_values == powers.numel()
    assert abs(kinds["gradients"].exponent_bits - 3) < 0.01
    reports = {codec.codec: codec for codec in kinds["activations"].codecs}
    assert abs(reports["int8x128"].error - 0.0083) < 0.0003
    assert abs(reports["int8x128"].ratio - 512 / 132) < 0.01
    assert max(abs(report.bias) for report in reports.values()) < 4
    assert reports["int4x128"].error > 0.1
    assert profile.changed == 128 / 131072
    assert profile.delta_ratio > 400
    assert profile.recommend().pp == ("int8x128", None)
    assert profile.recommend().zero is None
    assert profile_tensors({"weights": [normal]}).recommend() == Policy(zero=("int8x128", None))


def test_no_codec_is_recommended_to_a_job_without_replicas_and_edges(tmp_path, capsys):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    torch.save({"dimensions": [], "gradients": {"w": torch.randn(64, 64)}}, folder / "rank-0.pt")
    assert read_dump(tmp_path)[1] == set()
    assert main(["profile-compression", str(tmp_path)]) == 0
    assert "recommended: no codec, because the job has no traffic of dp, pp or zero" in capsys.readouterr().out
    torch.save({"gradients": {"w": torch.randn(64, 64)}}, folder / "rank-0.pt")
    assert read_dump(tmp_path)[1] is None
    assert profile_tensors(*read_dump(tmp_path)).recommend().dp == "int4x128-bf16"


def test_wrong_dumps_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="has no files"):
        read_dump(tmp_path)
    with pytest.raises(ArgumentError, match="no floating-point tensor"):
        profile_tensors({"gradients": [torch.ones(5)]})
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    torch.save({"pictures": {"x": torch.ones(3)}}, folder / "rank-0.pt")
    with pytest.raises(ArgumentError, match=r"rank-0.pt cannot be read as a dump: .*kind 'pictures' is unknown"):
        read_dump(tmp_path)


@pytest.mark.slow
def test_training_with_the_recommended_policy_loses_nothing(tmp_path, capfd):
    def train(*options):
        assert main([*command, *options]) == 0
        return float(capfd.readouterr().out.rpartition("held-out ")[2])

    command = ["train", "gpt3-125m", "--shrink", "12", "--meshes", "1x1,2x1", "--steps", "200", "--batch", "16"]
    command += ["--microbatches", "2", "--sequence", "64", "--log-every", "1000", "--eval-batches", "16"]
    command += ["--report", str(tmp_path / "report")]
    dump = str(tmp_path / "dump")
    raw = train("--dump-tensors", dump)
    assert main(["profile-compression", dump]) == 0
    shown = capfd.readouterr().out
    assert "a step changes" in shown
    policy = shown.rpartition("--compression ")[2].strip()
    assert policy == "dp=int4x128-bf16,pp=int8x128/int8x128"
    encoded = train("--compression", f"{policy},force-pp")
    assert encoded != raw
    assert encoded < raw + 0.05  # two runs with other random numbers differ by 0.02
