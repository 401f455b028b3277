#include "formats.h"

#include <math.h>

struct format {
    int exponent, mantissa, bias;
    bool ieee_top; /* E5M2: top exponent is Inf/NaN */
};
static const struct format formats[5] = {
    {4, 3, 7, false}, {5, 2, 15, true}, {2, 3, 1, false}, {3, 2, 3, false}, {2, 1, 1, false}};

float emu_fp8_to_f32(uint8_t code, int fmt) {
    const struct format *f = &formats[fmt];
    int m = code & ((1 << f->mantissa) - 1), e = code >> f->mantissa & ((1 << f->exponent) - 1);
    bool negative = code >> (f->mantissa + f->exponent) & 1;
    float x;
    if (fmt == 0 && (code & 0x7f) == 0x7f)
        x = __builtin_nanf("");
    else if (f->ieee_top && e == (1 << f->exponent) - 1)
        x = m ? __builtin_nanf("") : __builtin_inff();
    else if (e == 0)
        x = ldexpf((float)m, 1 - f->bias - f->mantissa);
    else
        x = ldexpf((float)(m + (1 << f->mantissa)), e - f->bias - f->mantissa);
    return negative ? -x : x;
}

uint8_t emu_f32_to_fp8(float x, int fmt, bool ovfl, bool *edge) {
    const struct format *f = &formats[fmt];
    float top = fmt == 0 ? 448.0f : 57344.0f, mag = __builtin_fabsf(x);
    uint8_t sign = __builtin_signbit(x) ? 0x80 : 0, max = fmt == 0 ? 0x7e : 0x7b, over = fmt == 0 ? 0x7f : 0x7c;
    if (x != x)
        return sign | 0x7f;
    if (__builtin_isinf(x))
        return sign | (ovfl ? max : over);
    int e = mag > 0 ? ilogbf(mag) : 0;
    int low = 1 - f->bias;
    if (e < low)
        e = low;
    double quantum = ldexp(1, e - f->mantissa), rounded = __builtin_roundeven(mag / quantum) * quantum;
    if (rounded > top)
        return sign | (ovfl ? max : over);
    if (mag > top)
        *edge = true;
    if (rounded == 0)
        return sign;
    e = ilogb(rounded);
    if (e < low)
        return (uint8_t)(sign | (int)(rounded / ldexp(1, low - f->mantissa)));
    int m = (int)(rounded / ldexp(1, e - f->mantissa)) - (1 << f->mantissa);
    return (uint8_t)(sign | (e + f->bias) << f->mantissa | m);
}

uint16_t emu_f32_to_bf16(float x) {
    uint32_t u = __builtin_bit_cast(uint32_t, x);
    if (x != x)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
