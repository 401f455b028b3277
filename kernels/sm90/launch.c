// sm_90 (H100, H200) behind CUDA's driver API: which kernels an op launches, with which grids.
#include "plan.h"

#include "../../csrc/gpu.h"

enum image { GEMM, PREPARE, QUANTIZE };

// PTX is text that ends at a zero.
static const unsigned char gemm_image[] = {
#embed "sm90/gemm.ptx" suffix(, 0)
};
static const unsigned char prepare_image[] = {
#embed "sm90/prepare.ptx" suffix(, 0)
};
static const unsigned char quantize_image[] = {
#embed "sm90/quantize.ptx" suffix(, 0)
};

static const void *const images[] = {[GEMM] = gemm_image, [PREPARE] = prepare_image, [QUANTIZE] = quantize_image};

#define OTHER_KERNEL(name, image) {#name, image, 0},
#define DEPTH_KERNEL(name) {#name, GEMM, MX_SM90_SHARED_BYTES},
#define ROWS_KERNEL(name, swapped) {#name, GEMM, MX_SM90_SHARED_BYTES},
static const struct mx_gpu_kernel kernels[] = {
#include "kernels.def"
};

// Indices of kernels, of the one that is not swapped where there are two.
enum { GEMM_DEPTH = MX_GPU_OWN_KERNELS, GEMM_ROWS };

static struct mx_gpu cuda = {
    .target = "sm_90",
    .driver = &mx_cuda,
    .images = images,
    .kernels = kernels,
    .image_count = MX_LENGTH(images),
    .kernel_count = MX_LENGTH(kernels),
};

// ------------------------------------------------------------------------------------------------------------- GEMMs

static struct mx_sm90_plan plan_rows(const struct mx_rows_args *args, const struct mx_exec *exec) {
    return mx_sm90_plan_rows(args, exec->workspace, mx_sm90_choose_swapped(args),
                             cuda.devices[exec->device].processors);
}

static struct mx_sm90_plan plan_depth(const struct mx_depth_args *args, const struct mx_exec *exec) {
    return mx_sm90_plan_depth(args, exec->workspace, cuda.devices[exec->device].processors);
}

static struct mx_gpu_map map_of(const struct mx_sm90_map *map, uint8_t *encoded) {
    enum { BOX_BYTES = 64 };
    return (struct mx_gpu_map){encoded,           map->base, map->rows,         map->row_bytes,
                               MX_SM90_ROW_BLOCK, BOX_BYTES, MX_GPU_SWIZZLE_64B};
}

// Limits of the kernels.
static int check_fits(int64_t a_rows, int64_t b_rows, int64_t elements, const struct mx_sm90_plan *plan,
                      struct mx_error *error) {
    if (a_rows > MX_SM90_MAX_EXTENT || b_rows > MX_SM90_MAX_EXTENT || elements > MX_SM90_MAX_EXTENT)
        return mx_fail(error,
                       "the operands must have at most %d rows and elements a row on sm_90, got %lld and %lld rows "
                       "of %lld",
                       MX_SM90_MAX_EXTENT, (long long)a_rows, (long long)b_rows, (long long)elements);
    if (plan->tiles == INT32_MAX)
        return mx_fail(error, "the output must have fewer than %d tiles of %d x %d on sm_90", INT32_MAX, MX_SM90_P,
                       MX_SM90_Q);
    return 0;
}

static int run_gemm(int prepare, int kernel, void *args, struct mx_sm90_plan *plan, const struct mx_exec *exec,
                    struct mx_error *error) {
    struct mx_sm90_maps encoded = {};
    const struct mx_gpu_map maps[] = {map_of(&plan->p_map, encoded.p), map_of(&plan->q_map, encoded.q)};
    const struct mx_gpu_launch launches[] = {
        {prepare, MX_SM90_PREPARE_THREADS, {(uint32_t)plan->prepare_blocks, 1, 1}},
        {kernel, MX_SM90_THREADS, {(uint32_t)plan->blocks, 1, 1}},
    };
    const struct mx_gpu_call call = {
        .launches = launches,
        .launch_count = MX_LENGTH(launches),
        .overlap = true,
        .parameters = (void *[]){args, plan, &encoded},
        .maps = maps,
        .map_count = plan->copies ? 0 : MX_LENGTH(maps),
    };
    return plan->blocks ? mx_gpu_run(&cuda, &call, exec, error) : 0;
}

static int gemm_rows(const struct mx_rows_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_rows_args copy = *args;
    struct mx_sm90_plan plan = plan_rows(args, exec);
    return check_fits(args->m, args->groups * args->n, args->k, &plan, error) ||
           run_gemm(MX_GPU_PREPARE_ROWS, GEMM_ROWS + plan.swapped, &copy, &plan, exec, error);
}

static int gemm_depth(const struct mx_depth_args *args, const struct mx_exec *exec, struct mx_error *error) {
    struct mx_depth_args copy = *args;
    struct mx_sm90_plan plan = plan_depth(args, exec);
    return check_fits(args->n, args->k, args->depth, &plan, error) ||
           run_gemm(MX_GPU_PREPARE_DEPTH, GEMM_DEPTH, &copy, &plan, exec, error);
}

static int64_t rows_workspace(const struct mx_rows_args *args, const struct mx_exec *exec) {
    return plan_rows(args, exec).bytes;
}

static int64_t depth_workspace(const struct mx_depth_args *args, const struct mx_exec *exec) {
    return plan_depth(args, exec).bytes;
}

// ----------------------------------------------------------------------------------------------------------- backend

static int quantize(const struct mx_quantize_args *args, const struct mx_exec *exec, struct mx_error *error) {
    return mx_gpu_quantize(&cuda, args, exec, error);
}

static int zero_padding(const struct mx_padding_args *args, const struct mx_exec *exec, struct mx_error *error) {
    return mx_gpu_zero_padding(&cuda, args, exec, error);
}

static int available(int32_t device, struct mx_error *error) { return mx_gpu_available(&cuda, device, error); }

const struct mx_backend mx_sm90 = {
    .name = "sm_90",
    .place = MX_ON_GPU,
    .alignment = 1,
    .kernel_count = MX_LENGTH(kernels),
    .kernels = kernels,
    .available = available,
    .quantize = quantize,
    .gemm_rows = gemm_rows,
    .gemm_depth = gemm_depth,
    .zero_padding = zero_padding,
    .quantize_workspace = mx_gpu_no_workspace,
    .gemm_rows_workspace = rows_workspace,
    .gemm_depth_workspace = depth_workspace,
};
