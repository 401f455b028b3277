/* Plain-C kernels of many kinds: what clang emits for them is what the emulator must know. Each is checked in
 * test_plain_c.py against numpy. */
#include "device.h"
typedef unsigned char u8;
typedef unsigned short u16;
typedef long i64;
typedef v4i v4i_u __attribute__((aligned(4)));
INL u32 tid(void) { return __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x(); }
INL void sync(void)
{
    __builtin_amdgcn_s_waitcnt(0);
    __builtin_amdgcn_s_barrier();
    asm volatile("" ::: "memory");
}

/* rows of 32 bf16 -> E8M0 scale (rceil) and 32 E4M3: one thread a block */
KERNEL void quantize(const GLB u16 *x, GLB u8 *q, GLB u8 *s, int blocks)
{
    u32 t = tid();
    if ((int)t >= blocks)
        return;
    float v[32], amax = 0;
    for (int i = 0; i < 32; i++) {
        v[i] = __builtin_bit_cast(float, (u32)x[(u64)t * 32 + i] << 16);
        amax = __builtin_fmaxf(amax, __builtin_fabsf(v[i]));
    }
    u32 a = __builtin_bit_cast(u32, amax);
    int e = (int)(a >> 23) - 8 + ((a & 0x7fffff) > 0x600000);
    e = e < 0 ? 0 : e;
    s[t] = (u8)e;
    float inv = __builtin_bit_cast(float, (u32)(254 - e) << 23);
    GLB u32 *out = (GLB u32 *)(q + (u64)t * 32);
    for (int i = 0; i < 32; i += 4) {
        int w = 0;
        w = __builtin_amdgcn_cvt_pk_fp8_f32(__builtin_amdgcn_fmed3f(v[i] * inv, 448.f, -448.f),
                                            __builtin_amdgcn_fmed3f(v[i + 1] * inv, 448.f, -448.f), w, 0);
        w = __builtin_amdgcn_cvt_pk_fp8_f32(__builtin_amdgcn_fmed3f(v[i + 2] * inv, 448.f, -448.f),
                                            __builtin_amdgcn_fmed3f(v[i + 3] * inv, 448.f, -448.f), w, 1);
        out[i / 4] = (u32)w;
    }
}

/* the same with one lane an element and a reduction over lanes; scaled conversion */
KERNEL __attribute__((amdgpu_flat_work_group_size(256, 256))) void quantize_lanes(const GLB u16 *x, GLB u8 *q, GLB u8 *s)
{
    u32 t = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    float v = __builtin_bit_cast(float, (u32)x[t] << 16), m = __builtin_fabsf(v);
    for (int d = 16; d; d >>= 1) {
        int other = __builtin_amdgcn_ds_bpermute(((int)(t & 63) ^ d) * 4, __builtin_bit_cast(int, m));
        m = __builtin_fmaxf(m, __builtin_bit_cast(float, other));
    }
    u32 a = __builtin_bit_cast(u32, m);
    int e = (int)(a >> 23) - 8 + ((a & 0x7fffff) > 0x600000);
    e = e < 0 ? 0 : e;
    float inv = __builtin_bit_cast(float, (u32)(254 - e) << 23);
    float c = __builtin_amdgcn_fmed3f(v * inv, 448.f, -448.f);
    int w = __builtin_amdgcn_cvt_pk_fp8_f32(c, c, 0, 0);
    q[t] = (u8)w;
    if ((t & 31) == 0)
        s[t >> 5] = (u8)e;
}

/* C = A * B, f32, 16x16 tiles through LDS */
KERNEL __attribute__((amdgpu_flat_work_group_size(256, 256))) void matmul(const GLB float *a, const GLB float *b, GLB float *c, int n)
{
    static LDS UNINIT float ta[16][17], tb[16][17];
    u32 t = __builtin_amdgcn_workitem_id_x(), x = t & 15, y = t >> 4;
    u32 row = __builtin_amdgcn_workgroup_id_y() * 16 + y, col = __builtin_amdgcn_workgroup_id_x() * 16 + x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        ta[y][x] = a[row * (u32)n + (u32)k + x];
        tb[y][x] = b[((u32)k + y) * (u32)n + col];
        sync();
        for (int i = 0; i < 16; i++)
            sum = __builtin_fmaf(ta[y][i], tb[i][x], sum);
        sync();
    }
    c[row * (u32)n + col] = sum;
}

