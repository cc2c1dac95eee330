"""The dimensions of a Llama, without torch, so that a converter can write them and a client can read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The dimensions of a model with RMSNorm, interleaved RoPE, grouped-query attention, SwiGLU, and its head tied
    to the embedding (arXiv:2302.13971)."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab_size: int
    max_context: int
    rope_theta: float
    norm_eps: float
    eos_ids: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's K and V, of all layers in fp32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by its name; matrices are [out, in], the norms [width].

        `qkv` holds the rows of q, then k, then v; `gate_up` those of the gate, then the up projection.
        """
        width, kv_width = self.width, self.kv_heads * self.head_dim
        layer = {
            "attn_norm": (width,),
            "qkv": (width + 2 * kv_width, width),
            "attn_out": (width, width),
            "ffn_norm": (width,),
            "gate_up": (2 * self.ffn_width, width),
            "down": (width, self.ffn_width),
        }
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, width), "out_norm": (width,)}
        for index in range(self.layers):
            shapes |= {f"{index}.{name}": shape for name, shape in layer.items()}
        return shapes
