"""The ways to divide a model or a sequence that are no strategy here: how users ask for them, why not, what to use instead.

Must not know: what is registered, launchers, torch.
"""

from __future__ import annotations

_DIVIDE = "use strategy='fsdp' or 'zero3', over several nodes 'fsdp:shard=node', which divide every parameter between layers' calls"
_SHORTEN = (
    "use 'fsdp:activation_checkpointing=true' and fewer rows per micro-batch with more gradient_accumulation_steps"
)
_REASONS = {
    "tp": "tensor parallelism, which is an option of one strategy: use 'fsdp:tp=2', with the number of ranks that divide a layer",
    "pp": f"pipeline parallelism, which needs a loop of its own over parts of a micro-batch; {_DIVIDE}",
    "cp": (
        "context parallelism, whose ranks share a sequence: torch has no sharded attention on a CPU (its flash attention there "
        f'"has no sharding strategy"), and rows are what is divided over ranks here; {_SHORTEN}'
    ),
    "sp": f"sequence parallelism, whose ranks share a sequence: rows are what is divided over ranks here; {_SHORTEN}",
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
    """What to do for `word`, a name or an option of a strategy that does not exist; empty where it means nothing here.

    instead("tp=2").startswith("; that is tensor parallelism, ")
    """
    word = word.partition("=")[0].strip().lower().replace("-", "_")
    if word in ("hsdp", "hybrid"):
        return "; replicas of a sharded model are strategy='fsdp:shard=node', or shard= a number of ranks"
    reason = _REASONS.get(_OTHER_WORDS.get(word, word))
    return f"; that is {reason}" if reason else ""