/* bytes transposed through LDS, 64 x 64 */
KERNEL __attribute__((amdgpu_flat_work_group_size(256, 256))) void transpose(const GLB u8 *in, GLB u8 *out)
{
    static LDS UNINIT u8 tile[64][68];
    u32 t = __builtin_amdgcn_workitem_id_x();
    for (u32 i = t; i < 4096; i += 256)
        tile[i >> 6][i & 63] = in[i];
    sync();
    for (u32 i = t; i < 4096; i += 256)
        out[i] = tile[i & 63][i >> 6];
}

/* inclusive scan of 1024 ints in LDS */
KERNEL __attribute__((amdgpu_flat_work_group_size(1024, 1024))) void scan(const GLB int *in, GLB int *out)
{
    static LDS UNINIT int buf[2][1024];
    u32 t = __builtin_amdgcn_workitem_id_x(), at = 0;
    buf[0][t] = in[t];
    sync();
    for (u32 d = 1; d < 1024; d <<= 1) {
        buf[at ^ 1][t] = buf[at][t] + (t >= d ? buf[at][t - d] : 0);
        at ^= 1;
        sync();
    }
    out[t] = buf[at][t];
}

/* integer arithmetic of every width; 16 results a thread */
KERNEL void integers(const GLB u32 *in, GLB u32 *out)
{
    u32 t = tid(), a = in[2 * t], b = in[2 * t + 1] | 1;
    int sa = (int)a, sb = (int)b;
    GLB u32 *o = out + 32 * t;
    o[0] = a / b;
    o[1] = a % b;
    o[2] = (u32)(sb == -1 ? 0 : sa / sb);
    o[3] = (u32)(sb == -1 ? 0 : sa % sb);
    u64 p = (u64)a * b;
    o[4] = (u32)(p >> 32);
    o[5] = (u32)p;
    i64 q = (i64)sa * sb;
    o[6] = (u32)((u64)q >> 32);
    o[7] = a ? (u32)__builtin_clz(a) : 32;
    o[8] = a ? (u32)__builtin_ctz(a) : 32;
    o[9] = (u32)__builtin_popcount(a);
    o[10] = a << (b & 31) | a >> (31 - (b & 31));
    o[11] = (u32)(sa >> (b & 31));
    o[12] = (u16)((u16)a * (u16)b + (u16)(a >> 16));
    o[13] = (u32)(u8)(a + b) + (u32)(int)(signed char)(a - b);
    o[14] = (a & b) | (~a & 0x0f0f0f0f) ^ b;
    o[15] = __builtin_bswap32(a);
    u64 w = (u64)a << 32 | b;
    w = w * 0x9e3779b97f4a7c15ul + (w >> 29);
    o[16] = (u32)w;
    o[17] = (u32)(w >> 32);
    o[18] = sa < sb ? a : b;
    o[19] = a > b ? a : b;
    o[20] = (u32)(w > p) + 2 * (u32)((i64)w < q);
    o[21] = __builtin_bitreverse32(a);
    o[22] = a - b > a ? 0 : a - b;
    o[23] = (u32)((w << (b & 63)) >> 32);
    o[24] = (u32)((i64)w >> (b & 63));
    int m = sa < sb ? sb : sa, n = sa < sb ? sa : sb;
    o[25] = (u32)(m > 1000 ? 1000 : n < -1000 ? -1000 : n);
    o[26] = (u16)(((int)(short)a >> (b & 15)) + (short)b);
    o[27] = (u32)__builtin_popcountl(w) + (u32)__builtin_clzl(w | 1);
    o[28] = (a >> 5 & 0x7f) + (u32)((sa << 4) >> 21);
    o[29] = a * 24 + b * 3 + 7;
    o[30] = (a ^ b) + t;
    o[31] = ((a << 3) + b) | t;
}

