"""Races through global memory stop the launch in every schedule; what a barrier or a launch orders does not."""

import numpy as np
import pytest
from builders import assemble, run_asm, stops

from emu.driver import Buffer, Module, launch, library, set_option

HEAD = "s_load_dwordx2 s[4:5], s[0:1], 0x0\n s_waitcnt lgkmcnt(0)\n"
WORD = "v_lshlrev_b32_e32 v1, 2, v0\n"  # a dword of its own for each thread of a block
OTHER = "v_xor_b32_e32 v3, 0x100, v1\n"  # that of the neighbour wave
STORE, LOAD = "global_store_dword v1, v2, s[4:5]\n", "global_load_dword v4, v1, s[4:5]\n s_waitcnt vmcnt(0)\n"
ANYTHING = "v_mov_b32_e32 v2, 7\n"
BLOCK = "v_mov_b32_e32 v2, s2\n"
DONE, BARRIER = "s_waitcnt vmcnt(0)\n", "s_barrier\n"
FIRST_BLOCK = "s_cmp_eq_u32 s2, 0\n s_cbranch_scc0 .Lend_of_first\n {}.Lend_of_first:\n"

RACES = {
    "two blocks store different values": (HEAD + WORD + BLOCK + STORE, 3, 64, "store, and another block's store"),
    "a block loads what another stores": (
        HEAD + WORD + ANYTHING + FIRST_BLOCK.format(STORE) + LOAD, 2, 64, "another block's"),
    "a scalar load of what another block stores": (
        HEAD + WORD + ANYTHING + FIRST_BLOCK.format(STORE) + "s_load_dword s6, s[4:5], 0x8\n s_waitcnt lgkmcnt(0)\n",
        2, 64, "another block's"),
    "many blocks load, one of them stores": (
        HEAD + WORD + ANYTHING + LOAD + FIRST_BLOCK.format(STORE), 5, 64, "another block's"),
    "two waves store different values": (
        HEAD + "v_mov_b32_e32 v1, 0\n v_and_b32_e32 v2, 64, v0\n" + STORE, 1, 128, "another wave's store"),
    "two lanes store different values": (
        HEAD + "v_lshrrev_b32_e32 v1, 1, v0\n v_lshlrev_b32_e32 v1, 2, v1\n v_mov_b32_e32 v2, v0\n" + STORE, 1, 64,
        "another lane"),
    "a wave loads what another stores": (
        HEAD + WORD + ANYTHING + OTHER + STORE + DONE + LOAD.replace("v1", "v3"), 1, 128, "no barrier between"),
    "a store in flight at the barrier": (
        HEAD + WORD + ANYTHING + OTHER + STORE + BARRIER + LOAD.replace("v1", "v3"), 1, 128, "no barrier between"),
}  # fmt: skip
ORDERED = {
    "the same value": (HEAD + WORD + ANYTHING + STORE, 3, 64),
    "bytes side by side": (HEAD + "v_lshl_add_u32 v1, v0, 1, s2\n" + BLOCK + STORE.replace("dword", "byte"), 2, 64),
    "loads alone": (HEAD + WORD + LOAD, 4, 128),
    "a store waited for before the barrier": (
        HEAD + WORD + ANYTHING + OTHER + STORE + DONE + BARRIER + LOAD.replace("v1", "v3"), 1, 128),
    "a wave's own data": (HEAD + WORD + ANYTHING + STORE + LOAD + "v_add_u32_e32 v2, 1, v4\n" + STORE, 1, 128),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RACES)
def test_race_stops(name, seed):
    body, grid, threads, text = RACES[name]
    set_option("SEED", seed)
    message = stops(body, grid=grid, threads=threads)
    assert "memory race at 0x" in message
    assert text in message
    library().emu_clear_error()
    set_option("RACES", 0)
    run_asm(body, 4096, grid=grid, threads=threads)


@pytest.mark.parametrize("name", ORDERED)
def test_no_race(name):
    body, grid, threads = ORDERED[name]
    for seed in range(4):
        set_option("SEED", seed)
        set_option("THREADS", 1 + seed % 2)
        run_asm(body, 4096, grid=grid, threads=threads)


def test_launches_are_ordered():
    """Each block stores its number where the block of that number of the launch before had stored its own."""
    body = (
        HEAD
        + "s_sub_u32 s6, 2, s2\n v_lshlrev_b32_e32 v1, 2, v0\n s_lshl_b32 s7, s6, 8\n"
        + ("v_add_u32_e32 v1, s7, v1\n" + LOAD + "v_add_u32_e32 v2, 1, v4\n" + STORE)
    )
    out, function = Buffer(np.zeros(192, np.uint32)), Module(assemble(body)).function("k")
    for _ in range(3):
        launch(function, [3], [64], [out])
    assert (out.read(np.uint32) == 3).all()


def test_message_and_marks_over_page_borders():
    """16-byte stores that straddle the pages of the marks; grids whose block numbers leave the tags."""
    body = (
        HEAD
        + "v_lshlrev_b32_e32 v1, 4, v0\n s_lshl_b32 s6, s2, 10\n v_add_u32_e32 v1, s6, v1\n"
        + (
            "v_mov_b32_e32 v4, s2\n v_mov_b32_e32 v5, s2\n v_mov_b32_e32 v6, s2\n v_mov_b32_e32 v7, s2\n"
            "global_store_dwordx4 v1, v[4:7], s[4:5] offset:{}\n"
        )
    )
    got = run_asm(body.format(8), 1100 * 1024 + 8, grid=1100)[8:].view(np.uint32)
    assert (got.reshape(1100, 256) == np.arange(1100)[:, None]).all()
    message = stops(body.format(8).replace("s2, 10", "s2, 9"), 1100 * 1024 + 8, grid=1100)
    assert "store of another value" in message
