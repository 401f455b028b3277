// Device side of sm_90: address spaces and thin wrappers over PTX (PTX ISA 8.8, target sm_90a). No device library.
#pragma once
#include "plan.h"

#define SHARED __attribute__((address_space(3)))
#define GLOBAL __attribute__((address_space(1)))
#define INLINE static inline __attribute__((always_inline))
#include "words.h"

// A kernel of at most `threads` threads a block and at least `blocks` blocks on a multiprocessor. C has no way to say
// so: the build reads it from this comment in the PTX and writes .maxntid and .minnctapersm.
#define KERNEL(name, threads, blocks)                                                                                  \
    asm("// launch bounds " #name " " #threads " " #blocks);                                                           \
    __attribute__((device_kernel)) void name
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")

typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef int32_t i32x4 __attribute__((ext_vector_type(4)));
typedef int16_t i16x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));

INLINE uint32_t thread_id(void) { return __nvvm_read_ptx_sreg_tid_x(); }
INLINE uint32_t block_id(void) { return __nvvm_read_ptx_sreg_ctaid_x(); }
INLINE uint32_t grid_size(void) { return __nvvm_read_ptx_sreg_nctaid_x(); }
INLINE void sync_block(void) { asm volatile("barrier.cta.sync.aligned 0;" ::: "memory"); }
INLINE void sync_warp(void) { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// What kernels/mx_quantize.h needs. Builtins, which the compiler sees through.
typedef uint32_t lane_mask;
enum { LANES = 32 };
enum : uint32_t { ALL_LANES = 0xffffffff };
INLINE uint32_t block_y(void) { return __nvvm_read_ptx_sreg_ctaid_y(); }
INLINE uint32_t block_z(void) { return __nvvm_read_ptx_sreg_ctaid_z(); }
INLINE uint32_t grid_y(void) { return __nvvm_read_ptx_sreg_nctaid_y(); }
INLINE uint32_t lane_id(void) { return thread_id() % LANES; }
INLINE uint32_t wave_id(void) { return thread_id() / LANES; }
INLINE uint32_t from_lane(uint32_t v, uint32_t from) {
    return (uint32_t)__nvvm_shfl_sync_idx_i32(ALL_LANES, (int)v, (int)from, LANES - 1);
}
INLINE uint32_t from_lane_xor(uint32_t v, uint32_t mask) {
    return (uint32_t)__nvvm_shfl_sync_bfly_i32(ALL_LANES, (int)v, (int)mask, LANES - 1);
}
INLINE int32_t read_lane(int32_t v, int lane) { return (int32_t)from_lane((uint32_t)v, (uint32_t)lane); }
INLINE lane_mask ballot(bool x) { return (lane_mask)__nvvm_vote_ballot_sync(ALL_LANES, x); }
// Sum over this lane and those below it.
INLINE uint32_t prefix_sum(uint32_t v) {
    UNROLL for (uint32_t step = 1; step < LANES; step *= 2) {
        uint32_t below = (uint32_t)__nvvm_shfl_sync_up_i32(ALL_LANES, (int)v, (int)step, 0);
        v += lane_id() >= step ? below : 0;
    }
    return v;
}
INLINE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
INLINE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000); }

