"""An engine with fused parameters and a loader, in the manner of inference servers: each rank cuts what it is given."""

from __future__ import annotations

import torch

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, EXPERT_FFN = 22, 10, 4, 2, 6, 12, 4, 8
#: Rows of vocabularies are padded to a multiple of this.
PADDING = 8

#: Fused parameter, what the checkpoint has instead, and its number.
FUSED = [("qkv_proj", f"{part}_proj", part) for part in "qkv"]
FUSED += [("gate_up_proj", f"{part}_proj", number) for number, part in enumerate(("gate", "up"))]


def checkpoint(layers=2, dtype=torch.float32):
    """A random checkpoint: the second layer has experts."""
    shapes = {"embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(layers):
        p = f"layers.{layer}"
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        shapes |= {f"{p}.attn.{part}_proj": (count, HIDDEN) for part, count in rows.items()}
        shapes |= {f"{p}.attn.o_proj": (HIDDEN, HEADS * HEAD_DIM), f"{p}.attn.rotary.inv_freq": (HEAD_DIM // 2,)}
        if layer % 2:
            for e in range(EXPERTS):
                shapes |= {f"{p}.experts.{e}.{part}_proj": (EXPERT_FFN, HIDDEN) for part in ("gate", "up")}
                shapes[f"{p}.experts.{e}.down_proj"] = (HIDDEN, EXPERT_FFN)
        else:
            shapes |= {f"{p}.mlp.{part}_proj": (FFN, HIDDEN) for part in ("gate", "up")}
            shapes[f"{p}.mlp.down_proj"] = (HIDDEN, FFN)
    return {f"{name}.weight": torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


class Engine(torch.nn.Module):
    """One rank of an engine.

    Args:
        rank, size: of tensor parallelism.
        is_expert_parallel: ranks hold whole experts, in place of a part of each.
    """

    def __init__(self, rank, size, is_expert_parallel=False, layers=2, dtype=torch.float32):
        super().__init__()
        self.rank, self.size, self.dtype = rank, size, dtype
        self.is_expert_parallel = is_expert_parallel
        rows = -(-VOCABULARY // PADDING) * PADDING // size
        for name in ("embed_tokens", "lm_head"):
            self._add(f"{name}.weight", (rows, HIDDEN), self.load_vocabulary)
        self._add("norm.weight", (HIDDEN,), self.load_whole)
        self.kv_heads = max(1, KV_HEADS // size)
        for layer in range(layers):
            p = f"layers.{layer}"
            heads = HEADS // size + 2 * self.kv_heads
            self._add(f"{p}.attn.qkv_proj.weight", (heads * HEAD_DIM, HIDDEN), self.load_qkv)
            self._add(f"{p}.attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM // size), self.load_columns)
            if layer % 2:
                count, ffn = (EXPERTS // size, EXPERT_FFN) if is_expert_parallel else (EXPERTS, EXPERT_FFN // size)
                self._add(f"{p}.experts.w13_weight", (count, 2 * ffn, HIDDEN), self.load_expert)
                self._add(f"{p}.experts.w2_weight", (count, HIDDEN, ffn), self.load_expert)
            else:
                self._add(f"{p}.mlp.gate_up_proj.weight", (2 * FFN // size, HIDDEN), self.load_merged)
                self._add(f"{p}.mlp.down_proj.weight", (HIDDEN, FFN // size), self.load_columns)

    def _add(self, name, shape, loader):
        parameter = torch.nn.Parameter(torch.full(shape, 7, dtype=self.dtype), requires_grad=False)
        parameter.weight_loader = loader
        self.register_parameter(name.replace(".", "/"), parameter)

    def load_whole(self, param, loaded_weight):
        assert param.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)

    def load_vocabulary(self, param, loaded_weight):
        rows = param.shape[0]
        first = min(self.rank * rows, loaded_weight.shape[0])
        mine = loaded_weight.narrow(0, first, min(rows, loaded_weight.shape[0] - first))
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(0)

    def load_columns(self, param, loaded_weight):
        size = param.shape[1]
        param.data.copy_(loaded_weight.narrow(1, self.rank * size, size))

    def load_qkv(self, param, loaded_weight, shard_id):
        q = HEADS // self.size
        at = {"q": 0, "k": q, "v": q + self.kv_heads}[shard_id] * HEAD_DIM
        count = (q if shard_id == "q" else self.kv_heads) * HEAD_DIM
        replicas = 1 if shard_id == "q" else max(1, self.size // KV_HEADS)
        target = param.data.narrow(0, at, count)
        mine = loaded_weight.narrow(0, self.rank // replicas * count, count)
        assert target.shape == mine.shape
        target.copy_(mine)

    def load_merged(self, param, loaded_weight, shard_id):
        param.data.chunk(2)[shard_id].copy_(loaded_weight.chunk(self.size)[self.rank])

    def load_expert(self, param, loaded_weight, weight_name, shard_id, expert_id):
        local = expert_id
        if self.is_expert_parallel:
            local = expert_id - self.rank * EXPERTS // self.size
            if not 0 <= local < param.shape[0]:
                return
        else:
            loaded_weight = loaded_weight.chunk(self.size, dim=1 if shard_id == "w2" else 0)[self.rank]
        target = param.data[local]
        if shard_id != "w2":
            target = target.unflatten(0, (2, -1))[{"w1": 0, "w3": 1}[shard_id]]
        target.copy_(loaded_weight)

    def load_weights(self, weights):
        """Load ``(name, whole tensor)`` pairs."""
        params = {name.replace("/", "."): param for name, param in self.named_parameters()}
        for name, loaded_weight in weights:
            if "inv_freq" in name:
                continue
            if ".experts." in name:
                prefix, _, rest = name.partition(".experts.")
                expert, part, _ = rest.split(".")
                fused, shard = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}[part]
                param = params[f"{prefix}.experts.{fused}_weight"]
                param.weight_loader(param, loaded_weight, name, shard, int(expert))
                continue
            for fused, part, shard in FUSED:
                if f".{part}." in name:
                    param = params[name.replace(part, fused)]
                    param.weight_loader(param, loaded_weight, shard)
                    break
            else:
                params[name].weight_loader(params[name], loaded_weight)