/* float arithmetic; 16 results a thread */
KERNEL void floats(const GLB float *in, GLB float *out)
{
    u32 t = tid();
    float a = in[2 * t], b = in[2 * t + 1];
    GLB float *o = out + 16 * t;
    o[0] = a / b;
    o[1] = __builtin_sqrtf(__builtin_fabsf(a));
    o[2] = __builtin_floorf(a) + __builtin_truncf(b);
    o[3] = __builtin_ceilf(a) - __builtin_rintf(b);
    o[4] = __builtin_fmaf(a, b, 1.0f);
    o[5] = __builtin_fmaxf(a, b) - __builtin_fminf(a, b);
    o[6] = (float)(int)a + (float)(u32)__builtin_fabsf(b);
    o[7] = a < b ? -a : __builtin_fabsf(b);
    o[8] = __builtin_amdgcn_exp2f(b * 0.01f);
    o[9] = __builtin_amdgcn_logf(__builtin_fabsf(a) + 1.0f);
    o[10] = (float)((double)a * b + 1.0 / 3.0);
    o[11] = __builtin_ldexpf(a, (int)t & 7);
    o[12] = (float)(_Float16)a;
    o[13] = (float)(__bf16)b;
    o[14] = a * b - a + b * 0.5f;
    o[15] = __builtin_amdgcn_rcpf(b) * __builtin_amdgcn_rsqf(__builtin_fabsf(a) + 1.0f);
}

/* private array with a dynamic index: scratch */
KERNEL void scratch(const GLB u32 *in, GLB u32 *out)
{
    u32 t = tid(), local[32];
    for (u32 i = 0; i < 32; i++)
        local[i] = in[t] * (i + 1);
    for (u32 i = 0; i < 16; i++) {
        u32 j = (in[t] >> i) & 31;
        u32 x = local[j];
        local[j] = local[i];
        local[i] = x + i;
    }
    u32 sum = 0;
    for (u32 i = 0; i < 32; i++)
        sum = sum * 31 + local[i];
    out[t] = sum;
}

/* cross-lane: DPP, readlane, swaps */
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void lanes(const GLB int *in, GLB int *out)
{
    u32 t = __builtin_amdgcn_workitem_id_x();
    int x = in[t], y = in[t + 64];
    out[t] = __builtin_amdgcn_update_dpp(0, x, 0xb1, 0xf, 0xf, true);
    out[t + 64] = __builtin_amdgcn_update_dpp(7, x, 0x111, 0xf, 0xf, false);
    out[t + 128] = __builtin_amdgcn_update_dpp(0, x, 0x140, 0xf, 0xf, true);
    out[t + 192] = __builtin_amdgcn_readlane(x, 17) + __builtin_amdgcn_readfirstlane(y);
    v2i s = __builtin_bit_cast(v2i, __builtin_amdgcn_permlane32_swap(x, y, false, false));
    out[t + 256] = s.x;
    out[t + 320] = s.y;
    v2i r = __builtin_bit_cast(v2i, __builtin_amdgcn_permlane16_swap(x, y, false, false));
    out[t + 384] = r.x;
    out[t + 448] = r.y;
    out[t + 512] = __builtin_amdgcn_ds_swizzle(x, 0x041f);
    out[t + 576] = __builtin_amdgcn_ds_permute((int)((t * 5 & 63) * 4), y);
    u64 ballot = __builtin_amdgcn_ballot_w64(x > y);
    out[t + 640] = (int)__builtin_amdgcn_mbcnt_hi((u32)(ballot >> 32), __builtin_amdgcn_mbcnt_lo((u32)ballot, 0));
    int acc = 0;
    for (int i = 0; i < (x & 15); i++) /* divergent loop */
        acc += i & 1 ? y : x * i;
    out[t + 704] = acc;
}

/* narrow loads and stores, unaligned vectors, switch */
KERNEL void narrow(const GLB signed char *in, GLB u16 *out, GLB v4i_u *wide, int n)
{
    u32 t = tid();
    if ((int)t >= n)
        return;
    int x = in[t];
    switch (x & 7) {
    case 0: x += 3; break;
    case 1: x *= 5; break;
    case 2: x = -x; break;
    case 3: x ^= 0x55; break;
    case 4: x = x << 3; break;
    case 5: x = 100 - x; break;
    default: x = x / 3; break;
    }
    out[t] = (u16)x;
    wide[t] = (v4i){x, x + 1, (short)x * 2, (int)t};
}

