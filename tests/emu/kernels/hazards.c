/* Kernels in which clang must put wait states between instructions: test_hazards.py takes each one away. */
#include "device.h"
#define MM16(a, b, c, f, s) __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, f, f, 0, s, 0, s)
#define MM32(a, b, c, f, s) __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, f, f, 0, s, 0, s)
#define T __builtin_amdgcn_workitem_id_x()
#define ONE __attribute__((amdgpu_flat_work_group_size(64, 64)))
KERNEL ONE void result16(const GLB v8i *a, GLB v4f *o) { o[T] = MM16(a[T], a[T + 64], (v4f){}, 0, 127) + 1.0f; }
KERNEL ONE void result16_fp4(const GLB v8i *a, GLB v4f *o) { o[T] = MM16(a[T], a[T + 64], (v4f){}, 4, 127) + 1.0f; }
KERNEL ONE void result32(const GLB v8i *a, GLB v16f *o) { o[T] = MM32(a[T], a[T + 64], (v16f){}, 0, 127) * 2.0f; }
KERNEL ONE void result32_fp4(const GLB v8i *a, GLB v16f *o) { o[T] = MM32(a[T], a[T + 64], (v16f){}, 4, 127) * 2.0f; }
KERNEL ONE void stored(const GLB v8i *a, GLB v4f *o) { o[T] = MM16(a[T], a[T + 64], (v4f){}, 0, 127); }
KERNEL ONE void as_operand(const GLB v8i *a, GLB v4f *o)
{
    v4i d = (v4i)MM16(a[T], a[T + 64], (v4f){}, 0, 127);
    o[T] = MM16(__builtin_shufflevector(d, d, 0, 1, 2, 3, 0, 1, 2, 3), a[T], (v4f){}, 0, 127);
}
KERNEL ONE void as_scale(const GLB v8i *a, GLB v4f *o)
{
    v4i d = (v4i)MM16(a[T], a[T + 64], (v4f){}, 0, 127);
    o[T] = MM16(a[T + 64], a[T], (v4f){}, 0, d.x & 0 ? 1 : d.y);
}
KERNEL ONE void valu_then_mfma(const GLB v8i *a, GLB v4f *o)
{
    v8i x = a[T];
    int s = a[T + 64][0];
    x[7] ^= 0x01010101;
    s += 1;
    o[T] = MM16(x, a[T + 64], (v4f){}, 0, s);
}
KERNEL ONE void lanes(const GLB v8i *a, GLB int *o)
{
    int x = a[T][0] * 3;
    int first = __builtin_amdgcn_readfirstlane(x);
    int moved = __builtin_amdgcn_mov_dpp(x + first, 0x140, 0xf, 0xf, true);
    int pick = __builtin_amdgcn_readlane(moved, first & 63);
    v2i s = __builtin_bit_cast(v2i, __builtin_amdgcn_permlane32_swap(x + pick, moved, false, false));
    o[T] = s.x ^ s.y;
}
KERNEL ONE void masks(const GLB v8i *a, GLB float *o)
{
    v8i x = a[T];
    float f = (float)(x[0] & 0xffff) / (float)((x[1] & 0xff) + 1), g = x[2] > x[3] ? f : -f;
    o[T] = __builtin_amdgcn_exp2f(g * 0.001f) + g;
}
KERNEL ONE void half_written(const GLB v8i *a, GLB int *o)
{
    float f = (float)(a[T][0] & 255);
    int w = __builtin_amdgcn_cvt_pk_fp8_f32(f, f, 0, 0);
    w = __builtin_amdgcn_cvt_pk_fp8_f32(f, f * 0.5f, w, 1);
    o[T] = w + 1;
}
