// What the CPU backend's files share. Each is compiled once per instruction-set level with -DMX_LEVEL=<level>; the
// level's name is a suffix of every symbol that crosses files.
#pragma once
#include "../../csrc/mxfp8.h"

#define MX_PASTE_(name, level) name##_##level
#define MX_PASTE(name, level) MX_PASTE_(name, level)
#define MX_LEVELED(name) MX_PASTE(name, MX_LEVEL)

#define mx_cpu_run MX_LEVELED(mx_cpu_run)
#define mx_cpu_check_offs MX_LEVELED(mx_cpu_check_offs)
#define mx_cpu_quantize MX_LEVELED(mx_cpu_quantize)
#define mx_cpu_quantize_workspace MX_LEVELED(mx_cpu_quantize_workspace)
#define mx_cpu_gemm_rows MX_LEVELED(mx_cpu_gemm_rows)
#define mx_cpu_gemm_rows_workspace MX_LEVELED(mx_cpu_gemm_rows_workspace)
#define mx_cpu_gemm_depth MX_LEVELED(mx_cpu_gemm_depth)
#define mx_cpu_gemm_depth_workspace MX_LEVELED(mx_cpu_gemm_depth_workspace)

// launch.c. Runs task(index, thread, context) for every index in [0, count), handing out indices in order to
// exec->threads threads as they become free; `thread` is below exec->threads and no two tasks share one at a time.
// Each thread runs under the default floating-point environment (round to nearest, denormals kept).
int mx_cpu_run(int64_t count, void (*task)(int64_t index, int thread, void *context), void *context,
               const struct mx_exec *exec, struct mx_error *error);

// launch.c. Fails unless 0 <= offs[0] <= offs[1] <= ... <= limit and every offset is a multiple of `multiple`.
int mx_cpu_check_offs(const int32_t *offs, int64_t groups, int64_t limit, int64_t multiple, struct mx_error *error);

// quantize.c and gemm.c: the mx_backend functions of the same names.
int mx_cpu_quantize(const struct mx_quantize_args *, const struct mx_exec *, struct mx_error *);
int64_t mx_cpu_quantize_workspace(const struct mx_quantize_args *, const struct mx_exec *);
int mx_cpu_gemm_rows(const struct mx_rows_args *, const struct mx_exec *, struct mx_error *);
int64_t mx_cpu_gemm_rows_workspace(const struct mx_rows_args *, const struct mx_exec *);
int mx_cpu_gemm_depth(const struct mx_depth_args *, const struct mx_exec *, struct mx_error *);
int64_t mx_cpu_gemm_depth_workspace(const struct mx_depth_args *, const struct mx_exec *);
