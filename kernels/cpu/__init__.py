"""The CPU's kernels: `ops` implements `kernels.contracts.Ops` with them.

`compiled/` holds what numba compiles, `simd/` the vector operations that compiled kernels are
written with. Knows no node and no transport.

The compiled kernels read weights in the layout that oneDNN chooses for AVX512-BF16. On
processors with AMX it would choose another one, which they cannot read, so oneDNN is limited
here, before its first use. An ONEDNN_MAX_CPU_ISA of the user's is left as it is.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
