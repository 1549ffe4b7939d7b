"""The device mesh in Accelerate's ParallelismConfig, as `accelerate launch --use_parallelism_config` exports it.

Must not know the other settings of launchers, nor strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabricate.errors import ConfigurationError
from fabricate.launch.unsupported import instead

REPLICATE, SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
TENSOR = "PARALLELISM_CONFIG_TP_SIZE"
VARIABLES = {
    f"parallelism_config.parallelism_config_{word}_size": f"PARALLELISM_CONFIG_{word.upper()}_SIZE"
    for word in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
} | {"use_parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG"}
"""Keys of an Accelerate YAML, each with the variable that `accelerate launch` sets for it."""


@dataclass(frozen=True)
class Mesh:
    """A requested mesh: `replicate` copies of a model, each in `shard` shards, with layers that `tp` ranks divide; 1: not requested."""

    replicate: int
    shard: int
    tp: int

    def options(self, node: str | None) -> dict[str, str]:
        """FSDP's options `shard` and `tp`. `node`: the value of `shard` from FSDP's own settings, or None."""
        ways = {"tp": str(self.tp)} if self.tp > 1 else {}
        if self.shard < 2 and self.replicate < 2 and ways:
            return ways | ({"shard": node} if node else {})
        return {"shard": self._shards(node)} | ways

    def _shards(self, node: str | None) -> str:
        if self.shard < 2:
            raise ConfigurationError(
                f"{SHARD}={self.shard} shards nothing, but ACCELERATE_USE_FSDP is true; set the number of ranks "
                "that share a copy of the model, or use "
                "strategy='ddp'"
            )
        if node:
            raise ConfigurationError(
                f"FSDP_SHARDING_STRATEGY asks for one copy per node, but {SHARD}={self.shard} for one per {self.shard} ranks; "
                "remove one"
            )
        return str(self.shard)


def mesh(environ: Mapping[str, str]) -> Mesh:
    """The requested mesh. Raises ConfigurationError for a dimension that no strategy has, and for a value that is not a number."""
    for word in ("cp", "sp"):
        name = f"PARALLELISM_CONFIG_{word.upper()}_SIZE"
        if (size := _size(environ, name)) > 1:
            raise ConfigurationError(f"{name}={size}{instead(word)}; set it to 1")
    return Mesh(_size(environ, REPLICATE), _size(environ, SHARD), _size(environ, TENSOR))


def _size(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip() or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"{name}={environ[name]!r} is not a whole number of at least 1; correct it or unset it"
        )
    return int(text)