/* 8-bit transposing LDS read: each 16-lane group turns 8 rows of 16 bytes into columns */
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void tr8(const GLB v2i *in, GLB v2i *out)
{
    static LDS UNINIT v2i buf[64];
    u32 t = __builtin_amdgcn_workitem_id_x();
    buf[t] = in[t];
    sync();
    out[t] = __builtin_amdgcn_ds_read_tr8_b64_v2i32((LDS v2i *)&buf[t]);
}

/* buffer loads and stores of every width */
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void buffers(const GLB u8 *in, GLB u8 *out, u32 bytes)
{
    rsrc_t r = __builtin_amdgcn_make_buffer_rsrc((void *)(const void *)in, 0, bytes, 0x00020000);
    rsrc_t w = __builtin_amdgcn_make_buffer_rsrc((void *)(void *)out, 0, bytes, 0x00020000);
    u32 t = __builtin_amdgcn_workitem_id_x();
    __builtin_amdgcn_raw_buffer_store_b8(__builtin_amdgcn_raw_buffer_load_b8(r, t, 0, 0), w, t, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b16(__builtin_amdgcn_raw_buffer_load_b16(r, t * 2 + 64, 0, 0), w, t * 2 + 64, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b32(__builtin_amdgcn_raw_buffer_load_b32(r, t * 4 + 192, 0, 1), w, t * 4 + 192, 0, 2);
    __builtin_amdgcn_raw_buffer_store_b64(__builtin_amdgcn_raw_buffer_load_b64(r, t * 8 + 448, 0, 0), w, t * 8 + 448, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b96(__builtin_amdgcn_raw_buffer_load_b96(r, t * 12 + 960, 0, 0), w, t * 12 + 960, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b128(__builtin_amdgcn_raw_buffer_load_b128(r, t * 16 + 1728, 0, 0), w, t * 16 + 1728, 0, 0);
}

/* copies from global memory to LDS of 16 and 4 bytes a lane, with an offset that moves both sides */
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void copies(const GLB char *in, GLB v4i *out)
{
    static LDS UNINIT char buf[2048] __attribute__((aligned(16)));
    u32 t = __builtin_amdgcn_workitem_id_x();
    __builtin_amdgcn_global_load_lds((GLB char *)in + t * 16, (LDS void *)buf, 16, 0, 0);
    __builtin_amdgcn_global_load_lds((GLB char *)in + t * 4, (LDS void *)buf, 4, 1024, 0);
    __builtin_amdgcn_global_load_lds((GLB char *)in + t * 4 + 512, (LDS void *)(buf + 256), 4, 1024, 0);
    __builtin_amdgcn_global_load_lds((GLB char *)in + t * 4 + 1024, (LDS void *)(buf + 512), 4, 1024, 0);
    __builtin_amdgcn_global_load_lds((GLB char *)in + t * 4 + 1536, (LDS void *)(buf + 768), 4, 1024, 0);
    sync();
    out[t] = *(LDS v4i *)(buf + t * 16);
    out[t + 64] = *(LDS v4i *)(buf + 1024 + t * 16);
}

/* packed f32 arithmetic */
typedef float v2f __attribute__((ext_vector_type(2)));
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void packed(const GLB v2f *a, const GLB v2f *b, GLB v2f *o)
{
    u32 t = __builtin_amdgcn_workitem_id_x();
    v2f x = a[t], y = b[t];
    o[t] = __builtin_elementwise_fma(x, y, x);
    o[t + 64] = x * 2.0f - y;
    o[t + 128] = x.yx + y;
    o[t + 192] = -x * y.xx;
    o[t + 256] = __builtin_elementwise_maximum(x, y) + __builtin_elementwise_minimum(x, y);
}

/* max of bytes and of 16-bit halves */
KERNEL __attribute__((amdgpu_flat_work_group_size(64, 64))) void small_max(const GLB u8 *in, GLB u16 *out)
{
    u32 t = __builtin_amdgcn_workitem_id_x();
    u8 m = 0;
    short low = 32767;
    for (u32 i = 0; i < 24; i++) {
        u8 x = in[t * 24 + i];
        m = x > m ? x : m;
        short y = (short)(x * 257 - 30000);
        low = y < low ? y : low;
    }
    out[t] = m;
    out[t + 64] = (u16)low;
}
