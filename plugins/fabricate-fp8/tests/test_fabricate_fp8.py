"""The conformance kit, with float8's rounding emulated so that it runs anywhere."""

from __future__ import annotations

import pytest

from fabricate.testing import check_precision


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_keeps_what_a_precision_promises(recipe: str) -> None:
    check_precision(f"fp8:emulate=true,recipe={recipe}", rtol=0.2, strategies=["single", "ddp", "fsdp"])