// Between a kernel and the next one, where the launch lets that start early: its blocks may start once all of this
// one's have said so, and see what this kernel writes only after they have waited.
INLINE void launch_dependents(void) { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void wait_for_previous(void) { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Makes a value one that the compiler knows nothing of.
#define HIDE(x) asm volatile("" : "+r"(x))
#define HIDE64(x) asm volatile("" : "+l"(x))

#define OF_WARP(name, operation)                                                                                       \
    INLINE uint32_t name(uint32_t x) {                                                                                 \
        uint32_t y;                                                                                                    \
        asm volatile("redux.sync." operation ".u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));                           \
        return y;                                                                                                      \
    }
OF_WARP(lowest_of_warp, "min")
OF_WARP(highest_of_warp, "max")
// A bit for every lane of the warp: whether x is not 0 there.
INLINE uint32_t lanes_where(uint32_t x) {
    uint32_t lanes;
    asm volatile("{.reg .pred in;\nsetp.ne.b32 in, %1, 0;\nvote.sync.ballot.b32 %0, in, 0xffffffff;}"
                 : "=r"(lanes)
                 : "r"(x));
    return lanes;
}
// x of another lane.
INLINE uint32_t shuffle(uint32_t x, uint32_t lane) {
    uint32_t y;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
    return y;
}
INLINE uint32_t shuffle_xor(uint32_t x, uint32_t mask) {
    uint32_t y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(mask));
    return y;
}
// An 8 x 8 matrix of 16-bit elements, two a lane, row by row; transposed.
INLINE uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

INLINE uint32_t shared_address(const SHARED void *p) { return (uint32_t)(uintptr_t)p; }

// Global memory that no one writes during the kernel.
INLINE uint32_t load_constant(const void *p) {
    uint32_t x;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
INLINE uint32_t load_constant_if(int condition, const void *p) {
    uint32_t x;
    asm volatile("{.reg .pred go;\nsetp.ne.b32 go, %2, 0;\nmov.b32 %0, 0;\n@go ld.global.nc.b32 %0, [%1];}"
                 : "=&r"(x)
                 : "l"(p), "r"(condition));
    return x;
}
INLINE u32x4 load_constant4(const void *p) {
    u32x4 x;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
// 16 bytes, or zeros, where the condition is 0; no branch. The last parameter: what the load may not be moved past.
#define LOAD4_IF(name, load, ...)                                                                                      \
    INLINE u32x4 name(int condition, const void *p) {                                                                  \
        u32x4 x;                                                                                                       \
        asm volatile("{.reg .pred go;\nsetp.ne.b32 go, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"       \
                     "mov.b32 %3, 0;\n@go " load ".v4.b32 {%0, %1, %2, %3}, [%4];}"                                    \
                     : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)                                                  \
                     : "l"(p), "r"(condition)                                                                          \
                     : __VA_ARGS__);                                                                                   \
        return x;                                                                                                      \
    }
LOAD4_IF(load_constant4_if, "ld.global.nc")
LOAD4_IF(load_global4_if, "ld.global", "memory")
INLINE void store_global4_if(int condition, void *p, u32x4 x) {
    asm volatile("{.reg .pred go;\nsetp.ne.b32 go, %5, 0;\n@go st.global.v4.b32 [%4], {%0, %1, %2, %3};}" ::"r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w), "l"(p), "r"(condition)
                 : "memory");
}

INLINE uint32_t load_shared(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}
INLINE uint32_t load_shared_byte(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}
INLINE uint32_t load_shared_half(uint32_t at) {
    uint32_t x;
    asm volatile("{.reg .b16 t;\nld.shared.u16 t, [%1];\ncvt.u32.u16 %0, t;}" : "=r"(x) : "r"(at));
    return x;
}
INLINE void load_shared4(uint32_t *x, uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
INLINE void store_shared(uint32_t at, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
INLINE void store_shared4(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// mbarriers, by shared address. A phase ends when `count` arrivals and the expected bytes are in.
INLINE void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
INLINE void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{.reg .pred done;\nagain_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again_%=;}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// Makes initialized barriers visible to the copy engine.
INLINE void fence_barrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders this thread's shared stores before what the matrix unit reads later.
INLINE void fence_shared_async(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies a box from (column x, row y) of a tensor map's matrix to shared memory; its bytes count on the barrier.
INLINE void copy_box(uint32_t to, uint64_t map, uint32_t barrier, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

// The generic address of a kernel's parameter; one that is a 64-byte aligned tensor map may be given to copy_box.
#define PARAMETER_ADDRESS(to, kernel, index)                                                                           \
    asm("{.reg .b64 t;\nmov.b64 t, " #kernel "_param_" #index ";\ncvta.param.u64 %0, t;}" : "=l"(to))

#define SET_REGISTERS_DOWN(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))
#define SET_REGISTERS_UP(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))

// 2^(exponent - 127) for exponents 1 .. 254.
INLINE float power_of_two(int32_t exponent) { return __builtin_bit_cast(float, exponent << 23); }

// x * 2^exponent for any exponent in -600 .. 600, rounded once where x is at least 2^-60 or so, or zero.
INLINE float scale_float(float x, int32_t exponent) {
    exponent = exponent < -252 ? -252 : exponent > 252 ? 252 : exponent;
    const int32_t half = exponent >> 1;
    return x * power_of_two(half + 127) * power_of_two(exponent - half + 127);
}

INLINE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
INLINE uint16_t round_bf16(float x) { return (uint16_t)pack_bf16(x, 0); }

// Four E4M3 codes, exactly: two pairs of float16.
INLINE void decode_e4m3(uint32_t codes, uint32_t *low, uint32_t *high) {
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(*low), "=r"(*high)
        : "r"(codes));
}
INLINE uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
INLINE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
