/* Number formats. Source: CDNA4 ISA 7.2. */
#ifndef EMU_FORMATS_H
#define EMU_FORMATS_H

#include <stdint.h>

float emu_fp8_to_f32(uint8_t code, int fmt); /* fmt: 0 E4M3, 1 E5M2, 2 E2M3, 3 E3M2, 4 E2M1 */
/* RNE to E4M3 (fmt 0) or E5M2 (1); *edge set when the overflow rule decides and sources leave it open */
uint8_t emu_f32_to_fp8(float x, int fmt, bool ovfl, bool *edge);
uint16_t emu_f32_to_bf16(float x);

#endif
