/* What every layer needs: errors, and numbers from seeds. */
#ifndef EMU_BASE_H
#define EMU_BASE_H

#include <stddef.h>
#include <stdint.h>

/* Errors travel up as text; nothing in the library prints or exits. */
enum emu_code { EMU_OK = 0, EMU_BAD_IMAGE, EMU_OTHER_GPU, EMU_BAD_VALUE, EMU_FAULT, EMU_MEMORY_FAULT };
struct emu_error {
    enum emu_code code;
    char text[1024];
};
/* fills the error; always false */
bool emu_fail(struct emu_error *e, enum emu_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

static const uint64_t emu_golden = 0x9e3779b97f4a7c15u;
static inline uint64_t emu_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static inline uint64_t emu_rand(uint64_t *state) { return emu_mix(*state += emu_golden); } /* splitmix64 */
/* junk that depends on the seed; bytes: a multiple of 8 */
void emu_junk(void *to, size_t bytes, uint64_t seed);

#endif
