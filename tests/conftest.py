"""Has Triton interpret its kernels where there is no GPU.

Triton reads the variable once, when it is imported; transformers imports it too, hence here
and not beside the tests of kernels.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
