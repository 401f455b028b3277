// Device side of gfx950: vector types, address spaces and thin wrappers over compiler builtins. No device library.
#pragma once
#include <stdint.h>

#include "plan.h"

#define GLOBAL __attribute__((address_space(1)))
#define LDS __attribute__((address_space(3)))
#define CONSTANT __attribute__((address_space(4))) // global memory that no one writes meanwhile: scalar loads
#define INLINE static inline __attribute__((always_inline))
#define KERNEL __attribute__((amdgpu_kernel, visibility("protected"), amdgpu_flat_work_group_size(256, 256)))
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable) vectorize(disable)")

typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef uint64_t u64x2 __attribute__((ext_vector_type(2)));
typedef int32_t i32x4 __attribute__((ext_vector_type(4)));
typedef int32_t i32x8 __attribute__((ext_vector_type(8)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x8 __attribute__((ext_vector_type(8)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef bf16x8 bf16x8_anywhere __attribute__((aligned(2)));

// A buffer resource: raw accesses at byte offsets from `base`; an access past `bytes` reads 0 and writes nothing.
// Whether the scalar offset counts in that check is not settled between sources, so every use is right either way.
typedef __amdgpu_buffer_rsrc_t buffer;
INLINE buffer make_buffer(const GLOBAL void *base, uint32_t bytes) {
    return __builtin_amdgcn_make_buffer_rsrc((void *)(const void *)base, 0, bytes, 0x00020000);
}
INLINE buffer load_buffer(const CONSTANT struct mx_gfx950_buffer *from) { return *(const CONSTANT buffer *)from; }
// An offset past every buffer's end, with room for what is added to it.
enum : uint32_t { OUTSIDE = 0x80000000 };

// Says that a value is the same in all lanes of the wave.
INLINE uint32_t uniform(uint32_t x) { return (uint32_t)__builtin_amdgcn_readfirstlane((int)x); }

INLINE uint32_t thread_id(void) { return __builtin_amdgcn_workitem_id_x(); }
INLINE uint32_t block_id(void) { return __builtin_amdgcn_workgroup_id_x(); }

// What kernels/mx_quantize.h needs as well.
typedef uint64_t lane_mask;
enum { LANES = 64 };
INLINE uint32_t block_y(void) { return __builtin_amdgcn_workgroup_id_y(); }
INLINE uint32_t block_z(void) { return __builtin_amdgcn_workgroup_id_z(); }
// The first hidden arguments.
INLINE uint32_t grid_size(void) { return ((const CONSTANT uint32_t *)__builtin_amdgcn_implicitarg_ptr())[0]; }
INLINE uint32_t grid_y(void) { return ((const CONSTANT uint32_t *)__builtin_amdgcn_implicitarg_ptr())[1]; }
INLINE uint32_t lane_id(void) { return thread_id() % LANES; }
INLINE uint32_t wave_id(void) { return uniform(thread_id() / LANES); }
INLINE int32_t read_lane(int32_t v, int lane) { return __builtin_amdgcn_readlane(v, lane); }
INLINE lane_mask ballot(bool x) { return __builtin_amdgcn_ballot_w64(x); }
// Orders LDS alone: a block's global loads and stores stay in flight.
INLINE void sync_block(void) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

#define DPP_ALL(v, control) (uint32_t)__builtin_amdgcn_update_dpp(0, (int)(v), control, 0xf, 0xf, true)
#define DPP_ROWS(v, control, rows) (uint32_t)__builtin_amdgcn_update_dpp(0, (int)(v), control, rows, 0xf, false)
#define QUAD_PERM(a, b, c, d) ((a) | (b) << 2 | (c) << 4 | (d) << 6)

// Sum over this lane and those below it.
INLINE uint32_t prefix_sum(uint32_t v) {
    v += DPP_ALL(v, 0x111); // row_shr 1, 2, 4, 8
    v += DPP_ALL(v, 0x112);
    v += DPP_ALL(v, 0x114);
    v += DPP_ALL(v, 0x118);
    v += DPP_ROWS(v, 0x142, 0xa); // row_bcast 15 and 31, to the rows after
    v += DPP_ROWS(v, 0x143, 0xc);
    return v;
}

INLINE uint32_t low_halves(uint32_t a, uint32_t b) { return __builtin_amdgcn_perm(b, a, 0x05040100); }
INLINE uint32_t high_halves(uint32_t a, uint32_t b) { return __builtin_amdgcn_perm(b, a, 0x07060302); }

// Row of a 32-row block that lane index r = lane % 16 of an operand fragment holds; fragment t adds 4 * (t & 1) and 32
// * (t >> 1). So a lane of the product has 8 consecutive columns: see gemm.c.
INLINE uint32_t fragment_row(uint32_t r) { return (r >> 2) << 3 | (r & 3); }
