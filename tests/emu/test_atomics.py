"""Atomics on global memory: each operation's result and what it returns, between lanes, blocks and host threads."""

import numpy as np
import pytest
from builders import run_asm, stops

from emu.driver import set_option

HEAD = "s_load_dwordx4 s[4:7], s[0:1], 0x0\n s_waitcnt lgkmcnt(0)\n v_lshlrev_b32_e32 v1, {shift}, v0\n"
OPS = {
    "swap": lambda old, x: x,
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "smin": lambda old, x: np.minimum(old.view(np.int32), x.view(np.int32)),
    "smax": lambda old, x: np.maximum(old.view(np.int32), x.view(np.int32)),
    "umin": np.minimum,
    "umax": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "add_f32": lambda old, x: old.view(np.float32) + x.view(np.float32),
    "add_x2": lambda old, x: old.view(np.uint64) + x.view(np.uint64),
    "add_f64": lambda old, x: old.view(np.float64) + x.view(np.float64),
}


def start(words: int, seed: int, floats: bool) -> np.ndarray:
    r = np.random.default_rng(seed)
    if floats:
        return r.standard_normal(64).astype(np.float64 if words == 2 else np.float32).view(np.uint32)
    return r.integers(0, 2**32, 64 * words, dtype=np.uint32)


@pytest.mark.parametrize("landing", ["early", "late"])
@pytest.mark.parametrize("name", OPS)
def test_result_and_old_value(name, landing):
    """The first half of out is copied and acted on, the second holds what the atomics returned."""
    set_option("LANDING", landing)
    words = 2 if name in ("add_x2", "add_f64") else 1
    size, data, got = ("x2", "v[2:3]", "v[4:5]") if words == 2 else ("", "v2", "v4")
    old, x = (start(words, seed, "_f" in name) for seed in (1, 2))
    body = HEAD.format(shift=1 + words) + (
        f"global_load_dword{size} {got}, v1, s[6:7]\n s_waitcnt vmcnt(0)\n"
        f"global_store_dword{size} v1, {got}, s[4:5]\n"
        f"global_load_dword{size} {data}, v1, s[6:7] offset:{256 * words}\n s_waitcnt vmcnt(0)\n"
        f"global_atomic_{name} {got}, v1, {data}, s[4:5] sc0\n s_waitcnt vmcnt(0)\n"
        f"global_store_dword{size} v1, {got}, s[4:5] offset:{256 * words}\n"
    )
    out = run_asm(body, 512 * words, [np.concatenate([old, x])]).view(np.uint32)
    assert (out[: 64 * words] == OPS[name](old, x).view(np.uint32)).all()
    assert (out[64 * words :] == old).all()


def test_compare_and_swap():
    body = HEAD.format(shift=2) + (
        "global_store_dword v1, v0, s[4:5]\n v_mov_b32_e32 v2, 7\n v_and_b32_e32 v3, 62, v0\n"
        "global_atomic_cmpswap v1, v[2:3], s[4:5]\n"
    )
    want = [n if n & 1 else 7 for n in range(64)]
    assert run_asm(body, 256, [np.zeros(4, np.uint32)]).view(np.uint32).tolist() == want


def test_pk_add_bf16():
    old, x = (np.array([0x3F80_4000, 0x4040_3F80], np.uint32)[n] for n in range(2))  # (1, 2) + (3, 1)
    body = HEAD.format(shift=2) + (
        f"v_mov_b32_e32 v2, 0x{old:x}\n global_store_dword v1, v2, s[4:5]\n v_mov_b32_e32 v3, 0x{x:x}\n"
        "global_atomic_pk_add_bf16 v1, v3, s[4:5]\n"
    )
    assert (run_asm(body, 256, [np.zeros(4, np.uint32)]).view(np.uint32) == 0x4080_4040).all()  # (4, 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_all_lanes_of_all_blocks_count(threads):
    """One counter for 20 blocks of 128: no update is lost, and no race is reported."""
    set_option("THREADS", threads)
    body = HEAD.format(shift=2) + (
        "v_mov_b32_e32 v2, 1\n v_mov_b32_e32 v3, 0\n global_atomic_add v4, v3, v2, s[6:7] sc0\n s_waitcnt vmcnt(0)\n"
        "v_lshlrev_b32_e32 v4, 2, v4\n global_store_dword v4, v2, s[4:5]\n"
    )
    assert (run_asm(body, 4 * 2560, [np.zeros(1, np.uint32)], threads=128, grid=20).view(np.uint32) == 1).all()


def test_misaligned():
    body = HEAD.format(shift=2) + "v_mov_b32_e32 v2, 1\n global_atomic_add v1, v2, s[4:5] offset:2\n"
    assert "not aligned" in stops(body, 512, [np.zeros(4, np.uint32)])
