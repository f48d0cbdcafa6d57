"""The real vLLM takes versions of a trainer, and keeps its own if an update fails."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 32
PROMPTS = [[1 + 7 * i, 3, 200 - 11 * i, 5 * i][: 2 + i % 3] for i in range(8)]
TIMEOUT_SECONDS = 60.0
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}


def _make_config(family, folder):
    import transformers

    if family == "llama":
        config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    else:
        config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)


class _Run:
    """An engine and a trainer."""

    def __init__(self, folder, family, tp):
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        import reshard.vllm
        from tests.support.serving_trainer import SIZE, train

        assert reshard.vllm.TrainerEngine  # imported, so that forked processes need not import it, and vLLM, again
        _make_config(family, folder)
        self.folder, self._orders, self._calls = folder, 0, 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._trainer = [
            multiprocessing.get_context("fork").Process(
                target=train, args=(rank, port, folder, TIMEOUT_SECONDS), daemon=True
            )
            for rank in range(SIZE)
        ]
        for process in self._trainer:
            process.start()
        self._store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            dtype="float32",
            max_model_len=128,
            tensor_parallel_size=tp,
            weight_transfer_config=WeightTransferConfig(backend="reshard"),
        )
        self._serve()

    def order(self, **order):
        """Let the trainer publish a version; returns its error."""
        self._store.set(f"order/{self._orders}", json.dumps(order))
        self._orders += 1
        self._serve()
        key = f"failed/{self._orders}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _serve(self):
        """Do what the trainer asks of the engine until it is done."""
        while not self._store.check([f"done/{self._orders}"]):
            assert self._trainer[0].is_alive()
            if not self._store.check([f"call/{self._calls}"]):
                self._trainer[0].join(0.02)
                continue
            name, *args = json.loads(self._store.get(f"call/{self._calls}"))
            try:
                getattr(self.llm, name)(*args)
                answer = ""
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            self._store.set(f"answer/{self._calls}", answer)
            self._calls += 1

    def close(self):
        self._store.set(f"order/{self._orders}", "null")
        for process in self._trainer:
            process.join(60)
            process.kill()
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self):
        """For each prompt: the tokens, and the largest log-probabilities of each by token."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=5, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        return [
            (
                list(each.outputs[0].token_ids),
                [{token: found.logprob for token, found in row.items()} for row in each.outputs[0].logprobs],
            )
            for each in outputs
        ]

    def check(self, seed):
        """The engine has the weights of a seed."""
        from tests.support.serving_trainer import check_outputs

        check_outputs(self.folder, seed, PROMPTS, self.generate())


# What workers do on request, to fail in the next update


def _flip_a_bit(worker):
    """On the last worker, change a bit of what arrives, whenever it is verified."""
    from reshard.weights.model.verify import Checker

    digest = Checker.digest_target

    def corrupt(self, arrays, rank):
        if rank == worker.weight_transfer_engine._group.world_size - 1:
            arrays["model.norm.weight"].view(torch.int32)[3] ^= 1
        return digest(self, arrays, rank)

    Checker.digest_target = corrupt
    worker.restore = lambda: setattr(Checker, "digest_target", digest)


def _fail_to_load(worker, always):
    """On the last worker, the loader fails halfway, once or always."""
    group, model = worker.weight_transfer_engine._group, worker.weight_transfer_engine.model
    load = model.load_weights

    def fail(pairs):
        if not always:
            del model.load_weights
        pairs = list(pairs)
        load(pairs[: len(pairs) // 2])
        raise ValueError("planted")

    if group.rank_in_group == group.world_size - 1:
        model.load_weights = fail


def _restore(worker):
    worker.restore()


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("llama", 2), ("qwen3", 1), ("qwen3", 2)])
def test_versions_are_whole_or_absent(family, tp, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: see docs/vllm.md")
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the functions that workers are asked to call here
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # workers are processes, but the process between is spared
    }.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(_Run(tmp_path, family, tp)) as run:
        for seed in (1, 2, 3):
            assert run.order(seed=seed) == ""
            run.check(seed)
        held = run.generate()

        run.llm.collective_rpc(_fail_to_load, args=(False,))
        assert f"rank {tp - 1}: ValueError: planted" in run.order(seed=4)
        assert run.generate() == held

        run.llm.collective_rpc(_flip_a_bit)
        assert f"'model.norm.weight' [0:64] on rank {tp - 1}: the digest" in run.order(seed=5)
        assert run.generate() == held
        run.llm.collective_rpc(_restore)

        assert run.order(seed=6) == ""
        run.check(6)
        held = run.generate()
        if family == "llama":
            assert "rank 1 of the trainer is lost" in run.order(seed=7, dies=True)
            run.llm.start_weight_update()
            with pytest.raises(Exception, match="no newer version was complete"):
                run.llm.update_weights({"update_info": {"timeout_seconds": 1}})
            assert run.generate() == held
            assert run.llm.get_weight_version() == "6"
        else:  # neither the new version nor the old one loads
            run.llm.collective_rpc(_fail_to_load, args=(True,))
            assert f"rank {tp - 1}: ValueError: planted" in run.order(seed=7)
            with pytest.raises(Exception, match="this engine holds no whole version of the weights"):
                run.generate()
