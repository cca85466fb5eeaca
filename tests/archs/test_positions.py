"""gpt_bigcode: a learned position for each row of a batch."""

from __future__ import annotations

from common import compare, restored
from mlx_lm.models import gpt_bigcode


def test_equals_mlx_lms_own() -> None:
    with restored(gpt_bigcode.GPTBigCodeModel):
        compare("gpt_bigcode", ("single", "batch"))
