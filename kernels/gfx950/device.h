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

// Row of a 32-row block that lane index r = lane % 16 of an operand fragment holds; fragment t adds 4 * (t & 1) and 32
// * (t >> 1). So a lane of the product has 8 consecutive columns: see gemm.c.
INLINE uint32_t fragment_row(uint32_t r) { return (r >> 2) << 3 | (r & 3); }
