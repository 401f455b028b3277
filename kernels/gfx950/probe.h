// The probes of gfx950: what the device does with operands and offsets that are given lane by lane.
// mxfp8_moe/selftest/gfx950.py compares it with what the kernels are built on, by way of mxfp8_probe_gfx950
// (launch.c).
#pragma once
#include <stdint.h>

enum : uint32_t { MX_GFX950_PROBE_MARK = 0xa5a5a5a5 }; // in LDS before a copy to it

struct mx_gfx950_probe_args {
    // mx_probe_matrix_gfx950: d[i][j] = c + a . b^T by v_mfma_scale_f32_16x16x128_f8f6f4, E4M3, with byte i of each
    // lane's a_scale and byte j of its b_scale. All as registers: [64 lanes][register].
    const uint32_t *a, *b;             // [64][8]
    const uint32_t *a_scale, *b_scale; // [64]
    const float *c;                    // [64][4]
    float *d;                          // [4][4][64][4]
    // mx_probe_memory_gfx950: accesses of buffers that begin at `from`, `to` and `to_word` and are said to have `bytes`
    // bytes. All of `size` bytes of them exist. Loads and copies are at offset[lane] + scalar_offset, stores at
    // offset[lane].
    const uint32_t *offset; // [64]
    const uint8_t *from;
    uint32_t *loaded;      // [64][4], by 16 bytes
    uint32_t *loaded_word; // [64], by 4
    uint32_t *copied;      // [2][64][4], by 16 to LDS; the second copy's immediate offset is 1024
    uint8_t *to, *to_word; // lane << 8 | word, by 16 bytes and by 4
    uint32_t bytes, size, scalar_offset;
};
