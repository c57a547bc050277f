from __future__ import annotations

import pytest
import torch


@pytest.fixture
def rounds(monkeypatch):
    """Let Triton's interpreter round to eight bits as a GPU does: to the nearest."""
    import triton.language as tl
    from triton.runtime import interpreter

    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16}
    really = interpreter._convert_float

    def convert(input, input_dtype, output_dtype, rounding_mode):
        if input_dtype != tl.float32 or output_dtype not in formats:
            return really(input, input_dtype, output_dtype, rounding_mode)
        found = torch.from_numpy(input.copy()).to(formats[output_dtype])
        return found.view(torch.uint8 if found.itemsize == 1 else torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
