"""MXFP8 grouped GEMMs for training mixture-of-experts layers.

`grouped_mm` replaces ``torch._grouped_mm``; `quantize_weight` quantizes a weight once for many calls; `dequantize`
gives the numbers that quantized tensors stand for. All stand on the operators ``torch.ops.mxfp8.*``, described in
`mxfp8_moe.ops`.
"""

from mxfp8_moe.ops import ROUNDINGS, SAC_SAVE_OPS, check_offs  # loads the library: before everything else

from mxfp8_moe.autograd import QuantizedWeight, grouped_mm, quantize_weight  # isort: skip
from mxfp8_moe.dequantize import dequantize  # isort: skip

__all__ = ["ROUNDINGS", "SAC_SAVE_OPS", "QuantizedWeight", "check_offs", "dequantize", "grouped_mm", "quantize_weight"]
