// Short names for the emulator's test kernels. They include nothing of the project's kernels.
typedef int v4i __attribute__((ext_vector_type(4)));
typedef int v2i __attribute__((ext_vector_type(2)));
typedef int v8i __attribute__((ext_vector_type(8)));
typedef float v4f __attribute__((ext_vector_type(4)));
typedef float v16f __attribute__((ext_vector_type(16)));
typedef __bf16 v4bf __attribute__((ext_vector_type(4)));
typedef __bf16 v8bf __attribute__((ext_vector_type(8)));
typedef float v8f __attribute__((ext_vector_type(8)));
typedef unsigned u32;
typedef unsigned long u64;
#define LDS __attribute__((address_space(3)))
#define GLB __attribute__((address_space(1)))
#define UNINIT __attribute__((loader_uninitialized))
#define KERNEL __attribute__((amdgpu_kernel, visibility("protected")))
#define INL static inline __attribute__((always_inline))
#define SB() __builtin_amdgcn_sched_barrier(0)
#define RFL(x) __builtin_amdgcn_readfirstlane(x)
typedef __amdgpu_buffer_rsrc_t rsrc_t;
