"""The ways to divide a model or a sequence that are not strategies here: their names, the reason, and what to use instead.

Must not know: what is registered, launchers, torch.
"""

from __future__ import annotations

_DIVIDE = (
    "use strategy='fsdp' or 'zero3' (over several nodes also 'fsdp:shard=node'), which shard every parameter and gather it while "
    "its layer runs"
)
_SHORTEN = (
    "use 'fsdp:activation_checkpointing=true' and fewer rows per micro-batch with more gradient_accumulation_steps"
)
_REASONS = {
    "tp": "tensor parallelism, which is an option of strategy='fsdp': use 'fsdp:tp=2', where 2 is the number of ranks that split a "
    "layer",
    "pp": f"pipeline parallelism, which needs a loop of its own over parts of a micro-batch; {_DIVIDE}",
    "cp": (
        "context parallelism, which splits a sequence over ranks. It is not supported: torch has no sharded attention on a CPU "
        f'(its flash attention there "has no sharding strategy"), and fabricate divides rows over ranks; {_SHORTEN}'
    ),
    "sp": f"sequence parallelism, which splits a sequence over ranks and is not supported: fabricate divides rows over ranks; {_SHORTEN}",
}
_OTHER_WORDS = {
    "tp_size": "tp",
    "tensor_parallel": "tp",
    "pp_size": "pp",
    "pipeline_parallel": "pp",
    "cp_size": "cp",
    "context_parallel": "cp",
    "sp_size": "sp",
    "ulysses": "sp",
}


def instead(word: str) -> str:
    """The advice for `word`, a name or an option of a strategy that does not exist; empty if there is none.

    instead("tp=2").startswith("; that is tensor parallelism, ")
    """
    word = word.partition("=")[0].strip().lower().replace("-", "_")
    if word in ("hsdp", "hybrid"):
        return "; for replicas of a sharded model use strategy='fsdp:shard=node', or set shard= to a number of ranks"
    reason = _REASONS.get(_OTHER_WORDS.get(word, word))
    return f"; that is {reason}" if reason else ""
