// The part of libtorch's stable C ABI (torch 2.11 and later) that the shim uses, declared here because torch's own
// headers are C++. Source: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h. Functions that
// return AOTITorchError give 0 on success.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StringOpaque *StringHandle;
typedef int32_t AOTITorchError;
// One slot of an operator's stack: a scalar's bytes, an owned handle, or (for an optional) null or an owned pointer
// to another slot.
typedef uint64_t StableIValue;

AOTITorchError aoti_torch_library_init_fragment(const char *ns, const char *file, uint32_t line, TorchLibraryHandle *);
AOTITorchError aoti_torch_library_init_impl(const char *ns, const char *key, const char *file, uint32_t line,
                                            TorchLibraryHandle *);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char *schema);
// The last argument is the torch version whose ABI the caller was written to.
AOTITorchError torch_library_impl(TorchLibraryHandle, const char *name,
                                  void (*)(StableIValue *, uint64_t inputs, uint64_t outputs), uint64_t version);
#define TORCH_ABI_2_11 ((uint64_t)2 << 56 | (uint64_t)11 << 48)
// Raises a C++ exception (RuntimeError in Python) when the condition is false.
void aoti_torch_check(bool condition, const char *function, const char *file, uint32_t line, const char *message);

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void **);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle, int64_t *bytes);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t *);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t **);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t **);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t *);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t *);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t *);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle *);

int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_device_type_cuda(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_uint8(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_float8_e5m2(void);
int32_t aoti_torch_dtype_float8_e4m3fn(void);
int32_t torch_dtype_float8_e8m0fnu(void);

AOTITorchError torch_string_c_str(StringHandle, const char **);
AOTITorchError torch_delete_string(StringHandle);
AOTITorchError torch_get_num_threads(uint32_t *);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*)(int64_t begin, int64_t end, void *context), void *context);

// In the GPU library of a torch built for CUDA or ROCm; null without one.
[[gnu::weak]] AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);

// C++'s operator delete(void *), which frees the slot behind an optional.
void mx_cxx_delete(void *) __asm__("_ZdlPv");
