// gfx950 probes: one wave does what the GEMMs are built on, with operands and offsets given lane by lane.
//
//   mx_probe_matrix_gfx950(struct mx_gfx950_probe_args)   every choice of scale bytes of the GEMMs' matrix instruction
//   mx_probe_memory_gfx950(struct mx_gfx950_probe_args)   loads, copies to LDS and stores at and past a buffer's end
//
// Grid: 1 block; waves but the first exit. No tails: every array is whole. LDS: 2 KB in the second.
#include "probe.h"
#include "device.h"

enum { WAVE = 64, COPY_BYTES = 1024 };

KERNEL void mx_probe_matrix_gfx950(struct mx_gfx950_probe_args args) {
    const uint32_t lane = thread_id();
    if (lane >= WAVE)
        return;
    const i32x8 a = ((const GLOBAL i32x8 *)args.a)[lane], b = ((const GLOBAL i32x8 *)args.b)[lane];
    const int a_scale = ((const GLOBAL int *)args.a_scale)[lane], b_scale = ((const GLOBAL int *)args.b_scale)[lane];
    const f32x4 c = ((const GLOBAL f32x4 *)args.c)[lane];
    GLOBAL f32x4 *d = (GLOBAL f32x4 *)args.d + lane;
#define MULTIPLY(i, j)                                                                                                 \
    d[((i) * 4 + (j)) * WAVE] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, 0, 0, i, a_scale, j, b_scale)
#define MULTIPLY_ROW(i) MULTIPLY(i, 0), MULTIPLY(i, 1), MULTIPLY(i, 2), MULTIPLY(i, 3)
    MULTIPLY_ROW(0), MULTIPLY_ROW(1), MULTIPLY_ROW(2), MULTIPLY_ROW(3);
}

static LDS char copies[2 * COPY_BYTES] __attribute__((aligned(1024), loader_uninitialized));

KERNEL void mx_probe_memory_gfx950(struct mx_gfx950_probe_args args) {
    const uint32_t lane = thread_id();
    if (lane >= WAVE)
        return;
    const buffer from = make_buffer((const GLOBAL void *)args.from, args.bytes);
    const int scalar = (int)args.scalar_offset;
    const uint32_t offset = ((const GLOBAL uint32_t *)args.offset)[lane];
    ((GLOBAL u32x4 *)args.loaded)[lane] = __builtin_amdgcn_raw_buffer_load_b128(from, offset, scalar, 0);
    ((GLOBAL uint32_t *)args.loaded_word)[lane] = __builtin_amdgcn_raw_buffer_load_b32(from, offset, scalar, 0);

    LDS u32x4 *const own = (LDS u32x4 *)copies + lane;
    own[0] = own[WAVE] = (u32x4)MX_GFX950_PROBE_MARK;
    __builtin_amdgcn_s_waitcnt(0);
    asm volatile("" ::: "memory");
    __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (LDS void *)copies, 16, offset, scalar, 0, 0);
    __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (LDS void *)copies, 16, offset, scalar, COPY_BYTES, 0);
    __builtin_amdgcn_s_waitcnt(0);
    asm volatile("" ::: "memory");
    ((GLOBAL u32x4 *)args.copied)[lane] = own[0];
    ((GLOBAL u32x4 *)args.copied)[lane + WAVE] = own[WAVE];

    const buffer to = make_buffer((const GLOBAL void *)args.to, args.bytes);
    const buffer to_word = make_buffer((const GLOBAL void *)args.to_word, args.bytes);
    const u32x4 value = {lane << 8, lane << 8 | 1, lane << 8 | 2, lane << 8 | 3};
    __builtin_amdgcn_raw_buffer_store_b128(value, to, offset, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b32(value.x, to_word, offset, 0, 0);
}
