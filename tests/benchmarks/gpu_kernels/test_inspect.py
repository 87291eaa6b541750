"""What the compiler made of the kernels: read rightly, and as the kernels' authors meant it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from benchmarks.gpu_kernels.inspect import Resources, by_width, describe, main, read_code

ROOT = Path(__file__).parents[3]

CODE = """
kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0020*/                   LDG.E.U16 R8, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], P1 ;
        /*0040*/               @P2 LDGSTS.E.64 [R9+0x10], desc[UR4][R2.64] ;
        /*0050*/                   LDGDEPBAR ;
        /*0060*/                   DEPBAR.LE SB0, 0x3 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/               @P3 BRA `(.L_x_1) ;
        /*00b0*/               @P4 BRA `(.L_x_0) ;
        /*00c0*/                   STG.E desc[UR4][R2.64], R4 ;
        /*00d0*/              @!P4 BRA `(.L_x_2) ;
.L_x_2:
        /*00e0*/                   EXIT ;
"""


def test_loops_and_what_is_in_them() -> None:
    code, loops = read_code(CODE)
    assert [each.kind for each in code[:3]] == ["LDC", "LDG", "LDG"]
    assert by_width(code, "LDG") == "1 x 16 B, 1 x 2 B"
    assert by_width(code, "STG") == "1 x 4 B"
    # The outer loop and the jump forward are none of the innermost loops.
    (loop,) = loops
    assert [code[loop[0]].name, code[loop[-1]].kind] == ["LDGSTS.E.BYPASS.128", "BRA"]
    assert describe([code[place] for place in loop]) == (
        "8 instructions, 1 HGMMA, no loaded, 1 x 16 B, 1 x 8 B copied, waits with 3 groups under "
        "way, no stored, 1 barriers, SPILLS 0 loads, 1 stores"
    )


def test_programs_on_a_processor() -> None:
    assert Resources(32, 0, 0, 4).programs == 16
    assert Resources(129, 0, 0, 4).programs == 3
    assert Resources(128, 0, 113 * 1024, 4).programs == 2
    assert Resources(128, 0, 114 * 1024, 4).programs == 1
    assert Resources(16, 0, 16, 1).programs == 32


def test_flags_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["m2n"])
    assert "no module m2n; choose of attention, grouped_mlp" in capsys.readouterr().err


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="asks what the interpreter gets")
def test_the_interpreter_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["norm"])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "match", "under_way"),
    [
        ("attention", "decode, 64 x 1 rows, context 8192, 32/4 heads of 128, bfloat16", 2),
        ("attention", "prefill, 1 x 8192 rows", 2),
        ("grouped_mlp", "plain, 8192 rows", 4),
        ("norm", "8192 x 2048", None),
    ],
)
def test_kernels_copy_ahead_and_keep_to_registers(
    module: str, match: str, under_way: int | None, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = ["-m", "benchmarks.gpu_kernels.inspect", module, "--match", match]
    done = subprocess.run(
        [sys.executable, "-P", *command, "--code", tmp_path / "code"],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "registers, 0 B spilled" in done.stdout
    assert "SPILLS" not in done.stdout
    products = [
        line for line in done.stdout.splitlines() if "loop:" in line and re.search("H.?MMA", line)
    ]
    assert bool(products) == (under_way is not None)
    for line in products:
        assert int(re.findall(r"waits with (\d+)", line)[0]) >= (under_way or 0), line
    assert {path.suffix for path in (tmp_path / "code").iterdir()} == {".sass", ".ttgir", ".ptx"}
